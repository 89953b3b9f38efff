"""An interrupted rank goes at once, and the others are told; where all try again, they meet."""

from __future__ import annotations

import _thread
import signal
import threading
import time

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
from gpurelease.groups.releasable import Releasable
from tests.cycles import POSING, backend_of, total
from tests.ranks import init_gloo, run_ranks

SIZE = 3


def interrupted_context(rank, size):
    init_gloo(rank, size)
    group = dist.new_group(list(range(size)))

    class Interrupted:
        def __enter__(self):
            if rank == 1:
                raise KeyboardInterrupt

        def __exit__(self, *error):
            pass

    started = time.monotonic()
    try:
        with released_world(**POSING, also=[Interrupted]):
            told = "it was entered"
    except KeyboardInterrupt:
        told = "interrupted"
    except RestoreFailed as error:
        told = str(error)
        assert error.missing == (1,)
    assert time.monotonic() - started < 5
    assert (is_released(), dist.get_backend()) == (True, "gloo")
    if rank == 1:
        time.sleep(2)
    restore_world()
    return told, total(group)


def test_a_rank_interrupted_in_a_context_leaves_at_once_and_the_others_are_told_who_left():
    first, second, third = run_ranks(interrupted_context, SIZE)
    assert second == ("interrupted", 3.0)
    assert first == third
    assert "rank 1 left with KeyboardInterrupt, and rebuilds nothing" in first[0]


def interrupted(rank, size):
    init_gloo(rank, size)
    started = time.monotonic()
    try:
        with released_world(**POSING | {"timeout": 30}):
            if rank == 1:
                raise KeyboardInterrupt
        return "restored"
    except KeyboardInterrupt:
        told = "interrupted", is_released(), dist.get_backend()
    except RestoreFailed as error:
        assert error.missing == (1,)
        told = str(error)
    assert time.monotonic() - started < 10
    if rank == 1:
        time.sleep(2)
    # Who left can come back: nobody's state was lost.
    restore_world()
    assert total() == 3
    return told


def test_an_interrupted_rank_leaves_at_once_and_the_others_are_told_who_left():
    first, second, third = run_ranks(interrupted, SIZE)
    assert second == ("interrupted", True, "gloo")
    assert first == third
    assert "rank 1 left with KeyboardInterrupt, and rebuilds nothing" in first


def interrupted_while_waiting(rank, size):
    init_gloo(rank, size)
    with released_world(**POSING):
        pass
    before = backend_of(dist.group.WORLD)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if rank == 1:
        threading.Timer(0.3, _thread.interrupt_main).start()
    if rank == 2:
        time.sleep(1)  # it comes when rank 1 has left
    started = time.monotonic()
    try:
        with released_world(**POSING | {"timeout": 30}):
            told = "it was entered"
    except KeyboardInterrupt:
        told = "interrupted"
    except ReleaseFailed as error:
        told = str(error)
    assert time.monotonic() - started < 5
    assert (is_released(), backend_of(dist.group.WORLD)) == (False, before)
    dist.barrier()
    with released_world(**POSING):
        pass
    return told, total()


def test_a_rank_interrupted_while_it_waits_at_the_entry_has_changed_nothing():
    first, second, third = run_ranks(interrupted_while_waiting, SIZE)
    assert second == ("interrupted", 3.0)
    assert first == third
    assert "rank 1 left with KeyboardInterrupt" in first[0]


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


def fails_once(*args):
    """Stand for ``Releasable.build`` once."""
    Releasable.build = fails_once.real
    raise OSError("injected")


fails_once.real = Releasable.build


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
