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
    release_world,
    released_world,
    restore_world,
    restored_world,
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
    scope: Any  # None: opened by release_world(), and no thread's


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
            run(release_world, keep=new.keep)
        else:
            run(new.scope.__enter__)

    def do_leave(self, old: Open, error: Exception | None) -> None:
        run = self.threads[old.thread].run
        if old.scope is None:
            run(restore_world)
        else:
            run(old.scope.__exit__, type(error) if error else None, error, None)

    @rule(wants=STATES, thread=st.integers(0, THREADS - 1), split=st.booleans())
    def enter(self, wants: str, thread: int, split: bool) -> None:
        split &= wants == "released"
        new = self.opened(wants, thread, split=split)
        # What release_world() opens is around everybody, and so is refused by what is around nobody else.
        if self.is_refused(wants, thread):
            with pytest.raises(ScopeMisuse, match="which is not around it"):
                self.do_enter(new)
            return
        self.do_enter(new)
        self.open.append(new)
        self.has_reached(entering=True)

    def take(self, which: int) -> Open:
        """Take an open scope from the list: restore_world() closes what release_world() has opened last."""
        old = self.open[which % len(self.open)]
        if old.scope is None:
            old = [each for each in self.open if each.scope is None][-1]
        self.open.remove(old)
        return old

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 99), body_failed=st.booleans())
    def leave(self, which: int, body_failed: bool) -> None:
        self.do_leave(self.take(which), ValueError() if body_failed else None)
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
        before, old = list(self.open), self.take(which)
        if self.wanted == self.state:
            self.open = before
            return
        self.world.fail_next = True
        with pytest.raises(RestoreFailed if self.state == "released" else ReleaseFailed):
            self.do_leave(old, None)
        self.settled = False

    @precondition(lambda self: all(each.scope is not None for each in self.open))
    @rule()
    def restore_out_of_turn(self) -> None:
        """It makes up for a failure if no scope is open, and is a mistake else."""
        if self.open or (self.settled and self.state == "restored"):
            with pytest.raises(ScopeMisuse, match=r"restore_world\(\)"):
                restore_world()
            return
        restore_world()
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
