"""A stand-in takes no more file descriptors than there are; without room for any, all ranks hear so beforehand."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from gpurelease import ReleaseFailed, is_released, released_world
from gpurelease.transition import gloo
from gpurelease.transition.gloo import GLOO_TAKES, WE_TAKE
from tests.cycles import POSING, backend_of, total
from tests.ranks import descriptors, init_gloo, run_ranks

SIZE = 4
ENOUGH = SIZE + GLOO_TAKES + WE_TAKE


@contextlib.contextmanager
def room_for(more):
    """Let this process open ``more`` descriptors only: the limit is on their numbers, so holes are filled."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/dev/fd")))
    fillers = []
    while (filler := os.open(os.devnull, os.O_RDONLY)) < highest:
        fillers.append(filler)
    os.close(filler)
    resource.setrlimit(resource.RLIMIT_NOFILE, (filler + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for filler in fillers:
            os.close(filler)


def narrow(rank, size, room, narrow_ranks, again):
    init_gloo(rank, size)
    group = dist.new_group(list(range(size)))
    assert total(group) == 6
    old = backend_of(group)
    if again:  # it has its Gloo, and needs no more
        with released_world(**POSING):
            pass
    told = None
    with room_for(room) if rank in narrow_ranks else contextlib.nullcontext():
        if rank:
            time.sleep(0.5)  # rank 0 is to count before the others' clients are among what is taken there
        try:
            with released_world(**POSING):
                assert total() == 6
        except ReleaseFailed as error:
            told = {who: text.partition(",")[0] for who, text in error.failures.items()}
            assert again or backend_of(group) is old
        assert not is_released()
        assert total() == total(group) == 6
    with released_world(**POSING):
        assert total() == 6
    return told, total(group)


@pytest.mark.parametrize(
    ("narrow_ranks", "room", "fails"),
    [
        *[((1, 2, 3), room, True) for room in (1, 2, 6, 7, ENOUGH - 1)],
        ((1, 2, 3), ENOUGH, False),
        ((2,), 1, True),
        ((2,), ENOUGH - 1, True),
        # It hosts the store, and so a client of every rank, by now of itself too.
        ((0, 1, 2, 3), ENOUGH, True),
        ((0, 1, 2, 3), ENOUGH + SIZE, False),
    ],
)
def test_all_ranks_hear_of_it_before_anything_is_changed(narrow_ranks, room, fails):
    told = dict.fromkeys((0,) if fails and 0 in narrow_ranks else narrow_ranks, "Gloo") if fails else None
    assert run_ranks(narrow, SIZE, room=room, narrow_ranks=narrow_ranks, again=False) == [(told, 6)] * SIZE


def test_a_gloo_that_is_there_needs_no_room():
    assert run_ranks(narrow, SIZE, room=3, narrow_ranks=range(SIZE), again=True) == [(None, 6)] * SIZE


# ------------------------------------------------------------------------------------------ connecting when they talk

MANY = 8
TALKS = 6 + GLOO_TAKES + WE_TAKE  # to those at 1, 2 and 4 from it, in both directions


def in_a_large_world(rank, size, room, up_to):
    gloo.TO_ALL_UP_TO = up_to
    init_gloo(rank, size)
    with room_for(room) if room and rank == 2 else contextlib.nullcontext():
        with released_world(**POSING):
            time.sleep(0.5)  # for the store to have closed the connection by which rank 0 handed out the token
            inside = descriptors()
            dist.barrier()
            assert total() == 28
            objects = [None] * size
            dist.all_gather_object(objects, rank)
            assert objects == list(range(size))
            if rank == 0:
                dist.recv(torch.ones(1), 3)  # they have not talked before
            elif rank == 3:
                dist.send(torch.ones(1), 0)
    assert total() == 28
    return inside


def test_a_large_world_connects_those_that_talk():
    all_to_all, lazily = (run_ranks(in_a_large_world, MANY, room=0, up_to=up_to) for up_to in (MANY, MANY - 1))
    assert [more - fewer for more, fewer in zip(all_to_all, lazily, strict=True)] == [2] * MANY


@pytest.mark.parametrize("room", [TALKS, TALKS + 1])
def test_where_one_rank_has_room_only_for_those_that_talk_all_connect_so(room):
    assert len(run_ranks(in_a_large_world, MANY, room=room, up_to=MANY)) == MANY


def one_does_not_come(rank, size, call):
    gloo.TO_ALL_UP_TO = 2
    init_gloo(rank, size, timeout=timedelta(seconds=4))
    try:
        with released_world(**POSING):
            started = time.monotonic()  # not before: a name server may hold up who connects to the store
            if rank != size - 1:
                call()
            else:
                time.sleep(7)
        told = ""
    except RuntimeError as error:
        told = str(error)
    return time.monotonic() - started, told, total()


@pytest.mark.parametrize("call", [dist.barrier, total])
def test_who_waits_for_one_that_does_not_come_waits_no_longer_than_world_s_time_out(call):
    """Though two that have not talked before wait five times as long for each other (gloo 520)."""
    for seconds, told, sum_of_all in run_ranks(one_does_not_come, MANY, call=call, timeout=60)[:-1]:
        assert seconds < 8.5, told
        assert "4000ms" in told or "closed by peer" in told
        assert sum_of_all == 28


def left_in_its_middle(rank, size):
    gloo.TO_ALL_UP_TO = 2
    init_gloo(rank, size, timeout=timedelta(seconds=4))
    with contextlib.suppress(ValueError), released_world(**POSING):
        started = time.monotonic()
        if rank == 3:
            raise ValueError
        gathered = [torch.ones(1) for _ in range(size)]
        dist.gather(gathered[0], gathered if rank == 0 else None, async_op=True)
        time.sleep(0.3)
    return time.monotonic() - started, total()


def test_a_gloo_on_which_ranks_wait_for_others_holds_nobody_up():
    for seconds, sum_of_all in run_ranks(left_in_its_middle, MANY, timeout=90):
        assert seconds < 3
        assert sum_of_all == 28
