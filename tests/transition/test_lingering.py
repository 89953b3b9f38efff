"""Nothing lingers of a WORLD that ended badly: no descriptors, threads, open scopes, reports, or objects of ours."""

from __future__ import annotations

import gc
import os
import signal
import time

import pytest
import torch.distributed as dist

from gpurelease import (
    RestoreFailed,
    current_report,
    is_released,
    release_depth,
    released_world,
    restored_world,
    sleep_world,
)
from gpurelease.groups.releasable import Releasable
from gpurelease.scopes.frame import Frame
from gpurelease.transition.world import World
from tests.cycles import POSING, cycle, total
from tests.ranks import descriptors, run_ranks, tcp_store, threads

OURS = (World, Frame, Releasable)
SOON = 8.0  # seconds


def left():
    """Return what this process holds."""
    gc.collect()
    objects = [sum(isinstance(each, kind) for each in gc.get_objects()) for kind in OURS]
    return descriptors(), threads(), *objects, release_depth(), is_released(), current_report()


def soon_is(expected):
    """Return what this process holds once that is no more than ``expected``: a thread ends a moment after its work."""
    deadline = time.monotonic() + SOON
    while (found := left()) != expected and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def a_world(rank, size, name):
    dist.init_process_group("gloo", store=tcp_store(rank, size, name), rank=rank, world_size=size)
    return dist.new_group(list(range(size)))


def a_good_one(rank, size, name):
    """Go through a WORLD with a cycle."""
    group = a_world(rank, size, name)
    with cycle(dist.group.WORLD, group):
        pass
    assert total(group) == size * (size - 1) / 2
    dist.destroy_process_group()


def with_a_dead_rank(rank, size, where):
    """All but the last rank outlive a WORLD in which that is killed."""
    if rank < size - 1:
        a_good_one(rank, size - 1, "before")
        before = left()
    a_world(rank, size, "with a dead rank")
    if rank == size - 1 and where == "building":
        Releasable.build = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
    try:
        with released_world(**POSING | {"timeout": 1}):
            dist.barrier()
            if rank == size - 1 and where == "inside":
                os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("it was restored")
    except RestoreFailed as error:
        assert error.missing == (size - 1,)
        del error
    assert is_released()
    dist.destroy_process_group()
    assert (is_released(), release_depth(), current_report()) == (False, 0, None)
    a_good_one(rank, size - 1, "after")
    return before, soon_is(before)


@pytest.mark.parametrize("where", ["inside", "building"])
def test_nothing_lingers_after_a_dead_rank_and_a_new_world(where):
    *others, _ = run_ranks(with_a_dead_rank, 3, where=where, dies={2: -signal.SIGKILL})
    for before, after in others:
        assert after == before
        assert before[2:] == (0, 0, 0, 0, False, None)


def fails(*args):
    raise OSError("injected")


class Nothing:
    def __enter__(self):
        pass

    def __exit__(self, *error):
        pass


def never_closed(rank, size, how):
    """Go through WORLDs that are destroyed inside scopes that nobody ever leaves."""
    a_good_one(rank, size, "before")
    seen, build = [left()], Releasable.build
    for number in range(3):
        a_world(rank, size, f"{number}")
        if how == "a call":
            sleep_world(**POSING)
        elif how == "a block":
            released_world(**POSING, also=[Nothing]).__enter__()
        else:
            outer = released_world(**POSING)
            outer.__enter__()
            Releasable.build = fails
            with pytest.raises(RestoreFailed):
                if how == "a failed inner one":
                    restored_world().__enter__()
                else:
                    outer.__exit__(None, None, None)
            Releasable.build = build
            del outer
        assert is_released() and (current_report() is None) == (how == "a failed one")
        dist.destroy_process_group()
        a_good_one(rank, size, f"after {number}")
        seen.append(soon_is(seen[0]))
    return seen


@pytest.mark.parametrize("how", ["a call", "a block", "a failed one", "a failed inner one"])
def test_nothing_lingers_of_scopes_that_nobody_ever_closed(how):
    for before, *after in run_ranks(never_closed, 2, how=how):
        assert after == [before] * 3
        assert before[2:] == (0, 0, 0, 0, False, None)
