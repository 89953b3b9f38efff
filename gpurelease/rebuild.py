"""The strategy "rebuild", on one rank: shut the groups' backends down, and later build new ones.

Nothing here raises: what fails is returned in words, for all ranks to hear at the next roll call.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import NamedTuple

from gpurelease import torch_internals
from gpurelease.groups import ReleasableGroup
from gpurelease.parallel import run_all
from gpurelease.report import Transition
from gpurelease.torch_internals import Backend

# Shutting a communicator down may wait until its other members do the same. All ranks start in one order, by key, so
# with any number of threads the first group that is not done is being shut down by all its members.
SHUTDOWN_THREADS = 32

Problems = list[str]


class Backends(NamedTuple):
    """A group with backends that are not on its table: the old ones on their way out, or new ones on their way in."""

    group: ReleasableGroup
    backends: list[Backend]


def take_off(groups: Sequence[ReleasableGroup]) -> tuple[list[Backends], Problems]:
    """Put placeholders on all groups' tables, once all that was queued on their devices is done."""
    taken: list[Backends] = []
    problems: Problems = []
    try:
        torch_internals.drain(group.device for group in groups)
    except Exception as error:
        problems.append(f"waiting for the device: {error}")
    for group in groups:
        try:
            taken.append(Backends(group, group.take_off()))
        except Exception as error:
            problems.append(f"taking {group} off its table: {error}")
    return taken, problems


def shut_down(taken: list[Backends], timeout: float) -> Problems:
    """Shut all backends down, at the same time, and drop them: nothing of ours refers to them afterwards.

    Args:
        taken: They are removed from this list.
        timeout: Longest wait for all of them, in seconds.
    """
    names = [str(group) for group, backends in taken for _ in backends]
    jobs = [
        partial(torch_internals.shut_down, backend, group.device) for group, backends in taken for backend in backends
    ]
    outcomes = run_all(jobs, SHUTDOWN_THREADS, timeout)
    taken.clear()
    problems = [
        f"shutting down {name}: {error}" for name, error in zip(names, outcomes, strict=True) if error is not None
    ]
    return problems + empty_cache()


def empty_cache() -> Problems:
    """Give what torch's allocator holds in reserve back to the device."""
    try:
        torch_internals.empty_cache()
    except Exception as error:
        return [f"emptying the cache: {error}"]
    return []


def build(
    groups: Sequence[ReleasableGroup], prefix: str, limit: timedelta, transition: Transition
) -> tuple[list[Backends], Problems]:
    """Build and connect new backends for all groups, in the order that all ranks have; the first failure ends it.

    Args:
        groups: What to build.
        prefix: Prefix of the keys over which the members meet, new for every time.
        limit: Longest wait for a group's other members, where building waits for them.
        transition: Where the seconds are written down.
    """
    built: list[Backends] = []
    problems = empty_cache()
    for group in groups:
        try:
            with transition.step("build"):
                built.append(Backends(group, group.build(prefix, limit)))
            with transition.step("connect"):
                group.connect(built[-1].backends)
        except Exception as error:
            free = torch_internals.free_bytes(group.device)
            memory = "" if free is None else f" ({free / 2**30:.2f} GiB were free on {group.device})"
            problems.append(f"building {group}: {error}{memory}")
            break
    return built, problems


def put_on(built: Sequence[Backends]) -> None:
    """Put new backends on all groups' tables."""
    for group, backends in built:
        group.put_on(backends)
