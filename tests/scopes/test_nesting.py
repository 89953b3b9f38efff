"""Which of several scopes acts, as literal lists of what was asked of the world."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import ProcessGroup

from gpurelease import (
    ScopeMisuse,
    is_released,
    release_depth,
    released_world,
    releases_world,
    restored_world,
    sleep_world,
    wake_world,
)
from gpurelease.groups.plan import Plan

# ----------------------------------------------------------------------------------------------------------- nesting


def test_only_the_outermost_scope_acts(world):
    depths = []
    with released_world() as outer:
        depths.append(release_depth())
        with released_world() as inner:
            depths.append(release_depth())
        depths.append(release_depth())
        assert is_released()
        assert world.events == ["release"]
    assert world.events == ["release", "restore"]
    assert depths == [1, 2, 1]
    assert (is_released(), release_depth()) == (False, 0)
    assert outer.report.reason == ""
    assert "nested in released_world()" in inner.report.reason


def test_a_recursive_decorated_function_releases_once(world):
    @releases_world
    def rollout(depth):
        return release_depth() if depth == 0 else rollout(depth - 1)

    assert rollout(3) == 4
    assert world.events == ["release", "restore"]


def test_one_scope_object_can_be_entered_again_and_within_itself(world):
    scope = released_world()
    with scope, scope:
        pass
    with scope:
        pass
    assert world.events == ["release", "restore"] * 2


def test_a_world_that_is_woken_inside_a_block_sleeps_to_the_end_of_the_block(world):
    sleep_world()
    with released_world():
        sleep_world()
        wake_world()
        assert world.events == ["release"]
    assert world.events == ["release", "restore"]


def test_threads_share_the_scope(world):
    inside, go_on = threading.Event(), threading.Event()

    def other():
        with released_world():
            inside.set()
            go_on.wait(5)

    thread = threading.Thread(target=other)
    with released_world():
        thread.start()
        assert inside.wait(5)
        assert release_depth() == 2
        go_on.set()
        thread.join(5)
        assert world.events == ["release"]
    assert world.events == ["release", "restore"]


def test_restored_world_is_the_inverse(world):
    with released_world():
        with restored_world():
            assert not is_released()
            with released_world():
                assert is_released()
            assert not is_released()
        assert is_released()
    assert world.events == ["release", "restore", "release", "restore", "release", "restore"]


def test_restored_world_outside_a_scope_does_nothing(world):
    with restored_world() as scope:
        pass
    assert world.events == []
    assert scope.report.reason == "the world is not released"


def test_restored_world_releases_again_with_the_options_of_the_scope_around(world):
    with released_world(keep=("weight_sync",)), released_world(), restored_world():
        pass
    assert [options.keep for options in world.released_with] == [("weight_sync",)] * 2


class Released:
    """Stands for a released group."""

    def __init__(self, name):
        self.group = ProcessGroup(0, 1)
        self.name, self.backend_names = name, ["gloo"]

    def __str__(self):
        return f"process group {self.name!r}"


@pytest.fixture
def with_groups(world, mocker):
    """Groups "a" and "b" were kept when the world was released, and "c" was not."""
    names = {name: Released(name) for name in "abc"}
    by_group = {each.group: name for name, each in names.items()}
    mocker.patch("gpurelease.groups.plan.books.name_of", by_group.get)
    world.released = [names["c"]]
    return {name: each.group for name, each in names.items()}


@pytest.mark.parametrize(
    "inner",
    [
        {},
        {"timeout": 3},
        {"strategy": "auto"},
        {"keep": ("b", "a")},
        {"keep": ("a",)},
        {"keep": "handle of a"},
        {"keep": "handles of b and a"},
        {"keep": lambda group: False},
        {"backends": ("gloo",)},
        {"backends": "GLOO"},
    ],
)
def test_an_inner_scope_may_ask_for_what_the_outer_has_done_in_whatever_words(world, with_groups, inner):
    if isinstance(inner.get("keep"), str):
        inner = {"keep": [with_groups[name] for name in inner["keep"].partition(" of ")[2].split(" and ")]}
    with released_world(keep=("a", "b"), backends=("gloo",)), released_world(**inner):
        assert release_depth() == 2
    assert world.events == ["release", "restore"]


@pytest.mark.parametrize(
    "inner, words",
    [
        ({"keep": ("a", "c")}, "keep= here has process group 'c', which the outer scope has released"),
        ({"keep": "handle"}, "keep= here has process group 'c'"),
        ({"keep": lambda group: True}, "keep= here has process group 'c'"),
        ({"backends": ("nccl", "gloo")}, r"backends=\('nccl',\) here, and the world was released with \('gloo',\)"),
        ({"strategy": "suspend"}, "strategy='suspend' here, and the world was released by 'rebuild'"),
    ],
)
def test_an_inner_scope_may_not_contradict_the_outer(world, with_groups, inner, words):
    if inner.get("keep") == "handle":
        inner = {"keep": with_groups["c"]}
    with released_world(keep=("a", "b")):
        with pytest.raises(ScopeMisuse, match=f"contradicts it: {words}"):
            released_world(**inner).__enter__()
        assert release_depth() == 1
    assert world.events == ["release", "restore"]


# --------------------------------------------------------------------------------------------------------- overlapping


def test_scopes_are_left_in_any_order_and_the_last_restores(world):
    for order in itertools.permutations(range(3)):
        scopes = [released_world() for _ in order]
        for scope in scopes:
            scope.__enter__()
        for left, number in enumerate(order, 1):
            assert is_released()
            scopes[number].__exit__(None, None, None)
            assert release_depth() == 3 - left
        assert world.events == ["release", "restore"]
        world.events.clear()


def test_overlapping_decorated_rollouts_give_all_results(world):
    @releases_world
    async def rollout(number, seconds):
        await asyncio.sleep(seconds)
        assert is_released()
        return number

    async def main():
        return await asyncio.gather(*(rollout(number, 0.05 * (5 - number)) for number in range(5)))

    assert asyncio.run(main()) == [0, 1, 2, 3, 4]
    assert world.events == ["release", "restore"]


def test_a_scope_that_comes_while_the_last_is_being_left_is_released_again(world):
    """It comes while the restore is on its way, which goes on to its end: then it has its own release."""
    restoring, seen = threading.Event(), []

    def slowly():
        if world.is_released:
            restoring.set()
            time.sleep(0.2)

    world.before_it_acts = slowly

    def second():
        restoring.wait(5)
        with released_world():
            seen.append(is_released())

    thread = threading.Thread(target=second)
    thread.start()
    with released_world():
        pass
    thread.join(5)
    assert seen == [True]
    assert world.events == ["release", "restore"] * 2


def test_threads_leave_one_shared_scope_object_in_any_order(world):
    scope = released_world()
    inside, leave = [threading.Event() for _ in range(2)], [threading.Event() for _ in range(2)]

    def go(number):
        with scope:
            inside[number].set()
            leave[number].wait(5)

    threads = [threading.Thread(target=go, args=(number,)) for number in range(2)]
    for number, thread in enumerate(threads):
        thread.start()
        assert inside[number].wait(5)
    for number, thread in enumerate(threads):
        assert is_released()
        leave[number].set()
        thread.join(5)
    assert world.events == ["release", "restore"]
    assert release_depth() == 0


@pytest.mark.parametrize("with_scope_of_its_own", [True, False])
def test_restored_world_is_refused_while_another_task_wants_it_released(world, with_scope_of_its_own):
    """When it is entered: not when results exist."""

    async def main():
        entered, leave = asyncio.Event(), asyncio.Event()

        async def generates():
            async with released_world():
                entered.set()
                await leave.wait()
                return "samples"

        async def syncs():
            await entered.wait()
            async with released_world() if with_scope_of_its_own else contextlib.nullcontext():
                with pytest.raises(ScopeMisuse, match=r"wants it released: .*copy_context\(\)\.run"):
                    await restored_world().__aenter__()
            leave.set()

        samples, _ = await asyncio.gather(generates(), syncs())
        return samples

    assert asyncio.run(main()) == "samples"
    assert world.events == ["release", "restore"]


def test_a_released_scope_is_refused_while_another_thread_has_it_restored(world):
    refused = []

    def other():
        with pytest.raises(ScopeMisuse, match="wants it restored"):
            released_world().__enter__()
        refused.append(True)

    with released_world(), restored_world():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(5)
        assert refused and not is_released()
    assert world.events == ["release", "restore", "release", "restore"]


def test_a_thread_in_the_context_of_a_scope_is_inside_it(world):
    def weight_sync():
        with restored_world():
            return is_released()

    async def main():
        async with released_world():
            return await asyncio.to_thread(weight_sync)

    with released_world(), ThreadPoolExecutor(1) as pool:
        assert pool.submit(contextvars.copy_context().run, weight_sync).result() is False
    assert asyncio.run(main()) is False
    assert world.events == ["release", "restore", "release", "restore"] * 2


def test_what_sleep_world_opened_is_around_everybody(world):
    sleep_world()

    def weight_sync():
        with restored_world():
            return is_released()

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(weight_sync).result() is False
        assert [each.kind for each in pool.submit(wake_world).result().transitions][-1] == "restore"
    assert world.events == ["release", "restore", "release", "restore"]


def test_a_scope_left_while_one_inside_it_is_open_changes_what_the_world_is_by_what_is_left(world):
    outer, inverse, inner = released_world(), restored_world(), released_world()
    for scope in (outer, inverse, inner):
        scope.__enter__()
    inverse.__exit__(None, None, None)
    assert is_released() and release_depth() == 2
    inner.__exit__(None, None, None)
    assert is_released()
    outer.__exit__(None, None, None)
    assert world.events == ["release", "restore", "release", "restore"]


def test_wake_world_inside_a_with_block_is_explained(world):
    with released_world():
        with pytest.raises(ScopeMisuse, match=r"innermost open scope is released_world\(\).*restored_world"):
            wake_world()
        assert world.events == ["release"]
    assert world.events == ["release", "restore"]


def test_sleep_world_inside_a_block_lasts_until_wake_world(world):
    with released_world():
        sleep_world()
    assert world.events == ["release"]
    wake_world()
    assert world.events == ["release", "restore"]


def test_a_scope_cannot_be_entered_from_inside_a_transition(world, mocker):
    """A user's predicate is asked by the thread that enters, and a rebuilder by one of ours."""

    def predicate(*args):
        with released_world():
            pytest.fail("it was entered")

    mocker.patch("gpurelease.scopes.reaching.plan", predicate)
    with released_world():
        pass
    assert release_depth() == 0
    errors = []

    def rebuilder():
        try:
            released_world().__enter__()
        except ScopeMisuse as error:
            errors.append(str(error))

    mocker.patch("gpurelease.scopes.reaching.plan", return_value=Plan())
    world.before_it_acts = rebuilder
    with released_world():
        pass
    assert len(errors) == 2 and all("from inside a transition" in error for error in errors)


def test_leaving_what_is_not_open_is_explained(world):
    scope = released_world()
    with scope:
        pass
    with pytest.raises(ScopeMisuse, match="it is not open"):
        scope.__exit__(None, None, None)
