"""The open scopes of this process, and what state of the world they want.

What the scope that was opened last wants is what the world should be; with no open scope it is restored. Scopes that
only want the world released may be left in any order. ``restored_world()`` is for the thread or task that it is in:
where others want the world released, it is refused when it is entered.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace

import torch.distributed as dist
from torch.distributed import ProcessGroup

from gpurelease.errors import ScopeMisuse
from gpurelease.options import ScopeOptions, disabled
from gpurelease.report import Report
from gpurelease.scopes.frame import Frame, whoami
from gpurelease.torch_internals import books
from gpurelease.torch_internals.extension import extension
from gpurelease.transition.passage import Passage
from gpurelease.transition.world import Phase, World

logger = logging.getLogger(__name__)


class Book:
    """All open scopes of this process.

    Args:
        inherited: The WORLD that this process has from one that it was forked off, if there is one.
    """

    def __init__(self, inherited: ProcessGroup | None = None) -> None:
        self._lock = threading.Lock()
        self._frames: list[Frame] = []
        self._worlds: weakref.WeakKeyDictionary[ProcessGroup, World] = weakref.WeakKeyDictionary()
        self._inherited = inherited
        # Weakly: its thread holds it as long as it is on, and it would keep a destroyed WORLD's connections.
        self._passage: Callable[[], Passage | None] = lambda: None

    # ------------------------------------------------------------------------------------------------------ questions

    def is_released(self) -> bool:
        """Return whether the groups of the current WORLD are released now."""
        world = self._known_world()
        return world is not None and world.is_released

    def depth(self) -> int:
        """Return how many open scopes want the current WORLD released."""
        world = self._known_world()
        return sum(frame.wants is Phase.RELEASED for frame in self._frames if world and frame.world is world)

    def report(self) -> Report | None:
        """Return the report of the scope that has released the current WORLD, while scopes are open in it."""
        world = self._known_world()
        return world.report if world is not None and self.frames_of(world) else None

    def split_frames(self) -> list[Frame]:
        """Return the scopes that sleep_world() has opened, the last first."""
        return [frame for frame in reversed(self._frames) if frame.is_split and frame.is_inside]

    def asleep(self) -> Frame | None:
        """Return the scope by which sleep_world() has put the current WORLD to sleep, if it sleeps on.

        In a ``restored_world()`` inside it does not.
        """
        has_effect = not self.why_no_effect()
        world = self._known_world() if has_effect else None
        if has_effect and world is None:
            return None
        for frame in reversed(self._frames):
            if frame.world is world and frame.wants is Phase.ARMED:
                return None
            if frame.world is world and frame.is_split:
                return frame
        return None

    def innermost(self) -> Frame | None:
        """Return the scope that was opened last."""
        return self._frames[-1] if self._frames else None

    def why_no_effect(self) -> str:
        """Return why a scope can have no effect, or the empty string."""
        if disabled():
            return "GPURELEASE_DISABLE is set"
        group = books.world()
        if group is None:
            return "there is no process group"
        if group in self._worlds:
            return ""
        backend = dist.get_backend(group)
        return f"WORLD's backend is {backend!r}, which has no store to agree over" if backend in ("fake", "mpi") else ""

    def frames_of(self, world: World) -> list[Frame]:
        """Return the open scopes of a WORLD, in the order in which they were opened."""
        return [frame for frame in self._frames if frame.world is world]

    def wanted(self, world: World) -> Phase:
        """Return what state the world should be in."""
        frames = self.frames_of(world)
        return frames[-1].wants if frames else Phase.ARMED

    def options_in_force(self, world: World) -> ScopeOptions:
        """Return the options of the outermost of the scopes that want the world released now."""
        options = world.options
        for frame in reversed(self.frames_of(world)):
            if frame.wants is Phase.ARMED:
                break
            options = replace(frame.options, spelled=frame.spelled)
        return options

    def current_world(self) -> World:
        """Return where the current WORLD stands. There must be one.

        Raises:
            ScopeMisuse: This process was forked off a rank, and has no WORLD of its own.
            NotBuilt: Nothing can be done in it without the C++ extension.
        """
        extension()
        group = books.world()
        assert group is not None
        if group is self._inherited:
            raise ScopeMisuse(
                f"this process was forked off rank {group.rank()}, and has no communicators of its own to release: "
                "call gpurelease in the process that called init_process_group()"
            )
        if group not in self._worlds:
            self._worlds[group] = World(group)
        return self._worlds[group]

    def _known_world(self) -> World | None:
        """Return where the current WORLD stands, if a scope was ever opened in it."""
        group = books.world()
        return None if group is None else self._worlds.get(group)

    # -------------------------------------------------------------------------------------------------------- changes

    def open(self, frame: Frame, check: Callable[[list[Frame]], None]) -> Frame | None:
        """Open a scope, and return the one that was opened before it.

        Args:
            frame: The scope.
            check: Told which scopes of the same WORLD are open, to refuse this one.
        """
        self._forget_the_gone()
        if frame.world is not None:
            check(self.frames_of(frame.world))  # may ask a user's predicate, and so without the lock
        with self._lock:
            before = self.innermost()
            self._frames.append(frame)
            if not frame.is_split:
                _chain.set((*_chain.get(), frame))
            return before

    def close(self, frame: Frame) -> None:
        """Close a scope, if it is open."""
        with self._lock:
            if frame in self._frames:
                self._frames.remove(frame)
            _chain.set(tuple(other for other in _chain.get() if other is not frame))

    def claim(self, passage: Passage) -> Passage | None:
        """Have ``passage`` be the one that is on, or return the one that is."""
        with self._lock:
            current = self._passage()
            if current is None or current.is_over:
                self._passage = weakref.ref(passage)
                return None
            return current

    def refuse_inside(self, frame: Frame) -> None:
        """Refuse to open or close scopes from where a transition waits for it, which would never end."""
        inside = _in_contexts.get()  # a task that a context has started inherits it, and may outlive what it says
        if inside is not None and inside is not frame and inside.contexts.are_moving and not inside.is_over:
            raise ScopeMisuse(
                f"a scope was entered or left from inside the also= of {inside}: its contexts are entered and left "
                "while the world is released, and cannot change that"
            )
        passage = self._passage()
        waits_here = passage is not None and not passage.is_over and passage.waits_in == threading.get_ident()
        if waits_here or threading.current_thread().name.startswith("gpurelease"):
            raise ScopeMisuse(
                "a scope was entered or left from inside a transition (a keep= predicate, a rebuilder, a signal "
                "handler): enter scopes before or after, not meanwhile"
            )

    def _forget_the_gone(self) -> None:
        """Let go of scopes that were never closed in a WORLD that is gone, and of what that has left behind."""
        worlds = {*self._worlds.values(), *(frame.world for frame in self._frames)}
        gone = {world for world in worlds if world is not None and world.is_gone}
        for world in gone:
            world.forget()
        if gone:
            self._frames = [frame for frame in self._frames if frame.world not in gone]
        chain = _chain.get()
        still_open = tuple(frame for frame in chain if frame in self._frames)
        if len(still_open) < len(chain):
            _chain.set(still_open)


def others_than_around(frame: Frame, frames: list[Frame]) -> list[Frame]:
    """Return those of ``frames`` that are not around ``frame``: they are other tasks' or threads'."""
    around = _chain.get()
    return [other for other in frames if other is not frame and not other.is_split and other not in around]


def own_of(frames: list[Frame]) -> Frame | None:
    """Return the last of ``frames`` that this task or thread has opened, or else the last."""
    if len(frames) < 2:
        return frames[0] if frames else None
    me = whoami()
    own = [frame for frame in frames if frame.opener == me]
    return next(iter(reversed(own or frames)), None)


@contextmanager
def in_contexts_of(frame: Frame) -> Iterator[None]:
    """While a scope's contexts are entered or left, they cannot open or close other scopes."""
    token = _in_contexts.set(frame)
    frame.contexts.are_moving = True
    try:
        yield
    finally:
        frame.contexts.are_moving = False
        _in_contexts.reset(token)


_chain: ContextVar[tuple[Frame, ...]] = ContextVar("gpurelease_scopes_around", default=())
_in_contexts: ContextVar[Frame | None] = ContextVar("gpurelease_in_contexts", default=None)
_book = Book()
_inherited: list[Book] = []


def book() -> Book:
    """Return the open scopes of this process."""
    return _book


def _in_a_forked_child() -> None:
    """Begin afresh.

    Nothing that the parent has open, and no lock that one of its threads may hold, is this process's.
    """
    global _book
    # Never let go of: at their end clients of the store would speak to it, or wait for locks of the parent's threads.
    _inherited.append(_book)
    _book = Book(inherited=dist.group.WORLD if dist.is_available() and dist.is_initialized() else None)


os.register_at_fork(after_in_child=_in_a_forked_child)
