"""A transition is made by a thread of ours, and waited for: what reaches the caller never stops it at some line."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

logger = logging.getLogger(__name__)

SLICE = 0.1  # seconds between two looks of a caller at the clock
SLACK = 1.0  # seconds that a step may take longer than it should


class Abandoned(BaseException):
    """A thread of ours comes back after nobody has waited for it any longer: it must change nothing."""


class Passage:
    """One transition on this rank: the thread that makes it, and those that wait for it.

    Its thread says how long its next step may take at the most. If the step takes longer, since the store does not
    answer, the caller leaves that thread to itself: it does nothing more that can be seen.

    Args:
        too_late: Returns what is raised if a step takes longer than it may.
        on_given_up: Called when its thread is left to itself.

    Attributes:
        is_voting: Whether nothing is decided yet, so that this rank may still vote against it.
        waits_in: The thread that waits for it and can do nothing else meanwhile, or None.
    """

    def __init__(self, too_late: Callable[[], BaseException], on_given_up: Callable[[], None]) -> None:
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._too_late = too_late
        self._on_given_up = on_given_up
        self._woken: list[Callable[[], None]] = []
        self._has_begun = self._given_up = False
        self.is_voting = True
        self.waits_in: int | None = None
        self._until = float("inf")
        self._result: Any = None
        self._error: BaseException | None = None

    # -------------------------------------------------------------------------------------------------- for its thread

    def begin(self, work: Callable[[], Any]) -> None:
        """Have a thread do ``work``.

        Raises:
            RuntimeError: There can be no more threads.
        """
        threading.Thread(target=self._run, args=(work,), name="gpurelease", daemon=True).start()

    def _run(self, work: Callable[[], Any]) -> None:
        with self._lock:
            if self._given_up:
                return
            self._has_begun = True
        result, error = None, None
        try:
            result = work()
        except BaseException as raised:
            logger.debug("a transition failed", exc_info=True)
            error = _without_frames(raised)
        self._end(result, error)

    def _end(self, result: Any, error: BaseException | None) -> None:
        with self._lock:
            if self._over.is_set():
                return
            self._result, self._error = result, error
            woken = self._woken
            self._over.set()
        for wake in woken:
            wake()

    def may_take(self, seconds: float) -> None:
        """Say how long the next step may take at the most, before the caller stops waiting for it.

        Raises:
            Abandoned: It has stopped.
        """
        with self._lock:
            if self._given_up:
                raise Abandoned("nobody waits for this transition any longer")
            self._until = time.monotonic() + seconds + SLACK

    @contextmanager
    def commit(self) -> Iterator[None]:
        """Change what others can see: all of it, or nothing if nobody waits any longer.

        Raises:
            Abandoned: Nobody does.
        """
        with self._lock:
            if self._given_up:
                raise Abandoned("nobody waits for this transition any longer")
            yield

    # -------------------------------------------------------------------------------------------------- for its caller

    @property
    def is_over(self) -> bool:
        """Whether there is nothing to wait for."""
        return self._over.is_set()

    @property
    def has_failed(self) -> bool:
        """Whether it has ended with an error."""
        return self._error is not None

    @property
    def has_begun(self) -> bool:
        """Whether a thread is at it, or was."""
        return self._has_begun

    def result(self) -> Any:
        """Return what the work has returned, or raise what it has raised."""
        if self._error is not None:
            raise self._error
        return self._result

    def wait(self) -> None:
        """Wait until it is over. What reaches the caller meanwhile, such as a Ctrl-C, comes out at once."""
        self.waits_in = threading.get_ident()
        while not self._over.wait(SLICE):
            self._look_at_the_clock()

    async def wait_async(self) -> None:
        """Wait until it is over, in the caller's event loop. What reaches the caller meanwhile comes out at once.

        Other tasks get their turn in any case: scopes that ``asyncio.gather`` enters together overlap on all ranks, and
        not only on those where this takes a while.
        """
        await asyncio.sleep(0)
        loop = asyncio.get_running_loop()
        woken = loop.create_future()

        def resolve() -> None:
            if not woken.done():
                woken.set_result(None)

        def wake() -> None:
            try:
                loop.call_soon_threadsafe(resolve)
            except RuntimeError:  # the loop is closed: nobody waits there
                logger.debug("a transition ended after its event loop", exc_info=True)

        with self._lock:
            if self._over.is_set():
                return
            self._woken.append(wake)
        while not self._over.is_set():
            await asyncio.wait([woken], timeout=SLICE)
            self._look_at_the_clock()

    def _look_at_the_clock(self) -> None:
        if time.monotonic() > self._until and not self._over.is_set():
            self.give_up(self._too_late())

    def over_within(self, seconds: float) -> bool:
        """Wait for a time, and return whether it is over."""
        return self._over.wait(seconds)

    def give_up(self, error: BaseException) -> None:
        """Leave the thread to itself, with ``error`` as the outcome, unless it is over already."""
        with self._lock:
            if self._over.is_set() or self._given_up:
                return
            self._given_up = True
            self._on_given_up()
        self._end(None, error)

    def withdraw(self) -> None:
        """Have it be over, if its thread has not begun: it never will."""
        with self._lock:
            if self._has_begun:
                return
            self._given_up = True
        self._end(None, Abandoned("it was never begun"))


def _without_frames(error: BaseException) -> BaseException:
    """Return an error that keeps nothing alive: its frames hold backends, whose communicators end with them."""
    chain: BaseException | None = error
    while chain is not None:
        chain.__traceback__ = None
        chain = chain.__cause__ or chain.__context__
    return error
