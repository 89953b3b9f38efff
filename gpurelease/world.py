"""One WORLD's way from ARMED to RELEASED and back: all ranks go, or none does.

Each way has a roll call before anything changes and one after everything is done. In between every rank only does
its part and notes what failed; what the second verdict says, all do::

    release   plan -> roll call [-> Gloo -> roll call] -> drain -> tear down -> roll call -> RELEASED
                                                    somebody failed: restore on all ranks -> ARMED, ReleaseFailed
    restore   roll call -> build -> connect -> roll call -> put on the tables -> ARMED
                              somebody failed: drop what was built on all ranks -> RELEASED, RestoreFailed
"""

from __future__ import annotations

import enum
import logging
import os
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import partial

from torch.distributed import ProcessGroup

from gpurelease import agreement, torch_internals
from gpurelease.agreement import Agreement
from gpurelease.errors import ReleaseFailed, RestoreFailed, ScopeMisuse
from gpurelease.groups import Plan, ReleasableGroup, plan
from gpurelease.parallel import run_all
from gpurelease.report import Report, Transition
from gpurelease.rollcall import RollCall, ranks_text
from gpurelease.settings import ScopeOptions
from gpurelease.standin import Absence, new_gloo
from gpurelease.torch_internals import Backend

logger = logging.getLogger(__name__)

# Shutting a communicator down may wait until its other members do the same. All ranks start in one order, by key, so
# with any number of threads the first group that is not done is being shut down by all its members.
SHUTDOWN_THREADS = 32


class Phase(enum.Enum):
    """Where a WORLD stands.

    * ``ARMED``: every group has its own backends.
    * ``RELEASING``: on the way; found by a later call only if an interrupt broke the way off.
    * ``RELEASED``: the agreed groups have placeholders; Gloo stands in for WORLD if it is one of them.
    * ``RESTORING``: on the way back; the same.
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
        self._generation = 0
        self._gloo: Backend | None = None
        self._absence: Absence | None = None
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
        self._released, self._absence, self._gloo = [], None, None

    def release(self, options: ScopeOptions, report: Report) -> None:
        """Release the groups that all their members agree on. If there are none, the report says so.

        Raises:
            ReleaseFailed: On all ranks; the world is ARMED.
            RestoreFailed: On all ranks; a rank failed, and the way back failed too: the world is RELEASED.
            ScopeMisuse: An interrupt broke off an earlier transition, or this is a forked child.
        """
        self._check_usable()
        transition = Transition("release")
        self.options = options
        self.phase = Phase.RELEASING
        try:
            released = self._release(options, report, transition)
        except RestoreFailed:
            self.phase = Phase.RELEASED
            raise
        except Exception:
            self.phase = Phase.ARMED
            raise
        except BaseException as interrupt:
            self.leave(interrupt)
            raise
        self.phase = Phase.RELEASED if released else Phase.ARMED
        if released:
            report.transitions.append(transition)
            logger.info("rank %d %s", self._rank, transition)

    def restore(self, report: Report, *, body_failed: bool = False) -> None:
        """Give the released groups new backends, connected as the old ones were.

        Args:
            report: Where to write what was done.
            body_failed: Whether the scope's body raised on this rank. Gloo is then built anew for the next scope: a
                collective that one rank left in the middle breaks Gloo's connections.

        Raises:
            RestoreFailed: On all ranks; the world is RELEASED.
            ScopeMisuse: An interrupt broke off an earlier transition, or this is a forked child.
        """
        self._check_usable()
        transition = Transition("restore")
        self.phase = Phase.RESTORING
        try:
            self._restore(transition, body_failed)
        except Exception:
            self.phase = Phase.RELEASED
            raise
        except BaseException as interrupt:
            self.leave(interrupt)
            raise
        self.phase = Phase.ARMED
        report.transitions.append(transition)
        logger.info("rank %d %s", self._rank, transition)

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

    def _release(self, options: ScopeOptions, report: Report, transition: Transition) -> bool:
        """Go from ARMED to RELEASED, and return whether there was anything to release."""
        together = Agreement(self._roll_call, ReleaseFailed, options.timeout or self._timeout(), transition)
        planned, problem = self._plan(options, transition)
        answer = {
            "goal": "release",
            "problem": problem,
            "strategy": options.strategy,
            "backends": options.backends,
            "groups": {c.key: [c.group.size(), c.connected] for c in planned.candidates},
            "unmatched": planned.unmatched,
        }
        verdict = together.reach(answer, agreement.on_release)
        report.strategy = options.strategy
        groups, report.groups = planned.agreed(verdict["kept"])
        if not verdict["any"]:
            report.reason = "no rank has a process group to release"
            return False

        for group in groups:
            group.connected = group.connected and group.key not in verdict["unconnected"]
        self._prepare_gloo(groups, together, transition, _limit(options.timeout or self._timeout()))
        free_before = torch_internals.free_bytes()
        self._there_at_release = weakref.WeakSet(torch_internals.groups())
        self._released = groups
        problems = self._tear_down(groups, options.timeout or self._timeout(), transition)
        try:
            together.confirm("released", problems, _difference(torch_internals.free_bytes(), free_before))
        except ReleaseFailed as failure:
            self._go_back(failure)
            raise
        if self._rank == 0:
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
        self, groups: list[ReleasableGroup], together: Agreement, transition: Transition, limit: timedelta
    ) -> None:
        """Have a Gloo backend to stand in for WORLD, if WORLD is to be released: then it is so on all ranks."""
        world = next((group for group in groups if group.group is self._world()), None)
        if world is None or self._gloo is not None:
            return
        problems: list[str] = []
        with transition.step("stand-in"):
            self._generation += 1
            timeout = timedelta(seconds=self._timeout())
            try:
                self._gloo = world.gloo_that_stays() or new_gloo(world.group, self._prefix("stand-in"), timeout, limit)
            except Exception as error:
                problems.append(f"Gloo could not be built to stand in for WORLD: {error}")
        try:
            together.confirm("have Gloo stand in", problems)
        except ReleaseFailed:
            self._gloo = None
            raise

    def _tear_down(self, groups: list[ReleasableGroup], timeout: float, transition: Transition) -> list[str]:
        """Take all groups off and shut their backends down, whatever fails on the way. Return what failed."""
        problems: list[str] = []
        with transition.step("drain"):
            problems += _attempt("waiting for the device", partial(torch_internals.drain, [g.device for g in groups]))
        with transition.step("tear down"):
            shutdowns: list[tuple[str, Callable[[], None]]] = []
            for group in groups:
                try:
                    backends = group.take_off()
                except Exception as error:
                    problems.append(f"taking {group} off its table: {error}")
                else:
                    shutdowns += [(str(group), partial(torch_internals.shut_down, b, group.device)) for b in backends]
            backends = []
            world = next((group.group for group in groups if group.group is self._world()), None)
            if self._gloo is not None and world is not None:
                self._absence = Absence(world, self._gloo)
            outcomes = run_all([job for _, job in shutdowns], SHUTDOWN_THREADS, timeout)
            problems += [
                f"shutting down {name}: {error}"
                for (name, _), error in zip(shutdowns, outcomes, strict=True)
                if error is not None
            ]
            shutdowns.clear()  # the last references to the backends
            problems += _attempt("emptying the cache", torch_internals.empty_cache)
        return problems

    def _go_back(self, failure: ReleaseFailed) -> None:
        try:
            self._restore(Transition("restore"), body_failed=True)
        except RestoreFailed as second:
            summary = f"{second.summary} (This was the way back from a release that failed: {failure})"
            raise RestoreFailed(summary, second.failures, second.missing) from failure

    # ------------------------------------------------------------------------------------------------------ restore

    def _restore(self, transition: Transition, body_failed: bool) -> None:
        """Go from RELEASED to ARMED."""
        timeout = self.options.timeout or self._timeout()
        together = Agreement(self._roll_call, RestoreFailed, timeout, transition)
        here = {group.key: group for group in self._released if torch_internals.exists(group.group)}
        destroyed = [group.key for group in self._released if group.key not in here]
        answer = {"goal": "restore", "destroyed": destroyed, "body_failed": body_failed}
        verdict = together.reach(answer, agreement.on_restore)
        for key in verdict["destroyed"].keys() & here.keys():
            # Nobody can build it without them. Its placeholder goes on refusing.
            where = ranks_text(verdict["destroyed"][key])
            group = here.pop(key)
            logger.warning("rank %d: %s is not restored: it was destroyed on %s", self._rank, group, where)
        self._made_while_released.update(g for g in torch_internals.groups() if g not in self._there_at_release)

        torch_internals.empty_cache()
        free_before = torch_internals.free_bytes()
        built, problems = self._build(list(here.values()), timeout, transition)
        try:
            together.confirm("restored", problems, _difference(torch_internals.free_bytes(), free_before))
        except RestoreFailed:
            run_all(
                [partial(torch_internals.shut_down, b, group.device) for group, backends in built for b in backends],
                SHUTDOWN_THREADS,
                timeout,
            )
            raise
        with transition.step("put on"):
            world = self._world()
            if self._absence is not None and world is not None:
                self._absence.end(world)
                self._absence = None
            for group, backends in built:
                group.put_on(backends)
        self._released = []
        if verdict["body_failed"]:
            self._gloo = None
        transition.groups = len(built)

    def _build(
        self, groups: list[ReleasableGroup], timeout: float, transition: Transition
    ) -> tuple[list[tuple[ReleasableGroup, list[Backend]]], list[str]]:
        """Build and connect all groups' backends, in the order that all ranks have. Return them, and what failed."""
        built: list[tuple[ReleasableGroup, list[Backend]]] = []
        self._generation += 1
        prefix = self._prefix("generation")
        for group in groups:
            try:
                with transition.step("build"):
                    backends = group.build(prefix, _limit(timeout))
                    built.append((group, backends))
                with transition.step("connect"):
                    group.connect(backends)
            except Exception as error:
                free = torch_internals.free_bytes()
                memory = "" if free is None else f" ({free / 2**30:.2f} GiB were free on the device)"
                return built, [f"building {group}: {error}{memory}"]
        return built, []

    # -------------------------------------------------------------------------------------------------------- small

    def _timeout(self) -> float:
        """Return WORLD's own time-out, in seconds."""
        world = self._world()
        own = None if world is None else torch_internals.world_timeout(world)
        return (own or torch_internals.DEFAULT_TIMEOUT).total_seconds()

    def _prefix(self, purpose: str) -> str:
        return f"gpurelease/{self._roll_call.token}/{purpose}/{self._generation}"


def _limit(timeout: float) -> timedelta:
    """Return how long building may wait for other ranks: so long that, if it is in vain because another rank has
    failed, this rank still comes to the roll call at which that one waits."""
    return timedelta(seconds=timeout / 2)


def _attempt(what: str, action: Callable[[], object]) -> list[str]:
    try:
        action()
    except Exception as error:
        return [f"{what}: {error}"]
    return []


def _difference(after: int | None, before: int | None) -> int | None:
    return None if after is None or before is None else after - before
