"""The open scopes of this process: a stack, of which only the outermost entries act.

What state the world should be in is what the innermost open scope wants: "released" or "restored"; with no open
scope it is restored. A scope that changes the answer by being entered or left makes the transition.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import types
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Literal

import torch.distributed as dist
from torch.distributed import ProcessGroup

from gpurelease import torch_internals
from gpurelease.errors import ScopeMisuse
from gpurelease.report import Report
from gpurelease.settings import ScopeOptions, disabled
from gpurelease.state import Phase
from gpurelease.world import World

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Frame:
    """One open scope.

    Attributes:
        wants: The state of the world that it stands for.
        spelled: What the user wrote to open it.
        options: Its options.
        world: The WORLD that it is about, or None if it can have no effect.
        acted: Whether it made a transition when it was entered.
        report: What it did.
        contexts: Whether it enters contexts once the world is released.
        in_contexts: Whether they are entered or left now.
        error: What its body raised, or entering it did.
        opener: The thread, and the asyncio task if there is one, that opened it.
    """

    wants: Literal["released", "restored"]
    spelled: str
    options: ScopeOptions
    world: World | None = None
    acted: bool = False
    report: Report = field(default_factory=Report)
    contexts: bool = False
    in_contexts: bool = False
    error: BaseException | None = None
    opener: str = field(default_factory=lambda: _whoami())

    def __str__(self) -> str:
        return f"{self.spelled} (opened by {self.opener})"


class Scopes:
    """All open scopes of this process. A thread that comes while another is in transition waits for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._frames: list[Frame] = []
        self._worlds: weakref.WeakKeyDictionary[ProcessGroup, World] = weakref.WeakKeyDictionary()

    def enter(self, frame: Frame) -> None:
        """Open a scope. If it raises, the scope is not open.

        Raises:
            ScopeMisuse: It asks for what the scope around it did not do.
            ReleaseFailed, RestoreFailed: See :class:`gpurelease.world.World`.
        """
        with self._alone(frame):
            frame.report.reason = self._why_no_effect()
            if not frame.report.reason:
                frame.world = self._current_world()
                outer = self._innermost(frame.world)
                if frame.wants == "released":
                    self._enter_released(frame, frame.world, outer)
                else:
                    self._enter_restored(frame, frame.world, outer)
            if frame.report.reason:
                logger.debug("%s: %s", frame.spelled, frame.report)
            self._frames.append(frame)

    def enter_contexts(self, frame: Frame, error: BaseException | None) -> None:
        """Hear whether the contexts of a scope that was just opened were entered on all ranks.

        Args:
            frame: The scope.
            error: What a context raised on this rank.

        Raises:
            ReleaseFailed: See :class:`gpurelease.world.World`. The scope is still open.
        """
        if frame.world is not None and frame.acted and frame.wants == "released":
            with self._alone(frame):
                frame.world.enter_contexts(error, frame.report)
        elif error is not None:
            raise error

    @contextmanager
    def contexts_of(self, frame: Frame) -> Iterator[None]:
        """While a scope's contexts are entered or left, they cannot open or close other scopes."""
        token = _contexts_of.set(frame)
        frame.in_contexts = True
        try:
            yield
        finally:
            frame.in_contexts = False
            _contexts_of.reset(token)

    def leave(self, frame: Frame, error: BaseException | None = None) -> None:
        """Close a scope. It is closed also if this raises.

        Args:
            frame: The scope.
            error: What is on its way out of it, raised by its body or by a context.

        Raises:
            ScopeMisuse: A scope that was opened after it is still open.
            ReleaseFailed, RestoreFailed, ContextFailed: See :class:`gpurelease.world.World`.
        """
        with self._alone(frame):
            inner = self._close(frame)
            if inner is not None:
                raise ScopeMisuse(
                    f"{frame} is left while {inner}, which was opened later, is still open: scopes must be left in "
                    f"the reverse order. The world stays {inner.wants} until that one is left."
                )
            world = frame.world
            if world is None:
                return
            if error is not None:
                world.doubt_stand_in()
            if world.is_gone:
                frame.report.reason = "WORLD was destroyed inside the scope"
                world.forget()
                return
            outer = self._innermost(world)
            wanted = outer.wants if outer else "restored"
            done = len(frame.report.transitions)
            if wanted == "restored" and world.phase is not Phase.ARMED:
                context_error = error if error is not frame.error else None
                world.restore(frame.report, body_failed=error is not None, context_error=context_error)
            elif wanted == "released" and frame.acted and world.phase is Phase.ARMED:
                world.release(frame.options, frame.report, again=True)
                self._tell_the_scope_around(frame, done)

    def abandon(self, frame: Frame, interrupt: BaseException) -> None:
        """Close a scope whose body was interrupted: rebuild nothing, and tell the ranks that will wait."""
        with self._alone(frame):
            self._close(frame)
            world = frame.world
            if world is None or world.is_gone:
                return
            world.doubt_stand_in()
            outer, armed = self._innermost(world), world.phase is Phase.ARMED
            wanted = outer.wants if outer else "restored"
            somebody_waits = not armed if wanted == "restored" else armed and frame.acted
            if somebody_waits:
                world.leave(interrupt)

    def leave_split(self) -> Report:
        """Close the scope that ``release_world()`` opened, or restore again after a restore that failed.

        Raises:
            ScopeMisuse: The innermost open scope is a ``with`` block or a decorated function, or none is open.
            RestoreFailed: See :class:`gpurelease.world.World`.
        """
        with self._alone():
            top = self._frames[-1] if self._frames else None
            if top is None:
                return self._restore_again()
        if top.spelled != "release_world()":
            raise ScopeMisuse(
                f"restore_world() closes what release_world() opened, and the innermost open scope is {top}, which "
                "is restored when it is left. To use the groups inside it, write `with restored_world():`"
            )
        self.leave(top)
        return top.report

    def is_released(self) -> bool:
        """Return whether the groups of the current WORLD are released now."""
        state = self._known_world()
        return state is not None and state.phase is not Phase.ARMED

    def depth(self) -> int:
        """Return how many open scopes want the current WORLD released."""
        state = self._known_world()
        return sum(frame.wants == "released" for frame in self._frames if state is not None and frame.world is state)

    def current_report(self) -> Report | None:
        """Return the report of the innermost open scope that released the world, or None."""
        acted = (frame for frame in reversed(self._frames) if frame.acted and frame.wants == "released")
        return next((frame.report for frame in acted), None)

    @contextmanager
    def _alone(self, frame: Frame | None = None) -> Iterator[None]:
        """Keep other threads out, and refuse this one if it is in a transition, or in another scope's contexts."""
        outer = _contexts_of.get()  # a task that a context has started inherits it, and may outlive what it says
        if outer is not None and outer is not frame and outer.in_contexts:
            raise ScopeMisuse(
                f"a scope was entered or left from inside the also= of {outer}: its contexts are entered and left "
                "while the world is released, and cannot change that"
            )
        if self._owner == threading.get_ident():
            raise ScopeMisuse(
                "a scope was entered or left from inside a transition (a keep= predicate, a rebuilder, a signal "
                "handler): enter scopes before or after, not meanwhile"
            )
        with self._lock:
            self._owner = threading.get_ident()
            try:
                yield
            finally:
                self._owner = None

    def _enter_released(self, frame: Frame, world: World, outer: Frame | None) -> None:
        if outer is not None and outer.wants == "released":
            contradictions = frame.options.contradictions(world.options)
            if contradictions:
                raise ScopeMisuse(f"{frame} is nested in {outer} and contradicts it: {'; '.join(contradictions)}")
            frame.report.reason = f"nested in {outer}"
        elif world.phase is not Phase.ARMED:
            frame.report.reason = "the world is still released, since restoring it failed"
        else:
            world.release(frame.options, frame.report, contexts=frame.contexts)
            frame.acted = not frame.report.reason

    def _enter_restored(self, frame: Frame, world: World, outer: Frame | None) -> None:
        if world.phase is Phase.ARMED:
            frame.report.reason = "the world is not released"
        else:
            frame.options = world.options  # it is released with them again, whatever was released with others inside
            world.restore(frame.report)
            frame.acted = outer is not None
            self._tell_the_scope_around(frame, 0)

    def _tell_the_scope_around(self, inner: Frame, done: int) -> None:
        """Add an inner scope's new transitions to the report of the scope whose release they interrupt."""
        for frame in reversed(self._frames):
            if frame.acted and frame.world is inner.world:
                frame.report.transitions += inner.report.transitions[done:]
                return

    def _close(self, frame: Frame) -> Frame | None:
        """Take ``frame`` off the stack, and return the scope on top of it, if there is one."""
        if frame not in self._frames:
            raise ScopeMisuse(f"{frame} is not open")
        top = self._frames[-1]
        self._frames.remove(frame)
        return None if top is frame else top

    def _restore_again(self) -> Report:
        reason = self._why_no_effect()
        if reason:
            return Report(reason=reason)
        world = self._current_world()
        if world.phase is Phase.ARMED:
            raise ScopeMisuse("restore_world() was called, and the world is not released: call release_world() first")
        report = Report(strategy=world.options.strategy)
        world.restore(report)
        return report

    def _innermost(self, world: World) -> Frame | None:
        return next((frame for frame in reversed(self._frames) if frame.world is world), None)

    def _why_no_effect(self) -> str:
        if disabled():
            return "GPURELEASE_DISABLE is set"
        group = torch_internals.world()
        if group is None:
            return "there is no process group"
        if group in self._worlds:
            return ""
        backend = dist.get_backend(group)
        return f"WORLD's backend is {backend!r}, which has no store to agree over" if backend in ("fake", "mpi") else ""

    def _known_world(self) -> World | None:
        """Return the state of the current WORLD, if a scope was ever opened in it."""
        group = torch_internals.world()
        return None if group is None else self._worlds.get(group)

    def _current_world(self) -> World:
        group = torch_internals.world()
        assert group is not None
        if group not in self._worlds:
            self._worlds[group] = World(group)
        return self._worlds[group]


def _whoami() -> str:
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    return f"thread {threading.current_thread().name!r}" + (f", task {task.get_name()!r}" if task else "")


def shared() -> Scopes:
    """Return this process's scopes: one object, also when the package was imported from two places (miles 545)."""
    module = sys.modules.setdefault("_gpurelease_shared", types.ModuleType("_gpurelease_shared"))
    scopes: Scopes = vars(module).setdefault("scopes", _scopes)
    return scopes


_scopes = Scopes()
_contexts_of: ContextVar[Frame | None] = ContextVar("gpurelease_contexts_of", default=None)
