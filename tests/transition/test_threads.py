"""A container's limit on threads is reached on one rank: one error on all ranks, and the groups work."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from contextlib import contextmanager

import pytest
import torch.distributed as dist

from gpurelease import (
    ReleaseFailed,
    RestoreFailed,
    TransitionFailed,
    is_released,
    release_depth,
    released_world,
    wake_world,
)
from gpurelease.strategies.pool import Pool
from tests.cycles import POSING, backend_of, cycle, refusal, total
from tests.ranks import init_gloo, run_ranks

SIZE = 3
MORE_THAN_ANY_MACHINE_HAS = 2**46  # bytes


@contextmanager
def none_can_be_started():
    """Have pthread_create() fail, as it does at a limit."""
    threading.stack_size(MORE_THAN_ANY_MACHINE_HAS)
    try:
        with pytest.raises(RuntimeError, match="can't start new thread"):
            threading.Thread(target=print).start()
        yield
    finally:
        threading.stack_size(0)


@contextmanager
def few_can_be_started(few):
    """Have all but the first ``few`` threads fail to start."""
    start, started = threading.Thread.start, []

    def limited(self):
        if len(started) >= few:
            raise RuntimeError("can't start new thread")
        started.append(self)
        start(self)

    threading.Thread.start = limited
    try:
        yield
    finally:
        threading.Thread.start = start


def limited(rank, size, few, limited_rank, entering, is_async):
    init_gloo(rank, size)
    groups = [dist.group.WORLD, *(dist.new_group(list(range(size))) for _ in range(3))]
    if few is not None:
        with released_world(**POSING):  # threads of Gloo's own are there
            pass
    before = [backend_of(group) for group in groups]
    scope, limit = released_world(**POSING), few_can_be_started(few) if few else none_can_be_started()
    told, started = None, time.monotonic()

    async def go_async():
        if not entering:
            await scope.__aenter__()
        if rank == limited_rank:
            limit.__enter__()
        await (scope.__aenter__() if entering else scope.__aexit__(None, None, None))

    def go():
        if not entering:
            scope.__enter__()
        if rank == limited_rank:
            limit.__enter__()
        if entering:
            scope.__enter__()
        else:
            scope.__exit__(None, None, None)

    try:
        asyncio.run(go_async()) if is_async else go()
    except TransitionFailed as error:
        told = error
    if rank == limited_rank:
        limit.__exit__(None, None, None)
    assert time.monotonic() - started < 10
    assert (is_released(), release_depth()) == (not entering, 0)
    assert isinstance(told, ReleaseFailed if entering else RestoreFailed)
    assert "it can start no more threads (can't start new thread)" in str(told)
    if entering:
        assert [backend_of(group) for group in groups] == before
        assert [total(group) for group in groups] == [3.0] * 4
    else:
        assert refusal(groups[1])
    dist.barrier()
    if not entering:
        wake_world()
    with released_world(**POSING):
        assert refusal(groups[1])
    assert [total(group) for group in groups] == [3.0] * 4
    return f"rank {limited_rank}" in str(told)


@pytest.mark.parametrize("limited_rank, is_async", [(0, False), (1, True)], ids=["0", "1, async"])
@pytest.mark.parametrize("entering", [True, False], ids=["on entering", "on leaving"])
@pytest.mark.parametrize("few", [None, 1, 2])
def test_one_error_on_all_ranks_and_the_groups_work(few, limited_rank, entering, is_async):
    results = run_ranks(limited, SIZE, few=few, limited_rank=limited_rank, entering=entering, is_async=is_async)
    assert results == [True] * SIZE


# ------------------------------------------------------------------------------------------------------------- chosen


def chosen(rank, size):
    init_gloo(rank, size)
    groups = [dist.new_group() for _ in range(11)]
    run, seen = Pool.run, set()

    def counting(self, jobs, *args, **kwargs):
        seen.add(sum(thread.name == "gpurelease-pool" for thread in threading.enumerate()))
        run(self, jobs, *args, **kwargs)

    Pool.run = counting
    counts = {}
    for number in ("", "1", "12", "99"):
        os.environ["GPURELEASE_THREADS"] = number if rank == 0 else ""
        with cycle(*groups):
            pass
        time.sleep(0.3)  # for the threads to be gone
        counts[number] = seen.copy()
        seen.clear()
    os.environ["GPURELEASE_THREADS"] = "many" if rank == 1 else ""
    with pytest.raises(ReleaseFailed) as failed, released_world(**POSING):
        pass
    assert failed.value.failures == {1: "GPURELEASE_THREADS='many' is no number of threads; there is 1, 2, 3 and so on"}
    os.environ["GPURELEASE_THREADS"] = ""
    return counts, [total(group) for group in groups] == [3.0] * 11


def test_the_number_of_threads_can_be_chosen_and_ranks_may_differ():
    results = run_ranks(chosen, SIZE)
    assert results[0] == ({"": {8}, "1": {1}, "12": {12}, "99": {12}}, True)
    assert results[1] == ({number: {8} for number in ("", "1", "12", "99")}, True)
