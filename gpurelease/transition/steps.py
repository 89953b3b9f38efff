"""What a verdict can have a rank do. What goes wrong is said at the next roll call, for all ranks to hear."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from gpurelease.agreement.ballot import Verdict
from gpurelease.agreement.meanwhile import Meanwhile
from gpurelease.errors import ranks_text
from gpurelease.groups.plan import taken_by_others
from gpurelease.groups.releasable import Releasable
from gpurelease.groups.standin import OWN_GLOO, Absence, StandIn
from gpurelease.options import ScopeOptions
from gpurelease.report import Transition
from gpurelease.strategies.patience import WhileSomebodyGetsOn
from gpurelease.strategies.pool import GivenUp, Pool
from gpurelease.strategies.rebuild import Rebuild
from gpurelease.strategies.strategy import Backends, Means, Problem, Strategy, end_all, problem
from gpurelease.strategies.suspend import Suspend
from gpurelease.torch_internals import books, stores
from gpurelease.transition import gloo
from gpurelease.transition.aim import Aim
from gpurelease.transition.nothing import why_nothing
from gpurelease.transition.passage import Abandoned, Passage
from gpurelease.transition.world import MemoryBefore, Phase, World

logger = logging.getLogger(__name__)

Said = dict[str, Any]  # fields of an answer


class Steps:
    """What one rank has done in a transition, and can do next.

    Args:
        world: Where this rank stands.
        aim: What its caller wants.
        passage: What others can see changes in its ``commit`` only.
        pool: The threads that work is done in.
        timeout: Longest wait for other ranks, in seconds.
    """

    def __init__(self, world: World, aim: Aim, passage: Passage, pool: Pool, timeout: float) -> None:
        self._world = world
        self._aim = aim
        self._passage = passage
        self._pool = pool
        self._timeout = timeout
        self._ready: list[Backends] = []
        self._half_back: list[Releasable] = []  # what restoring was tried of, and is not on the tables yet
        self._has_acted = False
        self._old: list[Any] = []  # what was on tables: other threads may just be reading it there
        self._dropped: list[StandIn] = []
        self._meanwhile: Meanwhile | None = None

    def do(self, verdict: Verdict, number: int, meanwhile: Meanwhile) -> Said:
        """Do what a verdict says, and return what this rank says of it at the next roll call.

        Args:
            verdict: The verdict.
            number: The number of its roll call.
            meanwhile: What ranks tell each other until the next one.
        """
        self._meanwhile = meanwhile
        steps: dict[str, Callable[[Verdict, int], Said]] = {
            "stand in": self._have_stand_in,
            "release": self._release,
            "follow": self._follow,
            "end": self._end,
            "restore": self._restore,
            "put on": self._put_on,
        }
        try:
            said = steps[verdict["do"]](verdict, number)
        except Exception as error:
            logger.debug("a step failed", exc_info=True)
            said = _said([Problem(f"{verdict['do']}: {error!r}")])
        if said.get("problem") and not said["because of others"]:
            self._passage.may_take(self._timeout)
            with contextlib.suppress(RuntimeError):  # if it is the store that is gone, the next roll call says so
                meanwhile.fail()
        return {"step of": number, **said} if said.get("problem") else said

    def undo(self) -> None:
        """End what nobody has got to see: what was built, or resumed on some ranks only."""
        if self._half_back:
            self._give_up()
        gloo.end(self._dropped)

    def let_go(self) -> None:
        """End what was built, in a thread that nobody waits for: nobody else knows of it."""
        if isinstance(self._world.strategy, Rebuild):
            ready, self._ready = self._ready, []
            end_all(ready, self._means(), self._world.husks)

    def over(self, verdict: Verdict) -> None:
        """Write down what was done and tidy up, now that all ranks are in one state."""
        world, aim = self._world, self._aim
        if verdict.get("nothing"):
            aim.report.groups = aim.plan.agreed(verdict["kept"], suspended=False)[1]
            aim.report.reason = why_nothing(world, aim.options, aim.report.groups)
        elif self._has_acted:
            aim.write_down(verdict, world.rank)
        self._old.clear()
        gloo.end(self._dropped)
        world.outdate(set())
        self._passage.may_take(self._timeout)
        try:
            while world.obsolete:
                stores.delete_keys(world.obsolete[-1], world.roll_call.client)
                world.obsolete.pop()
        except RuntimeError:  # the program of the rank that hosts the store may be over
            logger.debug("old keys could not be deleted", exc_info=True)

    # ------------------------------------------------------------------------------------------------------ stand-in

    def _have_stand_in(self, verdict: Verdict, number: int) -> Said:
        """Have a Gloo for WORLD, that all ranks build together; if another one stands in, this one takes over."""
        world = self._world
        with self._aim.transition.step("stand-in"):
            job = gloo.build(world, number, self._means(), lazily=verdict["lazily"])
        if job.error is not None:
            return _said([problem("Gloo could not be built to stand in for WORLD", job.error)])
        with self._passage.commit():
            self._dropped += gloo.drop(world)
            world.stand_in = job.result
            own = world.releasable()
            if world.absence is not None:
                world.absence.serve_by(job.result)
            elif own is not None:
                world.absence = Absence(own, job.result)
        return {}

    # ------------------------------------------------------------------------------------------------------- release

    def _release(self, verdict: Verdict, number: int) -> Said:
        """Put shells on the tables of all groups that are agreed on, and have their backends give back their memory."""
        world, aim = self._world, self._aim
        strategy: Strategy = (Suspend if verdict["strategy"] == "suspend" else Rebuild)(world.husks)
        suspends = strategy.name == "suspend"
        aim.report.strategy, aim.report.strategy_reason = strategy.name, verdict["strategy reason"]
        groups, aim.report.groups = aim.plan.agreed(verdict["kept"], suspended=suspends)
        for group in groups:
            group.connected = group.connected and group.key not in verdict["unconnected"]
        memory = MemoryBefore(groups)
        with aim.transition.step(strategy.step):
            taken, problems = self._take_off(groups, number, aim.options, strategy)
            unreleased = strategy.release(taken, self._means())
        aim.transition.groups = len(groups)
        aim.transition.memory = memory.until_now()
        tolerated = unreleased if suspends and aim.options.strategy == "auto" else []
        return {
            **_said(problems if tolerated else problems + unreleased),
            **aim.numbers(),
            "unsuspended": "; ".join(each.text for each in tolerated),
        }

    def _follow(self, verdict: Verdict, number: int) -> Said:
        """Be RELEASED, as other ranks are. Communicators have lost members: they are ended without asking those."""
        world = self._world
        self.undo()
        with self._aim.transition.step("tear down"):
            if world.is_released:
                self._give_up()
                with self._passage.commit():
                    world.generation = number
                return {}
            names = verdict["backends"]
            options = replace(self._aim.options, strategy="rebuild", keep=(), backends=names and tuple(names))
            groups = taken_by_others(verdict["keys"], options)
            taken, problems = self._take_off(groups, number, options, Rebuild(world.husks))
            return _said(problems + end_all(taken, self._means(), world.husks))

    def _take_off(
        self, groups: Sequence[Releasable], number: int, options: ScopeOptions, strategy: Strategy
    ) -> tuple[list[Backends], list[Problem]]:
        """Put shells on the tables, and Gloo on WORLD's. Returns the backends that were there."""
        world = self._world
        taken: list[Backends] = []
        problems: list[Problem] = []
        self._has_acted = True
        with self._passage.commit():
            world.there_at_release = weakref.WeakSet(books.groups())
            world.released, world.options, world.strategy = list(groups), options, strategy
            world.phase, world.generation = Phase.RELEASED, number
            for group in groups:
                try:
                    taken.append(Backends(group, group.take_off()))
                except Exception as error:
                    problems.append(problem(f"taking {group} off its table", error))
            self._old += taken
            world.outdate({id(group.group) for group in groups})
            own = world.releasable()
            if own is not None:
                stays = own.gloo_that_stays()
                world.stand_in = world.stand_in if stays is None else StandIn(stays, OWN_GLOO)
                if world.stand_in is not None:
                    world.absence = Absence(own, world.stand_in)
        return taken, problems

    def _end(self, verdict: Verdict, number: int) -> Said:
        """End suspended backends after all."""
        self._give_up()
        report = self._aim.report
        report.strategy, report.strategy_reason = self._world.strategy.name, verdict["reason"]
        released = {str(group.group.group_name) for group in self._world.released}
        report.groups = [each.unsuspended() if each.name in released else each for each in report.groups]
        return {}

    # ------------------------------------------------------------------------------------------------------- restore

    def _restore(self, verdict: Verdict, number: int) -> Said:
        """Have backends that work for all released groups, but for those that a member has destroyed meanwhile."""
        world, aim = self._world, self._aim
        if aim.transition.kind != "restore":
            aim.transition = Transition("restore")
        if verdict["because"] or self._half_back:
            self._give_up()
        here = {group.key: group for group in world.released if books.exists(group.group)}
        for key in verdict["gone"].keys() & here.keys():
            # Nobody can build it without them. Its shell goes on refusing.
            group, where = here.pop(key), ranks_text(verdict["gone"][key])
            logger.warning("rank %d: %s is not restored: it was destroyed on %s", world.rank, group, where)
        groups = list(here.values())
        memory = MemoryBefore(groups)
        self._half_back = groups
        prefix, in_turn = world.prefix("generation", number), verdict["in turn"]
        self._ready, problems = world.strategy.restore(groups, prefix, self._means(), in_turn=in_turn)
        if problems:
            return _said(problems)
        aim.transition.memory = memory.until_now()
        return {"step": "built", "step of": number, **aim.numbers()}

    def _put_on(self, verdict: Verdict, number: int) -> Said:
        """Put the backends that are ready on the tables."""
        world, ready, self._has_acted = self._world, self._ready, True
        with self._aim.transition.step("put on"), self._passage.commit():
            self._half_back = []
            made = [group for group in books.groups() if group not in world.there_at_release]
            world.made_while_released.update(made)
            if world.absence is not None:
                gloo.warn_of(world, made)
                world.absence.end()
                world.absence = None
            for group, backends in ready:
                group.put_on(backends)
                world.met_on.append((weakref.ref(group.group), group.met_on))
            world.strategy.settle()
            world.phase, world.generation = Phase.ARMED, number
            self._old += world.released
            world.released = []
            if verdict["doubts"]:
                self._dropped += gloo.drop(world)
        self._aim.transition.groups = len(ready)
        return {}

    # ----------------------------------------------------------------------------------------------------------- all

    def _give_up(self) -> None:
        """End what is half back, or suspended, and go on by building."""
        ready, self._ready = self._ready, []
        self._world.obsolete += [met_on for group in self._half_back for met_on in group.met_on]
        self._half_back = []
        strategy = self._world.strategy.give_up(ready, self._means())
        with self._passage.commit():
            self._world.strategy = strategy

    def _patience(self) -> WhileSomebodyGetsOn:
        assert self._meanwhile is not None
        return WhileSomebodyGetsOn(self._timeout, self._meanwhile, self._may_take)

    def _may_take(self, seconds: float) -> None:
        try:
            self._passage.may_take(seconds)
        except Abandoned as why:
            raise GivenUp(str(why), because_of_others=True) from None

    def _means(self) -> Means:
        return Means(
            pool=self._pool,
            patience=self._patience,
            limit=timedelta(seconds=self._timeout),
            client=self._world.roll_call.client,
            transition=self._aim.transition,
        )


def _said(problems: Sequence[Problem]) -> Said:
    """Return problems as they are told to the other ranks."""
    own = [each for each in problems if not each.because_of_others] or list(problems)
    others = bool(own) and all(each.because_of_others for each in own)
    return {"problem": "; ".join(each.text for each in own), "because of others": others}
