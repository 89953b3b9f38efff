"""Ranks that are late, dead, or silent: the others name them in time, and go on as soon as all are there."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch.distributed as dist

from gpurelease import (
    ReleaseFailed,
    RestoreFailed,
    is_released,
    released_world,
    wake_world,
)
from gpurelease.agreement.ballot import Ballot
from gpurelease.groups.releasable import Releasable
from gpurelease.torch_internals import backends
from tests.cycles import POSING, backend_of, refusal, total
from tests.ranks import init_gloo, run_ranks

SIZE = 3


def late(rank, size, late_rank):
    init_gloo(rank, size)
    group = dist.new_group(list(range(size)))
    before = backend_of(group)
    for _ in range(2):
        started = time.monotonic()
        if rank == late_rank:
            time.sleep(2.5)
        try:
            with released_world(**POSING | {"timeout": 1}):
                raise AssertionError("it was entered")
        except ReleaseFailed as error:
            # Who is late joins the next roll call, and waits there: whoever tries again meets.
            others = tuple(other for other in range(size) if other != late_rank)
            # In the very first it is rank 0 that it waits for.
            assert error.missing in ([others, (0,)] if rank == late_rank else [(late_rank,)]), error
            assert "every group works as before" in str(error)
            took = time.monotonic() - started
        assert not is_released()
        assert backend_of(group) is before
        assert took < 5
        assert total(group) == 3
        with released_world(**POSING | {"timeout": 20}):
            pass
        assert total(group) == 3
        before = backend_of(group)
    return True


@pytest.mark.parametrize("late_rank", [0, 2])
def test_a_rank_that_does_not_enter_is_named_by_the_others_who_are_as_before(late_rank):
    assert run_ranks(late, SIZE, late_rank=late_rank) == [True] * SIZE


def late_to_leave(rank, size, late_rank):
    init_gloo(rank, size)
    group = dist.new_group(list(range(size)))
    started = time.monotonic()
    try:
        with released_world(**POSING | {"timeout": 1}):
            if rank == late_rank:
                time.sleep(2.5)
            started = time.monotonic()
    except RestoreFailed as error:
        told = error.missing
    took = time.monotonic() - started
    assert (is_released(), dist.get_backend()) == (True, "gloo")
    assert refusal(group)
    dist.barrier()
    wake_world()
    return told, took < 4, total(), total(group)


@pytest.mark.parametrize("late_rank", [0, 2])
def test_a_rank_that_hangs_inside_is_named_by_the_others_and_restoring_works_once_it_is_back(late_rank):
    results = run_ranks(late_to_leave, SIZE, late_rank=late_rank)
    assert [told for rank, (told, *_) in enumerate(results) if rank != late_rank] == [(late_rank,)] * (SIZE - 1)
    assert [rest for _, *rest in results] == [[True, 3.0, 3.0]] * SIZE


def killed(rank, size, where):
    init_gloo(rank, size)
    with released_world(**POSING):
        pass

    def die(*args):
        os.kill(os.getpid(), signal.SIGKILL)

    started = time.monotonic()
    if rank == 2 and where == "before":
        die()
    if rank == 2 and where == "tearing down":
        backends.shut_down = die
    try:
        with released_world(**POSING | {"timeout": 3}):
            started = time.monotonic()
            if rank == 2 and where == "inside":
                die()
            if rank == 2 and where == "building":
                Releasable.build = die
    except (ReleaseFailed, RestoreFailed) as error:
        told = type(error).__name__, error.missing, is_released()
    assert time.monotonic() - started < 3 + 3
    dist.distributed_c10d._world.pg_map.clear()  # nothing is left to be destroyed together
    dist.distributed_c10d._update_default_pg(None)
    return told


@pytest.mark.parametrize("where", ["before", "tearing down", "inside", "building"])
def test_a_killed_rank_is_named_by_the_others_in_time(where):
    results = run_ranks(killed, SIZE, where=where, dies={2: -signal.SIGKILL})
    expected = ("ReleaseFailed", (2,), False) if where == "before" else ("RestoreFailed", (2,), True)
    assert results == [expected, expected, None]


def killed_in_a_group_of_some(rank, size):
    """Rank 2 stands still in the group that rank 1 dies in, and the others have nothing to do but to wait for both."""
    init_gloo(rank, size)
    for members in ([0, 1], [1, 2], [0, 1, 2]):
        dist.new_group(members)
    build = Releasable.build

    def die(self, *args):
        if rank == 1 and self.group.size() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return build(self, *args)

    try:
        with released_world(**POSING | {"timeout": 3}):
            Releasable.build = die
            started = time.monotonic()
    except RestoreFailed as error:
        told = error.missing
    assert time.monotonic() - started < 3 + 5
    dist.distributed_c10d._world.pg_map.clear()  # nothing is left to be destroyed together
    dist.distributed_c10d._update_default_pg(None)
    return told


def test_who_stands_still_because_of_a_killed_rank_is_not_named_with_it():
    for _ in range(2):
        assert run_ranks(killed_in_a_group_of_some, 4, dies={1: -signal.SIGKILL}) == [(1,), None, (1,), (1,)]


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


def store_is_gone(rank, size, where):
    init_gloo(rank, size)
    with released_world(**POSING):
        pass

    def die(*args):
        os.kill(os.getpid(), signal.SIGKILL)

    started = time.monotonic()
    try:
        with released_world(**POSING | {"timeout": 3}):
            if rank == 0 and where == "inside":  # it hosts the store
                die()
            if rank == 0 and where == "building":
                Releasable.build = die
    except RestoreFailed as error:
        told = str(error)
    assert time.monotonic() - started < 3 + 3
    dist.distributed_c10d._world.pg_map.clear()  # nothing is left to be destroyed together
    dist.distributed_c10d._update_default_pg(None)
    return told


@pytest.mark.parametrize("where", ["inside", "building"])
def test_the_rank_that_hosts_the_store_is_named_if_it_is_killed(where):
    _, *others = run_ranks(store_is_gone, SIZE, where=where, dies={0: -signal.SIGKILL})
    for text in others:
        assert "WORLD's store does not answer; its host, usually rank 0, may be gone" in text
