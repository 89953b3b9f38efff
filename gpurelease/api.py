"""The scopes as users write them: context managers, plain and async, and a pair of calls."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from contextlib2 import AsyncExitStack, ExitStack

from gpurelease import torch_internals
from gpurelease.errors import InvalidOption, ReleaseFailed
from gpurelease.report import Report
from gpurelease.scopes import Frame, shared
from gpurelease.settings import ScopeOptions
from gpurelease.world import INTERRUPTS

if TYPE_CHECKING:
    from gpurelease.settings import Keep

    Leaver = Callable[[type[BaseException] | None, BaseException | None, TracebackType | None], bool]
    AsyncLeaver = Callable[[type[BaseException] | None, BaseException | None, TracebackType | None], Awaitable[bool]]

logger = logging.getLogger(__name__)


class _Scope:
    """A scope that can be entered with ``with`` and ``async with``, again and again, also nested in itself."""

    def __init__(self, make_frame: Callable[[], Frame], also: Iterable[Any] = ()) -> None:
        self._make_frame = make_frame
        self._also = tuple(also)
        self._open: list[tuple[Frame, Any]] = []  # with an ExitStack or AsyncExitStack, for each entry
        self.report = Report()
        for item in self._also:
            if not callable(item) and not _is_context(item):
                raise InvalidOption(f"also= takes context managers, or functions that return one, and got {item!r}")

    def __enter__(self) -> _Scope:
        frame = self._make_frame()
        frame.contexts = bool(self._also)
        shared().enter(frame)
        with shared().contexts_of(frame), ExitStack() as stack:
            stack.push(_leaver(frame))
            with _noting_error(frame):
                failure = None
                try:
                    for item in self._also:
                        stack.enter_context(_context(item))
                except Exception as error:
                    failure = error
                shared().enter_contexts(frame, failure)
            self._open.append((frame, stack.pop_all()))
        self.report = frame.report
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        frame, stack = self._open.pop()
        frame.error = error
        try:
            with shared().contexts_of(frame):
                return bool(stack.__exit__(kind, error, trace))
        except Exception as second:
            return _first_error_wins(error, second)

    async def __aenter__(self) -> _Scope:
        frame = self._make_frame()
        frame.contexts = bool(self._also)
        cancelled = await _in_thread(partial(shared().enter, frame))
        with shared().contexts_of(frame):
            async with AsyncExitStack() as stack:
                stack.push_async_exit(_async_leaver(frame))
                with _noting_error(frame):
                    failure: BaseException | None = cancelled
                    try:
                        for item in self._also if cancelled is None else ():
                            await _enter_async(stack, _context(item))
                    except (Exception, asyncio.CancelledError) as error:
                        failure = error
                    try:
                        cancelled = await _in_thread(partial(shared().enter_contexts, frame, failure))
                    except ReleaseFailed:
                        if isinstance(failure, asyncio.CancelledError):
                            raise failure from None  # the others have heard why; this task is to end
                        raise
                    if cancelled is not None:
                        raise cancelled
                self._open.append((frame, stack.pop_all()))
        self.report = frame.report
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        frame, stack = self._open.pop()
        frame.error = error
        try:
            with shared().contexts_of(frame):
                return bool(await stack.__aexit__(kind, error, trace))
        except Exception as second:
            return _first_error_wins(error, second)


class released_world(_Scope):
    """Release the communicators of all groups for the length of a ``with`` block.

    Inside, every NCCL group is an empty shell that refuses collectives, and its device memory is free; WORLD runs on
    Gloo: object collectives, barriers, CPU collectives and ``new_group()`` work. Afterwards every group works again,
    and is the same object as before, wherever it is held. Also works with ``async with``; also functions as a
    decorator under the name :func:`releases_world`.

    All ranks of WORLD must enter and leave, from any one thread each; a rank that does not come is named by an error
    on all others after ``timeout``. Scopes nest: only the outermost acts. ``async with`` waits for the other ranks in a
    worker thread, so that the event loop goes on meanwhile.

    If the body raises, the world is restored and the exception goes on. ``KeyboardInterrupt`` and ``SystemExit`` go
    on at once: nothing is rebuilt, and the other ranks are told.

    Args:
        strategy: How groups are released. ``"rebuild"`` shuts their communicators down and makes new ones, with the
            same options, at the end: it gives back everything. ``"suspend"`` keeps them and has NCCL give back what it
            can of their memory (torch 2.12, NCCL 2.29.7 and up), which takes less time. ``"auto"`` suspends if all
            communicators on all ranks can be suspended, and else rebuilds; the report says which, and why.
        keep: What is left alone: process groups, names or descriptions of groups, or one predicate on a group. A
            group is released only if all its members release it.
        backends: Names of the backends to release ("nccl"); by default all that serve an accelerator. ``("gloo",)``
            shows the whole life cycle on a machine without a GPU.
        timeout: Longest wait for other ranks at each end of the scope, in seconds or as a timedelta; by default
            WORLD's own time-out.
        also: Context managers, or functions that return one, that are entered once the world is released and left
            before it is restored: memory savers, offloading. Functions are called anew for each entry. In ``async
            with`` they may be asynchronous. If one raises on entry, the scope is entered on no rank. They cannot open
            or close scopes themselves.

    Yields:
        The scope; its ``report`` says what became of each group, and what it took and gave.

    Raises:
        InvalidOption: An argument can never work.
        ScopeMisuse: The scope contradicts the one around it, or scopes are left in the wrong order.
        ReleaseFailed: On entry, on all ranks. The world is as it was.
        RestoreFailed: On exit, on all ranks. The world is still released; :func:`restore_world` tries again.
        ContextFailed: On exit, where nothing else was raised: an ``also=`` context raised on another rank. The world is
            restored.

    Example:
        >>> with released_world() as scope:
        ...     samples = engine.generate(prompts)
        >>> print(scope.report)
        released 18 process groups in 0.050 s (...), freed 7.81 GiB of device memory (...); restored 18 ...
    """

    def __init__(
        self,
        *,
        strategy: str = "rebuild",
        keep: Keep = (),
        backends: str | Iterable[str] | None = None,
        timeout: float | timedelta | None = None,
        also: Iterable[Any] = (),
    ) -> None:
        options = ScopeOptions.check(strategy, keep, backends, timeout)
        super().__init__(partial(Frame, "released", "released_world()", options), also)


class restored_world(_Scope):
    """Restore the world for the length of a ``with`` block inside a released scope, for weight sync in mid-rollout.

    At the end of the block the world is released again, with the options of the scope around it. Where the world is
    not released, nothing is done. All ranks of WORLD must enter and leave. Also works with ``async with``.

    Yields:
        The scope; its ``report`` says what was done.

    Raises:
        RestoreFailed: On entry, on all ranks. The world is still released.
        ReleaseFailed: On exit, on all ranks. The world is restored, and stays so until the scope around is left.
        ScopeMisuse: Scopes are left in the wrong order.

    Example:
        >>> with released_world():
        ...     samples = engine.generate(prompts)
        ...     with restored_world():
        ...         broadcast_weights(model, engine)
        ...     samples += engine.generate(more_prompts)
    """

    def __init__(self) -> None:
        super().__init__(partial(Frame, "restored", "restored_world()", ScopeOptions()))


def release_world(
    *,
    strategy: str = "rebuild",
    keep: Keep = (),
    backends: str | Iterable[str] | None = None,
    timeout: float | timedelta | None = None,
) -> Report:
    """Release the world until :func:`restore_world`, for sleep and wake-up calls that come apart (a Ray actor's).

    Where release and restore are in one function, ``with released_world():`` is safer. Takes its options (but
    ``also=``) and raises its errors. All ranks of WORLD must call.

    Returns:
        What was done. :func:`restore_world` adds to it.
    """
    frame = Frame("released", "release_world()", ScopeOptions.check(strategy, keep, backends, timeout))
    shared().enter(frame)
    return frame.report


def restore_world() -> Report:
    """Restore the world that :func:`release_world` released, or try again after :class:`RestoreFailed`.

    All ranks of WORLD must call.

    Returns:
        What was done, with what :func:`release_world` did.

    Raises:
        ScopeMisuse: The innermost open scope is a ``with`` block or a decorated function, or the world is not released.
        RestoreFailed: On all ranks. The world is still released.
    """
    return shared().leave_split()


def is_released() -> bool:
    """Return whether the groups of the current WORLD are released now. Any thread of any rank may ask."""
    return shared().is_released()


def release_depth() -> int:
    """Return how many open scopes want the current WORLD released. Any thread of any rank may ask."""
    return shared().depth()


def current_report() -> Report | None:
    """Return the report of the open scope that released the world, or None: for code inside a decorated rollout.

    What is done later, such as the restore, is added to the same object. Any thread of any rank may ask.
    """
    return shared().current_report()


def _leaver(frame: Frame) -> Leaver:
    """Return what an exit stack calls last: it closes the scope, and so restores the world."""

    def leave(kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, INTERRUPTS):
            shared().abandon(frame, error)
        else:
            shared().leave(frame, error)
        return False

    return leave


def _async_leaver(frame: Frame) -> AsyncLeaver:
    leave = _leaver(frame)

    async def leave_in_thread(kind: object, error: BaseException | None, trace: object) -> bool:
        cancelled = await _in_thread(partial(leave, None, error, None))
        if cancelled is not None:
            raise cancelled
        return False

    return leave_in_thread


async def _in_thread(transition: Callable[[], object]) -> asyncio.CancelledError | None:
    """Run a transition in a worker thread, to its end. If the task is cancelled meanwhile, return the cancellation."""
    device = torch_internals.accelerator()  # a new thread's would be device 0, whichever is this rank's

    def run() -> None:
        with torch_internals.on_device(device):
            transition()

    running = asyncio.ensure_future(asyncio.to_thread(run))
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError as error:
            cancelled = error
        except Exception:
            break  # the transition's own: raised below
    running.result()
    return cancelled


@contextmanager
def _noting_error(frame: Frame) -> Iterator[None]:
    """What is raised here is not a context's, when the scope is left for it: all ranks have heard of that already."""
    try:
        yield
    except BaseException as error:
        frame.error = error
        raise


async def _enter_async(stack: AsyncExitStack, context: Any) -> None:
    if hasattr(type(context), "__aenter__"):
        await stack.enter_async_context(context)
    else:
        stack.enter_context(context)


def _context(item: Any) -> Any:
    """Return the context manager that ``item`` is, or makes."""
    return item if _is_context(item) else item()


def _is_context(item: Any) -> bool:
    return hasattr(type(item), "__enter__") or hasattr(type(item), "__aenter__")


def _first_error_wins(first: BaseException | None, second: Exception) -> bool:
    """Raise ``second`` if it is the only error or the first one on its way; else write it down and return False."""
    if first is None or second is first:
        raise second
    logger.error("the body of the scope raised, and then leaving the scope did", exc_info=second)
    if hasattr(first, "add_note"):  # Python 3.11
        first.add_note(f"Leaving the scope then raised {type(second).__name__}: {second}")
    return False
