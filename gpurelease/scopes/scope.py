"""One scope as users hold it: a context manager, plain and async, and a decorator."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

from gpurelease.errors import ScopeMisuse
from gpurelease.report import Report
from gpurelease.scopes.book import book, own_of
from gpurelease.scopes.decorator import Function, decorate
from gpurelease.scopes.driver import drive, drive_async, guarded, guarded_async
from gpurelease.scopes.frame import Frame
from gpurelease.scopes.leaving import rescue
from gpurelease.scopes.life import life


class Scope:
    """What ``released_world()`` and ``restored_world()`` return, and what their ``with`` blocks yield.

    It can be entered with ``with`` and ``async with``, again and again, also nested in itself, and it decorates
    functions, each call of which has a scope of its own.

    Args:
        make_frame: Returns a new entry in the book of open scopes; told what the user wrote to open it.
        name: What the user calls to make such a scope.
        spelled: What the user wrote, if it is not that call.

    Attributes:
        report: What became of each group, and what it took and gave; of the last entry, if there were more.
    """

    report: Report

    def __init__(self, make_frame: Callable[[str], Frame], name: str, spelled: str = "") -> None:
        self._make_frame = make_frame
        self._name = name
        self._spelled = spelled or f"{name}()"
        self._frames: list[Frame] = []
        self.report = Report()

    def __call__(self, function: Function, /) -> Function:
        """Return a function that does what ``function`` does, with a scope like this one around each call."""
        return decorate(function, partial(Scope, self._make_frame, self._name), self._name)

    def _enter(self) -> Scope:
        frame = self._begin()
        drive(frame.life)
        self.report = frame.report
        frame.is_inside = True  # the last thing: from here on it is left, and no longer taken back
        return self

    async def _enter_async(self) -> Scope:
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
        frame = self._make_frame(self._spelled)
        frame.life = life(book(), frame)
        self._frames.append(frame)
        return frame

    def _innermost(self) -> Frame:
        frame = own_of(self._frames)
        if frame is None:
            raise ScopeMisuse(f"{self._spelled} is left, and it is not open")
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

    # To a type checker a scope swallows nothing, so that a function may return inside its block: what a context in
    # also= swallows is that context's business.
    if TYPE_CHECKING:

        def __enter__(self) -> Scope: ...
        def __exit__(
            self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
        ) -> None: ...
        async def __aenter__(self) -> Scope: ...
        async def __aexit__(
            self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
        ) -> None: ...
    else:
        __enter__ = guarded(_enter, partial(_rescue, entering=True, may_wait=True))
        __exit__ = guarded(_exit, partial(_rescue, entering=False, may_wait=True))
        __aenter__ = guarded_async(_enter_async, partial(_rescue, entering=True, may_wait=False))
        __aexit__ = guarded_async(_exit_async, partial(_rescue, entering=False, may_wait=False))
