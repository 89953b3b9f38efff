"""Scopes that are opened and closed in any order, by several threads, against a model of a few lines."""

from __future__ import annotations

import contextvars
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch.distributed import ProcessGroup

from gpurelease import (
    ReleaseFailed,
    RestoreFailed,
    ScopeMisuse,
    is_released,
    release_depth,
    released_world,
    restored_world,
    sleep_world,
    wake_world,
)
from gpurelease.groups.plan import Plan
from gpurelease.scopes import book
from tests.conftest import FakeEngine, FakeWorld

THREADS = 2
STATES = st.sampled_from(["released", "restored"])


@dataclass
class Open:
    """An open scope: what it wants, the thread that it is in, and what it keeps, which tells its options apart."""

    wants: str
    thread: int
    keep: str
    scope: Any  # None: opened by sleep_world(), and no thread's


class AnyOrder(RuleBasedStateMachine):
    """After each entry and exit the world is as the scope wants that was opened last; one that fails leaves it."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = ExitStack()
        patch = self.patches.enter_context(pytest.MonkeyPatch.context())
        group = ProcessGroup(0, 1)
        self.world = FakeWorld(group)
        patch.setattr(book, "_book", book.Book())
        patch.setattr("gpurelease.scopes.book.books.world", lambda: group)
        patch.setattr("gpurelease.scopes.book.dist.get_backend", lambda group: "nccl")
        patch.setattr("gpurelease.scopes.book.World", lambda group: self.world)
        patch.setattr("gpurelease.scopes.reaching.Engine", FakeEngine)
        patch.setattr("gpurelease.scopes.reaching.plan", lambda *args: Plan())
        patch.setattr("gpurelease.scopes.reaching.why_not_now", lambda plan: "")
        # What makes a scope one thread's is the context that the thread runs in.
        self.threads = [contextvars.Context() for _ in range(THREADS)]
        self.open: list[Open] = []
        self.state = "restored"
        self.settled = True
        self.released_for = ""
        self.transitions: list[str] = []
        self.made = 0

    @initialize()
    def begin(self) -> None:
        self.world.events.clear()

    def teardown(self) -> None:
        self.patches.close()

    # ------------------------------------------------------------------------------------------------------ the model

    @property
    def wanted(self) -> str:
        return self.open[-1].wants if self.open else "restored"

    @property
    def in_force(self) -> str:
        """What is kept: by the outermost of the scopes that want the world released now."""
        keep = ""
        for each in reversed(self.open):
            if each.wants == "restored":
                break
            keep = each.keep
        return keep

    def has_reached(self, *, entering: bool) -> None:
        """A scope was entered or left, and that went well."""
        if self.state != self.wanted:
            self.state = self.wanted
            self.transitions.append(self.state)
            self.settled = True
            if self.state == "released":
                self.released_for = self.in_force
        self.settled |= entering

    def is_refused(self, wants: str, thread: int) -> bool:
        """Whether another thread's scope wants the opposite."""
        return any(each.wants != wants for each in self.open if each.scope is not None and each.thread != thread)

    # ------------------------------------------------------------------------------------------------------ the rules

    def opened(self, wants: str, thread: int, *, split: bool) -> Open:
        self.made += 1
        keep = f"group {self.made}" if wants == "released" else ""
        if split:
            return Open(wants, thread, keep, None)
        return Open(wants, thread, keep, released_world(keep=keep) if keep else restored_world())

    def do_enter(self, new: Open) -> None:
        run = self.threads[new.thread].run
        if new.scope is None:
            run(sleep_world, keep=new.keep)
        else:
            run(new.scope.__enter__)

    def do_leave(self, old: Open, error: Exception | None) -> None:
        run = self.threads[old.thread].run
        if old.scope is None:
            run(wake_world)
        else:
            run(old.scope.__exit__, type(error) if error else None, error, None)

    @rule(wants=STATES, thread=st.integers(0, THREADS - 1), split=st.booleans())
    def enter(self, wants: str, thread: int, split: bool) -> None:
        split &= wants == "released"
        new = self.opened(wants, thread, split=split)
        # What sleep_world() opens is around everybody, and so is refused by what is around nobody else.
        if self.is_refused(wants, thread):
            with pytest.raises(ScopeMisuse, match="which is not around it"):
                self.do_enter(new)
            return
        self.do_enter(new)
        if not (split and self.is_asleep):
            self.open.append(new)
        self.has_reached(entering=True)

    @property
    def is_asleep(self) -> bool:
        """Whether sleep_world() has nothing to do: not inside a restored world that was entered since."""
        since = [number for number, each in enumerate(self.open) if each.scope is None]
        return bool(since) and all(each.wants == "released" for each in self.open[since[-1] :])

    def closed_with(self, which: int) -> list[Open]:
        """The open scopes that go with one of them, in order: wake_world() closes all that sleep_world() has opened."""
        old = self.open[which % len(self.open)]
        return [old] if old.scope is not None else [each for each in reversed(self.open) if each.scope is None]

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 99), body_failed=st.booleans())
    def leave(self, which: int, body_failed: bool) -> None:
        closed = self.closed_with(which)
        self.do_leave(closed[0], ValueError() if body_failed else None)
        for old in closed:
            self.open.remove(old)
            self.has_reached(entering=False)

    @rule(wants=STATES, thread=st.integers(0, THREADS - 1))
    def fail_to_enter(self, wants: str, thread: int) -> None:
        """A scope whose transition fails is not open, and the world is as it was."""
        if self.is_refused(wants, thread) or (self.settled and wants == self.state):
            return
        self.world.fail_next = True
        with pytest.raises(RestoreFailed if self.state == "released" else ReleaseFailed):
            self.do_enter(self.opened(wants, thread, split=False))
        self.settled = False

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 99))
    def fail_to_leave(self, which: int) -> None:
        """A scope whose last transition fails is closed all the same, and who comes next makes up for it."""
        before, closed = list(self.open), self.closed_with(which)
        for old in closed:
            self.open.remove(old)
            if self.wanted != self.state:
                break
        else:
            self.open = before
            return
        self.world.fail_next = True
        with pytest.raises(RestoreFailed if self.state == "released" else ReleaseFailed):
            self.do_leave(closed[0], None)
        self.settled = False

    @precondition(lambda self: all(each.scope is not None for each in self.open))
    @rule()
    def wake_out_of_turn(self) -> None:
        """It makes up for a failure if no scope is open, does nothing if the world is awake, and is a mistake else."""
        is_awake = self.settled and self.state == "restored"
        if self.open and (self.open[-1].wants == "released" or not is_awake):
            with pytest.raises(ScopeMisuse, match=r"wake_world\(\)"):
                wake_world()
            return
        assert (wake_world().reason == "the world is awake") == is_awake
        self.has_reached(entering=True)

    # -------------------------------------------------------------------------------------------------- what always is

    @invariant()
    def the_world_is_as_the_model_says(self) -> None:
        assert is_released() == (self.state == "released")
        assert release_depth() == sum(each.wants == "released" for each in self.open)
        assert self.world.settled == self.settled
        if self.state == "released":
            assert self.world.options.keep == (self.released_for,)

    @invariant()
    def nothing_is_done_twice(self) -> None:
        verbs = {"release": "released", "restore": "restored"}
        done = [event.split()[0] for event in self.world.events if "fails" not in event]
        assert [verbs[verb] for verb in done] == self.transitions


AnyOrder.TestCase.settings = settings(
    max_examples=100, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
test_scopes_in_any_order = AnyOrder.TestCase
