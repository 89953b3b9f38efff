"""One rank's way through an episode."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import torch.distributed as dist

from gpurelease import is_released, restore_world
from tests.soak import checks
from tests.soak.events import CYCLES, WORLD, Destroy, Episode, Event, NewGroup, Restore, Scope, SetTimeout, Trouble
from tests.soak.machines import Posing, forget_world, machine
from tests.soak.model import Model
from tests.soak.openers import open_scope
from tests.soak.outcomes import Outcome
from tests.soak.troubles import Troubled

BEGIN, END = "==== soak failure ====", "==== end of soak failure ===="


class BodyFailed(Exception):
    """What bodies of scopes raise."""


class AlsoFailed(Exception):
    """What context managers in ``also=`` raise."""


def run_episode(rank: int, size: int, episode: Episode, backend: str) -> int:
    """Go through an episode; return how many events it had on this rank."""
    soak = _Rank(rank, episode, machine(backend))
    soak.go()
    return soak.number


class _Passage:
    """One way into or out of a scope: what goes wrong there is arranged, and how it ended is compared.

    Args:
        soak: The rank.
        here: What it is, in words.
        outcome: How it should end.
        trouble: What goes wrong.
    """

    def __init__(self, soak: _Rank, here: str, outcome: Outcome, trouble: Trouble | None) -> None:
        self.soak, self.here, self.outcome = soak, here, outcome
        self.started = time.monotonic()
        soak.machine.hurry(trouble)
        self.trouble = Troubled(trouble, soak.rank, soak.model.options.timeout)

    def over(self, error: BaseException | None) -> None:
        """Compare: it ended with this error, or none."""
        self.soak.machine.hurry(None)
        wrong = self.trouble.stop() + checks.of_error(self.outcome.by_rank[self.soak.rank], error)
        took = time.monotonic() - self.started
        if took > self.outcome.seconds:
            wrong.append(f"seconds: expected at most {self.outcome.seconds:.1f}, found {took:.1f}")
        if wrong:
            trace = [] if error is None else traceback.format_exception(error, chain=False)
            self.soak.fail(self.here, [*wrong, *"".join(trace).splitlines()])


class _Rank:
    def __init__(self, rank: int, episode: Episode, machine: Posing) -> None:
        self.rank = rank
        self.episode = episode
        self.machine = machine
        self.model = Model(episode.size, episode.world_timeout, machine.backend)
        self.handles: dict[str, Any] = {}
        self.state = checks.State(self.model, machine, rank, self.handles, episode.watches)
        self.number = 0

    def go(self) -> None:
        store = self.machine.start(self.rank, self.episode.size, timedelta(seconds=self.episode.world_timeout))
        self.handles[WORLD] = dist.group.WORLD

        def measure() -> dict[str, Any]:
            return checks.footprint(store, self.machine, self.rank)

        self.run(CYCLES)
        self.state.forget()
        self.in_step()
        before = measure()
        self.in_step()
        self.run(self.episode.events)
        if self.model.dead is not None:
            forget_world()
            return
        self.run(CYCLES)
        self.state.forget()
        self.in_step()
        wrong = checks.grown(before, measure)
        self.in_step()
        if wrong:
            self.fail("the episode's end", wrong)

    def in_step(self) -> None:
        """Wait for all ranks, before and after what is measured."""
        self.machine.total(self.handles[WORLD], 1.0)

    def run(self, events: tuple[Event, ...]) -> None:
        for event in events:
            self.number += 1
            here = f"event {self.number}: {event}"
            if isinstance(event, Scope):
                self.scope(event, here)
            else:
                self.other(event, here)
            self.check(here, sums=not event.hush)

    def check(self, here: str, *, sums: bool) -> None:
        try:
            wrong = self.state.differences(sums=sums)
        except Exception as error:
            wrong = [f"checking: expected no error, found {error!r}"]
        if wrong:
            self.fail(here, wrong)

    def fail(self, here: str, wrong: list[str]) -> NoReturn:
        """Say what is wrong and end this process: through open scopes it would not get out alone."""
        lines = [f"{BEGIN} {time.time():.3f}", f"rank {self.rank}, {here}", *(f"  {line}" for line in wrong), END]
        print("\n".join(lines), flush=True)
        os._exit(1)

    # ------------------------------------------------------------------------------------------------------- scopes

    def scope(self, scope: Scope, here: str) -> None:
        """Go in and out of a scope."""
        options = self.options(scope)
        entered = self.model.enter(scope)
        passage = _Passage(self, f"entry of {here}", entered, scope.on_entry)

        def leave() -> None:
            nonlocal passage
            outcome = self.model.leave(scope)
            passage = _Passage(self, f"exit of {here}", outcome, scope.on_exit)

        def inside() -> None:
            passage.over(None)
            self.check(f"inside {here}", sums=scope.also != "raises on entry")
            self.run(scope.body)
            self.model.end_of_body(scope)
            leave()
            self.end_of_body(scope)

        def also_fails() -> None:
            passage.over(None)
            leave()
            raise AlsoFailed

        if scope.also:
            options["also"] = [lambda: self.also(scope, here, also_fails if entered.opened else None)]
        error: BaseException | None = None
        try:
            open_scope(scope.how, options, inside, partial(self.machine.on_this_thread, self.rank))
        except BaseException as caught:
            error = caught
        passage.over(error)

    def end_of_body(self, scope: Scope) -> None:
        """Raise what the scope's body raises."""
        raises = scope.raises
        if raises is None:
            return
        if self.rank in raises.on:
            raise KeyboardInterrupt if raises.what == "interrupt" else BodyFailed
        if raises.what == "in the middle":
            self.in_step()

    @contextmanager
    def also(self, scope: Scope, here: str, fails: Callable[[], None] | None) -> Iterator[None]:
        """Be the context manager in ``also=``: entered once the world is released, left before it is restored.

        Args:
            scope: The scope.
            here: The event.
            fails: Makes the entry of an open scope fail; None if the scope is not to be opened, on any rank.
        """
        if fails is not None:
            self.check(f"also= in the entry of {here}", sums=False)
        if scope.also == "raises on entry" and self.rank in scope.also_on:
            if fails is None:
                raise AlsoFailed
            fails()
        inside = is_released()
        try:
            yield
        finally:
            if scope.body == () and is_released() != inside:
                self.fail(f"also= in the exit of {here}", [f"is_released(): expected {inside}, found {is_released()}"])
        if scope.also == "raises on exit" and self.rank in scope.also_on:
            raise AlsoFailed

    def options(self, scope: Scope) -> dict[str, Any]:
        """Return the scope's options as a user writes them."""
        if scope.wants == "restored":
            return {}
        options: dict[str, Any] = {**self.machine.options, "strategy": scope.strategy, "timeout": scope.timeout}
        if scope.contradicts:
            return options | {"keep": lambda group: False}
        if not scope.keep or (scope.keep_on is not None and scope.keep_on != self.rank):
            return options
        kept = [self.handles.get(name) for name in scope.keep]
        if scope.keep_by == "predicate":
            options["keep"] = lambda group: any(group is handle for handle in kept)
        elif scope.keep_by == "name":
            options["keep"] = [dist.group.WORLD.group_name if name == WORLD else name for name in scope.keep]
        else:
            options["keep"] = kept
        return options

    # ------------------------------------------------------------------------------------------------- other events

    def other(self, event: Event, here: str) -> None:
        """Do an event that is not a scope."""
        trouble = event.trouble if isinstance(event, Restore) else None
        passage = _Passage(self, here, self.model.apply(event), trouble)
        error: BaseException | None = None
        try:
            self.do(event)
        except (Exception, KeyboardInterrupt) as caught:
            error = caught
        passage.over(error)

    def do(self, event: Event) -> None:
        if isinstance(event, NewGroup):
            timeout = timedelta(seconds=event.timeout)
            backend = event.backend or None
            group = dist.new_group(list(event.members), timeout=timeout, backend=backend, group_desc=event.name)
            if self.rank in event.members:
                self.handles[event.name] = group
        elif isinstance(event, Destroy) and self.rank in event.on:
            dist.destroy_process_group(self.handles.pop(event.name))
            self.state.forget(event.name)
        elif isinstance(event, SetTimeout) and self.rank in self.model.groups[event.name].holders:
            self.handles[event.name].set_timeout(timedelta(seconds=event.seconds))
        elif isinstance(event, Restore):
            restore_world()
