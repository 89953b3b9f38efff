"""Ctrl-C and bodies that raise, in places where what they leave shows only later. All of it was found by the soak."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from gpurelease import (
    ReleaseFailed,
    RestoreFailed,
    is_released,
    released_world,
    restore_world,
    restored_world,
)
from gpurelease.agreement.ballot import Ballot
from gpurelease.groups.releasable import Releasable
from tests.cycles import POSING, backend_of, refusal, total
from tests.ranks import init_gloo, run_ranks


def fails_once(*args):
    """Stand for ``Releasable.build`` once."""
    Releasable.build = fails_once.real
    raise OSError("injected")


fails_once.real = Releasable.build


def left_in_the_middle(rank, size, case):
    init_gloo(rank, size, timeout=timedelta(seconds=2))

    def body():
        if rank == 1:
            raise KeyboardInterrupt if case == "interrupt" else ValueError
        dist.barrier()

    try:
        with released_world(**POSING):
            if case == "nested":
                try:
                    with released_world(**POSING):
                        body()
                except (ValueError, RuntimeError):
                    pass
            else:
                if case == "retry":
                    Releasable.build = fails_once
                body()
    except (KeyboardInterrupt, ValueError, RuntimeError):
        pass
    if is_released():
        restore_world()
    assert total() == 3
    with released_world(**POSING):
        return total()


@pytest.mark.parametrize("case", ["nested", "interrupt", "retry"])
def test_a_gloo_in_which_a_collective_was_left_is_never_used_again(case):
    """The error is caught in the outer scope; or it is an interrupt; or restoring fails too, and is tried again."""
    assert run_ranks(left_in_the_middle, 3, case=case) == [3] * 3


def interrupted_again_and_again(rank, size, who):
    store = init_gloo(rank, size)
    seen = []
    for _ in range(5):
        try:
            with released_world(**POSING):
                if rank == who:
                    raise KeyboardInterrupt
        except (KeyboardInterrupt, RestoreFailed):
            if is_released():  # else they have met who left at once, who was back already
                restore_world()
        with released_world(**POSING):
            pass
        dist.barrier()
        seen.append(sum("gpurelease" in key for key in store.list_keys()))
        dist.barrier()
    return seen


@pytest.mark.parametrize("who", [0, 1])
def test_interrupts_leave_no_keys(who):
    seen = run_ranks(interrupted_again_and_again, 2, who=who)[0]
    assert len(set(seen[1:])) == 1, seen


def interrupted_twice(rank, size):
    init_gloo(rank, size)

    def keep(group):
        if rank == 1:
            raise KeyboardInterrupt  # while the release is being planned
        return False

    with released_world(**POSING):
        try:
            with restored_world():
                if rank == 1:
                    raise KeyboardInterrupt
        except (KeyboardInterrupt, ReleaseFailed):
            pass
    dist.barrier()
    started = time.monotonic()
    with pytest.raises((KeyboardInterrupt, ReleaseFailed)), released_world(**POSING, keep=keep):
        pass
    return time.monotonic() - started < 5, is_released(), total()


def test_a_rank_that_is_interrupted_twice_is_told_of_twice():
    assert run_ranks(interrupted_twice, 3) == [(True, False, 3)] * 3


def interrupted_in_the_next_scope(rank, size):
    init_gloo(rank, size)
    with pytest.raises(RestoreFailed), released_world(**POSING):
        Releasable.build = fails_once
    started = time.monotonic()
    try:
        with released_world(**POSING):  # the world is still released: leaving this one restores it
            if rank == 1:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        told = "interrupted"
        time.sleep(2)
    except RestoreFailed as error:
        told = error.missing
    in_time = time.monotonic() - started < 5
    restore_world()
    return told, in_time, total()


def test_an_interrupt_in_a_scope_around_a_world_that_is_still_released_is_told_of():
    assert run_ranks(interrupted_in_the_next_scope, 3) == [((1,), True, 3), ("interrupted", True, 3), ((1,), True, 3)]


def options_of_the_scope_around(rank, size):
    init_gloo(rank, size)
    group = dist.new_group([0, 1])
    seen = []
    with released_world(**POSING):
        seen.append(bool(refusal(group)))
        with restored_world(), released_world(**POSING, keep=group):
            seen.append(bool(refusal(group)))
        seen.append(bool(refusal(group)))
    return seen


def test_restored_world_releases_again_with_the_options_of_the_scope_around_it():
    assert run_ranks(options_of_the_scope_around, 2) == [[True, False, True]] * 2


def over_at_once(rank, size):
    init_gloo(rank, size)
    if rank > 0:
        read = Ballot.verdict_within

        def slowly(ballot, timeout):
            time.sleep(0.3)
            return read(ballot, timeout)

        Ballot.verdict_within = slowly
    with released_world(**POSING):
        pass
    if rank == 0:
        os._exit(0)  # it hosts the store
    return is_released()


def test_a_program_may_end_right_after_a_scope():
    assert run_ranks(over_at_once, 3) == [None, False, False]


def kept_and_gone(rank, size):
    init_gloo(rank, size)
    group = dist.new_group([0, 1], group_desc="weights")
    with released_world(**POSING, keep="weights"):
        with restored_world():
            dist.destroy_process_group(group)
        assert is_released()
    return total()


def test_a_group_that_is_kept_by_name_may_be_destroyed_in_a_restored_world():
    assert run_ranks(kept_and_gone, 2) == [1, 1]


def timeout_of_world(rank, size):
    init_gloo(rank, size)
    seen = []
    for seconds in (77, 88):
        with released_world(**POSING):
            dist.group.WORLD.set_timeout(timedelta(seconds=seconds))
        for _ in range(2):
            seen.append(backend_of(dist.group.WORLD).options._timeout)
            with released_world(**POSING):
                pass
    return [int(each.total_seconds()) for each in seen]


def test_a_time_out_that_is_set_on_world_inside_is_world_s_afterwards():
    assert run_ranks(timeout_of_world, 2) == [[77, 77, 88, 88]] * 2
