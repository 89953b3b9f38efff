"""Steps on the device, or in NCCL, that take too long: nobody waits without a bound, and nothing is left behind."""

from __future__ import annotations

import gc
import time

import pytest
import torch.distributed as dist

from gpurelease import ReleaseFailed, RestoreFailed, is_released, released_world, wake_world
from tests.nccl.double import FIRST, HAS_SECOND, backend_of, delay, held, init_nccl, live, total

KINDS = [FIRST, "nccl2"] if HAS_SECOND else [FIRST]


LATE = 4  # seconds that a communicator takes to be made, once


def made_too_late(rank, size, kind, after, inside):
    init_nccl(rank, size, backend=kind)
    group = dist.new_group(list(range(size)), backend=kind)
    total(), total(group)
    before = live(), held()
    made = time.monotonic() + LATE + (0.7 if size == 1 else 2.7)  # two wait for each other for 2 s more
    with pytest.raises(RestoreFailed, match="not done within 1 s"), released_world(timeout=1):
        if rank == size - 1:
            delay("init", LATE, after=after)
    assert is_released() and time.monotonic() < made - 1
    if not inside:
        wake_world()
        assert time.monotonic() < made - 1, "nobody was to wait for what was given up"
        assert total() == total(group)
    time.sleep(made - time.monotonic())
    gc.collect()
    if inside:
        assert (live(), held()) == (0, 0)
        wake_world()
    assert (live(), held()) == before
    with released_world(timeout=20):
        assert (live(), held()) == (0, 0)
    return total(group)


@pytest.mark.parametrize(
    ("size", "after", "inside"),
    [(1, 0, False), (2, 1, False), (2, 1, True)],
    ids=["the first of one rank", "the second of two", "while still released"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_communicator_that_is_made_too_late_is_closed_by_who_made_it(nccl_ranks, kind, size, after, inside):
    env = {"SIMGPU_TIMEOUT": "2"}
    results = nccl_ranks(made_too_late, size, kind=kind, after=after, inside=inside, env=env, timeout=90)
    assert results == [size - 1] * size


def endless_drain(rank, size, busy, cycles_before):
    init_nccl(rank, size, backend=FIRST)
    group = dist.new_group(list(range(size)), backend=FIRST)
    total(), total(group)
    for _ in range(cycles_before):
        with released_world(timeout=20):
            pass
    before = backend_of(group), live()
    if rank in busy:
        delay("synchronize", 8)
    started = time.monotonic()
    with pytest.raises(ReleaseFailed) as failure, released_world(timeout=3):
        raise AssertionError("it was entered")
    in_time = time.monotonic() - started < 5
    assert not is_released()
    assert (backend_of(group), live()) == before, "nothing was to be changed before all devices are done"
    with released_world(timeout=20):  # it waits for what is still queued
        assert live() == 0
    return failure.value.failures, in_time, total(group)


@pytest.mark.parametrize("cycles_before", [0, 1])
@pytest.mark.parametrize("busy", [(1,), (0, 1)])
def test_a_device_that_is_not_done_holds_nobody_beyond_the_time_limit(nccl_ranks, busy, cycles_before):
    text = "waiting for the device: not done within 1.5 s"
    expected = (dict.fromkeys(busy, text), True, 1)
    assert nccl_ranks(endless_drain, 2, busy=busy, cycles_before=cycles_before, timeout=90) == [expected] * 2
