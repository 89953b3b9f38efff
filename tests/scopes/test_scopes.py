"""Which of several scopes acts, as literal lists of what was asked of the world."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import pytest
from torch.distributed import ProcessGroup

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


def test_what_release_world_opened_is_around_everybody(world):
    release_world()

    def weight_sync():
        with restored_world():
            return is_released()

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(weight_sync).result() is False
        assert [each.kind for each in pool.submit(restore_world).result().transitions][-1] == "restore"
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


def test_restore_world_inside_a_with_block_is_explained(world):
    with released_world():
        with pytest.raises(ScopeMisuse, match=r"innermost open scope is released_world\(\).*restored_world"):
            restore_world()
        assert world.events == ["release"]
    assert world.events == ["release", "restore"]


def test_restore_world_without_release_world_is_explained(world):
    with pytest.raises(ScopeMisuse, match="call release_world\\(\\) first"):
        restore_world()


def test_release_world_inside_a_block_lasts_until_restore_world(world):
    with released_world():
        release_world()
    assert world.events == ["release"]
    restore_world()
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
        assert scope.report.reason == "the world was released still, since a transition had failed"
    assert str(scope.report).startswith("restored 0 process groups")
    assert world.events == ["release", "restore fails", "restore"]


def test_a_restore_that_is_tried_again_can_be_given_more_time(world):
    with pytest.raises(RestoreFailed), released_world(timeout=3):
        world.fail_next = True
    given = []
    world.before_it_acts = lambda: given.append(world.timeout_of_aim)
    restore_world(timeout=60)
    release_world(timeout=3)
    restore_world(timeout=timedelta(minutes=2))
    assert given == [60, 3, 120]
    with pytest.raises(InvalidOption):
        restore_world(timeout=-1)


def test_a_rank_that_may_be_apart_from_the_others_meets_them_where_they_are(world):
    """It was interrupted or late: it is ARMED, and does not know whether the others are."""
    world.settled = False
    restore_world()
    assert world.events == []
    with pytest.raises(ScopeMisuse, match="call release_world"):
        restore_world()
    world.settled = False
    with released_world():
        pass
    assert world.events == ["release", "restore"]


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_rebuilds_nothing_and_tells_the_others(world, interrupt):
    with pytest.raises(interrupt), released_world(), released_world():
        raise interrupt
    assert world.events == ["release", f"leave: rank 0 left with {interrupt.__name__}, and rebuilds nothing"]
    assert (is_released(), release_depth()) == (True, 0)
    restore_world()


def test_an_interrupt_inside_restored_world_tells_the_others_once(world):
    with pytest.raises(KeyboardInterrupt), released_world(), restored_world():
        raise KeyboardInterrupt
    assert world.events == ["release", "restore", "leave: rank 0 left with KeyboardInterrupt, and rebuilds nothing"]


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


# ----------------------------------------------------------------------------------------------------------- interrupts


class Odd(Exception):
    """What a signal handler may raise."""


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, Odd])
@pytest.mark.parametrize("counts", [True, False], ids=["in time", "too late"])
@pytest.mark.parametrize("entering", [True, False], ids=["entry", "exit"])
def test_what_interrupts_the_wait_is_a_vote_and_is_raised_as_itself(world, error, counts, entering):
    """If there is a verdict already, the transition goes to its end first."""
    signal.signal(signal.SIGUSR2, lambda *args: (_ for _ in ()).throw(error("now")))
    world.roll_call.counts = counts
    world.before_it_acts = lambda: (os.kill(os.getpid(), signal.SIGUSR2), time.sleep(0.3))
    if entering:
        with pytest.raises(error):
            released_world().__enter__()
    else:
        world.before_it_acts, interrupt = lambda: None, world.before_it_acts
        with pytest.raises(error), released_world():
            world.before_it_acts = interrupt
    assert release_depth() == 0
    vote = f"leave: rank 0 left with {error.__name__}: now, and rebuilds nothing"
    acted = {(True, False): ["release", vote], (False, False): ["restore"]}.get((entering, counts), [])
    assert world.events == [*([] if entering else ["release"]), vote, *acted]


def test_a_second_interrupt_does_not_wait(world):
    signal.signal(signal.SIGUSR2, lambda *args: (_ for _ in ()).throw(Odd))
    go_on = threading.Event()

    def twice():
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGUSR2)
            time.sleep(0.2)
        go_on.wait(5)

    world.before_it_acts = twice
    started = time.monotonic()
    with pytest.raises(Odd):
        released_world().__enter__()
    assert time.monotonic() - started < 3
    assert release_depth() == 0
    go_on.set()


# -------------------------------------------------------------------------------------------------------------- async


def test_the_event_loop_goes_on_while_the_ranks_wait(world):
    ticks = []
    world.before_it_acts = lambda: time.sleep(0.3)

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
    assert len(ticks) > 20
    assert world.events == ["release", "restore"]


def test_no_executor_of_the_loop_is_needed(world):
    async def main():
        asyncio.get_running_loop().run_in_executor = lambda *args: pytest.fail("an executor was used")
        async with released_world(), restored_world():
            pass

    asyncio.run(main())
    assert world.events == ["release", "restore", "release", "restore"]


@pytest.mark.parametrize("where", ["release", "body", "restore"])
def test_a_cancelled_task_ends_with_no_scope_open_and_the_others_told_or_the_world_restored(world, where):
    started = threading.Event()

    def slowly():
        if where == ("restore" if world.is_released else "release"):
            started.set()
            time.sleep(0.3)

    world.before_it_acts = slowly

    async def body():
        async with released_world():
            world.events.append("body")
            if where == "body":
                started.set()
                await asyncio.sleep(5)

    async def main():
        task = asyncio.create_task(body())
        while not started.is_set():
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    vote = "leave: rank 0 left with CancelledError, and rebuilds nothing"
    expected = {
        "release": [vote, "release", vote],
        "body": ["release", "body", "restore after an error"],
        "restore": ["release", "body", vote, "restore"],
    }
    assert world.events == expected[where]
    assert release_depth() == 0


def test_ctrl_c_leaves_an_async_scope_as_a_plain_one(world):
    signal.signal(signal.SIGINT, signal.default_int_handler)

    async def main():
        async with released_world():
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
            await asyncio.sleep(5)

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())
    assert time.monotonic() - started < 2
    assert world.events == ["release", "leave: rank 0 left with KeyboardInterrupt, and rebuilds nothing"]
    assert (is_released(), release_depth()) == (True, 0)
