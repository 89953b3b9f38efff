"""Groups are built side by side, with no kernel in flight: one that waits for another rank would close circles."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from gpurelease import RestoreFailed, is_released, released_world, wake_world
from tests.nccl.double import (
    FIRST,
    HAS_SECOND,
    backend_of,
    created,
    delay,
    fault,
    held,
    init_nccl,
    library,
    live,
    pass_along,
    total,
)

RINGS = 8
# Making a communicator takes 0 to 40 ms, and ends only once no kernel of its device waits for another rank.
IN_FLIGHT = {"SIMGPU_INIT_JITTER_MS": "40", "SIMGPU_INIT_WAITS": "1", "SIMGPU_TIMEOUT": "3"}
KINDS = [FIRST, "nccl2", "nccl-lazy"] if HAS_SECOND else [FIRST]


def ring(rank, size, backend):
    """Make the groups of all neighbours in a ring of ranks, several times, and return this rank's."""
    pairs = [sorted((low, (low + 1) % size)) for low in range(size)] * RINGS
    groups = [dist.new_group(pair, backend=backend) for pair in pairs]
    return [group for group, pair in zip(groups, pairs, strict=True) if rank in pair]


# -------------------------------------------------------------------------------------------------------- deadlocks


def by_kernels(rank, size):
    init_nccl(rank, size, backend=FIRST, timeout=timedelta(seconds=60))
    groups = ring(rank, size, FIRST)

    def connect(group):
        torch.cuda.set_device(rank)
        try:
            backend_of(group).allreduce([torch.empty(1, dtype=torch.uint8, device="cuda")]).wait()
        except RuntimeError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(groups)) as pool:
        return [error for error in pool.map(connect, groups) if error]


def test_the_double_shows_the_deadlock_of_kernels_in_flight(nccl_ranks):
    """Without this the next tests would show nothing."""
    assert any(nccl_ranks(by_kernels, 3, env=IN_FLIGHT, timeout=120))


def cycles(rank, size, backend, in_turn):
    init_nccl(rank, size, backend=backend)
    groups = [dist.group.WORLD, *ring(rank, size, backend)]
    for group in groups:
        total(group)
    count, before = live(), library().simgpu_simulated()
    for _ in range(2):
        with released_world(timeout=20):
            assert (live(), held()) == (0, 0)
        assert live() == count
    simulated = library().simgpu_simulated() - before
    sums = [total(group) == sum(dist.get_process_group_ranks(group)) for group in groups]
    assert live() == count, "using a group that was connected made another communicator"
    return all(sums), simulated == (2 * count if backend == FIRST and not in_turn else 0)


@pytest.mark.parametrize("in_turn", [False, True], ids=["side by side", "in turn"])
@pytest.mark.parametrize("backend", KINDS)
def test_there_is_no_deadlock(nccl_ranks, backend, in_turn, monkeypatch):
    env = IN_FLIGHT | ({"GPURELEASE_CONNECT": "collective"} if in_turn else {})
    assert nccl_ranks(cycles, 3, backend=backend, in_turn=in_turn, env=env, timeout=120) == [(True, True)] * 3


# ----------------------------------------------------------------------------------------------------------- alike


def one_cannot(rank, size, why):
    init_nccl(rank, size, backend=FIRST)
    groups = [dist.group.WORLD, *ring(rank, size, FIRST)]
    for group in groups:
        total(group)
    before = library().simgpu_simulated()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1 and why == "variable":
            patch.setenv("GPURELEASE_CONNECT", "collective")
        elif rank == 1:
            patch.setattr("gpurelease.torch_internals.nccl.connects_without_kernel", lambda *args, **kwargs: False)
        with released_world(timeout=20):
            pass
    assert library().simgpu_simulated() == before
    return all(total(group) == sum(dist.get_process_group_ranks(group)) for group in groups)


@pytest.mark.parametrize("why", ["variable", "probe"])
def test_if_one_rank_cannot_all_build_in_turn(nccl_ranks, why):
    assert nccl_ranks(one_cannot, 3, why=why, env=IN_FLIGHT, timeout=120) == [True] * 3


# ----------------------------------------------------------------------------------------------------- communicators


def sends(rank, size):
    init_nccl(rank, size, backend=FIRST)
    group = dist.new_group(list(range(size)), backend=FIRST)
    total(group)
    assert pass_along(group) == rank
    before = live()
    with released_world(timeout=20):
        pass
    seen = [live()]
    assert pass_along(group) == rank
    return [*seen, live() == before, total(group)]


def test_send_and_recv_keep_communicators_of_their_own(nccl_ranks):
    """Connected in torch's eager way they would share the one of all members, in the order of its collectives."""
    assert nccl_ranks(sends, 3) == [[1, True, 3]] * 3


# ------------------------------------------------------------------------------------------------------------- speed


def how_long(rank, size, backend, count):
    init_nccl(rank, size, backend=backend)
    groups = [dist.new_group(list(range(size)), backend=backend) for _ in range(count)]
    for group in groups:
        total(group)
    with released_world(timeout=20) as scope, pytest.MonkeyPatch.context() as patch:
        pass
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SIMGPU_INIT_MS", "200")
        with released_world(timeout=20) as scope:
            pass
    return scope.report.transitions[-1].seconds["build"]


@pytest.mark.parametrize("backend", KINDS)
def test_eight_communicators_take_no_longer_than_two(nccl_ranks, backend):
    seconds = nccl_ranks(how_long, 2, backend=backend, count=8)
    assert all(0.2 <= each < 0.8 for each in seconds), seconds


# ------------------------------------------------------------------------------------------------------------ faults


def fails_in_the_middle(rank, size, backend, failing, after):
    init_nccl(rank, size, backend=backend)
    groups = [dist.group.WORLD, *ring(rank, size, backend)]
    for group in groups:
        total(group)
    count = live()
    started = time.monotonic()
    with pytest.raises(RestoreFailed) as failure, released_world(timeout=10):
        if rank == failing:
            fault("init", after=after)
        elif rank == (failing + 1) % size:
            delay("init", 0.3, after=2)
        started = time.monotonic()
    seconds = time.monotonic() - started
    assert is_released()
    deadline = time.monotonic() + 12
    while (live(), held()) != (0, 0):  # what was begun is closed by who began it
        assert time.monotonic() < deadline, (live(), held())
        time.sleep(0.02)
    made = created()
    wake_world()
    assert (live(), created()) == (count, made + count)
    return (
        sorted(failure.value.failures),
        seconds < 6,
        all(total(group) == sum(dist.get_process_group_ranks(group)) for group in groups),
    )


@pytest.mark.parametrize(("failing", "after"), [(0, 0), (1, 5), (2, 12)])
@pytest.mark.parametrize("backend", KINDS[:2])
def test_one_that_fails_ends_what_others_wait_for_and_leaves_nothing_behind(nccl_ranks, backend, failing, after):
    env = {"SIMGPU_TIMEOUT": "4", "SIMGPU_INIT_JITTER_MS": "20"}
    results = nccl_ranks(fails_in_the_middle, 3, backend=backend, failing=failing, after=after, env=env, timeout=120)
    assert results == [([failing], True, True)] * 3
