"""Contexts in ``also=``: when they are entered and left, and what of them other ranks hear."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import contextmanager
from functools import partial

import pytest

from gpurelease import (
    InvalidOption,
    ReleaseFailed,
    RestoreFailed,
    ScopeMisuse,
    release_depth,
    released_world,
    restored_world,
)


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
    with pytest.raises(ReleaseFailed, match=r"also= raised OSError\('second'\)") as failure:
        released_world(also=[recorder(world, "first"), recorder(world, "second", fails_on="enter")]).__enter__()
    assert isinstance(failure.value.__cause__, OSError)
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
        with pytest.raises(ReleaseFailed, match=r"inside the also= of released_world\(\)") as failure:
            released_world(also=[partial(Meddler, make)]).__enter__()
        assert isinstance(failure.value.__cause__, ScopeMisuse)
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


def test_also_is_left_before_a_restored_world_and_entered_again_after_it(world):
    with released_world(also=[recorder(world, "outer")]), released_world(also=[recorder(world, "inner")]):
        with restored_world():
            world.events.append("weight sync")
        world.events.append("body")
    both = ["enter outer", "enter inner"]
    neither = ["leave inner", "leave outer"]
    expected = ["release", *both, *neither, "restore", "weight sync", "release", *both, "body", *neither, "restore"]
    assert world.events == expected


def test_also_is_entered_again_where_restoring_fails(world):
    with released_world(also=[recorder(world, "saver")]):
        world.fail_next = True
        with pytest.raises(RestoreFailed):
            restored_world().__enter__()
    both = ["enter saver", "leave saver"]
    assert world.events == ["release", *both, "restore fails", *both, "restore"]


def test_an_also_that_cannot_be_entered_again_leaves_the_world_restored(world):
    saver = recorder(world, "saver")
    savers = iter([saver, recorder(world, "broken", fails_on="enter")])
    with pytest.raises(ReleaseFailed, match="OSError"), released_world(also=[lambda: next(savers)()]):
        with restored_world():
            pass
        pytest.fail("it went on")
    assert world.events == ["release", "enter saver", "leave saver", "restore", "release", "restore after an error"]


def test_an_error_that_an_also_swallows_counts_as_the_body_s(world):
    with released_world(also=[lambda: contextlib.suppress(ZeroDivisionError)]):
        1 / 0  # noqa: B018
    assert world.events == ["release", "restore after an error"]


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_in_an_also_leaves_those_before_it_and_tells_the_others(world, interrupt):
    class Interrupted:
        def __enter__(self):
            raise interrupt

        def __exit__(self, *error):
            pytest.fail("it was not entered")

    with pytest.raises(interrupt):
        released_world(also=[recorder(world, "first"), Interrupted]).__enter__()
    told = f"leave: rank 0 left with {interrupt.__name__}, and rebuilds nothing"
    assert world.events == ["release", "enter first", "leave first", told]
    assert release_depth() == 0


def test_an_asynchronous_also_in_a_plain_scope_is_explained(world):
    class Asleep:
        async def __aenter__(self):
            await asyncio.sleep(0)

        async def __aexit__(self, *error):
            pass

    with pytest.raises(ReleaseFailed, match="write `async with`"):
        released_world(also=[Asleep]).__enter__()
    assert world.events == ["release", "restore after an error"]
