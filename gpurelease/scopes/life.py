"""What one scope does, from its entry to its end.

One generator function for all kinds: it yields what it waits for, and None where the scope's body runs.

Whatever the body raises, the scope is closed, and the world is what the scopes that are still open want. For what a
user's Ctrl-C raises, and the end of the process, nothing is rebuilt: the other ranks are told, if they count on this
one.
"""

from __future__ import annotations

import logging
import os
from functools import partial
from typing import Any

from gpurelease.errors import ContextFailed, TransitionFailed, ranks_text
from gpurelease.scopes.book import Book, in_contexts_of
from gpurelease.scopes.driver import Life
from gpurelease.scopes.frame import Frame
from gpurelease.scopes.leaving import Interrupted, abandon, is_interrupt
from gpurelease.scopes.nesting import check
from gpurelease.scopes.reaching import reach
from gpurelease.transition.world import Phase

logger = logging.getLogger(__name__)


def life(book: Book, frame: Frame) -> Life:
    """Live through one scope.

    Args:
        book: The open scopes.
        frame: The scope.

    Returns:
        Whether a context in ``also=`` has swallowed what the body has raised.

    Raises:
        ScopeMisuse: See :func:`gpurelease.scopes.nesting.check`. The scope is not open.
        ReleaseFailed, RestoreFailed, ContextFailed: See :class:`gpurelease.released_world`. The scope is closed.
    """
    try:
        yield from _enter(book, frame)
        error = yield None  # here the body runs
        return (yield from _leave(book, frame, error))
    except Interrupted as interrupted:
        abandon(book, frame, interrupted.by, may_wait=not interrupted.again)
        by = interrupted.by
    raise by


def _enter(book: Book, frame: Frame) -> Life:
    """Open the scope. If that fails it is closed, and the world is what the others want."""
    try:
        book.refuse_inside(frame)
        frame.report.reason = book.why_no_effect()
        if not frame.report.reason:
            frame.world = book.current_world()
        around = book.open(frame, partial(check, frame))
        if frame.world is None:
            with in_contexts_of(frame):
                yield from frame.contexts.enter()
        elif (yield from reach(book, frame, entering=True)) is None:
            nested = f"nested in {around}" if frame.wants is Phase.RELEASED else "the world is not released"
            frame.report.reason = nested
        elif not frame.report.transitions and not frame.report.reason:
            frame.report.reason = f"the world was {frame.world.phase.value} still, since a transition had failed"
    except Exception as error:
        if frame.is_entering:
            raise  # a signal handler's, at some line of ours: see what is rescued
        if frame.contexts.are_entered:
            with in_contexts_of(frame):
                yield from frame.contexts.leave(error)
        book.close(frame)
        frame.is_over = True
        raise
    if frame.report.reason:
        logger.debug("%s: %s", frame.spelled, frame.report)


def _leave(book: Book, frame: Frame, error: BaseException | None) -> Life:
    """Close the scope, and bring the world to what the others want."""
    if frame.pid != os.getpid():
        logger.debug("%s is its parent's: this process was forked inside it", frame)
        return False
    with in_contexts_of(frame):
        now, raised_here = yield from frame.contexts.leave(error)
    if is_interrupt(now):
        raise Interrupted(now) from None
    book.close(frame)
    world = frame.world
    second: TransitionFailed | None = None
    if world is not None and world.is_gone:
        frame.report.reason = "WORLD was destroyed inside the scope"
        world.forget()
    elif world is not None:
        if world.is_released and (error is not None or now is not None):
            world.doubts = True  # also of what a context has swallowed
        try:
            verdict = yield from reach(book, frame, entering=False, context_error=now if raised_here else None)
            second = _of_contexts(verdict) if now is None else None
        except TransitionFailed as failure:
            second = failure
    frame.is_over = True
    if now is None and second is not None:
        raise second
    if now is not None and second is not None:
        _note(now, second)
    if now is not None and raised_here:
        raise now
    return error is not None and now is None


def _of_contexts(verdict: Any) -> ContextFailed | None:
    """Return what is raised if a context has raised on another rank, when it was left."""
    failed = {int(rank): text for rank, text in ((verdict or {}).get("contexts failed") or {}).items()}
    if not failed:
        return None
    return ContextFailed(f"The world was restored, but also= failed on {ranks_text(sorted(failed))}:", failed)


def _note(first: BaseException, second: Exception) -> None:
    """Write the second error down: the first is what the user sees."""
    logger.error("the body of the scope raised, and then leaving the scope did", exc_info=second)
    if hasattr(first, "add_note"):  # Python 3.11
        first.add_note(f"Leaving the scope then raised {type(second).__name__}: {second}")
