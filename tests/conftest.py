"""Fixtures of the unit tests: this process's scopes, over a WORLD that only writes down what is asked of it."""

from __future__ import annotations

import threading

import pytest
from torch.distributed import ProcessGroup

from gpurelease.errors import ReleaseFailed, RestoreFailed
from gpurelease.groups.plan import Plan
from gpurelease.options import ScopeOptions
from gpurelease.report import Report
from gpurelease.scopes import book as book_module
from gpurelease.transition.world import Phase


class FakeRollCall:
    """Stands for :class:`gpurelease.agreement.rollcall.RollCall`, which only votes here."""

    def __init__(self, events):
        self._events = events
        self.counts = self.is_left = False

    def leave(self, reason, timeout, cast=lambda: None):
        self._events.append(f"leave: {reason}")
        self.is_left = self.counts
        cast()
        return self.counts

    def successor(self):
        return self


class FakeWorld:
    """Stands for :class:`gpurelease.transition.world.World`; ``events`` is what it was asked, in order."""

    def __init__(self, group):
        self.group = group
        self.phase = Phase.ARMED
        self.settled = True
        self.options = ScopeOptions()
        self.report = Report()
        self.rank = 0
        self.released = []
        self.strategy = type("Strategy", (), {"name": "rebuild"})
        self.made_while_released = ()
        self.doubts = False
        self.is_gone = False
        self.nothing_to_release = False
        self.fail_next = None
        self.contexts_fail = {}
        self.events = []
        self.released_with = []
        self.before_it_acts = lambda: None
        self.roll_call = FakeRollCall(self.events)

    @property
    def is_released(self):
        return self.phase is Phase.RELEASED

    def timeout(self, options):
        return options.timeout or 30.0

    def failure(self, wanted, why="", **more):
        return (RestoreFailed if self.is_released else ReleaseFailed)(why or "no", more.get("failures"))

    def forget(self):
        self.events.append("forget")
        self.phase = Phase.ARMED


class FakeEngine:
    """Stands for :class:`gpurelease.transition.engine.Engine`: one rank on its own."""

    def __init__(self, world, aim, passage):
        self.world, self.aim, self.passage = world, aim, passage
        self.wants = aim.wants

    def go(self):
        world, aim = self.world, self.aim
        world.settled = False
        world.timeout_of_aim = aim.options.timeout
        world.before_it_acts()
        verb = "release" if aim.wants is Phase.RELEASED else "restore"
        if aim.context and world.is_released and aim.wants is Phase.RELEASED:
            raise world.failure(aim.wants, failures={0: aim.context})
        if world.roll_call.is_left:
            raise world.failure(aim.wants, "this rank left")
        if world.fail_next:
            world.fail_next = None
            world.events.append(f"{verb} fails")
            raise world.failure(aim.wants)
        world.settled = True
        if world.nothing_to_release:
            aim.report.reason = "no rank has a process group to release"
            return {"do": "rest", "nothing": True}
        if world.phase is aim.wants:
            return {"do": "rest", "contexts": aim.contexts}
        with self.passage.commit():
            self.passage.is_voting = False
            if verb == "release":
                world.options = aim.options
                world.released_with.append(aim.options)
                world.events.append("release")
            else:
                world.events.append("restore after an error" if world.doubts else "restore")
                world.doubts = False
            world.phase = aim.wants
        aim.report.transitions.append(aim.transition)
        return {"do": "rest" if verb == "release" else "put on", "contexts": aim.contexts, "contexts failed": {}}


@pytest.fixture(autouse=True)
def fresh_book(monkeypatch):
    """Scopes that an earlier test has left open are none of this one's."""
    monkeypatch.setattr(book_module, "_book", book_module.Book())


@pytest.fixture
def world(mocker):
    """A WORLD that exists, and whose state is a :class:`FakeWorld`."""
    group = ProcessGroup(0, 1)
    mocker.patch("gpurelease.scopes.book.books.world", return_value=group)
    mocker.patch("gpurelease.scopes.book.dist.get_backend", return_value="nccl")
    fake = FakeWorld(group)
    mocker.patch("gpurelease.scopes.book.World", return_value=fake)
    mocker.patch("gpurelease.scopes.reaching.Engine", FakeEngine)
    mocker.patch("gpurelease.scopes.reaching.plan", return_value=Plan())
    mocker.patch("gpurelease.scopes.reaching.why_not_now", return_value="")
    yield fake
    ours = [thread for thread in threading.enumerate() if thread.name.startswith("gpurelease")]
    for thread in ours:
        thread.join(5)


@pytest.fixture
def no_world(mocker):
    """A process without a process group."""
    mocker.patch("gpurelease.scopes.book.books.world", return_value=None)
