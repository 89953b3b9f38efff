"""Scopes of all kinds on real ranks."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

import gpurelease
from gpurelease import (
    ReleaseFailed,
    is_released,
    release_depth,
    released_world,
    releases_world,
    restored_world,
    sleep_world,
    wake_world,
)
from tests.cycles import POSING, backend_of, refusal, total
from tests.ranks import init_gloo, run_ranks


def every_kind_of_scope(rank, size):
    init_gloo(rank, size)
    group = dist.new_group([0, 1, 2, 3])
    log = []

    @releases_world(**POSING)
    def rollout(depth=1):
        log.append(bool(refusal(group)))
        with restored_world():
            log.append(total(group))
        log.append(bool(refusal(group)))
        return rollout(depth - 1) if depth else "samples"

    @releases_world(**POSING)
    async def async_rollout():
        await asyncio.sleep(0.01)
        log.append(bool(refusal(group)))
        async with restored_world():
            log.append(total(group))
        return "samples"

    async def main():
        async with released_world(**POSING):
            return await async_rollout()

    with released_world(**POSING) as scope:
        assert rollout() == "samples"
    assert [t.kind for t in scope.report.transitions] == ["release", *["restore", "release"] * 2, "restore"]
    assert scope.report.seconds("restore") > 0
    assert log == [True, 6.0, True] * 2
    log.clear()
    assert asyncio.run(main()) == "samples"
    assert log == [True, 6.0]
    assert total(group) == 6
    sleep_world(**POSING)
    assert refusal(group)
    wake_world()
    assert total(group) == 6
    try:
        with released_world(**POSING):
            raise ValueError(f"rank {rank}")
    except ValueError as error:
        assert str(error) == f"rank {rank}"
    assert total() == total(group) == 6
    return True


def test_decorated_async_nested_inverse_and_split_scopes_on_real_ranks():
    assert run_ranks(every_kind_of_scope) == [True] * 4


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


def second_thread(rank, size):
    init_gloo(rank, size)
    group = dist.new_group(list(range(size)))
    inside = []

    def enter(name, first):
        first.wait()
        with released_world(**POSING):
            inside.append(name)
            time.sleep(0.2)

    # The same order on all ranks: which of two threads is first is for the program to say.
    first, second = threading.Event(), threading.Event()
    threads = [threading.Thread(target=enter, args=pair) for pair in (("first", first), ("second", second))]
    for thread in threads:
        thread.start()
    first.set()
    while not inside:
        time.sleep(0.01)
    second.set()  # nests in the first, in whichever order they are left
    for thread in threads:
        thread.join(20)
    return inside, total(group)


@pytest.mark.parametrize("size", [1, 2])
def test_a_second_thread_s_scope_is_nested_in_the_first_s(size):
    for inside, group_sum in run_ranks(second_thread, size):
        assert inside == ["first", "second"]
        assert group_sum == size * (size - 1) / 2


def imported_twice(rank, size):
    """miles 545: wrapped twice, memory grew with each cycle until it ran out."""
    init_gloo(rank, size)
    first = gpurelease.released_world
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "gpurelease"}
    spec = importlib.util.spec_from_file_location(
        "gpurelease", Path(gpurelease.__file__), submodule_search_locations=[str(Path(gpurelease.__file__).parent)]
    )
    second = importlib.util.module_from_spec(spec)
    sys.modules["gpurelease"] = second
    spec.loader.exec_module(second)
    assert kept["gpurelease"] is not second
    assert second.released_world is first and second.ReleaseFailed is ReleaseFailed
    with first(**POSING):
        assert second.is_released()
        with second.released_world() as scope:
            assert second.release_depth() == 2
        assert "nested in" in scope.report.reason
        assert second.is_released()
    assert not second.is_released()
    assert total() == 1
    return True


def test_two_imports_share_one_state():
    assert run_ranks(imported_twice, size=2) == [True] * 2


def default_group_swapped(rank, size, swapped_while):
    """Have another group be the default one meanwhile, as frameworks do it: WORLD lives on."""
    init_gloo(rank, size)
    everybody = list(range(size))
    world, other, group = dist.group.WORLD, dist.new_group(everybody), dist.new_group(everybody)
    before = [backend_of(each) for each in (world, other, group)]
    seen = []

    def swap(to, moment):
        if moment in swapped_while:
            dist.distributed_c10d._update_default_pg(to)

    scope = released_world(**POSING, keep=other)
    scope.__enter__()
    swap(other, "inside")
    seen.append((total(other), bool(refusal(group))))
    swap(world, "inside")
    swap(other, "leaving")
    scope.__exit__(None, None, None)
    seen.append(total(group))
    swap(world, "leaving")
    after = [backend_of(each) for each in (world, other, group)]
    assert [new is old for new, old in zip(after, before, strict=True)] == [False, True, False]
    assert [transition.kind for transition in scope.report.transitions] == ["release", "restore"]
    assert (is_released(), release_depth()) == (False, 0)
    with released_world(**POSING):
        assert refusal(other)
    return seen, total(), total(other), total(group)


@pytest.mark.parametrize("swapped_while", [("inside",), ("leaving",), ("inside", "leaving")])
def test_a_scope_is_about_the_world_that_it_was_entered_in_whatever_group_is_the_default_one(swapped_while):
    sums = [(1.0, True), 1.0], 1.0, 1.0, 1.0
    assert run_ranks(default_group_swapped, 2, swapped_while=swapped_while) == [sums] * 2
