"""What should be so: a small model of the whole world, the same on every rank, written from the documentation.

It knows nothing of roll calls, tables or stores. :class:`Model` says what an event ends with on each rank (an
:class:`Outcome`), and what is so after it.
"""

from __future__ import annotations

from collections.abc import Iterable

from tests.soak.events import LATE_BY, WORLD, Destroy, Event, NewGroup, Restore, Scope, SetTimeout, Trouble, Use
from tests.soak.outcomes import SLACK, Expected, Frame, Group, Outcome

UNTOUCHED = ("coming", "plan", "stand-in")  # steps of a release before which no backend was taken


class Model:
    """The world as it should be.

    Attributes:
        groups: By name, in order of creation; WORLD is one of them.
        frames: The open scopes.
        released: Names of the groups that are released now.
        is_released: Whether the world is.
        options: The scope that released it the last time.
        has_standin: Whether there is a Gloo that stands in for WORLD, or waits to do so.
        standin_broken: Whether a collective was left in the middle on it.
        suspended: Whether the groups that are released now are suspended.
        gone: Groups that were destroyed while they were suspended, with the ranks that have done so.
        dead: The rank that was killed, or None.
        unknown: Whether the survivors may each be released or not.
    """

    def __init__(self, size: int, world_timeout: int, backend: str = "gloo") -> None:
        self.size = size
        self.backend = backend
        everyone = tuple(range(size))
        self.groups = {WORLD: Group(WORLD, everyone, world_timeout, holders=set(everyone))}
        self.frames: list[Frame] = []
        self.released: set[str] = set()
        self.is_released = False
        self.options = Scope("block")
        self.has_standin = False
        self.standin_broken = False
        self.suspended = False
        self.gone: list[tuple[Group, tuple[int, ...]]] = []
        self.dead: int | None = None
        self.unknown = False

    # ---------------------------------------------------------------------------------------------------- questions

    @property
    def innermost(self) -> Frame | None:
        return self.frames[-1] if self.frames else None

    @property
    def depth(self) -> int:
        return sum(frame.wants == "released" for frame in self.frames)

    def refuses(self, group: Group) -> bool:
        """Return whether the group refuses collectives."""
        return group.husk or (group.name in self.released and group.name != WORLD)

    def works(self, group: Group) -> bool:
        """Return whether the group's collectives work, on all its members."""
        if self.refuses(group) or self.dead in group.members or len(group.holders) < len(group.members):
            return False
        return not (group.name == WORLD and WORLD in self.released and self.standin_broken)

    def entry(self, scope: Scope) -> str:
        """Return the transition that entering the scope makes: "release", "restore" or none."""
        if scope.wants == "restored":
            return "restore" if self.is_released else ""
        nested = self.innermost is not None and self.innermost.wants == "released"
        return "" if nested or self.is_released else "release"

    def exit(self) -> str:
        """Return the transition that leaving the innermost scope makes."""
        frame, outer = self.frames[-1], self.frames[-2] if len(self.frames) > 1 else None
        if outer is None or outer.wants == "restored":
            return "restore" if self.is_released else ""
        return "release" if frame.acted and not self.is_released else ""

    def to_release(self, scope: Scope) -> list[str]:
        """Return the groups that a release with the scope's options takes."""
        kept = {
            name
            for name in scope.keep
            if name in self.groups and (scope.keep_on is None or scope.keep_on in self.groups[name].members)
        }
        groups = (group for group in self.groups.values() if group.backend in (self.backend, ""))
        return [group.name for group in groups if not (group.inside or group.husk or group.name in kept)]

    def suspends(self, scope: Scope) -> bool:
        """Return whether a release with the scope's options suspends: Gloo cannot."""
        return self.backend == "nccl" and scope.strategy in ("suspend", "auto")

    def steps(self, transition: str, scope: Scope, rank: int) -> dict[str, int]:
        """Return the steps that a rank goes through in a transition, and how many calls each has at least."""
        if transition == "release":
            names = self.to_release(scope)
            mine = sum(rank in self.groups[name].members for name in names)
            steps = {"coming": 1, "plan": 1}
            if names:
                steps |= {"drain": 1, "empty cache": 1, "take off": mine}
                # WORLD is always connected; whether the others are is not known here.
                steps |= {"suspend": int(WORLD in names)} if self.suspends(scope) else {"shut down": mine}
            if WORLD in names and not self.has_standin:
                steps["stand-in"] = 1
        else:
            mine = sum(rank in self.groups[name].members for name in self._to_restore())
            steps = {"coming": 1, "empty cache": 1}
            steps |= {"resume": int(WORLD in self.released)} if self.suspended else {"build": mine, "connect": mine}
        return {step: calls for step, calls in steps.items() if calls}

    # ------------------------------------------------------------------------------------------------------- scopes

    def enter(self, scope: Scope) -> Outcome:
        """Open a scope, unless that fails."""
        if scope.contradicts:
            return self._all(Expected("ScopeMisuse", text="contradicts"), opened=False)
        transition = self.entry(scope)
        frame = Frame(scope.wants, scope.how == "split", acted=False, again=self.options)
        if transition:
            outcome = self._go(transition, scope, scope.on_entry)
            if not outcome.opened:
                return outcome
            frame.acted = self.is_released if transition == "release" else self.innermost is not None
            if frame.acted and scope.also == "raises on entry":
                # All ranks hear of it, and go back.
                self._restore(body_failed=True)
                failed = Expected("ReleaseFailed", failed=min(scope.also_on), text="AlsoFailed")
                return self._all(failed, outcome.seconds, opened=False)
        else:
            outcome = self._all(Expected())
        self.frames.append(frame)
        return outcome

    def leave(self, scope: Scope) -> Outcome:
        """Close the innermost scope, which is ``scope``: also if that fails."""
        transition, frame = self.exit(), self.frames.pop()
        raised = self._raised(scope)
        interrupted = tuple(rank for rank, error in raised.items() if error.kind == "KeyboardInterrupt")
        if transition and interrupted:
            outcome = self._missed(transition, interrupted, 0.0)
        elif transition:
            body_failed = bool(raised) and scope.how != "split"
            outcome = self._go(transition, frame.again or scope, scope.on_exit, body_failed)
            if transition == "restore" and scope.also == "raises on exit":
                outcome = self._all(Expected("ContextFailed", failed=min(scope.also_on), text="AlsoFailed"))
        else:
            outcome = self._all(Expected())
        by_rank = tuple(
            expected if expected.kind == "KeyboardInterrupt" else raised.get(rank, expected)
            for rank, expected in enumerate(outcome.by_rank)
        )
        return Outcome(by_rank, outcome.seconds)

    def apply(self, event: Event) -> Outcome:
        """Do any other event than a scope."""
        everyone = self._all(Expected())
        if isinstance(event, NewGroup):
            backend = event.backend or ("gloo" if WORLD in self.released else self.backend)
            group = Group(event.name, event.members, event.timeout, backend, event.quiet, self.is_released)
            group.holders = set(event.members)
            self.groups[event.name] = group
        elif isinstance(event, Use):
            self.groups[event.name].quiet = False
        elif isinstance(event, SetTimeout):
            self.groups[event.name].timeout = event.seconds
        elif isinstance(event, Destroy):
            holders = self.groups[event.name].holders
            assert holders.issuperset(event.on) and event.on, event
            holders.difference_update(event.on)
            if self.suspended and event.name in self.released:
                self.gone.append((self.groups[event.name], event.on))
            if not holders:
                self.released.discard(event.name)
                del self.groups[event.name]
        elif isinstance(event, Restore):
            if self.frames or not self.is_released:
                return self._all(Expected("ScopeMisuse", text="restore_world()"))
            return self._go("restore", self.options, event.trouble)
        return everyone

    def end_of_body(self, scope: Scope) -> None:
        """A collective is left in the middle, if the scope's body does so."""
        if scope.raises and scope.raises.what == "in the middle" and WORLD in self.released:
            self.standin_broken = True

    # -------------------------------------------------------------------------------------------------- transitions

    def _go(self, transition: str, scope: Scope, trouble: Trouble | None, body_failed: bool = False) -> Outcome:
        """Make a transition, in which something may go wrong."""
        options = scope if transition == "release" else self.options
        failure = "ReleaseFailed" if transition == "release" else "RestoreFailed"
        names = self.to_release(options) if transition == "release" else []
        if transition == "release":
            self.options = options
        if trouble is None or trouble.what == "slow":
            if transition == "release":
                self._release(names)
                self.suspended = self.is_released and self.suspends(options)
            else:
                self._restore(body_failed)
            return self._all(Expected())
        waits = options.timeout * 1.5 + LATE_BY + SLACK
        gone = (trouble.rank,)
        if trouble.what == "dies":
            self.dead = trouble.rank
        if trouble.what in ("late", "dies", "interrupted"):
            if transition == "release" and trouble.step not in UNTOUCHED:
                # What was taken cannot be had back without the one who is missing.
                self._release(names)
                self.unknown = trouble.what == "dies" and trouble.rank == 0
                return self._missed("restore", gone, waits, trouble)
            return self._missed(transition, gone, waits, trouble)
        if transition == "release" and trouble.step not in UNTOUCHED:
            self._release(names)
            if options.strategy == "auto" and self.suspends(options) and trouble.step in ("suspend", "empty cache"):
                return self._all(Expected(), waits)  # it goes on with rebuilding
            self._restore(body_failed=True)
        self.suspended, self.gone = False, []  # they are given up
        return self._all(Expected(failure, failed=trouble.rank, text="injected"), waits, opened=False)

    def _release(self, names: Iterable[str]) -> None:
        self.released = set(names)
        self.is_released = bool(self.released)
        if WORLD in self.released and not self.has_standin:
            self.has_standin, self.standin_broken = True, False

    def _restore(self, body_failed: bool) -> None:
        for name in self._to_restore():
            self.groups[name].generation += not self.suspended
        for name in self.released.difference(self._to_restore()):
            self.groups[name].husk = True
        self.released = set()
        self.is_released = self.suspended = False
        self.gone = []
        if body_failed or self.standin_broken:
            self.has_standin = self.standin_broken = False

    def _to_restore(self) -> list[str]:
        return [name for name in self.released if len(self.groups[name].holders) == len(self.groups[name].members)]

    def _missed(self, transition: str, gone: tuple[int, ...], waits: float, trouble: Trouble | None = None) -> Outcome:
        """Nobody makes the transition, for want of those who are gone."""
        failure = "ReleaseFailed" if transition == "release" else "RestoreFailed"
        told = trouble is None or trouble.what == "interrupted"
        expected = Expected(failure, missing=gone, text="left with KeyboardInterrupt" if told else "")
        if trouble is not None and trouble.what == "dies" and trouble.rank == 0:
            # Who hosts the store may take it away before the others have read that all came.
            failure = "ReleaseFailed|RestoreFailed" if self.unknown else failure
            expected = Expected(failure, missing=(), text="store does not answer")
        outcome = [expected] * self.size
        if trouble is not None and trouble.what == "interrupted":
            outcome[trouble.rank] = Expected("KeyboardInterrupt")
        return Outcome(tuple(outcome), waits or SLACK, opened=False)

    def _raised(self, scope: Scope) -> dict[int, Expected]:
        """Return what the ranks raise that do not come to the exit with empty hands."""
        raised: dict[int, Expected] = {}
        if scope.also in ("raises on entry", "raises on exit"):
            raised |= {rank: Expected("AlsoFailed") for rank in scope.also_on}
        if scope.raises:
            if scope.raises.what == "in the middle":
                raised |= {rank: Expected("RuntimeError") for rank in range(self.size)}
            kind = "KeyboardInterrupt" if scope.raises.what == "interrupt" else "BodyFailed"
            raised |= {rank: Expected(kind) for rank in scope.raises.on}
        return raised

    def _all(self, expected: Expected, seconds: float = SLACK, opened: bool = True) -> Outcome:
        return Outcome((expected,) * self.size, seconds, opened)
