"""What a time-out bounds, and what it does not; and nothing of it stays behind."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from datetime import timedelta
from functools import partial

import pytest
import torch.distributed as dist

from gpurelease import (
    RestoreFailed,
    TransitionFailed,
    is_released,
    register_rebuilder,
    released_world,
    restored_world,
    wake_world,
)
from gpurelease.groups import blueprint as blueprints
from gpurelease.torch_internals import backends
from tests.cycles import POSING, backend_of, total
from tests.ranks import init_gloo, run_ranks

# ------------------------------------------------------------------------------------------------------- a slow build


def slow_build(rank, size, slow_group, seconds):
    store = init_gloo(rank, size, timeout=timedelta(seconds=111))
    store.set_timeout(timedelta(seconds=123))
    group = dist.new_group([0, 1], timeout=timedelta(seconds=222))
    slow = [rank == 1]
    real = blueprints.rebuild_gloo

    def rebuild(blueprint, store, timeout):
        if slow[0] and blueprint.group_name == slow_group:
            slow[0] = False
            time.sleep(seconds)
        return real(blueprint, store, timeout)

    register_rebuilder("gloo", rebuild)

    def time_outs():
        found = [backend_of(each).options._timeout for each in (dist.group.WORLD, group)]
        stores = [store, dist.distributed_c10d._get_default_store(), dist.distributed_c10d._world.pg_map[group][1]]
        return [int(each.total_seconds()) for each in [*found, *(each.timeout for each in stores)]]

    before, seen = time_outs(), []
    with pytest.raises(RestoreFailed), released_world(**POSING | {"timeout": 1}):
        pass
    assert is_released()
    wake_world(timeout=20)
    seen.append(time_outs())
    assert total() == total(group) == 1
    time.sleep(seconds)  # the late build is over by now
    seen.append(time_outs())
    with released_world(**POSING):
        seen.append(time_outs()[2:])
    seen.append(time_outs())
    assert total() == total(group) == 1
    return before, seen


@pytest.mark.parametrize("slow_group", ["0", "1"])
def test_after_a_build_that_took_too_long_all_time_outs_are_as_before(slow_group):
    for before, (after, later, inside, at_last) in run_ranks(slow_build, 2, slow_group=slow_group, seconds=2.5):
        assert before[:3] == [111, 222, 123]
        assert after == later == at_last == before
        assert inside == before[2:]


# --------------------------------------------------------------------------------------------------- healthy, but long


def healthy_but_long(rank, size, busy, step):
    """One rank has more to do than fits in the time-out, and does one after the other; nobody fails."""
    init_gloo(rank, size)
    mine, *_ = [dist.new_group([busy]) for _ in range(5)]
    before = backend_of(mine) if rank == busy else None
    slowed = []

    def slowly(do):
        def slow(*args):
            if rank == busy and (step == "tear down" or args[0].size == 1):
                slowed.append(args)
                time.sleep(0.6)
            return do(*args)

        return slow

    if step == "build":
        register_rebuilder("gloo", slowly(blueprints.rebuild_gloo))
    else:
        backends.shut_down = slowly(backends.shut_down)
    os.environ["GPURELEASE_THREADS"] = "1"
    started = time.monotonic()
    with released_world(**POSING | {"timeout": 1.5}):
        pass
    took = time.monotonic() - started
    if rank == busy:
        assert backend_of(mine) is not before
        assert len(slowed) >= 5
    return took > 2.5, total()


@pytest.mark.parametrize("busy", [0, 1])
@pytest.mark.parametrize("step", ["build", "tear down"])
def test_work_that_goes_on_may_take_longer_than_the_time_out(busy, step):
    assert run_ranks(healthy_but_long, 2, busy=busy, step=step) == [(True, 1.0)] * 2


# ----------------------------------------------------------------------------------------------------------- the store

STOPPED_FOR = 6.5  # seconds


def store_host_stops(rank, size, when):
    """Rank 0 hosts the store and is stopped, as a host is that swaps or has lost its network. It goes on later."""
    init_gloo(rank, size)
    scope = released_world(**POSING | {"timeout": 2})
    if when != "before the first scope":
        with scope:
            pass
    pids = [None] * size
    dist.all_gather_object(pids, os.getpid())
    if when == "inside":
        scope.__enter__()
    next_call = partial(scope.__exit__, None, None, None) if when == "inside" else scope.__enter__
    dist.barrier()
    told, took = None, 0.0
    if rank == 0:
        time.sleep(1)  # is stopped here
        if when == "inside":
            told_by(next_call)
    else:
        if rank == 1:
            os.kill(pids[0], signal.SIGSTOP)
            threading.Timer(STOPPED_FOR, os.kill, (pids[0], signal.SIGCONT)).start()
        time.sleep(0.3)
        started = time.monotonic()
        told = told_by(next_call)
        took = time.monotonic() - started
        time.sleep(max(0.0, STOPPED_FOR - took))
    with released_world(**POSING):  # it is back, and so is the world
        pass
    return told, took, is_released(), total()


def told_by(call):
    try:
        call()
    except TransitionFailed as error:
        return type(error).__name__, "store does not answer" in str(error)
    return "nothing"


@pytest.mark.parametrize("when", ["before the first scope", "between scopes", "inside"])
def test_a_store_that_stops_answering_holds_nobody_up_for_much_longer_than_the_time_out(when):
    _, *others = run_ranks(store_host_stops, 3, when=when)
    for told, took, released, group_sum in others:
        assert told == ("RestoreFailed" if when == "inside" else "ReleaseFailed", True)
        assert took < STOPPED_FOR - 1
        assert (released, group_sum) == (False, 3.0)


def a_client_of_the_user_s_waits(rank, size):
    """It holds up all that ask over the same client: the store that WORLD was made with."""
    store = init_gloo(rank, size)
    group = dist.new_group([0, 1])
    over = threading.Event()

    def wait():
        with contextlib.suppress(RuntimeError):
            store.get(f"never, on rank {rank}")
        over.set()

    store.set_timeout(timedelta(seconds=8))
    threading.Thread(target=wait, daemon=True).start()
    time.sleep(0.2)
    started = time.monotonic()
    for _ in range(3):
        with released_world(**POSING), restored_world():
            pass
    took = time.monotonic() - started
    waits = not over.is_set()
    over.wait()
    return waits, took < 6, total(group)


def test_a_client_of_the_user_s_that_waits_holds_no_scope_up():
    assert run_ranks(a_client_of_the_user_s_waits, 2) == [(True, True, 1.0)] * 2
