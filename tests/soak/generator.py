"""From a seed to an episode. The model goes along, so that only that is drawn which can happen.

What it must not draw, and why:

* somebody late, dead, or not building while others wait for it, in a scope with the long time-out: it takes too long;
* Ctrl-C while backends go off the tables: afterwards a world cannot be used, and says so;
* after a late rank that no collective brings in step, anything else but a plain cycle: who is late then is a race.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from tests.soak.events import (
    CYCLES,
    PATIENT,
    SHORT,
    SHORT_WORLD,
    STRATEGIES,
    WORLD,
    Destroy,
    Episode,
    Event,
    NewGroup,
    Raises,
    Restore,
    Scope,
    SetTimeout,
    Trouble,
    Use,
)
from tests.soak.model import Model

DEEPEST = 3
MOST_GROUPS = 7
RELEASING = ("block", "block", "decorator", "async", "async decorator", "split")
RESTORING = ("restored", "async restored")
# Steps in which the other ranks wait for one that does not do its part, for half the time-out.
MEETINGS = ("stand-in", "build", "connect", "suspend", "resume")
# ProcessGroupNCCL lets its communicator go in no other way than by a shutdown that goes well.
LEAKS = (("shut down", "raises"), ("take off", "raises"), ("take off", "raises after"))


def generate(seed: int, number: int, size: int, backend: str, events: int = 30) -> Episode:
    """Return an episode.

    Args:
        seed: The seed of the run.
        number: Which episode of the run.
        size: Number of ranks.
        backend: "gloo" or "nccl".
        events: How many events it has at the outermost level, about.
    """
    return _Generator(Random(f"{seed}/{number}/{size}/{backend}"), size, backend).episode(events)


class _Generator:
    def __init__(self, random: Random, size: int, backend: str) -> None:
        self.random = random
        self.size = size
        self.backend = backend
        self.leaves_collectives = self.chance(0.15)
        self.model = Model(size, SHORT_WORLD if self.leaves_collectives else 60, backend)
        self.made = 0

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def episode(self, count: int) -> Episode:
        world_timeout = self.model.groups[WORLD].timeout
        for cycle in CYCLES:
            self.done(cycle)
        events: list[Event] = []
        while len(events) < count:
            event = self.event(0)
            events.append(event)
            if getattr(event, "hush", False) and self.model.frames == []:
                events += self.in_step()
        if self.model.is_released:
            events.append(self.done(Restore()))
        if self.chance(0.3):
            events.append(self.death())
        else:
            for name in [name for name in self.model.groups if name != WORLD]:
                events.append(self.done(Destroy(name, tuple(sorted(self.model.groups[name].holders)))))
        return Episode(self.size, world_timeout, self.chance(0.5), tuple(events))

    def done(self, event: Event) -> Event:
        if isinstance(event, Scope):
            if self.model.enter(event).opened:
                self.model.leave(event)
        else:
            self.model.apply(event)
        return event

    def event(self, depth: int) -> Event:
        """Draw an event and do it on the model."""
        if self.chance(0.5) and depth < DEEPEST:
            return self.scope(depth)
        groups = [group for name, group in self.model.groups.items() if name != WORLD]
        group = self.random.choice(groups) if groups else None
        kind = self.random.choice(("new", "new", "use", "destroy", "destroy some", "set time-out", "restore"))
        if kind == "new" or group is None:
            if len(groups) >= MOST_GROUPS and group is not None:
                return self.done(Destroy(group.name, tuple(sorted(group.holders))))
            return self.done(self.new_group())
        if kind == "use":
            return self.done(Use(group.name))
        if kind == "destroy some" and group.name in self.model.released and len(group.holders) > 1:
            some = self.random.sample(sorted(group.holders), self.random.randrange(1, len(group.holders)))
            return self.done(Destroy(group.name, tuple(sorted(some))))
        if kind == "set time-out" and not group.husk:
            if not self.leaves_collectives and self.chance(0.2):
                group = self.model.groups[WORLD]
            return self.done(SetTimeout(group.name, self.random.randrange(100, 200)))
        if kind == "restore" and not (self.model.innermost and self.model.innermost.split):
            return self.restore_again()
        return self.done(Destroy(group.name, tuple(sorted(group.holders))))

    def new_group(self) -> NewGroup:
        self.made += 1
        members = sorted(self.random.sample(range(self.size), self.random.randrange(1, self.size + 1)))
        backend = "nccl" if self.backend == "nccl" and self.model.is_released and self.chance(0.5) else ""
        return NewGroup(
            f"group {self.made}", tuple(members), self.random.randrange(50, 100), backend, quiet=self.chance(0.2)
        )

    def restore_again(self) -> Event:
        """Call restore_world(), or try again in another way, or make a mistake of it."""
        if not self.model.frames and self.model.is_released:
            how = self.random.choice(("restore_world", "block", "restored"))
            if how != "restore_world":
                return self.done(Scope(how))
            short = self.model.options.timeout == SHORT
            return self.done(Restore(self.trouble("restore", self.model.options, short) if self.chance(0.3) else None))
        return self.done(Restore())

    def in_step(self) -> list[Event]:
        """Return plain events that bring the ranks in step."""
        return [self.done(Restore() if self.model.is_released else Scope("block"))]

    # ------------------------------------------------------------------------------------------------------- scopes

    def scope(self, depth: int) -> Scope:
        """Draw a scope with all that is in it, and do it on the model."""
        scope = self.closed_scope()
        transition = self.model.entry(scope)
        if transition and not scope.contradicts and self.chance(0.25):
            options = scope if transition == "release" else self.model.options
            trouble = self.trouble(transition, options, options.timeout == SHORT)
            scope = replace(scope, on_entry=trouble, hush=self.may_hush(depth, trouble))
        outcome = self.model.enter(scope)
        if not outcome.opened:
            return scope
        if scope.also != "raises on entry":
            for _ in range(self.random.choice((0, 0, 1, 2, 3))):
                scope = replace(scope, body=(*scope.body, self.event(depth + 1)))
            scope = self.end(scope, depth)
        self.model.leave(scope)
        return scope

    def closed_scope(self) -> Scope:
        """Draw how a scope is written."""
        how = self.random.choice(RELEASING + RESTORING if self.chance(0.3) or self.model.is_released else RELEASING)
        scope = Scope(how, timeout=SHORT if self.chance(0.3) else PATIENT)
        if scope.wants == "restored":
            return scope
        nested = self.model.innermost is not None and self.model.innermost.wants == "released"
        if nested and self.chance(0.15):
            return replace(scope, contradicts=True)
        if not nested:
            names = STRATEGIES if self.backend == "nccl" else ("rebuild", "auto")
            scope = replace(scope, strategy=self.random.choice(names))
        if not nested and self.chance(0.3):
            names = list(self.model.groups)
            keep = tuple(name for name in names if self.chance(0.4)) if self.chance(0.9) else tuple(names)
            by = self.random.choice(("handle", "name", "predicate"))
            keep_on = self.random.randrange(self.size) if self.chance(0.2) else None
            scope = replace(scope, keep=keep, keep_by=by, keep_on=keep_on)
        if self.chance(0.3) and how != "split":
            what = self.random.choice(("works", "works", "raises on entry", "raises on exit"))
            scope = replace(scope, also=what, also_on=self.some_ranks())
        return scope

    def end(self, scope: Scope, depth: int) -> Scope:
        """Draw how a scope ends."""
        transition = self.model.exit()
        options = self.model.frames[-1].again if transition == "release" else self.model.options
        assert options is not None
        if self.chance(0.25) and scope.also in ("", "works") and scope.how != "split":
            raises = Raises(self.random.choice(("error", "error", "interrupt")), self.some_ranks())
            if self.leaves_collectives and self.may_leave_a_collective(options.timeout):
                raises = Raises("in the middle", (self.random.randrange(self.size),))
            scope = replace(scope, raises=raises)
            self.model.end_of_body(scope)
        interrupted = scope.raises is not None and scope.raises.what == "interrupt"
        if transition and not interrupted and scope.also != "raises on exit" and self.chance(0.25):
            trouble = self.trouble(transition, options, options.timeout == SHORT)
            scope = replace(scope, on_exit=trouble, hush=self.may_hush(depth, trouble))
        return scope

    def may_leave_a_collective(self, timeout: float) -> bool:
        return timeout == PATIENT and WORLD in self.model.released and not self.model.standin_broken

    def may_hush(self, depth: int, trouble: Trouble | None) -> bool:
        return depth == 0 and trouble is not None and trouble.what != "interrupted" and self.chance(0.5)

    def some_ranks(self) -> tuple[int, ...]:
        """Return one rank or, less often, all."""
        return tuple(range(self.size)) if self.chance(0.3) else (self.random.randrange(self.size),)

    def trouble(self, transition: str, options: Scope, short: bool) -> Trouble:
        """Draw what goes wrong in a transition."""
        rank = self.random.randrange(self.size)
        step, after = self.step(self.model.steps(transition, options, rank))
        if step == "coming":
            late = short and not self.leaves_collectives and self.chance(0.7)
            return Trouble(rank, "late" if late else "slow", step)
        whats = ["slow"]
        if short or step not in MEETINGS:
            whats += ["raises after", "raises"]
        if self.backend == "nccl":
            whats = [what for what in whats if (step, what) not in LEAKS]
        if step == "take off" and short and not self.leaves_collectives:
            whats.append("late")
        if step == "plan" or (
            step == "stand-in" and short
        ):  # the others are another thread's, which Ctrl-C never reaches
            whats.append("interrupted")
        return Trouble(rank, self.random.choice(whats), step, after)

    def step(self, steps: dict[str, int]) -> tuple[str, int]:
        """Draw a step and a call of it; often the stand-in's, which is seldom built."""
        step = "stand-in" if "stand-in" in steps and self.chance(0.4) else self.random.choice(list(steps))
        return step, self.random.randrange(steps[step])

    def death(self) -> Scope:
        """Draw a scope in which a rank is killed. The survivors hold no others open, as each would wait for it."""
        scope = Scope(self.random.choice(RELEASING[:-1]), timeout=SHORT)
        rank = self.random.randrange(self.size)
        at_entry = self.chance(0.5)
        steps = self.model.steps("release", scope, rank)
        if not at_entry:
            inside = Model(self.size, 60, self.backend)
            inside.groups, inside.has_standin = self.model.groups, True
            inside._release(inside.to_release(scope))
            steps = inside.steps("restore", scope, rank)
        trouble = Trouble(rank, "dies", *self.step(steps))
        return self.done(replace(scope, on_entry=trouble) if at_entry else replace(scope, on_exit=trouble))  # type: ignore[return-value]
