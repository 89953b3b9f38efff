"""Bringing the world to what the open scopes want, with the contexts of their ``also=``."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from dataclasses import replace

from gpurelease.agreement.ballot import Verdict
from gpurelease.agreement.rollcall import store_is_silent
from gpurelease.agreement.waiting import NotAllCame
from gpurelease.errors import ReleaseFailed, TransitionFailed
from gpurelease.groups.plan import Plan, plan, why_not_now
from gpurelease.scopes.book import Book, in_contexts_of
from gpurelease.scopes.driver import Life
from gpurelease.scopes.frame import Frame
from gpurelease.scopes.leaving import Interrupted, is_interrupt, vote_against
from gpurelease.torch_internals import devices
from gpurelease.transition.aim import Aim
from gpurelease.transition.engine import Engine
from gpurelease.transition.passage import Passage
from gpurelease.transition.world import Phase, World

logger = logging.getLogger(__name__)


def reach(book: Book, frame: Frame, *, entering: bool, context_error: BaseException | None = None) -> Life:
    """Bring the world to what the open scopes want, if it is not.

    Args:
        book: The open scopes.
        frame: The scope that was opened or closed just now. It must have a WORLD.
        entering: Whether it was opened. Then the ranks meet also if they may not all be in one state.
        context_error: What its contexts have raised when they were left.

    Returns:
        The last verdict; None if nothing had to be done.

    Raises:
        ReleaseFailed, RestoreFailed: On all ranks.
    """
    world = frame.world
    assert world is not None
    verdict: Verdict | None = None
    while not (world.phase is book.wanted(world) and (world.settled or not entering)):
        frame.is_entering = True
        left: list[Frame] = []
        try:
            if book.wanted(world) is Phase.ARMED:
                context_error = (yield from _leave_contexts(book, world, left)) or context_error
            made = yield from _go(book, frame, book.wanted(world), context_error)
        except TransitionFailed:
            yield from _enter_again(left)
            raise
        frame.is_entering = False
        verdict = made or verdict
        if made and made.get("nothing"):
            return made
    if world.is_released:
        yield from _enter_contexts(book, frame, world, verdict)
    return verdict


# -------------------------------------------------------------------------------------------------------- transitions


def _go(book: Book, frame: Frame, wanted: Phase, context_error: BaseException | None = None) -> Life:
    """Make one transition. The world may be in another phase afterwards than it was made for.

    Args:
        book: The open scopes.
        frame: The scope that it is made for.
        wanted: The phase that it is made for.
        context_error: What contexts have raised that were left for it.
    """
    world = frame.world
    assert world is not None
    known = len(frame.report.transitions)
    verdict = yield from _pass(book, frame, world, wanted, lambda: _prepare(book, frame, world, wanted, context_error))
    if verdict is None:
        return None
    if wanted is frame.wants is Phase.RELEASED and world.is_released:
        world.report = frame.report
    elif world.report is not frame.report:
        world.report.transitions += frame.report.transitions[known:]
    return verdict


def _pass(book: Book, frame: Frame, world: World, wanted: Phase, prepare: Callable[[], Aim]) -> Life:
    """Go through a passage, if no other one is on. Returns its verdict, or None once the other is over."""
    passage = Passage(
        lambda: world.failure(wanted, store_is_silent().reason),
        lambda: setattr(world, "roll_call", world.roll_call.successor()),
    )
    try:
        other = book.claim(passage)
        if other is not None:
            yield other  # what it ends with is for those who have begun it
            return None
        passage.waits_in = threading.get_ident()
        engine = Engine(world, prepare(), passage)
        passage.waits_in = None
        return (yield from _through(frame, world, passage, engine))
    except BaseException:
        passage.withdraw()
        raise


def _through(frame: Frame, world: World, passage: Passage, engine: Engine) -> Life:
    """Wait for a transition.

    What interrupts that is this rank's vote while there is one to cast, and is raised once the transition is over.
    """
    frame.passage = passage
    try:
        passage.begin(engine.go)
    except RuntimeError as error:
        raise _no_thread(frame, world, engine.wants, error) from error
    interrupted: BaseException | None = None
    has_waited = False  # in an event loop, other tasks have had their turn by then
    while not (has_waited and passage.is_over):
        has_waited = True
        try:
            yield passage
        except GeneratorExit:
            raise
        except BaseException as error:
            if interrupted is not None:
                raise Interrupted(error, again=True) from None
            interrupted = error
            vote_against(frame, world, passage, error)
    frame.is_entering = False
    if interrupted is not None:
        raise Interrupted(interrupted)
    return passage.result()


def _prepare(book: Book, frame: Frame, world: World, wanted: Phase, context_error: BaseException | None) -> Aim:
    """Ask what only the caller's thread can be asked: its streams, its device, a user's predicate."""
    options = book.options_in_force(world) if wanted is Phase.RELEASED else world.options
    if frame.options.timeout is not None:
        options = replace(options, timeout=frame.options.timeout)
    aim = Aim(wanted, options, frame.report)
    aim.device = devices.accelerator()
    aim.context = "" if context_error is None else repr(context_error)
    aim.contexts = wanted is Phase.RELEASED and any(each.contexts for each in book.frames_of(world))
    group = world.group
    if wanted is Phase.RELEASED and not world.is_released and group is not None:
        with aim.transition.step("plan"):
            try:
                aim.plan = plan(group, options, world.made_while_released)
                aim.problem = why_not_now(aim.plan)
            except Exception as error:
                logger.debug("planning failed", exc_info=True)
                aim.plan, aim.problem = Plan(), f"planning failed: {error!r}"
        if frame.wants is Phase.ARMED:
            aim.plan.unmatched = []  # what keep= names may be gone by now
    return aim


def _no_thread(frame: Frame, world: World, wanted: Phase, error: RuntimeError) -> TransitionFailed:
    """Tell the other ranks that this one can start no thread, and return what it raises itself."""
    frame.is_entering = False
    text = f"it can start no more threads ({error})"
    world.settled = False
    timeout = world.timeout(frame.options if frame.options.timeout is not None else world.options)
    try:
        world.roll_call.leave(f"rank {world.rank} left: {text}", timeout)
    except (NotAllCame, RuntimeError):
        logger.warning("the other ranks could not be told that rank %d can start no thread", world.rank, exc_info=True)
    return world.failure(wanted, failures={world.rank: text})


# ----------------------------------------------------------------------------------------------------------- contexts


def _leave_contexts(book: Book, world: World, left: list[Frame]) -> Life:
    """Leave the contexts of all open scopes, the last first, and return what one of them has raised.

    Args:
        book: The open scopes.
        world: The WORLD that is to be restored.
        left: Where to note the scopes whose contexts were left.
    """
    failed: BaseException | None = None
    for frame in reversed(book.frames_of(world)):
        if frame.contexts.are_entered:
            left.insert(0, frame)
            with in_contexts_of(frame):
                error, _ = yield from frame.contexts.leave(None)
            if is_interrupt(error):
                raise Interrupted(error)
            failed = failed or error
    return failed


def _enter_again(left: list[Frame]) -> Life:
    """Enter contexts again that were left for a restore that failed."""
    for frame in left:
        try:
            with in_contexts_of(frame):
                yield from frame.contexts.enter()
        except Exception:
            logger.exception("entering also= of %s again, since restoring failed", frame)


def _enter_contexts(book: Book, frame: Frame, world: World, verdict: Verdict | None) -> Life:
    """Enter the contexts of all open scopes whose contexts are not entered; all ranks hear if that fails on one.

    Args:
        book: The open scopes.
        frame: The scope that was opened, or in which a restored world was left.
        world: The WORLD that is released now.
        verdict: By which, if it was released just now.
    """
    entered: list[Frame] = []
    failed: BaseException | None = None
    for each in book.frames_of(world):
        if each.contexts and not each.contexts.are_entered:
            entered.insert(0, each)
            try:
                with in_contexts_of(each):
                    yield from each.contexts.enter()
            except GeneratorExit:
                raise
            except BaseException as error:
                if is_interrupt(error):
                    raise Interrupted(error) from None
                failed = error
                break
    told: TransitionFailed | None = None
    if verdict is not None and verdict.get("contexts"):
        try:
            yield from _confirm(book, frame, world, failed)
        except TransitionFailed as failure:
            told = failure
    if told is None and failed is None:
        return
    for each in entered:
        with in_contexts_of(each):
            yield from each.contexts.leave(failed or told)
    world.doubts = True
    opened = frame.wants is Phase.RELEASED
    if opened:
        book.close(frame)
    if told is None:
        assert failed is not None
        raise failed  # a scope inside another one, which goes on
    if told.missing:
        raise told  # nothing can be restored without them, and nobody waits for them a second time
    if not opened or book.wanted(world) is Phase.ARMED:
        yield from _go(book, frame, Phase.ARMED, None)
    if isinstance(failed, asyncio.CancelledError):
        raise failed  # the others have heard why; this task is to end
    raise ReleaseFailed(told.summary, told.failures) from failed


def _confirm(book: Book, frame: Frame, world: World, failed: BaseException | None) -> Life:
    """Hear whether contexts were entered on all ranks.

    Raises:
        RestoreFailed: They were not: the world is still released.
    """
    aim = Aim(Phase.RELEASED, world.options, frame.report)
    if frame.options.timeout is not None:
        aim.options = replace(world.options, timeout=frame.options.timeout)
    aim.transition = frame.report.transitions[-1]
    aim.device = devices.accelerator()
    aim.step = "contexts"
    aim.context = "" if failed is None else f"also= raised {failed!r}"
    verdict = None
    while verdict is None:
        verdict = yield from _pass(book, frame, world, Phase.RELEASED, lambda: aim)
    if verdict.get("contexts refused"):
        raise world.failure(Phase.RELEASED, verdict["contexts refused"])
