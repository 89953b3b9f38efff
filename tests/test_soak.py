"""A short soak, and what it stands on: the generator, its model, and the scopes against a model of nesting."""

from __future__ import annotations

from collections import Counter

import pytest
from gpurelease.settings import ScopeOptions
from gpurelease.state import Phase
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch.distributed import ProcessGroup

from gpurelease.errors import ReleaseFailed, RestoreFailed, ScopeMisuse
from gpurelease.scopes import Frame, Scopes
from tests.conftest import FakeWorld
from tests.soak.__main__ import Soak, kinds
from tests.soak.events import CYCLES, WORLD, Episode, Event, Restore, Scope, Trouble
from tests.soak.generator import MEETINGS, generate
from tests.soak.model import Model

SEED = 7


@pytest.mark.parametrize("first", [0])
def test_a_short_soak(first):
    soak = Soak(SEED, events_each=15)
    assert soak.run(15, first=first), soak.failure
    assert soak.episodes >= 1 and soak.events > 15, soak


# ------------------------------------------------------------------------------------------------------- the generator


def walk(model: Model, events: tuple[Event, ...]) -> None:
    """Do events on a model as a rank does them, and check that each can happen."""
    for event in events:
        assert model.dead is None, "nothing happens after a death"
        if not isinstance(event, Scope):
            if isinstance(event, Restore):
                assert not (model.innermost and model.innermost.split), "it would close a scope of another event"
                check_trouble(model, event.trouble, "restore", model.options)
            model.apply(event)
            continue
        transition = "" if event.contradicts else model.entry(event)
        check_trouble(model, event.on_entry, transition, event if transition == "release" else model.options)
        if not model.enter(event).opened:
            assert event.body == () and event.raises is None and event.on_exit is None
            continue
        walk(model, event.body)
        model.end_of_body(event)
        transition = model.exit()
        again = model.frames[-1].again
        check_trouble(model, event.on_exit, transition, again if transition == "release" else model.options)
        model.leave(event)


def check_trouble(model: Model, trouble: Trouble | None, transition: str, options: Scope | None) -> None:
    if trouble is None:
        return
    assert transition and options is not None, f"{trouble} without a transition"
    assert trouble.after < model.steps(transition, options, trouble.rank)[trouble.step], trouble
    waits_in_vain = trouble.what in ("late", "dies") or (trouble.step in MEETINGS and trouble.what != "slow")
    assert not waits_in_vain or options.timeout < 10, f"{trouble} in a patient scope"


def replayed(episode: Episode, backend: str) -> Model:
    model = Model(episode.size, episode.world_timeout, backend)
    walk(model, CYCLES + episode.events)
    return model


@given(seed=st.integers(0, 2**32), number=st.integers(0, 1000), size=st.integers(1, 8), nccl=st.booleans())
@settings(max_examples=100, deadline=None)
def test_what_is_generated_can_happen_and_leaves_nothing_behind(seed, number, size, nccl):
    backend = "nccl" if nccl else "gloo"
    model = replayed(generate(seed, number, size, backend), backend)
    assert model.frames == []
    if model.dead is None:
        assert not model.is_released
        assert list(model.groups) == [WORLD]


@given(seed=st.integers(0, 2**32), number=st.integers(0, 1000))
@settings(max_examples=20, deadline=None)
def test_a_seed_is_one_run(seed, number):
    assert generate(seed, number, 4, "gloo") == generate(seed, number, 4, "gloo")
    assert generate(seed, number, 4, "gloo") != generate(seed, number + 1, 4, "gloo")


def test_everything_is_generated():
    seen = Counter(
        kind for number in range(300) for event in generate(1, number, 4, "gloo").events for kind in kinds(event)
    )
    scopes = {"block", "decorator", "split", "async", "async decorator", "restored", "async restored"}
    others = {"NewGroup", "Use", "Destroy", "SetTimeout", "Restore"}
    bodies = {"body: error", "body: interrupt", "body: in the middle"}
    steps = ("plan", "stand-in", "drain", "take off", "shut down", "empty cache", "build", "connect")
    troubles = {f"{what} at {step}" for what in ("raises", "raises after", "slow", "dies") for step in steps}
    late = {f"late at {step}" for step in ("coming", "take off")} | {"dies at coming", "slow at coming"}
    interrupted = {f"interrupted at {step}" for step in ("plan", "stand-in")}
    assert seen.keys() == scopes | others | bodies | troubles | late | interrupted
    on_nccl = Counter(
        kind for number in range(100) for event in generate(1, number, 4, "nccl").events for kind in kinds(event)
    )
    assert {f"{what} at {step}" for what in ("raises", "slow") for step in ("suspend", "resume")} <= on_nccl.keys()


# --------------------------------------------------------------------------------------------------- scopes and nesting


class Nesting(RuleBasedStateMachine):
    """Any sequence of scopes, opened and closed in order, gives the state that the innermost open one wants.

    A transition that fails leaves the state as it was; then only what is said in the rules holds.
    """

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        group = ProcessGroup(0, 1)
        self.world = FakeWorld(group)
        self.patch.setattr("gpurelease.scopes.torch_internals.world", lambda: group)
        self.patch.setattr("gpurelease.scopes.dist.get_backend", lambda group: "nccl")
        self.patch.setattr("gpurelease.scopes.World", lambda group: self.world)
        self.scopes = Scopes()
        self.open: list[Frame] = []
        self.released_for: list[float] = []  # time-outs tell options apart
        self.made = 0

    def teardown(self) -> None:
        self.patch.undo()

    @property
    def wanted(self) -> str:
        return self.open[-1].wants if self.open else "restored"

    @property
    def state(self) -> str:
        return "restored" if self.world.phase is Phase.ARMED else "released"

    @property
    def in_force(self) -> float:
        """The time-out of the scope whose options count: the outermost since the last one that wants it restored."""
        first = len(self.open)
        while first and self.open[first - 1].wants == "released":
            first -= 1
        return self.open[first].options.timeout or 0.0

    @initialize()
    def start(self) -> None:
        self.world.events.clear()

    @rule(wants=st.sampled_from(["released", "restored"]), split=st.booleans())
    def enter(self, wants: str, split: bool) -> None:
        self.made += 1
        spelled = f"{wants}_world()" if wants == "restored" or not split else "release_world()"
        options = ScopeOptions(timeout=float(self.made)) if wants == "released" else ScopeOptions()
        frame = Frame(wants, spelled, options)  # type: ignore[arg-type]
        self.scopes.enter(frame)
        self.open.append(frame)

    @precondition(lambda self: self.open)
    @rule(body_failed=st.booleans())
    def leave(self, body_failed: bool) -> None:
        frame = self.open.pop()
        if frame.spelled == "release_world()":
            assert self.scopes.leave_split() is frame.report
        else:
            self.scopes.leave(frame, ValueError() if body_failed else None)

    @precondition(lambda self: not self.open or self.open[-1].spelled != "release_world()")
    @rule()
    def restore_out_of_turn(self) -> None:
        with pytest.raises(ScopeMisuse, match=r"restore_world\(\)"):
            self.scopes.leave_split()

    @rule(wants=st.sampled_from(["released", "restored"]))
    def fail_to_enter(self, wants: str) -> None:
        """A scope whose transition fails is not open, and nothing has changed."""
        if wants == self.state or (wants == "released" and self.wanted == "released"):
            return
        self.world.fail_next = True
        expected = ReleaseFailed if wants == "released" else RestoreFailed
        with pytest.raises(expected):
            self.scopes.enter(Frame(wants, f"{wants}_world()", ScopeOptions()))  # type: ignore[arg-type]

    @invariant()
    def the_state_is_what_the_innermost_scope_wants(self) -> None:
        assert self.state == self.wanted
        assert self.scopes.is_released() == (self.wanted == "released")
        assert self.scopes.depth() == sum(frame.wants == "released" for frame in self.open)

    @invariant()
    def the_options_are_those_of_the_scope_that_counts(self) -> None:
        if self.wanted == "released":
            assert self.world.options.timeout == self.in_force

    @invariant()
    def releases_and_restores_take_turns(self) -> None:
        done = [event.split()[0] for event in self.world.events if "fails" not in event]
        assert done == (["release", "restore"] * len(done))[: len(done)]


Nesting.TestCase.settings = settings(
    max_examples=200, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
test_nesting = Nesting.TestCase
