"""One WORLD's way from ARMED to RELEASED and back: all ranks go, or none does.

Each way has a roll call before anything changes and one after everything is done. In between every rank only does
its part and notes what failed; what the second verdict says, all do::

    release   plan -> roll call [-> Gloo -> roll call] -> drain -> placeholders -> tear down -> roll call -> RELEASED
                                                  somebody failed: give up, restore on all ranks -> ARMED, ReleaseFailed
    restore   roll call -> build and connect -> roll call -> put on the tables -> ARMED
                                  somebody failed: give up what was built on all ranks -> RELEASED, RestoreFailed

"Tear down" and "build and connect" are "suspend" and "resume" by that strategy.
"""

from __future__ import annotations

import enum
import logging
import os
import weakref
from datetime import timedelta

import torch
from torch.distributed import ProcessGroup

from gpurelease import agreement, torch_internals
from gpurelease.agreement import Agreement
from gpurelease.errors import ContextFailed, ReleaseFailed, RestoreFailed, ScopeMisuse
from gpurelease.groups import Plan, ReleasableGroup, plan
from gpurelease.rebuild import Rebuild
from gpurelease.report import Report, Transition
from gpurelease.rollcall import RollCall, ranks_text
from gpurelease.settings import ScopeOptions
from gpurelease.standin import Absence, new_gloo
from gpurelease.strategy import Strategy, put_on, take_off
from gpurelease.suspend import Suspend
from gpurelease.torch_internals import Backend

logger = logging.getLogger(__name__)

# What a user's Ctrl-C, or the end of the process, raises: nobody wants to wait for a rebuild then.
INTERRUPTS = (KeyboardInterrupt, SystemExit)


class Phase(enum.Enum):
    """Where a WORLD stands.

    * ``ARMED``: every group has its own backends.
    * ``RELEASING``: backends go off the tables. A later call finds this only if an interrupt broke it off.
    * ``RELEASED``: the agreed groups have placeholders; Gloo stands in for WORLD if it is one of them.
    * ``RESTORING``: new backends, built and connected on all ranks, go on the tables. The same.
    """

    ARMED = "armed"
    RELEASING = "releasing"
    RELEASED = "released"
    RESTORING = "restoring"


class World:
    """The state of one WORLD on one rank. One thread at a time may call, and all ranks must.

    Args:
        group: WORLD. It is not kept alive while it is ARMED: a WORLD that is destroyed takes its state with it.

    Attributes:
        phase: Where it stands.
        options: What it was released with the last time.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._world = weakref.ref(group)
        self._pid = os.getpid()
        self._rank = group.rank()
        self._store = torch_internals.store_of(group)
        self._roll_call = RollCall(self._store, group.rank(), group.size())
        self._gloo: Backend | None = None
        self._absence: Absence | None = None
        self._strategy: Strategy = Rebuild()
        self._contexts = False
        self._lost: tuple[int, ...] = ()
        self._released: list[ReleasableGroup] = []
        self._there_at_release: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()
        self._made_while_released: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()
        self.phase = Phase.ARMED
        self.options = ScopeOptions()

    @property
    def is_gone(self) -> bool:
        """Whether WORLD was destroyed (another may have been made since)."""
        return torch_internals.world() is not self._world()

    def forget(self) -> None:
        """Let go of what a destroyed WORLD left behind."""
        self._strategy.give_up([], _limit(self.options.timeout or torch_internals.DEFAULT_TIMEOUT.total_seconds()))
        self._released, self._absence, self._gloo = [], None, None

    def release(self, options: ScopeOptions, report: Report, *, contexts: bool = False) -> None:
        """Release the groups that all their members agree on. If there are none, the report says so.

        Args:
            options: What the user asked for.
            report: Where to write what was done.
            contexts: Whether the scope enters contexts now: then ``enter_contexts`` must be called.

        Raises:
            ReleaseFailed: On all ranks; the world is ARMED.
            RestoreFailed: On all ranks; a rank failed, and the way back failed too: the world is RELEASED.
            ScopeMisuse: An interrupt broke off an earlier transition, or this is a forked child.
        """
        self._check_usable()
        transition = Transition("release")
        self.options = options
        try:
            released = self._release(options, report, transition, contexts)
        except INTERRUPTS as interrupt:
            self.leave(interrupt)
            raise
        if released:
            report.transitions.append(transition)
            logger.info("rank %d %s", self._rank, transition)

    def enter_contexts(self, error: BaseException | None, report: Report) -> None:
        """Hear whether the scope's contexts were entered on all ranks, if any rank has some.

        Args:
            error: What a context raised on this rank.
            report: Where to write how long it took.

        Raises:
            ReleaseFailed: On all ranks; the scope is to be left, and the world to be restored, on all ranks.
        """
        if not self._contexts:
            if error is not None:
                raise error
            return
        timeout = self.options.timeout or self._timeout()
        together = Agreement(self._roll_call, ReleaseFailed, timeout, report.transitions[-1])
        try:
            together.confirm("enter also=", [] if error is None else [f"also= raised {error!r}"])
        except ReleaseFailed as failure:
            self._lost = failure.missing
            raise failure from error
        except INTERRUPTS as interrupt:
            self.leave(interrupt)
            raise

    def restore(self, report: Report, *, body_failed: bool = False, context_error: BaseException | None = None) -> None:
        """Give the released groups new backends, connected as the old ones were.

        Args:
            report: Where to write what was done.
            body_failed: Whether the scope's body raised on this rank. Gloo is then built anew for the next scope: a
                collective that one rank left in the middle breaks Gloo's connections.
            context_error: What a context of the scope raised on this rank when it was left.

        Raises:
            RestoreFailed: On all ranks; the world is RELEASED.
            ContextFailed: A context raised on another rank, and nothing did on this one; the world is ARMED.
            ScopeMisuse: An interrupt broke off an earlier transition, or this is a forked child.
        """
        self._check_usable()
        transition = Transition("restore")
        try:
            contexts_failed = self._restore(transition, body_failed, context_error)
        except INTERRUPTS as interrupt:
            self.leave(interrupt)
            raise
        report.transitions.append(transition)
        logger.info("rank %d %s", self._rank, transition)
        if contexts_failed and not body_failed:
            where = ranks_text(sorted(contexts_failed))
            raise ContextFailed(f"The world was restored, but also= failed on {where}:", contexts_failed)

    def leave(self, interrupt: BaseException) -> None:
        """Tell the ranks that will wait for this one why it does not come."""
        self._roll_call.leave(f"rank {self._rank} left with {type(interrupt).__name__}, and rebuilds nothing")

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise ScopeMisuse(
                f"this process was forked off rank {self._rank}, and has no communicators of its own to release: "
                "call gpurelease in the process that called init_process_group()"
            )
        if self.phase in (Phase.RELEASING, Phase.RESTORING):
            raise ScopeMisuse(
                f"an interrupt broke off {self.phase.value} the world on rank {self._rank}: some groups have no "
                "backends; call destroy_process_group() and init_process_group() on all ranks"
            )

    # ------------------------------------------------------------------------------------------------------ release

    def _release(self, options: ScopeOptions, report: Report, transition: Transition, contexts: bool) -> bool:
        """Go from ARMED to RELEASED, and return whether there was anything to release."""
        timeout = options.timeout or self._timeout()
        together = Agreement(self._roll_call, ReleaseFailed, timeout, transition)
        planned, problem = self._plan(options, transition)
        answer = {
            "goal": "release",
            "problem": problem,
            "strategy": options.strategy,
            "backends": options.backends,
            "groups": {c.key: [c.group.size(), c.connected, c.why_not_suspended] for c in planned.candidates},
            "unmatched": planned.unmatched,
            "contexts": contexts,
        }
        verdict = together.reach(answer, agreement.on_release)
        self._contexts = verdict["contexts"]
        strategy = Suspend() if verdict["strategy"] == "suspend" else Rebuild()
        report.strategy, report.strategy_reason = strategy.name, verdict["strategy_reason"]
        groups, report.groups = planned.agreed(verdict["kept"], suspended=strategy.name == "suspend")
        if not verdict["any"]:
            report.reason = "no rank has a process group to release"
            return False

        for group in groups:
            group.connected = group.connected and group.key not in verdict["unconnected"]
        world = next((group for group in groups if group.group is self._world()), None)
        if world is not None and self._gloo is None:
            self._prepare_gloo(world, together, transition, _limit(timeout))
        device = _device_of(groups)
        free_before = torch_internals.free_bytes(device)
        self._there_at_release = weakref.WeakSet(torch_internals.groups())
        self._released = groups
        self._strategy = strategy
        self.phase = Phase.RELEASING
        with transition.step(strategy.step):
            taken, problems = take_off(groups)
            if world is not None and self._gloo is not None:
                self._absence = Absence(world.group, self._gloo)
            unreleased = strategy.release(taken, _limit(timeout))
        self.phase = Phase.RELEASED
        may_fall_back = options.strategy == "auto" and strategy.name == "suspend"
        try:
            if may_fall_back:
                failed = together.confirm("released", problems, _freed(device, free_before), unreleased)
            else:
                failed = together.confirm("released", problems + unreleased, _freed(device, free_before))
            if failed:  # on all ranks
                self._strategy = strategy.give_up([], _limit(timeout))
                report.strategy, report.strategy_reason = self._strategy.name, failed
                report.groups = planned.agreed(verdict["kept"], suspended=False)[1]
                together.confirm("released", [], _freed(device, free_before))
        except ReleaseFailed as failure:
            self._strategy = self._strategy.give_up([], _limit(timeout))
            self._go_back(failure)
            raise
        if self._rank == 0 and self._strategy.name == "rebuild":
            # Everybody is done with the keys of the generation that has gone; at 5,000 groups and 10,000 cycles they
            # would fill the store. The others need not wait for this.
            with transition.step("delete keys"):
                torch_internals.delete_keys(self._store, f"gpurelease/{self._roll_call.token}/generation/")
        transition.groups = len(groups)
        return True

    def _plan(self, options: ScopeOptions, transition: Transition) -> tuple[Plan, str]:
        """Plan; and if this rank cannot release now, return why, for all ranks to hear."""
        with transition.step("plan"):
            try:
                return plan(options, self._made_while_released), torch_internals.why_not_now()
            except Exception as error:
                logger.debug("planning failed", exc_info=True)
                return Plan(), f"planning failed: {error!r}"

    def _prepare_gloo(
        self, world: ReleasableGroup, together: Agreement, transition: Transition, limit: timedelta
    ) -> None:
        """Have a Gloo backend to stand in for WORLD. If WORLD is to be released, it is so on all ranks."""
        problems: list[str] = []
        with transition.step("stand-in"):
            timeout = timedelta(seconds=self._timeout())
            try:
                prefix = self._prefix("stand-in")
                self._gloo = world.gloo_that_stays() or new_gloo(world.group, prefix, timeout, limit)
            except Exception as error:
                problems.append(f"Gloo could not be built to stand in for WORLD: {error}")
        try:
            together.confirm("have Gloo stand in", problems)
        except ReleaseFailed:
            self._gloo = None
            raise
        if self._rank == 0:  # those of a Gloo that was here before
            torch_internals.delete_keys(self._store, f"gpurelease/{self._roll_call.token}/stand-in/", but=f"{prefix}/")

    def _go_back(self, failure: ReleaseFailed) -> None:
        """Restore what a failed release has taken, or raise RestoreFailed."""
        if failure.missing:
            # Nothing can be restored without them, and nobody waits for them a second time.
            summary = f"{failure.summary} What was released by then cannot be restored without them."
            raise RestoreFailed(summary, failure.failures, failure.missing) from failure
        try:
            self._restore(Transition("restore"), True, None)
        except RestoreFailed as second:
            told = "; ".join(f"rank {rank}: {text}" for rank, text in failure.failures.items())
            summary = f"{second.summary} (This was the way back from a release that failed: {told})"
            raise RestoreFailed(summary, second.failures, second.missing) from failure

    # ------------------------------------------------------------------------------------------------------ restore

    def _restore(
        self, transition: Transition, body_failed: bool, context_error: BaseException | None
    ) -> dict[int, str]:
        """Go from RELEASED to ARMED, and return what contexts have raised, by rank."""
        if self._lost:
            lost, self._lost = self._lost, ()
            raise RestoreFailed(f"The world could not be restored without {ranks_text(lost)}.", missing=lost)
        timeout = self.options.timeout or self._timeout()
        together = Agreement(self._roll_call, RestoreFailed, timeout, transition)
        here = {group.key: group for group in self._released if torch_internals.exists(group.group)}
        destroyed = [group.key for group in self._released if group.key not in here]
        context = "" if context_error is None else repr(context_error)
        answer = {"goal": "restore", "destroyed": destroyed, "body_failed": body_failed, "context": context}
        verdict = together.reach(answer, agreement.on_restore)
        for key in verdict["destroyed"].keys() & here.keys():
            # Nobody can build it without them. Its placeholder goes on refusing.
            where = ranks_text(verdict["destroyed"][key])
            group = here.pop(key)
            logger.warning("rank %d: %s is not restored: it was destroyed on %s", self._rank, group, where)
        self._made_while_released.update(g for g in torch_internals.groups() if g not in self._there_at_release)

        device = _device_of(list(here.values()))
        free_before = torch_internals.free_bytes(device)
        groups, prefix = list(here.values()), self._prefix("generation")
        ready, problems = self._strategy.restore(groups, prefix, _limit(timeout), transition)
        try:
            together.confirm("restored", problems, _freed(device, free_before))
        except RestoreFailed:
            self._strategy = self._strategy.give_up(ready, _limit(timeout))
            raise
        self.phase = Phase.RESTORING
        with transition.step("put on"):
            world = self._world()
            if self._absence is not None and world is not None:
                self._absence.end(world)
                self._absence = None
            put_on(ready)
        self._strategy.settle()
        self.phase = Phase.ARMED
        self._released = []
        if verdict["body_failed"]:
            self._gloo = None
        transition.groups = len(ready)
        return {int(rank): text for rank, text in verdict["contexts"].items()}

    # -------------------------------------------------------------------------------------------------------- small

    def _timeout(self) -> float:
        """Return WORLD's own time-out, in seconds."""
        world = self._world()
        own = None if world is None else torch_internals.world_timeout(world)
        return (own or torch_internals.DEFAULT_TIMEOUT).total_seconds()

    def _prefix(self, purpose: str) -> str:
        """Return a prefix for keys: the same on all ranks, and never used before."""
        return f"gpurelease/{self._roll_call.token}/{purpose}/{self._roll_call.number}"


def _limit(timeout: float) -> timedelta:
    """Return how long building may wait for other ranks: so long that, if it is in vain because another rank has
    failed, this rank still comes to the roll call at which that one waits."""
    return timedelta(seconds=timeout / 2)


def _device_of(groups: list[ReleasableGroup]) -> torch.device | None:
    """Return the device whose memory is reported: the groups', since looking at another would make a context there."""
    return next((group.device for group in groups if group.device is not None), None)


def _freed(device: torch.device | None, free_before: int | None) -> int | None:
    free = torch_internals.free_bytes(device)
    return None if free is None or free_before is None else free - free_before
