"""Sleep and wake-up in two calls: what is done twice, out of turn, or meant as a block."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager

import pytest

from gpurelease import (
    GpuReleaseError,
    ReleaseFailed,
    RestoreFailed,
    ScopeMisuse,
    is_released,
    release_depth,
    released_world,
    restored_world,
    sleep_world,
    wake_world,
)


def kinds(report):
    return [transition.kind for transition in report.transitions]


def test_a_world_that_sleeps_sleeps_on_and_is_woken_by_one_call(world):
    report = sleep_world()
    assert sleep_world() is report
    assert (world.events, release_depth()) == (["release"], 1)
    assert wake_world() is report and kinds(report) == ["release", "restore"]
    assert (world.events, is_released(), release_depth()) == (["release", "restore"], False, 0)


def test_a_world_that_is_awake_is_not_woken(world):
    for _ in range(2):
        report = wake_world()
        assert str(report) == "nothing done: the world is awake"
    sleep_world()
    wake_world()
    assert wake_world().reason == "the world is awake"
    with released_world(), restored_world():
        assert wake_world().reason == "the world is awake"
    assert world.events == ["release", "restore"] * 3


def test_a_second_call_whose_options_contradict_the_first_is_refused(world):
    report = sleep_world()
    with pytest.raises(ScopeMisuse, match=r"sleep_world\(\).* is nested in sleep_world\(\).*strategy='suspend' here"):
        sleep_world(strategy="suspend")
    assert release_depth() == 1 and is_released()
    assert wake_world() is report


def test_contexts_are_entered_when_it_sleeps_and_left_before_it_wakes(world):
    @contextmanager
    def paused():
        world.events.append("pause")
        yield
        world.events.append("resume")

    sleep_world(also=[paused])
    sleep_world(also=[paused])
    assert world.events == ["release", "pause"]
    with restored_world():
        pass
    wake_world()
    assert world.events == ["release", "pause", "resume", "restore", "release", "pause", "resume", "restore"]


def test_what_was_asleep_and_has_failed_to_sleep_again_is_tried_again(world):
    sleep_world()
    with pytest.raises(ReleaseFailed), restored_world():
        world.fail_next = True
    assert not is_released()
    again = sleep_world()
    assert is_released() and release_depth() == 1
    assert wake_world() is again and kinds(again)[-2:] == ["release", "restore"]
    assert not is_released()


def test_a_wake_up_that_has_failed_can_be_tried_again_or_slept_through(world):
    sleep_world()
    world.fail_next = True
    with pytest.raises(RestoreFailed, match=r"wake_world\(\) on all ranks tries again"):
        wake_world()
    sleep_world()
    world.fail_next = True
    with pytest.raises(RestoreFailed):
        wake_world()
    wake_world()
    assert world.events == ["release", "restore fails", "restore fails", "restore"]


def test_inside_a_restored_world_it_is_put_to_sleep_again_and_woken_for_good(world):
    sleep_world()
    with restored_world():
        sleep_world()
        assert is_released() and release_depth() == 2
        wake_world()
        assert not is_released()
    assert (is_released(), release_depth()) == (False, 0)
    assert world.events == ["release", "restore", "release", "restore"]


def with_block():
    with sleep_world():
        pytest.fail("the block was entered")


def async_with_block():
    async def main():
        async with sleep_world():
            pytest.fail("the block was entered")

    asyncio.run(main())


def decorated():
    @sleep_world()
    def rollout():
        pass


@pytest.mark.parametrize(
    "mistake, meant",
    [
        (with_block, "`with released_world()`"),
        (async_with_block, "`async with released_world()`"),
        (decorated, "`@released_world()`"),
    ],
)
def test_who_means_a_block_is_told_and_the_world_is_not_left_asleep(world, mistake, meant):
    with pytest.raises(ScopeMisuse) as told:
        mistake()
    assert f"Write {meant}. The world is awake again" in str(told.value)
    assert (world.events, is_released(), release_depth()) == (["release", "restore"], False, 0)


def test_who_means_a_block_is_told_where_there_is_nothing_to_release(no_world):
    with pytest.raises(GpuReleaseError, match="Write `with released_world"):
        with_block()


def test_one_that_slept_before_there_was_a_world_is_put_to_sleep_in_it(world, mocker):
    group = world.group
    books = mocker.patch("gpurelease.scopes.book.books.world", return_value=None)
    assert sleep_world() is sleep_world(), "there is nothing to put to sleep"
    books.return_value = group
    sleep_world()
    assert is_released()
    assert kinds(wake_world()) == ["release", "restore"]
    assert wake_world().reason == "the world is awake"
