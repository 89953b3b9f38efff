"""Without room for the stand-in's file descriptors, all ranks hear so before anything is changed."""

from __future__ import annotations

import os
import resource

import pytest
import torch.distributed as dist

from gpurelease import ReleaseFailed, is_released, released_world
from gpurelease.transition.gloo import GLOO_TAKES, WE_TAKE
from tests.cycles import POSING, backend_of, total
from tests.ranks import init_gloo, run_ranks

SIZE = 4
ENOUGH = SIZE + GLOO_TAKES + WE_TAKE


def leave_room(for_more):
    """Let this process open ``for_more`` more descriptors only: the limit is on their numbers, so holes are filled."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/dev/fd")))
    fillers = []
    while (filler := os.open(os.devnull, os.O_RDONLY)) < highest:
        fillers.append(filler)
    os.close(filler)
    resource.setrlimit(resource.RLIMIT_NOFILE, (filler + for_more, before[1]))
    return before, fillers


def narrow(rank, size, room, narrow_ranks, again):
    init_gloo(rank, size)
    group = dist.new_group(list(range(size)))
    assert total(group) == 6
    old = backend_of(group)
    if again:  # it has its Gloo, and needs no more
        with released_world(**POSING):
            pass
    if rank in narrow_ranks:
        before, fillers = leave_room(room)
    told = None
    try:
        with released_world(**POSING):
            assert total() == 6
    except ReleaseFailed as error:
        told = {who: text.partition(",")[0] for who, text in error.failures.items()}
        assert again or backend_of(group) is old
    assert not is_released()
    assert total() == total(group) == 6
    if rank in narrow_ranks:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for filler in fillers:
            os.close(filler)
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
