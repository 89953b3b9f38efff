"""Gloo in WORLD's place: what works on it, and when it is no longer trusted."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from gpurelease import (
    is_released,
    released_world,
    restore_world,
)
from gpurelease.groups.releasable import Releasable
from tests.cycles import POSING, backend_of, cycle, total
from tests.ranks import init_gloo, run_ranks


def reason_kept(scope, group):
    return next(report.reason for report in scope.report.groups if report.name == group.group_name)


def gloo_stands_in(rank, size):
    init_gloo(rank, size)
    world = dist.group.WORLD
    old = dist.new_group(list(range(size)))
    made_inside = []
    for number in range(3):
        with cycle(world, old):
            assert (dist.get_backend(), dist.get_backend(world)) == ("gloo", "gloo")
            assert (dist.get_rank(), dist.get_world_size(), world.size()) == (rank, size, size)
            objects = [None] * size
            dist.all_gather_object(objects, rank)
            assert objects == [0, 1, 2, 3]
            dist.barrier()
            dist.monitored_barrier()
            assert total() == 6
            made_inside.append(dist.new_group([0, 1, 2, 3]))
            assert [total(group) for group in made_inside] == [6] * (number + 1)
        assert [total(group) for group in made_inside] == [6] * (number + 1)
    kept = [backend_of(group) for group in made_inside]
    with released_world(**POSING) as scope:
        assert [backend_of(group) for group in made_inside] == kept
        assert [total(group) for group in made_inside] == [6] * 3
        assert {reason_kept(scope, group) for group in made_inside} == {"made while the world was released"}
    return True


def test_gloo_stands_in_and_groups_made_inside_are_never_released():
    assert run_ranks(gloo_stands_in) == [True] * 4


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


# ------------------------------------------------------------------------------------------------------------- in doubt


def one_body_raises(rank, size):
    init_gloo(rank, size)
    group = dist.new_group(list(range(size)))
    try:
        with released_world(**POSING):
            if rank == 1:
                raise ValueError("only here")
            time.sleep(0.2)
        told = "fine"
    except ValueError as error:
        told = str(error)
    assert not is_released()
    # Its Gloo is not trusted any more: a collective may have been left in the middle.
    with released_world(**POSING):
        dist.barrier()
        assert total() == 3
    return told, total(), total(group)


def test_a_body_that_raises_on_one_rank_only_does_not_hang_the_others():
    told = [text for text, *sums in run_ranks(one_body_raises, 3) if sums == [3.0, 3.0]]
    assert told == ["fine", "only here", "fine"]


def collective_left_in_the_middle(rank, size):
    from datetime import timedelta

    init_gloo(rank, size, timeout=timedelta(seconds=2))
    try:
        with released_world(**POSING):
            if rank == 1:
                raise ValueError("before the barrier")
            dist.barrier()
    except (ValueError, RuntimeError) as error:
        told = type(error).__name__
    assert not is_released()
    with released_world(**POSING):
        dist.barrier()
        assert total() == 3
    return told, total()


def test_a_gloo_that_a_left_collective_has_broken_is_built_anew():
    results = run_ranks(collective_left_in_the_middle, 3)
    assert results == [("RuntimeError", 3.0), ("ValueError", 3.0), ("RuntimeError", 3.0)]


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
