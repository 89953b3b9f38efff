"""The checks on a real GPU, and what a scope gives and takes there, in under four minutes on one card.

    python -m tests.gpu

Prints, for each strategy and number of groups, the bytes that a cycle gives back and the seconds it takes; then runs
``tests/gpu``. With several GPUs there is a rank on each of up to four. Ends with 0 if there is no GPU, and says so.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.client import measure
from tests.gpu.conftest import MOST_RANKS
from tests.ranks import run_ranks


def main() -> int:
    """Measure, and run the tests."""
    if not torch.cuda.is_available():
        print("skipped: there is no GPU")
        return 0
    size = min(torch.cuda.device_count(), MOST_RANKS)
    print(f"torch {torch.__version__}, NCCL {torch.cuda.nccl.version()}, {size} x {torch.cuda.get_device_name()}")
    print("strategy  groups   held outside    inside     release     restore   (rank 0; median of 5 cycles)")
    for strategy in ("rebuild", "suspend"):
        for count in (1, 8, 18):
            result = run_ranks(measure, size, timeout=60, strategy=strategy, count=count)[0]
            if isinstance(result, str):
                print(f"{strategy:8} {count:7}   {result}")
            else:
                held, inside, release, restore = result
                print(f"{strategy:8} {count:7} {held:10.0f} MiB {inside:7.0f} MiB {release:9.3f} s {restore:9.3f} s")
    return pytest.main([str(Path(__file__).parent), "-q", "-s", "-p", "no:cacheprovider"])


if __name__ == "__main__":
    sys.exit(main())
