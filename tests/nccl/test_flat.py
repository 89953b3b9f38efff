"""Hundreds of cycles on the real ProcessGroupNCCL leave nothing behind."""

from __future__ import annotations

import pytest

from tests.flat import check, many_cycles
from tests.nccl.double import FIRST, HAS_SECOND, held, init_nccl, live, total

OPTIONS = [{"timeout": 30, "strategy": strategy} for strategy in ("rebuild", "suspend", "rebuild", "auto")]


def flat(rank, size, cycles, backend):
    def use(group):
        assert total(group) == size * (size - 1) / 2

    store = init_nccl(rank, size, backend=backend)
    return many_cycles(store, cycles, cycles // 6, OPTIONS, use, lambda: (live(), held()))


@pytest.mark.parametrize(("backend", "cycles"), [(FIRST, 300), *([("nccl2", 120)] if HAS_SECOND else [])])
def test_nothing_grows_over_many_cycles_of_all_kinds(nccl_ranks, backend, cycles):
    """pytorch 107298, Megatron 6897: a kept handle kept the communicator. The double itself leaks the communicators
    that have gone, so as to find out who uses them: memory is looked at on Gloo."""
    for left, resident in nccl_ranks(flat, cycles=cycles, backend=backend, timeout=280):
        check(left, resident, noise=64 << 10)
