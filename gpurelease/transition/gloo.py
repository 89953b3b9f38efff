"""The Gloo that stands in for WORLD: built by all ranks together, kept for many scopes, and dropped when in doubt."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from torch.distributed import ProcessGroup

from gpurelease.groups.standin import StandIn, build_stand_in
from gpurelease.strategies.pool import Job, Token
from gpurelease.strategies.strategy import Means
from gpurelease.torch_internals import books, tables
from gpurelease.transition.world import World

logger = logging.getLogger(__name__)


def build(world: World, number: int, means: Means) -> Job:
    """Build one. All ranks must call.

    Args:
        world: Where this rank stands.
        number: Number of the roll call whose verdict asks for it.
        means: What to work with.

    Returns:
        The job, whose result is a :class:`StandIn`.
    """
    group = world.group
    assert group is not None
    prefix = world.prefix("stand-in", number)
    timeout = tables.group_timeout(group) or means.limit
    met_on: list[Any] = []

    def build_it(token: Token) -> StandIn:
        def made(meeting: Any) -> None:
            met_on.append(meeting)
            token.on_giving_up(meeting.call_off)

        return build_stand_in(group, prefix, means.client, timeout, means.limit, made)

    job = Job(build_it)
    means.pool.run([job], means.patience())
    if job.error is not None:
        world.obsolete += met_on
    return job


def drop(world: World) -> StandIn | None:
    """Let go of the one that there is, and return it. For a commit."""
    dropped, world.stand_in, world.doubts = world.stand_in, None, False
    if dropped is not None and dropped.met_on is not None:
        world.obsolete.append(dropped.met_on)
    return dropped


def warn_of(world: World, made: Sequence[ProcessGroup]) -> None:
    """Say once that groups were made on Gloo while it stood in, and stay there.

    Args:
        world: Where this rank stands; Gloo stands in.
        made: The groups that were made meanwhile.
    """
    absence = world.absence
    groups = [group for group in made if absence is not None and absence.looks_meant_for_device(group)]
    if not groups or world.has_warned:
        return
    world.has_warned = True
    logger.warning(
        "made inside a released scope without a backend named, and so on Gloo, where they stay: process groups %s. "
        "If they are meant for the device, make them before the scope, or name the backend",
        ", ".join(f"{books.name_of(group)!r} ({group.group_desc})" for group in groups),
    )
