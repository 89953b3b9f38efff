"""What reaches a caller that waits, in threads and in event loops, as lists of what was asked of the world."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time

import pytest

from gpurelease import (
    is_released,
    release_depth,
    released_world,
    restored_world,
)

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
