"""What every strategy has to do with the groups' backends, and the part that is the same for all.

Nothing here raises: what fails is returned in words, for all ranks to hear at the next roll call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import torch

from gpurelease import torch_internals
from gpurelease.groups import ReleasableGroup
from gpurelease.parallel import run_all
from gpurelease.report import Transition
from gpurelease.torch_internals import Backend

# Ending or suspending a communicator may wait until its other members do the same. All ranks start in one order, by
# key, so with any number of threads the first group that is not done is being worked on by all its members.
THREADS = 32

Problems = list[str]


class Backends(NamedTuple):
    """A group with backends that are not on its table: old ones on their way out, or those on their way in."""

    group: ReleasableGroup
    backends: list[Backend]


class Shells:
    """What is left of ended backends that Work objects, which users may still hold, point to.

    A Work of torch's second ProcessGroupNCCL does not keep its backend alive, and corrupts memory when it is asked, or
    only dropped, after it: a loop's variable of the scope before is enough. So the last few are kept; they hold no
    device memory.
    """

    def __init__(self) -> None:
        self._kept: deque[list[Backend]] = deque(maxlen=8)

    def keep(self, ended: Sequence[Backends]) -> None:
        """Keep those backends that may be pointed to, and let the oldest go."""
        outliving = _second_nccl(ended)
        if outliving:
            self._kept.append(outliving)


class Strategy(ABC):
    """How communicators give their memory back, during one release and the restore after it, on one rank.

    Args:
        shells: What outlives the strategy.

    Attributes:
        name: What users call it.
        step: What the release's main step is called in reports.
    """

    name: str
    step: str

    def __init__(self, shells: Shells) -> None:
        self._shells = shells

    @abstractmethod
    def release(self, taken: list[Backends], limit: timedelta) -> Problems:
        """Have all backends give their memory back. All ranks must call.

        Args:
            taken: What was taken off the tables, in the order that all ranks have. It is emptied.
            limit: Longest wait for other ranks, in all.
        """

    @abstractmethod
    def restore(
        self, groups: Sequence[ReleasableGroup], prefix: str, limit: timedelta, transition: Transition
    ) -> tuple[list[Backends], Problems]:
        """Return backends that work, for all groups, or up to the first that failed. All ranks must call.

        Args:
            groups: Those of the released groups that nobody has destroyed meanwhile, in the order that all ranks have.
            prefix: Prefix of the keys over which members meet, new for every time.
            limit: Longest wait for other ranks, for one group.
            transition: Where the seconds are written down.
        """

    @abstractmethod
    def give_up(self, built: list[Backends], limit: timedelta) -> Strategy:
        """Drop all backends after a failure on any rank, and return how to go on from there. All ranks must call."""

    @abstractmethod
    def settle(self) -> None:
        """Hear that all backends are on the tables again, on all ranks."""


def on_all(
    do: Callable[[Backend, torch.device | None], None], taken: Sequence[Backends], limit: timedelta
) -> list[tuple[ReleasableGroup, BaseException]]:
    """Do something with all backends, at the same time, and return what it raised, with the group.

    Args:
        do: What to do with a backend, on its group's device.
        taken: The backends, in the order that all ranks have.
        limit: Longest wait for all of them.
    """
    pairs = [(group, backend) for group, backends in taken for backend in backends]
    jobs = [partial(do, backend, group.device) for group, backend in pairs]
    outcomes = run_all(jobs, 1 if _second_nccl(taken) else THREADS, limit.total_seconds())
    return [(group, error) for (group, _), error in zip(pairs, outcomes, strict=True) if error is not None]


def _second_nccl(taken: Sequence[Backends]) -> list[Backend]:
    backends = (backend for _, backends in taken for backend in backends)
    return [each for each in backends if torch_internals.is_second_nccl(torch_internals.unwrap(each))]


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


def put_on(ready: Sequence[Backends]) -> None:
    """Put backends that work on all groups' tables."""
    for group, backends in ready:
        group.put_on(backends)


def empty_cache() -> Problems:
    """Give what torch's allocator holds in reserve back to the device."""
    try:
        torch_internals.empty_cache()
    except Exception as error:
        return [f"emptying the cache: {error}"]
    return []


def memory_left(group: ReleasableGroup) -> str:
    """Return how much is free on ``group``'s device, for the text of an error."""
    free = torch_internals.free_bytes(group.device)
    return "" if free is None else f" ({free / 2**30:.2f} GiB were free on {group.device})"
