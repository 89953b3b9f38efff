"""The checks on a real GPU, and what a scope gives and takes there, in under four minutes on one card.

    python -m tests.gpu

Prints, for each strategy, number of threads and number of groups, the bytes that a cycle gives back and the seconds
that it takes, beside torch's own destroy and init; then runs ``tests/gpu``. With several GPUs there is a rank on each
of up to four. Ends with 0 if there is no GPU, and says so.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.client import CYCLES, measure
from tests.gpu.conftest import MOST_RANKS
from tests.ranks import run_ranks


def main() -> int:
    """Measure, and run the tests."""
    if not torch.cuda.is_available():
        print("skipped: there is no GPU")
        return 0
    size = min(torch.cuda.device_count(), MOST_RANKS)
    print(f"torch {torch.__version__}, NCCL {torch.cuda.nccl.version()}, {size} x {torch.cuda.get_device_name()}")
    print(f"on rank 0, median of {CYCLES} cycles; a cycle goes to the first use of every group, as torch's own does")
    print("strategy  threads  groups   held outside    inside     release     restore       cycle     torch's    ratio")
    for strategy, threads in (("rebuild", 1), ("rebuild", 8), ("rebuild", 16), ("suspend", 8)):
        for count in (1, 8, 18):
            env = {"GPURELEASE_THREADS": str(threads)}
            result = run_ranks(measure, size, timeout=60, env=env, strategy=strategy, count=count)[0]
            print(f"{strategy:8} {threads:8} {count:7} ", end="")
            if isinstance(result, str):
                print(f"  {result}")
            else:
                held, inside, *seconds = result
                told = " ".join(f"{each:9.3f} s" for each in seconds)
                print(f"{held:10.0f} MiB {inside:7.0f} MiB {told} {seconds[-2] / seconds[-1]:8.2f}", flush=True)
    return pytest.main([str(Path(__file__).parent), "-q", "-s", "-p", "no:cacheprovider"])


if __name__ == "__main__":
    sys.exit(main())
