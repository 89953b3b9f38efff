"""Processes that are forked off a rank: they never speak for it, never wait for its peers, and never hang."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import threading
import time

import pytest
import torch.distributed as dist

from gpurelease import ScopeMisuse, is_released, release_depth, released_world, releases_world, wake_world
from gpurelease.groups.releasable import Releasable
from tests.cycles import POSING, total
from tests.ranks import init_gloo, run_ranks

HANGS = 10.0  # seconds

# --------------------------------------------------------------------------------------- what a child does, and its end


def nothing():
    return "done"


def opens_a_scope():
    try:
        with released_world(**POSING):
            return "it was entered"
    except ScopeMisuse as error:
        return str(error)


def calls_a_decorated_function():
    try:
        return releases_world(nothing)()
    except ScopeMisuse as error:
        return str(error)


def asks():
    return f"{is_released()}, {release_depth()}"


def restores():
    try:
        return str(wake_world())
    except ScopeMisuse as error:
        return str(error)


def has_a_world_of_its_own():
    # What it has inherited is of no use to it, and torch has no better way to be rid of it.
    dist.distributed_c10d._world.pg_map.clear()
    dist.distributed_c10d._update_default_pg(None)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with released_world(**POSING) as scope:
        released = is_released()
    return f"{released}, {is_released()}, {scope.report.reason!r}, {total(value=3)}"


REFUSED = "was forked off rank 1, and has no communicators of its own"
OWN = "True, False, '', 3.0"


def exits():
    sys.exit(3)


def exits_at_once():
    os._exit(3)


def raises():
    raise ValueError("in the child")


def ends():
    pass


def in_a_child(do, end, *, where=None):
    """Fork, have the child do something and end in some way, and return what it said, or that it hung.

    Args:
        do: Returns what the child says.
        end: How it ends.
        where: The scope that the parent is in, if it is in one.
    """
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        faulthandler.dump_traceback_later(HANGS - 2)
        os.write(write, do().encode())
        try:
            if where is None:
                end()
            else:
                with where:  # entered by the parent
                    end()
        except BaseException:
            os._exit(3)
        os._exit(0)
    os.close(write)
    deadline = time.monotonic() + HANGS
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "it hung"
        time.sleep(0.01)
    with os.fdopen(read) as said:
        return said.read()


class Entered:
    """Leaves a scope that was entered elsewhere."""

    def __init__(self, scope):
        self._scope = scope

    def __enter__(self):
        return self._scope

    def __exit__(self, *error):
        return self._scope.__exit__(*error)


# ---------------------------------------------------------------------------------------------------- when it is forked


def forked(rank, size, when, do, end):
    init_gloo(rank, size)
    group = dist.new_group(list(range(size)))
    said = []

    def fork(where=None):
        if rank == 1:
            said.append(in_a_child(do, end, where=where))

    if when == "before the first scope":
        fork()
    if when == "in the middle":
        real = Releasable.take_off

        def take_off(self):
            # In another thread, as a data loader's, while ours holds its locks.
            Releasable.take_off = real
            thread = threading.Thread(target=fork)
            thread.start()
            thread.join()
            return real(self)

        Releasable.take_off = take_off
    started = time.monotonic()
    scope = released_world(**POSING)
    with scope:
        assert is_released()
        if when == "inside":
            fork(Entered(scope))
        dist.barrier()
        assert is_released() and release_depth() == 1
    if when == "after":
        fork()
    assert time.monotonic() - started < HANGS
    assert (is_released(), total(), total(group)) == (False, 1, 1)
    with released_world(**POSING):
        pass
    assert total(group) == 1
    return said


WHENS = ["before the first scope", "in the middle", "inside", "after"]


@pytest.mark.parametrize("when", WHENS)
@pytest.mark.parametrize(
    "do, words", [(opens_a_scope, REFUSED), (calls_a_decorated_function, REFUSED), (has_a_world_of_its_own, OWN)]
)
def test_a_child_is_refused_at_once_but_in_a_world_of_its_own(when, do, words):
    _, [said] = run_ranks(forked, 2, when=when, do=do, end=ends)
    assert words in said


@pytest.mark.parametrize("end", [exits, exits_at_once, raises, ends])
def test_however_a_child_ends_inside_a_scope_it_does_not_speak_for_its_parent(end):
    assert run_ranks(forked, 2, when="inside", do=asks, end=end) == [[], ["False, 0"]]


@pytest.mark.parametrize("when", WHENS)
def test_a_child_has_nothing_to_restore(when):
    _, [said] = run_ranks(forked, 2, when=when, do=restores, end=exits)
    assert REFUSED in said


def says(queue, do):
    queue.put(do())


def in_a_worker(rank, size):
    init_gloo(rank, size)
    multiprocessing.current_process()._config["daemon"] = False  # or it could have no children
    queue = multiprocessing.get_context("fork").SimpleQueue()
    with released_world(**POSING):
        workers = [
            multiprocessing.get_context("fork").Process(target=says, args=(queue, do)) for do in (opens_a_scope, asks)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(HANGS)
        codes = [worker.exitcode for worker in workers]
        said = sorted(queue.get() for _ in workers)
    return codes, said, total()


def test_workers_of_multiprocessing_come_and_go_inside_a_scope():
    for rank, (codes, (first, second), group_sum) in enumerate(run_ranks(in_a_worker, 2)):
        assert codes == [0, 0] and group_sum == 1
        assert first == "False, 0" and f"was forked off rank {rank}" in second
