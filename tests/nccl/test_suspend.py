"""Suspending the real ProcessGroupNCCL: the same communicators before, inside and after, with less memory inside."""

from __future__ import annotations

import gc
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from gpurelease import ReleaseFailed, RestoreFailed, is_released, released_world, restored_world, wake_world
from gpurelease.strategies.strategy import Backends
from tests.cycles import total as total_on_host
from tests.nccl.double import (
    CONNECTS_AT_ONCE,
    FIRST,
    HAS_SECOND,
    backend_of,
    created,
    delay,
    fault,
    held,
    init_nccl,
    live,
    pass_along,
    total,
)
from tests.ranks import tcp_store

MIB = 1 << 20
GIVES, STAYS = 256 * MIB, 64 * MIB  # of each communicator: the double's defaults
CYCLES = 3
BACKENDS = [FIRST, "nccl2", "nccl-lazy"] if HAS_SECOND else [FIRST]


# ----------------------------------------------------------------------------------------------------------- as it is


def cycles(rank, size, backend, strategy):
    init_nccl(rank, size, backend=backend)
    group, unused = (dist.new_group([0, 1], backend=backend) for _ in range(2))
    assert total() == total(group) == 1
    count, made, backends = live(), created(), [backend_of(each) for each in (dist.group.WORLD, group, unused)]
    for _ in range(CYCLES):
        with released_world(strategy=strategy, timeout=20) as scope:
            assert (live(), held()) == (count, count * STAYS)
            assert total_on_host() == 1
            with pytest.raises(RuntimeError, match="is released by gpurelease"):
                total(group)
        assert [backend_of(each) for each in (dist.group.WORLD, group, unused)] == backends
        assert (live(), created(), held()) == (count, made, count * (GIVES + STAYS))
        assert total() == total(group) == 1
    assert total(unused) == 1
    report = scope.report
    groups = [(each.connected, each.suspended_bytes, each.stayed_bytes) for each in report.released]
    freed = report.freed_bytes // STAYS * STAYS  # without what the allocator had in its cache
    return report.strategy, report.strategy_reason, groups, freed, str(report).partition("; comm")[2]


@pytest.mark.parametrize("strategy", ["suspend", "auto"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_communicators_stay_and_give_back_what_they_can(nccl_ranks, backend, strategy):
    results = nccl_ranks(cycles, 2, backend=backend, strategy=strategy)
    reason = "all communicators can be suspended" if strategy == "auto" else ""
    told = "unicators suspended 0.50 GiB and held 0.12 GiB"
    if reason:
        told += f"; strategy 'suspend': {reason}"
    used, unused = (True, GIVES, STAYS), (False, None, None)
    if results[0][2][2] == used:  # where torch connects at once
        unused, told = used, told.replace("0.50", "0.75").replace("0.12", "0.19")
    gave = sum(each is used for each in (used, used, unused)) * GIVES
    assert results == [("suspend", reason, [used, used, unused], gave, told)] * 2


def pairs(rank, size, backend, with_collective):
    init_nccl(rank, size, backend=backend)
    group = dist.new_group(list(range(size)), backend=backend)
    if with_collective:
        total(group)

    seen = []
    for _ in range(CYCLES):
        assert pass_along(group) == rank
        count = live()
        with released_world(strategy="suspend", timeout=20):
            assert live() == count
            seen.append(held() // MIB)
    assert pass_along(group) == rank
    return seen


@pytest.mark.parametrize(
    ("backend", "with_collective", "expected"),
    [
        (FIRST, True, [64 + 320, 64 + 640, 64 + 320]),
        (FIRST, False, [320, 640, 320]),
        # From 2.15 it sends over the one of all members, and WORLD has one too.
        *([("nccl-lazy", True, [128, 128 if CONNECTS_AT_ONCE else 192, 128])] if HAS_SECOND else []),
    ],
)
def test_what_torch_suspends_of_communicators_of_two_ranks(nccl_ranks, backend, with_collective, expected):
    """xtuner 1971: a backend that has none of all its members raises if it is suspended; it is left alone."""
    results = nccl_ranks(pairs, 3, backend=backend, with_collective=with_collective)
    assert results == [[size] * CYCLES for size in expected]


def small_things(rank, size):
    init_nccl(rank, size)
    group = dist.new_group([0, 1], timeout=timedelta(seconds=111))
    total(), total(group)
    with released_world(strategy="suspend", timeout=20):
        group.set_timeout(timedelta(seconds=222))
        with restored_world():
            assert held() == live() * (GIVES + STAYS)
            assert total(group) == 1
        assert held() == live() * STAYS
        engine = dist.new_group([0, 1], backend="nccl")
        assert total(engine) == 1
    assert held() == live() * (GIVES + STAYS)
    with pytest.raises(ZeroDivisionError), released_world(strategy="suspend", timeout=20):
        _ = 1 / 0
    gc.collect()
    assert not [each for each in gc.get_objects() if isinstance(each, Backends)], "they are the groups' own again"
    assert total() == total(group) == total(engine) == 1
    return int(backend_of(group).options._timeout.total_seconds())


@pytest.mark.parametrize("second", ["0", "1"], ids=["ProcessGroupNCCL", "ProcessGroupNCCL2"])
def test_a_scope_behaves_as_with_the_other_strategy(nccl_ranks, second):
    assert nccl_ranks(small_things, 2, env={"TORCH_DIST_USE_NCCL2": second}) == [222, 222]


def detail(rank, size):
    init_nccl(rank, size)
    assert total() == 1
    old = backend_of(dist.group.WORLD)
    with released_world(strategy="suspend", timeout=20):
        assert held() == live() * STAYS
    assert backend_of(dist.group.WORLD) is old
    return total()


def test_under_the_debug_wrapper(nccl_ranks):
    assert nccl_ranks(detail, 2, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}) == [1, 1]


def both(rank, size):
    init_nccl(rank, size, backend=FIRST)
    group = dist.new_group([0, 1], backend=FIRST)
    total(), total(group)
    seen = []
    for strategy in ("rebuild", "suspend", "suspend", "rebuild", "suspend", "auto", "rebuild"):
        with released_world(strategy=strategy, timeout=20):
            seen.append((live(), held() // MIB))
        assert total() == total(group) == 1
    return seen


def test_strategies_can_change_from_scope_to_scope(nccl_ranks):
    suspended = (2, 128)
    expected = [(0, 0), suspended, suspended, (0, 0), suspended, suspended, (0, 0)]
    assert nccl_ranks(both, 2) == [expected] * 2


# ------------------------------------------------------------------------------------------------------ not supported


def unsupported(rank, size):
    init_nccl(rank, size, backend=FIRST)
    group = dist.new_group([0, 1], backend=FIRST)
    never = dist.new_group([0, 1], backend=FIRST)
    total(), total(group)
    backend = backend_of(group)
    with pytest.raises(ReleaseFailed) as failure, released_world(strategy="suspend", timeout=20):
        raise AssertionError("it was entered")
    assert backend_of(group) is backend
    assert total() == total(group) == 1
    with released_world(strategy="auto", timeout=20) as scope:
        assert (live(), held()) == (0, 0)
    assert backend_of(group) is not backend
    assert total(group) == total(never) == 1
    return failure.value.failures, scope.report.strategy, scope.report.strategy_reason


def test_an_nccl_that_cannot_is_asked_and_not_guessed(nccl_ranks):
    for failures, strategy, reason in nccl_ranks(unsupported, 2, env={"SIMGPU_NCCL_VERSION": "22800"}):
        assert set(failures) == {0, 1}
        assert failures[0].startswith("strategy='suspend' is not supported: process group '0' (default_pg): ")
        assert "NCCL error" in failures[0]
        assert (strategy, reason.partition(": ")[0]) == ("rebuild", "rank 0")
        assert reason.partition(": ")[2] in failures[0]


# -------------------------------------------------------------------------------------------------------- destruction


def destroyed(rank, size, backend):
    init_nccl(rank, size, backend=backend)
    group, other = (dist.new_group([0, 1], backend=backend) for _ in range(2))
    total(), total(group), total(other)
    with released_world(strategy="suspend", timeout=20):
        dist.destroy_process_group(group)
        assert live() == 3
    assert live() == 2
    assert total() == total(other) == 1
    with released_world(strategy="suspend", timeout=20):
        dist.destroy_process_group()
    assert (live(), held()) == (0, 0)
    dist.init_process_group(backend, store=tcp_store(rank, size, "again"), rank=rank, world_size=size)
    return total()


@pytest.mark.parametrize("backend", BACKENDS[:2])
def test_what_is_destroyed_while_suspended_is_gone_after_the_scope(nccl_ranks, backend):
    assert nccl_ranks(destroyed, 2, backend=backend) == [1, 1]


# ------------------------------------------------------------------------------------------------------------- faults


def failing_suspend(rank, size, backend, failing, strategy):
    init_nccl(rank, size, backend=backend)
    group = dist.new_group(list(range(size)), backend=backend)
    total(), total(group)
    old = backend_of(group)
    if rank == failing:
        fault("suspend")
    started = time.monotonic()
    told = None
    try:
        with released_world(strategy=strategy, timeout=6) as scope:
            told = scope.report.strategy, scope.report.strategy_reason, live(), held(), scope.report.suspended_bytes
    except ReleaseFailed as error:
        told = error.failures
    assert time.monotonic() - started < 10
    time.sleep(1)  # for a watchdog that has found something, to end the process
    assert (is_released(), dist.get_backend()) == (False, backend)
    assert backend_of(group) is not old
    assert total() == total(group) == 3
    before = live()
    with released_world(strategy="suspend", timeout=20):
        assert live() == before
    assert total(group) == 3
    return told


@pytest.mark.parametrize("failing", [0, 2])
@pytest.mark.parametrize("backend", BACKENDS[:2])
def test_a_suspend_that_fails_on_one_rank_fails_on_all_and_new_communicators_work(nccl_ranks, backend, failing):
    env = {"SIMGPU_TIMEOUT": "2", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "100"}
    results = nccl_ranks(failing_suspend, 3, backend=backend, failing=failing, strategy="suspend", env=env)
    for failures in results:
        assert "suspending process group" in failures[failing]


@pytest.mark.parametrize("failing", [0, 2])
def test_auto_goes_on_with_rebuild_if_suspending_fails(nccl_ranks, failing):
    """Such as for communicators that share memory with a parent (``split_share``): NCCL tells only when it is asked."""
    env = {"SIMGPU_TIMEOUT": "2"}
    for strategy, reason, count, size, suspended in nccl_ranks(
        failing_suspend, 3, backend=FIRST, failing=failing, strategy="auto", env=env
    ):
        assert (strategy, count, size, suspended) == ("rebuild", 0, 0, None)
        assert "suspending process group" in reason


def failing_resume(rank, size, backend, failing, memory):
    init_nccl(rank, size, backend=backend)
    group = dist.new_group(list(range(size)), backend=backend)
    total(), total(group)
    count = live()
    with pytest.raises(RestoreFailed) as failure, released_world(strategy="suspend", timeout=6):
        taken = None
        if rank == failing and memory:
            taken = torch.empty(700 * MIB, dtype=torch.uint8, device="cuda")
        elif rank == failing:
            fault("resume")
    assert (is_released(), live(), held(), dist.get_backend()) == (True, 0, 0, "gloo")
    assert total_on_host() == 3
    with pytest.raises(RuntimeError, match="is released by gpurelease"):
        total(group)
    del taken
    wake_world()
    assert (is_released(), live()) == (False, count)
    assert total() == total(group) == 3
    return failure.value.failures[failing]


@pytest.mark.parametrize("memory", [True, False], ids=["no memory", "fault"])
@pytest.mark.parametrize("failing", [0, 2])
@pytest.mark.parametrize("backend", BACKENDS[:2])
def test_a_resume_that_fails_on_one_rank_fails_on_all_and_the_next_try_builds_new_ones(
    nccl_ranks, backend, failing, memory
):
    env = {"SIMGPU_TIMEOUT": "2", "SIMGPU_TOTAL_MB": "1000"}
    for text in nccl_ranks(failing_resume, 3, backend=backend, failing=failing, memory=memory, env=env):
        assert "resuming process group" in text
        assert ("0.1" in text and f"GiB were free on cuda:{failing}" in text) or not memory


def hanging(rank, size, call):
    init_nccl(rank, size, backend=FIRST)
    total()
    error, started = None, 0.0
    try:
        if call == "suspend" and rank == 1:
            delay("suspend", 8)
        started = time.monotonic()
        with released_world(strategy="suspend", timeout=4):
            if call == "resume" and rank == 1:
                delay("resume", 8)
            started = time.monotonic()
    except (ReleaseFailed, RestoreFailed) as failure:
        error = failure
    took = time.monotonic() - started
    if is_released():
        wake_world()
    return type(error).__name__, error.failures, took < 11, total()


@pytest.mark.parametrize(("call", "kind"), [("suspend", "ReleaseFailed"), ("resume", "RestoreFailed")])
def test_nobody_waits_without_a_bound_for_a_rank_that_hangs(nccl_ranks, call, kind):
    """Both are a rendezvous in NCCL. torch's own bindings keep the GIL meanwhile: nobody could even say so."""
    text = f"{call[:-1] if call[-1] == 'e' else call}ing process group '0' (default_pg): not done within 4 s"
    for name, failures, in_time, sum_after in nccl_ranks(hanging, 2, call=call, timeout=90):
        assert (name, in_time, sum_after) == (kind, True, 1)
        assert failures and all(failure.startswith(text) for failure in failures.values())
