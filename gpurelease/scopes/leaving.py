"""What a rank does that is interrupted: it goes at once, and the other ranks are told why it does not come."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from gpurelease.agreement.waiting import NotAllCame
from gpurelease.scopes.book import Book
from gpurelease.scopes.driver import drive
from gpurelease.scopes.frame import Frame
from gpurelease.transition.passage import Passage
from gpurelease.transition.world import World

logger = logging.getLogger(__name__)

TOLD_WITHIN = 2.0  # seconds that a rank which leaves waits at most until the others can read why
OVER_WITHIN = 0.5  # seconds that a transition has to end by itself, once this rank's vote has ended it

# What a user's Ctrl-C, or the end of the process, raises: nobody wants to wait for a rebuild then.
INTERRUPTS = (KeyboardInterrupt, SystemExit)


class Interrupted(BaseException):
    """A scope was interrupted where it waited, or its body was. It is abandoned, and what interrupted it goes on.

    Args:
        by: What.
        again: Whether it has waited for the end of a transition once already, and does so no longer.
    """

    def __init__(self, by: BaseException, *, again: bool = False) -> None:
        self.by = by
        self.again = again
        super().__init__(repr(by))


def is_interrupt(error: BaseException | None) -> bool:
    """Return whether ``error`` comes of a Ctrl-C, or of the end of the process."""
    return isinstance(error, INTERRUPTS) or (isinstance(error, asyncio.CancelledError) and _by_ctrl_c(error))


def _by_ctrl_c(error: BaseException) -> bool:
    """Return whether a task was cancelled since Ctrl-C was pressed.

    From Python 3.11 ``asyncio.run`` turns the first Ctrl-C into a cancellation of its main task (``asyncio.Runner``'s
    ``_on_sigint``, 3.11 to 3.14); before, it cancels all tasks while it handles the KeyboardInterrupt itself.
    """
    runner = getattr(getattr(signal.getsignal(signal.SIGINT), "func", None), "__self__", None)
    if getattr(runner, "_interrupt_count", 0) > 0:
        return True
    context = error.__context__
    while context is not None and not isinstance(context, INTERRUPTS):
        context = context.__context__
    return context is not None


def abandon(book: Book, frame: Frame, error: BaseException, *, may_wait: bool) -> None:
    """Close a scope that is not gone through to its end: rebuild nothing, and tell the ranks that count on this one.

    Args:
        book: The open scopes.
        frame: The scope.
        error: What has interrupted it.
        may_wait: Whether to wait for a transition that is on to end: what is to be told goes by where it leads.
    """
    try:
        drive(frame.contexts.leave(error))
    except Exception:
        logger.exception("leaving also= of %s, which is abandoned", frame)
    finally:
        book.close(frame)
        frame.is_over = True
    world = frame.world
    if world is None or world.is_gone:
        return
    passage = frame.passage
    if passage is not None and passage.has_begun and not passage.is_over:
        vote_against(frame, world, passage, error)
        if may_wait:
            passage.wait()
            frame.is_entering = False
    if passage is not None and passage.is_over and not passage.has_failed:
        frame.is_told = False  # its vote came too late: the others went on, and so did it
    if world.is_released:
        world.doubts = True
    if (frame.is_entering or world.phase is not book.wanted(world)) and not frame.is_told:
        frame.is_told = True
        world.settled = False
        told = threading.Event()
        in_thread(partial(_tell, world, error, told.set))
        told.wait(TOLD_WITHIN)


def rescue(book: Book, frame: Frame, error: BaseException, *, may_wait: bool) -> None:
    """Hear of what comes out of a scope's entry or exit, and see that the scope is not left half open.

    Most often that is an error at the end of its life. Else a Ctrl-C, or what a signal handler has raised, has come at
    some line of ours. The life hears of it, as if it had come where it waits, and goes on to where that leads.

    Args:
        book: The open scopes.
        frame: The scope.
        error: What comes out.
        may_wait: Whether the life may wait in this thread: not in an event loop's.
    """
    if frame.is_over or frame.pid != os.getpid():
        return
    try:
        if frame.life is not None and may_wait:
            drive(frame.life, error=error)
        elif frame.life is not None:
            for _ in range(3):  # in the end it no longer waits for anything
                frame.life.throw(error)
    except BaseException as raised:
        logger.debug("%s was interrupted by %r, and ended with %r", frame, error, raised)
    finally:
        if not frame.is_over:
            abandon(book, frame, error, may_wait=may_wait)


def vote_against(frame: Frame, world: World, passage: Passage, error: BaseException) -> None:
    """Have an interrupt end the transition that this rank waits in, on all ranks, if nothing is decided yet.

    Args:
        frame: The scope that was interrupted.
        world: Its WORLD.
        passage: What this rank waits in.
        error: What has interrupted it.
    """
    if not passage.is_voting:
        return

    def vote() -> None:
        if _tell(world, error, lambda: None):
            frame.is_told = True
            if not passage.over_within(OVER_WITHIN):
                passage.give_up(error)

    in_thread(vote)


def in_thread(work: Callable[[], Any]) -> None:
    """Have a thread do something, or do it here, if there can be no more threads."""
    try:
        threading.Thread(target=work, name="gpurelease-leaving", daemon=True).start()
    except RuntimeError:
        work()


def _tell(world: World, error: BaseException, cast: Callable[[], None]) -> bool:
    """Write for the other ranks to read why this one does not come. Returns whether they do."""
    words = f"rank {world.rank} left with {_words_of(error)}, and rebuilds nothing"
    try:
        return world.roll_call.leave(words, world.timeout(world.options), cast)
    except (NotAllCame, RuntimeError) as silent:
        logger.warning("the other ranks could not be told that %s: %s", words, silent)
        cast()
        return False


def _words_of(error: BaseException) -> str:
    if isinstance(error, asyncio.CancelledError) and _by_ctrl_c(error):
        return "KeyboardInterrupt"
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
