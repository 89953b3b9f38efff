"""The Gloo that stands in for WORLD: built by all ranks together, kept for many scopes, and dropped when in doubt."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from typing import Any

from torch.distributed import ProcessGroup

from gpurelease.groups.standin import StandIn, build_stand_in
from gpurelease.strategies.pool import Job, Token
from gpurelease.strategies.strategy import Means
from gpurelease.torch_internals import books, tables
from gpurelease.torch_internals import gloo as torch_gloo
from gpurelease.transition.world import World

try:
    import resource
except ImportError:  # on Windows
    resource = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)


# Ranks. Each reads 8 bytes for every two of them from the store: that is 134 MB then, 8.6 GB at 1,024.
TO_ALL_UP_TO = 256
GLOO_TAKES = 5  # file descriptors, beside its connections (3, counted at 4 to 64 ranks)
WE_TAKE = 3  # until it is built (1, counted: our own client of the store; on rank 0 for a while another one)


def may_connect_to_all(world: ProcessGroup) -> bool:
    """Return whether a Gloo for WORLD may connect this rank to every other."""
    if world.size() > TO_ALL_UP_TO or torch_gloo.is_lazy():
        return False
    return not _why_no_room(_needed(world, connections=world.size()))


def why_no_room(world: ProcessGroup) -> str:
    """Return why this rank cannot open what a Gloo that connects two ranks when they talk takes, or the empty string.

    That leaves it room to talk: a barrier takes two connections for each doubling of the number of ranks.
    """
    return _why_no_room(_needed(world, connections=min(world.size(), 2 * (world.size() - 1).bit_length())))


def _needed(world: ProcessGroup, connections: int) -> int:
    """Return how many file descriptors a first scope takes on this rank: rank 0 hosts the store, and so all clients."""
    clients = world.size() if world.rank() == 0 else 0
    return connections + GLOO_TAKES + WE_TAKE + clients


def _why_no_room(takes: int) -> str:
    """Return why this process cannot open so many file descriptors.

    Gloo itself raises if there is no room at all, and ends the process if there is a little (2.11 to 2.15).
    """
    if resource is None:
        return ""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        taken = len(os.listdir("/dev/fd")) - 1  # one is listdir's own
    except OSError:
        return ""
    if limit == resource.RLIM_INFINITY or limit - taken >= takes:
        return ""
    return (
        f"Gloo, which is to stand in for WORLD, takes {takes} file descriptors, and of {limit} that this process may "
        f"have {taken} are taken: raise the limit (ulimit -n {taken + takes} or more, before the process starts)"
    )


def build(world: World, number: int, means: Means, *, lazily: bool) -> Job:
    """Build one. All ranks must call.

    Args:
        world: Where this rank stands.
        number: Number of the roll call whose verdict asks for it.
        means: What to work with.
        lazily: Whether two ranks are to connect only when they talk.

    Returns:
        The job, whose result is a :class:`StandIn`.
    """
    group = world.group
    assert group is not None
    prefix = world.prefix("stand-in", number)
    timeout = tables.group_timeout(group) or means.limit
    met_on: list[Any] = []

    def build_it(token: Token) -> StandIn:
        if not lazily and (why := _why_no_room(group.size() + GLOO_TAKES)):
            raise OSError(why)

        def made(meeting: Any) -> None:
            met_on.append(meeting)
            token.on_giving_up(meeting.call_off)

        return build_stand_in(group, prefix, means.client, timeout, means.limit, made, lazily=lazily)

    job = Job(build_it)
    means.pool.run([job], means.patience())
    if job.error is not None:
        world.obsolete += met_on
    return job


def drop(world: World) -> list[StandIn]:
    """Let go of the one that there is, if any, and return it. For a commit."""
    dropped, world.stand_in, world.doubts = world.stand_in, None, False
    if dropped is not None and dropped.met_on is not None:
        world.obsolete.append(dropped.met_on)
    return [] if dropped is None else [dropped]


def end(dropped: list[StandIn]) -> None:
    """Have those in the list end, in a thread that nobody waits for: they wait for what was left in its middle."""
    if dropped:
        try:
            threading.Thread(target=dropped.clear, name="gpurelease-gloo-ends", daemon=True).start()
        except RuntimeError:  # there can be no more threads
            dropped.clear()


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
        "made inside a released scope without a backend named, and so on Gloo, where they stay: %s. "
        "If they are meant for the device, make them before the scope, or name the backend",
        ", ".join(map(books.text_of, groups)),
    )
