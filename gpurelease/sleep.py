"""The same in two calls: for sleep and wake-up that come apart, as in a Ray actor."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from gpurelease.errors import ScopeMisuse
from gpurelease.options import ScopeOptions, StrategyName
from gpurelease.report import Report
from gpurelease.scopes.book import book
from gpurelease.scopes.contexts import Contexts
from gpurelease.scopes.driver import drive, guarded
from gpurelease.scopes.frame import Frame
from gpurelease.scopes.leaving import rescue
from gpurelease.scopes.life import life
from gpurelease.transition.world import Phase

if TYPE_CHECKING:
    from gpurelease.options import Keep


def sleep_world(
    *,
    strategy: StrategyName = "rebuild",
    keep: Keep = (),
    backends: str | Iterable[str] | None = None,
    timeout: float | timedelta | None = None,
    also: Iterable[Any] = (),
) -> Report:
    """Release the world until :func:`wake_world`, for sleep and wake-up calls that come apart (a Ray actor's).

    Where both are in one function, ``with released_world():`` is safer. Takes its options and raises its errors;
    contexts in ``also=`` are entered here, and left in :func:`wake_world`. All ranks of WORLD must call; the thread
    that calls :func:`wake_world` may be another one.

    A world that this has put to sleep already sleeps on, and nothing is done: neither are contexts entered again.

    Returns:
        What was done when the world was put to sleep. :func:`wake_world` adds to it.

    Raises:
        ScopeMisuse: The options contradict those with which the world was put to sleep, or other open scopes.

    Example:
        >>> class Trainer:  # a Ray actor
        ...     def sleep(self):
        ...         sleep_world()
        ...     def wake_up(self):
        ...         wake_world()
    """
    options, contexts = ScopeOptions.check(strategy, keep, backends, timeout), Contexts(tuple(also))
    asleep = book().asleep()
    if asleep is None:
        frame = Frame(Phase.RELEASED, "sleep_world()", options, contexts, report=SleepReport(), is_split=True)
        _call(frame)
        return frame.report
    # Like a scope inside the one that is open: it refuses what contradicts that, and makes up for what has failed.
    again = Frame(Phase.RELEASED, "sleep_world()", options, report=SleepReport(), is_split=True)
    _call(again)
    _call(again)
    if again.report.transitions:
        asleep.report = again.report
    return asleep.report


def wake_world(*, timeout: float | timedelta | None = None) -> Report:
    """Wake the world that :func:`sleep_world` put to sleep, or try again after :class:`RestoreFailed`.

    All ranks of WORLD must call, from any thread. While other scopes want the world released it stays so, and the last
    of them restores it. Where the world is awake, nothing is done.

    Args:
        timeout: Longest wait for other ranks, in seconds or as a timedelta; by default what the world was put to sleep
            with.

    Returns:
        What was done, with what :func:`sleep_world` did. If nothing was, a new report whose ``reason`` says so.

    Raises:
        ScopeMisuse: It was not ``sleep_world()`` that has released the world, but a block that is still open.
        RestoreFailed: On all ranks. The world is still released.
    """
    given = ScopeOptions.check("rebuild", (), None, timeout)
    reports = []
    for frame in book().split_frames():
        book().refuse_inside(frame)
        if given.timeout is not None:
            frame.options = replace(frame.options, timeout=given.timeout)
        _call(frame)
        reports.append(frame.report)
    if not reports:
        return _wake_without_sleep(given)
    return next((report for report in reports if report.transitions), reports[0])


def _wake_without_sleep(given: ScopeOptions) -> Report:
    """Bring all ranks to one state, after a failure that has left the world released; if it is awake, do nothing."""
    innermost = book().innermost()
    world = None if book().why_no_effect() else book().current_world()
    is_awake = world is None or (world.settled and not world.is_released)
    if innermost is not None and (innermost.wants is Phase.RELEASED or not is_awake):
        raise ScopeMisuse(
            f"wake_world() ends what sleep_world() began, and the innermost open scope is {innermost}, which ends when "
            "it is left. To use the groups inside it, write `with restored_world():`"
        )
    if world is not None and is_awake:
        return Report(reason="the world is awake")
    frame = Frame(Phase.ARMED, "wake_world()", given, is_split=True)
    _call(frame)  # opens it
    _call(frame)
    return frame.report


class SleepReport(Report):
    """What :func:`sleep_world` returns.

    Who writes ``with sleep_world():`` or ``@sleep_world()`` means :func:`released_world`. The call itself cannot know,
    and the world is asleep by then, with nothing to wake it at the end of the block. So it is woken before that is
    told: all ranks run the same program, and make the same mistake. Type checkers know none of this, and complain.
    """

    if not TYPE_CHECKING:

        def __enter__(self) -> NoReturn:
            _wake_and_explain("with sleep_world()")

        def __exit__(self, *told: object) -> None: ...  # Python looks for it before it enters

        async def __aenter__(self) -> NoReturn:
            _wake_and_explain("async with sleep_world()")

        async def __aexit__(self, *told: object) -> None: ...

        def __call__(self, function: object) -> NoReturn:
            """Refuse to decorate."""
            _wake_and_explain("@sleep_world()")


def _wake_and_explain(spelled: str) -> NoReturn:
    wake_world()
    meant = spelled.replace("sleep_world", "released_world")
    raise ScopeMisuse(
        f"`{spelled}` would leave the world asleep: sleep_world() lasts until wake_world(). Write `{meant}`. The world "
        "is awake again"
    )


def _open_or_close(frame: Frame) -> None:
    if frame.is_inside:
        drive(frame.life)
        return
    frame.life = life(book(), frame)
    drive(frame.life)
    frame.is_inside = True


_call = guarded(_open_or_close, lambda frame, error: rescue(book(), frame, error, may_wait=True))
