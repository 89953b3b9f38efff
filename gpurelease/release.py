"""The way of all ranks from ARMED to RELEASED, and back to ARMED if one of them fails."""

from __future__ import annotations

import logging
import weakref

from gpurelease import agreement, torch_internals
from gpurelease.agreement import Agreement
from gpurelease.errors import ReleaseFailed, RestoreFailed
from gpurelease.groups import Plan, ReleasableGroup, plan
from gpurelease.rebuild import Rebuild
from gpurelease.report import Report, Transition
from gpurelease.restore import restore
from gpurelease.rollcall import Verdict
from gpurelease.state import FreeMemory, Phase, State
from gpurelease.strategy import Strategy, take_off
from gpurelease.suspend import Suspend

logger = logging.getLogger(__name__)


def release(state: State, report: Report, transition: Transition, *, contexts: bool, again: bool) -> Verdict:
    """Release the groups that all their members agree on, with ``state.options``. All ranks must call.

    Args:
        state: It is ARMED.
        report: Where to write what becomes of each group.
        transition: Where to write the seconds and bytes.
        contexts: Whether this rank's scope has an ``also=``.
        again: Whether a ``restored_world()`` is left. What ``keep=`` names may be gone by now.

    Returns:
        What was agreed: see :func:`gpurelease.agreement.on_release`.

    Raises:
        ReleaseFailed: On all ranks; the state is ARMED.
        RestoreFailed: On all ranks; a rank failed, and the way back failed too: the state is RELEASED.
    """
    together = Agreement(state.roll_call, ReleaseFailed, state.timeout, transition)
    planned, problem = _plan(state, transition)
    answer = {
        "goal": "release",
        "problem": problem,
        "strategy": state.options.strategy,
        "backends": state.options.backends,
        "groups": {c.key: [c.group.size(), c.connected, c.why_not_suspended] for c in planned.candidates},
        "unmatched": [] if again else planned.unmatched,
        "contexts": contexts,
    }
    verdict = together.reach(answer, agreement.on_release)
    strategy = (Suspend if verdict["strategy"] == "suspend" else Rebuild)(state.shells)
    report.strategy, report.strategy_reason = strategy.name, verdict["strategy_reason"]
    groups, report.groups = planned.agreed(verdict["kept"], suspended=strategy.name == "suspend")
    if not verdict["any"]:
        report.reason = "no rank has a process group to release"
        return verdict

    for group in groups:
        group.connected = group.connected and group.key not in verdict["unconnected"]
    world = next((group for group in groups if group.group is state.world), None)
    if world is not None and not state.stand_in.is_ready:
        _prepare_stand_in(state, world, together, transition)
    memory = FreeMemory(groups)
    state.there_at_release = weakref.WeakSet(torch_internals.groups())
    state.released, state.strategy = groups, strategy
    state.phase = Phase.RELEASING
    with transition.step(strategy.step):
        taken, problems = take_off(groups)
        if world is not None:
            state.stand_in.begin(world.group)
        unreleased = strategy.release(taken, state.limit)
    state.phase = Phase.RELEASED
    try:
        _confirm(state, together, memory, problems, unreleased, report)
    except ReleaseFailed as failure:
        state.strategy = state.strategy.give_up([], state.limit)
        _go_back(state, failure)
        raise
    if report.strategy != strategy.name:
        report.groups = planned.agreed(verdict["kept"], suspended=False)[1]
    if state.rank == 0 and report.strategy == "rebuild":
        # Everybody is done with the keys of the generation that has gone; at 5,000 groups and 10,000 cycles they
        # would fill the store. The others need not wait for this.
        with transition.step("delete keys"):
            state.delete_keys("generation")
    transition.groups = len(groups)
    return verdict


def _plan(state: State, transition: Transition) -> tuple[Plan, str]:
    """Plan; and if this rank cannot release now, return why, for all ranks to hear."""
    with transition.step("plan"):
        try:
            return plan(state.options, state.made_while_released), torch_internals.why_not_now()
        except Exception as error:
            logger.debug("planning failed", exc_info=True)
            return Plan(), f"planning failed: {error!r}"


def _prepare_stand_in(state: State, world: ReleasableGroup, together: Agreement, transition: Transition) -> None:
    """Have a Gloo backend for WORLD. If WORLD is to be released here, it is so on all ranks."""
    problems, prefix = [], state.prefix("stand-in")
    with transition.step("stand-in"):
        try:
            state.stand_in.prepare(world, prefix, state.world_timeout, state.limit)
        except Exception as error:
            problems.append(f"Gloo could not be built to stand in for WORLD: {error}")
    try:
        together.confirm("have Gloo stand in", problems)
    except ReleaseFailed:
        state.stand_in.drop()
        raise
    if state.rank == 0:  # those of a Gloo that was there before
        state.delete_keys("stand-in", but=prefix)


def _confirm(
    state: State,
    together: Agreement,
    memory: FreeMemory,
    problems: list[str],
    unreleased: list[str],
    report: Report,
) -> None:
    """Hear whether all is released on all ranks; if it was suspending that failed, ``auto`` goes on with rebuilding."""
    strategy: Strategy = state.strategy
    if state.options.strategy != "auto" or strategy.name != "suspend":
        together.confirm("released", problems + unreleased, memory.gained())
        return
    failed = together.confirm("released", problems, memory.gained(), unreleased)
    if failed:  # on all ranks
        state.strategy = strategy.give_up([], state.limit)
        report.strategy, report.strategy_reason = state.strategy.name, failed
        together.confirm("released", [], memory.gained())


def _go_back(state: State, failure: ReleaseFailed) -> None:
    """Restore what a failed release has taken, or raise RestoreFailed."""
    if failure.missing:
        # Nothing can be restored without them, and nobody waits for them a second time.
        summary = f"{failure.summary} What was released by then cannot be restored without them."
        raise RestoreFailed(summary, failure.failures, failure.missing) from failure
    try:
        restore(state, Transition("restore"), body_failed=True)
    except RestoreFailed as second:
        told = "; ".join(f"rank {rank}: {text}" for rank, text in failure.failures.items())
        summary = f"{second.summary} (This was the way back from a release that failed: {told})"
        raise RestoreFailed(summary, second.failures, second.missing) from failure
