"""Runs ranks on real GPUs, one on each, or skips."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks

MOST_RANKS = 4


@pytest.fixture
def gpu_ranks():
    """``run_ranks`` with a rank on each GPU of this machine, up to four; NCCL allows no two on one."""
    if not (dist.is_nccl_available() and torch.cuda.is_available()):
        pytest.skip("there is no GPU, or torch is built without NCCL")

    def run(function, **kwargs):
        return run_ranks(function, min(torch.cuda.device_count(), MOST_RANKS), timeout=90, **kwargs)

    return run


def pytest_collection_modifyitems(items):
    """Mark all tests in this folder: ``-m gpu``."""
    for item in items:
        if "tests/gpu" in item.path.as_posix():
            item.add_marker(pytest.mark.gpu)
