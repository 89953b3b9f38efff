"""Which of several scopes acts, as literal lists of what was asked of the world."""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager
from functools import partial

import pytest

from gpurelease import (
    InvalidOption,
    ReleaseFailed,
    RestoreFailed,
    ScopeMisuse,
    current_report,
    is_released,
    release_depth,
    release_world,
    released_world,
    releases_world,
    restore_world,
    restored_world,
)

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


def test_split_calls_nest_with_blocks(world):
    release_world()
    with released_world():
        release_world()
        restore_world()
    assert world.events == ["release"]
    restore_world()
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


@pytest.mark.parametrize(
    "options, contradicts",
    [
        ({}, False),
        ({"keep": ("a",)}, False),
        ({"timeout": 3}, False),
        ({"keep": ("b",)}, True),
        ({"backends": ("nccl",)}, True),
    ],
)
def test_an_inner_scope_may_not_contradict_the_outer(world, options, contradicts):
    with released_world(keep=("a",)):
        if contradicts:
            with pytest.raises(ScopeMisuse, match=f"contradicts it: {next(iter(options))}=.*in the outer scope"):
                released_world(**options).__enter__()
        else:
            with released_world(**options):
                pass
        assert release_depth() == 1
    assert world.events == ["release", "restore"]


# -------------------------------------------------------------------------------------------------------- misnesting


def test_a_scope_left_before_an_inner_one_is_explained_and_the_world_is_restored_by_the_last(world):
    first, second = released_world(), released_world()
    first.__enter__()
    second.__enter__()
    with pytest.raises(ScopeMisuse, match=r"opened later, is still open.*stays released"):
        first.__exit__(None, None, None)
    assert world.events == ["release"]
    second.__exit__(None, None, None)
    assert world.events == ["release", "restore"]


def test_overlapping_tasks_are_explained(world):
    async def main():
        entered, leave = asyncio.Event(), asyncio.Event()

        async def first():
            async with released_world():
                await entered.wait()

        async def second():
            async with released_world():
                entered.set()
                await leave.wait()

        one = asyncio.create_task(first(), name="one")
        await asyncio.sleep(0.05)
        two = asyncio.create_task(second(), name="two")
        with pytest.raises(ScopeMisuse, match="scopes must be left in the reverse order"):
            await one
        leave.set()
        await two

    asyncio.run(main())
    assert world.events == ["release", "restore"]


def test_restore_world_inside_a_with_block_is_explained(world):
    with released_world():
        with pytest.raises(ScopeMisuse, match=r"innermost open scope is released_world\(\).*restored_world"):
            restore_world()
        assert world.events == ["release"]
    assert world.events == ["release", "restore"]


def test_restore_world_without_release_world_is_explained(world):
    with pytest.raises(ScopeMisuse, match="call release_world\\(\\) first"):
        restore_world()


def test_release_world_inside_a_block_must_be_restored_inside_it(world):
    with pytest.raises(ScopeMisuse, match=r"while release_world\(\)"), released_world():
        release_world()
    assert world.events == ["release"]
    restore_world()
    assert world.events == ["release", "restore"]


def test_a_scope_cannot_be_entered_from_inside_a_transition(world, mocker):
    def nested(options, report, **_):
        with released_world():
            pass

    mocker.patch.object(world, "release", nested)
    with pytest.raises(ScopeMisuse, match="from inside a transition"), released_world():
        pass
    assert release_depth() == 0


# ------------------------------------------------------------------------------------------------------------ errors


def test_a_failed_entry_leaves_no_scope_open(world):
    world.fail_next = True
    with pytest.raises(ReleaseFailed), released_world():
        pytest.fail("the body ran")
    assert release_depth() == 0
    with released_world():
        pass
    assert world.events == ["release fails", "release", "restore"]


def test_the_world_is_restored_before_the_body_s_error_is_seen(world):
    with pytest.raises(ZeroDivisionError), released_world():
        1 / 0  # noqa: B018
    assert world.events == ["release", "restore after an error"]


def test_the_body_s_error_wins_over_a_failed_restore_and_both_are_kept(world, caplog):
    with pytest.raises(ZeroDivisionError) as caught, released_world():
        world.fail_next = True
        1 / 0  # noqa: B018
    assert "RestoreFailed" in caplog.text
    notes = getattr(caught.value, "__notes__", ["RestoreFailed: before Python 3.11 there are no notes"])
    assert "RestoreFailed" in notes[0]


def test_a_failed_restore_can_be_tried_again(world):
    with pytest.raises(RestoreFailed), released_world():
        world.fail_next = True
    assert (is_released(), release_depth()) == (True, 0)
    restore_world()
    assert world.events == ["release", "restore fails", "restore"]


def test_after_a_failed_restore_a_new_scope_restores_as_well(world):
    with pytest.raises(RestoreFailed), released_world():
        world.fail_next = True
    with released_world() as scope:
        assert "still released" in scope.report.reason
    assert world.events == ["release", "restore fails", "restore"]


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_rebuilds_nothing_and_tells_the_others(world, interrupt):
    with pytest.raises(interrupt), released_world(), released_world():
        raise interrupt
    assert world.events == ["release", f"leave with {interrupt.__name__}"]


def test_an_interrupt_inside_restored_world_tells_the_others_once(world):
    with pytest.raises(KeyboardInterrupt), released_world(), restored_world():
        raise KeyboardInterrupt
    assert world.events == ["release", "restore", "leave with KeyboardInterrupt"]


def test_a_destroyed_world_is_not_restored(world):
    with released_world() as scope:
        world.is_gone = True
    assert world.events == ["release", "forget"]
    assert "destroyed" in scope.report.reason


# ------------------------------------------------------------------------------------------------------------- no-ops


@pytest.mark.parametrize("value", ["1", "true", "YES"])
def test_disabled_scopes_do_nothing_and_say_so(world, monkeypatch, value):
    monkeypatch.setenv("GPURELEASE_DISABLE", value)
    with released_world() as scope, restored_world():
        assert not is_released()
    release_world()
    restore_world()
    assert world.events == []
    assert scope.report.reason == "GPURELEASE_DISABLE is set"


def test_without_a_process_group_scopes_do_nothing_and_say_so(no_world):
    with released_world() as scope:
        assert (is_released(), release_depth()) == (False, 0)
    assert scope.report.reason == "there is no process group"
    assert str(scope.report) == "nothing done: there is no process group"
    release_world()
    assert restore_world().reason == "there is no process group"


def test_with_nothing_to_release_the_scope_is_a_no_op(world):
    world.nothing_to_release = True
    with released_world() as scope, restored_world():
        assert not is_released()
    assert world.events == []
    assert scope.report.reason == "no rank has a process group to release"


def test_current_report_is_that_of_the_scope_that_acted(world):
    assert current_report() is None
    with released_world() as outer, released_world():
        assert current_report() is outer.report
    assert current_report() is None


# -------------------------------------------------------------------------------------------------------------- also=


def recorder(world, name, *, fails_on=None):
    @contextmanager
    def context():
        if fails_on == "enter":
            raise OSError(name)
        world.events.append(f"enter {name}")
        try:
            yield
        finally:
            world.events.append(f"leave {name}")
            if fails_on == "exit":
                raise OSError(name)

    return context


def test_also_is_entered_after_the_release_and_left_before_the_restore(world):
    """slime 1690, miles 3129: groups were rebuilt while the weights were still paused."""
    for _ in range(2):
        with released_world(also=[recorder(world, "saver"), recorder(world, "offload")()]):
            world.events.append("body")
        assert world.events == [
            "release",
            "enter saver",
            "enter offload",
            "body",
            "leave offload",
            "leave saver",
            "restore",
        ]
        world.events.clear()


def test_an_also_that_fails_on_entry_unwinds_and_restores(world):
    with pytest.raises(OSError, match="second"):
        released_world(also=[recorder(world, "first"), recorder(world, "second", fails_on="enter")]).__enter__()
    assert world.events == ["release", "enter first", "leave first", "restore after an error"]


def test_an_also_that_fails_on_exit_does_not_keep_the_others_or_the_world(world):
    with (
        pytest.raises(OSError, match="second"),
        released_world(also=[recorder(world, "first"), recorder(world, "second", fails_on="exit")]),
    ):
        pass
    assert world.events[-3:] == ["leave second", "leave first", "restore after an error"]


def test_an_also_of_a_nested_scope_is_left_with_it(world):
    with released_world():
        with released_world(also=[recorder(world, "inner")]):
            pass
        world.events.append("body")
    assert world.events == ["release", "enter inner", "leave inner", "body", "restore"]


def test_an_also_cannot_open_or_close_scopes(world):
    class Meddler:
        def __init__(self, make):
            self.make = make

        def __enter__(self):
            self.make().__enter__()

        def __exit__(self, *error):
            pass

    for make in (released_world, restored_world):
        with pytest.raises(
            ScopeMisuse, match=r"inside the also= of released_world\(\) \(opened by thread 'MainThread'\)"
        ):
            released_world(also=[partial(Meddler, make)]).__enter__()
    assert world.events == ["release", "restore after an error"] * 2
    with released_world(), restored_world():
        pass


def test_an_asynchronous_also_does_not_hold_up_other_tasks_scopes(world):
    class Slow:
        async def __aenter__(self):
            await asyncio.sleep(0.05)

        async def __aexit__(self, *error):
            pass

    async def main():
        scope = released_world(also=[Slow])
        entering = asyncio.ensure_future(scope.__aenter__())
        await asyncio.sleep(0.02)
        async with released_world() as inner:
            assert inner.report.reason.startswith("nested in released_world()")
        await entering
        await scope.__aexit__(None, None, None)

    asyncio.run(main())
    assert world.events == ["release", "restore"]


def test_a_task_that_an_also_has_started_can_open_scopes_later(world):
    async def work():
        await asyncio.sleep(0.05)
        async with released_world() as scope:
            return scope.report.reason

    class Starter:
        async def __aenter__(self):
            self.task = asyncio.ensure_future(work())
            return self

        async def __aexit__(self, *error):
            pass

    async def main():
        starter = Starter()
        async with released_world(also=[starter]):
            await asyncio.sleep(0)
            return await starter.task

    assert asyncio.run(main()).startswith("nested in released_world()")


def test_asynchronous_also(world):
    class Asleep:
        async def __aenter__(self):
            world.events.append("asleep")

        async def __aexit__(self, *error):
            world.events.append("awake")

    async def main():
        async with released_world(also=[Asleep, recorder(world, "plain")]):
            world.events.append("body")

    asyncio.run(main())
    assert world.events == ["release", "asleep", "enter plain", "body", "leave plain", "awake", "restore"]


def test_also_takes_context_managers_only():
    with pytest.raises(InvalidOption, match="also= takes context managers"):
        released_world(also=[3])


# -------------------------------------------------------------------------------------------------------------- async


def test_the_event_loop_goes_on_while_the_ranks_wait(world, mocker):
    release = world.release
    ticks = []

    def slow(options, report, **_):
        import time

        time.sleep(0.3)
        release(options, report)

    mocker.patch.object(world, "release", slow)

    async def tick():
        while True:
            ticks.append(1)
            await asyncio.sleep(0.01)

    async def main():
        ticking = asyncio.create_task(tick())
        async with released_world():
            assert is_released()
        ticking.cancel()

    asyncio.run(main())
    assert len(ticks) > 10
    assert world.events == ["release", "restore"]


@pytest.mark.parametrize("slow_method", ["release", "restore"])
def test_a_task_cancelled_in_a_transition_ends_with_the_world_restored(world, mocker, slow_method):
    method = getattr(world, slow_method)
    started = threading.Event()

    def slow(*args, **kwargs):
        import time

        started.set()
        time.sleep(0.2)
        method(*args, **kwargs)

    mocker.patch.object(world, slow_method, slow)

    async def body():
        async with released_world():
            world.events.append("body")

    async def main():
        task = asyncio.create_task(body())
        while not started.is_set():
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert world.events in (["release", "restore after an error"], ["release", "body", "restore"])
    assert release_depth() == 0
