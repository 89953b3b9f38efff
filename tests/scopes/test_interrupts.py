"""An interrupted rank goes at once, and the others are told; where all try again, they meet."""

from __future__ import annotations

import _thread
import asyncio
import itertools
import os
import random
import signal
import threading
import time

import pytest
import torch.distributed as dist

from gpurelease import (
    ReleaseFailed,
    RestoreFailed,
    TransitionFailed,
    is_released,
    release_depth,
    released_world,
    restored_world,
    wake_world,
)
from gpurelease.groups.releasable import Releasable
from tests.cycles import POSING, backend_of, total
from tests.ranks import init_gloo, run_ranks, tcp_store

SIZE = 3
EVERYWHERE = os.environ.get("CTRL_C_EVERYWHERE") == "1"  # as `make test-ctrl-c` has it


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
    assert time.monotonic() - started < 12
    assert (is_released(), dist.get_backend()) == (True, "gloo")
    if rank == 1:
        time.sleep(2)
    wake_world()
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
    wake_world()
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
    assert time.monotonic() - started < 12
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
                wake_world()
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
    return time.monotonic() - started < 12, is_released(), total()


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
    in_time = time.monotonic() - started < 12
    wake_world()
    return told, in_time, total()


def test_an_interrupt_in_a_scope_around_a_world_that_is_still_released_is_told_of():
    assert run_ranks(interrupted_in_the_next_scope, 3) == [((1,), True, 3), ("interrupted", True, 3), ((1,), True, 3)]


# --------------------------------------------------------------------------------------- Ctrl-C, plain and async


class Kind:
    """Enters, stays in, and leaves a scope in a plain or in an asynchronous way."""

    def __init__(self, is_async):
        self._is_async = is_async

    def go(self, options, body=lambda: 0.0):
        """Go through a scope whose body takes as many seconds as ``body()`` says, once it is called."""
        if self._is_async:
            asyncio.run(self._go_async(options, body))
            return
        with released_world(**options):
            time.sleep(body())

    async def _go_async(self, options, body):
        async with released_world(**options):
            await asyncio.sleep(body())


class Meeting:
    """A barrier that needs no group: a rank that left and came back at once would meet those that are not told yet."""

    def __init__(self, rank, size):
        self._store, self._size, self._met = tcp_store(rank, size, "meeting"), size, 0

    def wait(self):
        self._met += 1
        if self._store.add(f"come {self._met}", 1) == self._size:
            self._store.set(f"all {self._met}", "")
        self._store.wait([f"all {self._met}"])


def ctrl_c(after):
    """Have Ctrl-C pressed in this process, in so many seconds."""
    threading.Timer(after, os.kill, (os.getpid(), signal.SIGINT)).start()


# Which rank it is pressed on, and whether in an asynchronous scope.
KINDS = [(0, False), (1, True), *([(0, True), (1, False)] if EVERYWHERE else [])]
PLACES = ("planning", "waiting to enter", "inside", "waiting to leave")


def pressed_at(rank, size, who, is_async):
    """Press Ctrl-C on one rank in each place, in the first and in a later scope; return what each rank was told."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    kind, told, meeting = Kind(is_async), [], Meeting(rank, size)
    for number, (place, is_first) in enumerate(itertools.product(PLACES, (True, False))):
        dist.init_process_group("gloo", store=tcp_store(rank, size, f"{number}"), rank=rank, world_size=size)
        group = dist.new_group(list(range(size)))
        if not is_first:
            with released_world(**POSING):
                pass
        dist.barrier()
        told.append((place, is_first, *pressed(kind, rank, who, place, size)))
        meeting.wait()
        if is_released():
            wake_world()
        with released_world(**POSING):
            pass
        assert (is_released(), release_depth(), total(group)) == (False, 0, 3.0)
        dist.destroy_process_group()
    return told


def pressed(kind, rank, who, place, size):
    """Return what this rank was told, and how many seconds after it had come."""
    last = next(each for each in range(size) if each != who)

    def keep(group):
        if rank == who and place == "planning":
            raise KeyboardInterrupt
        return False

    def body():
        if rank == who and place == "inside":
            ctrl_c(0.2)
            return 20.0
        if rank == who and place == "waiting to leave":
            ctrl_c(0.3)
        # The interrupted rank does not wait for those that are inside for longer.
        return {"inside": 2.0, "waiting to leave": 1.0}.get(place, 0.1) if rank == last else 0.1

    if place == "waiting to enter":
        if rank == who:
            ctrl_c(0.6)
        if rank == last:
            time.sleep(1.2)
    started = time.monotonic()
    try:
        kind.go({**POSING, "keep": keep} if place == "planning" else POSING, body)
        words = "nothing"
    except KeyboardInterrupt:
        words = "interrupted"
    except TransitionFailed as error:
        words = str(error).partition(": ")[2].partition(" (")[0].partition(".")[0]
        words = words if error.missing == (who,) else f"{error.missing}: {words}"
    return words, time.monotonic() - started


@pytest.mark.parametrize("who, is_async", KINDS)
def test_ctrl_c_comes_out_at_once_and_the_others_are_told_at_once(who, is_async):
    for rank, told in enumerate(run_ranks(pressed_at, SIZE, who=who, is_async=is_async, timeout=90)):
        for place, is_first, words, seconds in told:
            where = (rank, place, is_first, words, seconds)
            expected = f"rank {who} left with KeyboardInterrupt, and rebuilds nothing"
            assert words == ("interrupted" if rank == who else expected), where
            assert seconds < (1.9 if rank == who and place == "inside" else 6), where


# ------------------------------------------------------------------------------------------------------ at the verdict


def at_the_verdict(rank, size, who, leaving, is_async, moments):
    """Press Ctrl-C on one rank at about the time at which the last one comes; return who was where afterwards."""
    init_gloo(rank, size)
    group = dist.new_group(list(range(size)))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    kind, seen, meeting = Kind(is_async), [], Meeting(rank, size)
    with released_world(**POSING):
        pass
    for moment in moments:
        dist.barrier()
        meets_at = time.monotonic() + 0.15

        def body(meets_at=meets_at, moment=moment):
            if not leaving:
                return 0.1
            if rank == who:
                ctrl_c(max(0.0, 0.15 + moment))
            return 0.15 if rank != who else 0.0

        if not leaving and rank == who:
            ctrl_c(0.15 + moment)
        if not leaving and rank != who:
            time.sleep(max(0.0, meets_at - time.monotonic()))
        outcome = "done"
        try:
            try:
                kind.go(POSING, body)
            finally:
                time.sleep(0.3 * (rank == who))  # else it would come where the next one is opened
        except KeyboardInterrupt:
            outcome = "interrupted"
        except TransitionFailed as error:
            outcome = type(error).__name__
        assert release_depth() == 0
        meeting.wait()
        started = time.monotonic()
        with released_world(**POSING):
            assert is_released()
        assert time.monotonic() - started < 12
        assert (is_released(), total(group)) == (False, 1.0)
        seen.append(outcome)
    return seen


@pytest.mark.parametrize("who, is_async", KINDS)
@pytest.mark.parametrize("leaving", [False, True], ids=["entry", "exit"])
def test_after_a_ctrl_c_at_the_verdict_all_ranks_are_brought_to_one_state_by_the_next_scope(who, is_async, leaving):
    rng = random.Random(f"{who}, {is_async}, {leaving}")
    moments = [rng.uniform(-0.005, 0.03) for _ in range(24 if EVERYWHERE else 4)]
    by_rank = run_ranks(at_the_verdict, 2, timeout=120, who=who, leaving=leaving, is_async=is_async, moments=moments)
    assert "interrupted" in by_rank[who]
    assert "interrupted" not in by_rank[1 - who]
