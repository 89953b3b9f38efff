"""The scopes as users write them: context managers, plain and async, and a pair of calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from gpurelease.errors import ScopeMisuse
from gpurelease.options import ScopeOptions
from gpurelease.report import Report
from gpurelease.scopes.book import Frame, book, own_of
from gpurelease.scopes.contexts import Contexts
from gpurelease.scopes.driver import drive, drive_async, guarded, guarded_async
from gpurelease.scopes.leaving import rescue
from gpurelease.scopes.life import life
from gpurelease.transition.world import Phase

if TYPE_CHECKING:
    from gpurelease.options import Keep


class _Scope:
    """A scope that can be entered with ``with`` and ``async with``, again and again, also nested in itself."""

    def __init__(self, make_frame: Callable[[], Frame]) -> None:
        self._make_frame = make_frame
        self._frames: list[Frame] = []
        self.report = Report()

    def _enter(self) -> _Scope:
        frame = self._begin()
        drive(frame.life)
        self.report = frame.report
        frame.is_inside = True  # the last thing: from here on it is left, and no longer taken back
        return self

    async def _enter_async(self) -> _Scope:
        frame = self._begin()
        await drive_async(frame.life)
        self.report = frame.report
        frame.is_inside = True
        return self

    def _exit(
        self, kind: type[BaseException] | None = None, error: BaseException | None = None, trace: object = None
    ) -> bool:
        frame = self._innermost()
        swallowed = drive(frame.life, error)
        self._end(frame)
        return bool(swallowed)

    async def _exit_async(
        self, kind: type[BaseException] | None = None, error: BaseException | None = None, trace: object = None
    ) -> bool:
        frame = self._innermost()
        swallowed = await drive_async(frame.life, error)
        self._end(frame)
        return bool(swallowed)

    def _begin(self) -> Frame:
        frame = self._make_frame()
        frame.life = life(book(), frame)
        self._frames.append(frame)
        return frame

    def _innermost(self) -> Frame:
        frame = own_of(self._frames)
        if frame is None:
            raise ScopeMisuse(f"{type(self).__name__}() is left, and it is not open")
        return frame

    def _end(self, frame: Frame) -> None:
        frame.life = None
        self._frames = [each for each in self._frames if each is not frame]

    def _rescue(self, error: BaseException, *, entering: bool, may_wait: bool) -> None:
        """Hear of what comes out of a method, and see that nothing stays half open."""
        frame = own_of([frame for frame in self._frames if not (entering and frame.is_inside)])
        if frame is not None:
            rescue(book(), frame, error, may_wait=may_wait)
            self._end(frame)

    if TYPE_CHECKING:

        def __enter__(self) -> _Scope: ...
        def __exit__(
            self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
        ) -> None: ...
        async def __aenter__(self) -> _Scope: ...
        async def __aexit__(
            self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
        ) -> None: ...
    else:
        __enter__ = guarded(_enter, partial(_rescue, entering=True, may_wait=True))
        __exit__ = guarded(_exit, partial(_rescue, entering=False, may_wait=True))
        __aenter__ = guarded_async(_enter_async, partial(_rescue, entering=True, may_wait=False))
        __aexit__ = guarded_async(_exit_async, partial(_rescue, entering=False, may_wait=False))


class released_world(_Scope):
    """Release the communicators of all groups for the length of a ``with`` block.

    Inside, every NCCL group is an empty shell that refuses collectives, and its device memory is free; WORLD runs on
    Gloo: object collectives, barriers, CPU collectives and ``new_group()`` work. Afterwards every group works again,
    and is the same object as before, wherever it is held. Also works with ``async with``; also functions as a
    decorator under the name :func:`releases_world`.

    All ranks of WORLD must enter and leave, from any one thread each; a rank that does not come is named by an error
    on all others after ``timeout``. Scopes that only want the world released may overlap in any way, of blocks, tasks
    and threads: it is released while one is open, and the last that is left restores it.

    A thread of gpurelease does the work, and the caller only waits: with ``async with`` its event loop goes on
    meanwhile. What interrupts the wait is told to the other ranks at once, and raised as itself.

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
        timeout: Longest wait for other ranks, in seconds or as a timedelta; by default WORLD's own time-out. It bounds
            waiting for ranks that do not come, and steps in which no rank gets on: not work that goes on.
        also: Context managers, or functions that return one, that are entered once the world is released and left
            before it is restored, also in the middle, by :class:`restored_world`: memory savers, offloading. Functions
            are called anew for each entry. In ``async with`` they may be asynchronous. If one raises on entry, the
            scope is entered on no rank. They cannot open or close scopes themselves.

    Yields:
        The scope; its ``report`` says what became of each group, and what it took and gave.

    Raises:
        InvalidOption: An argument can never work.
        NotBuilt: On entry: the C++ extension is missing, or was built for another torch.
        ScopeMisuse: On entry: the scope contradicts those that are open.
        ReleaseFailed: On entry, on all ranks. The world is as it was.
        RestoreFailed: On all ranks. The world is still released; :func:`restore_world`, or the next scope to which all
            come, brings all ranks to one state.
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
        options, items = ScopeOptions.check(strategy, keep, backends, timeout), tuple(also)
        Contexts(items)  # a bad item is told where it is written
        super().__init__(lambda: Frame(Phase.RELEASED, "released_world()", options, Contexts(items)))


class restored_world(_Scope):
    """Restore the world for the length of a ``with`` block inside a released scope, for weight sync in mid-rollout.

    At the end of the block the world is released again, with the options of the scope around it. Contexts in ``also=``
    of the scopes around are left before, and entered again after it. Where the world is not released, nothing is done.
    All ranks of WORLD must enter and leave. Also works with ``async with``.

    Yields:
        The scope; its ``report`` says what was done.

    Raises:
        RestoreFailed: On entry, on all ranks. The world is still released.
        ReleaseFailed: On exit, on all ranks. The world is restored.
        ScopeMisuse: On entry: another task or thread is inside a scope that wants the world released.

    Example:
        >>> with released_world():
        ...     samples = engine.generate(prompts)
        ...     with restored_world():
        ...         broadcast_weights(model, engine)
        ...     samples += engine.generate(more_prompts)
    """

    def __init__(self) -> None:
        super().__init__(lambda: Frame(Phase.ARMED, "restored_world()", ScopeOptions()))


def release_world(
    *,
    strategy: str = "rebuild",
    keep: Keep = (),
    backends: str | Iterable[str] | None = None,
    timeout: float | timedelta | None = None,
) -> Report:
    """Release the world until :func:`restore_world`, for sleep and wake-up calls that come apart (a Ray actor's).

    Where release and restore are in one function, ``with released_world():`` is safer. Takes its options (but
    ``also=``) and raises its errors. All ranks of WORLD must call; the thread that calls :func:`restore_world` may be
    another one.

    Returns:
        What was done. :func:`restore_world` adds to it.
    """
    options = ScopeOptions.check(strategy, keep, backends, timeout)
    frame = Frame(Phase.RELEASED, "release_world()", options, is_split=True)
    _call(frame)
    return frame.report


def restore_world(*, timeout: float | timedelta | None = None) -> Report:
    """Restore the world that :func:`release_world` released, or try again after :class:`RestoreFailed`.

    All ranks of WORLD must call, from any thread. While other scopes want the world released it stays so, and the last
    of them restores it.

    Args:
        timeout: Longest wait for other ranks, in seconds or as a timedelta; by default what the world was released
            with.

    Returns:
        What was done, with what :func:`release_world` did.

    Raises:
        ScopeMisuse: No call of ``release_world()`` is to be closed, and nothing has failed.
        RestoreFailed: On all ranks. The world is still released.
    """
    given = ScopeOptions.check("rebuild", (), None, timeout)
    frame = book().split_frame()
    if frame is None:
        return _restore_again(given)
    book().refuse_inside(frame)
    if given.timeout is not None:
        frame.options = replace(frame.options, timeout=given.timeout)
    _call(frame)
    return frame.report


def is_released() -> bool:
    """Return whether the groups of the current WORLD are released now. Any thread of any rank may ask."""
    return book().is_released()


def release_depth() -> int:
    """Return how many open scopes want the current WORLD released. Any thread of any rank may ask."""
    return book().depth()


def current_report() -> Report | None:
    """Return the report of the open scope that released the world, or None: for code inside a decorated rollout.

    What is done later, such as the restore, is added to the same object. Any thread of any rank may ask.
    """
    return book().report()


def _restore_again(given: ScopeOptions) -> Report:
    """Bring all ranks to one state, after a failure that has left the world released, or with no scope open."""
    innermost = book().innermost()
    if innermost is not None:
        raise ScopeMisuse(
            f"restore_world() closes what release_world() opened, and the innermost open scope is {innermost}, which "
            "is restored when it is left. To use the groups inside it, write `with restored_world():`"
        )
    frame = Frame(Phase.ARMED, "restore_world()", given, is_split=True)
    if not book().why_no_effect():
        world = book().current_world()
        if world.settled and not world.is_released:
            raise ScopeMisuse("restore_world() was called, and the world is not released: call release_world() first")
    _call(frame)  # opens it
    _call(frame)
    return frame.report


def _open_or_close(frame: Frame) -> None:
    if frame.is_inside:
        drive(frame.life)
        return
    frame.life = life(book(), frame)
    drive(frame.life)
    frame.is_inside = True


_call = guarded(_open_or_close, lambda frame, error: rescue(book(), frame, error, may_wait=True))
