"""The way of all ranks from RELEASED to ARMED, and back to RELEASED if one of them fails."""

from __future__ import annotations

import logging

from gpurelease import agreement, torch_internals
from gpurelease.agreement import Agreement
from gpurelease.errors import RestoreFailed
from gpurelease.report import Transition
from gpurelease.rollcall import Verdict, ranks_text
from gpurelease.state import FreeMemory, Phase, State
from gpurelease.strategy import Backends, put_on

logger = logging.getLogger(__name__)


def restore(state: State, transition: Transition, *, body_failed: bool, context_failed: str = "") -> Verdict:
    """Put backends that work on the tables of all released groups. All ranks must call.

    Args:
        state: It is RELEASED.
        transition: Where to write the seconds and bytes.
        body_failed: Whether something is on its way out of the scope on this rank: Gloo is then built anew for the next
            one, since a collective that one rank left in the middle breaks its connections.
        context_failed: What a context of the scope raised on this rank when it was left.

    Returns:
        What was agreed: see :func:`gpurelease.agreement.on_restore`.

    Raises:
        RestoreFailed: On all ranks; the state is RELEASED.
    """
    together = Agreement(state.roll_call, RestoreFailed, state.timeout, transition)
    here = {group.key: group for group in state.released if torch_internals.exists(group.group)}
    answer = {
        "goal": "restore",
        "destroyed": [group.key for group in state.released if group.key not in here],
        "doubted": state.stand_in.is_doubted or body_failed,
        "context": context_failed,
    }
    verdict = together.reach(answer, agreement.on_restore)
    for key in verdict["destroyed"].keys() & here.keys():
        # Nobody can build it without them. Its placeholder goes on refusing.
        where = ranks_text(verdict["destroyed"][key])
        group = here.pop(key)
        logger.warning("rank %d: %s is not restored: it was destroyed on %s", state.rank, group, where)
    state.made_while_released.update(g for g in torch_internals.groups() if g not in state.there_at_release)

    groups = list(here.values())
    memory = FreeMemory(groups)
    ready: list[Backends] = []
    try:
        ready, problems = state.strategy.restore(groups, state.prefix("generation"), state.limit, transition)
        together.confirm("restored", problems, memory.gained())
    except BaseException:  # also Ctrl-C, of which the others hear and do the same
        state.strategy = state.strategy.give_up(ready, state.limit)
        raise
    state.phase = Phase.RESTORING
    with transition.step("put on"):
        timeout = state.stand_in.end(state.world)
        put_on(ready)
        if timeout is not None and state.world is not None:
            torch_internals.set_timeout(state.world, timeout)
    state.strategy.settle()
    state.phase = Phase.ARMED
    state.released = []
    if verdict["doubted"]:
        state.stand_in.drop()
    transition.groups = len(ready)
    return verdict
