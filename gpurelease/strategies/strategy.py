"""What every strategy has to do with the groups' backends, and the part that is the same for all.

Nothing here raises: what fails is returned in words, for all ranks to hear at the next roll call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch.distributed.distributed_c10d import Store

from gpurelease.groups.releasable import Releasable
from gpurelease.report import Transition
from gpurelease.strategies.pool import GivenUp, Job, Patience, Pool
from gpurelease.torch_internals import backends as torch_backends
from gpurelease.torch_internals import devices, nccl
from gpurelease.torch_internals.backends import Backend


class Backends(NamedTuple):
    """A group with backends that are not on its table: old ones on their way out, or those on their way in."""

    group: Releasable
    backends: list[Backend]


class Problem(NamedTuple):
    """What went wrong, in words; and whether it was broken off since another rank has failed."""

    text: str
    because_of_others: bool = False


Problems = list[Problem]


class Means(NamedTuple):
    """What a strategy works with during one transition.

    Attributes:
        pool: The threads.
        patience: How long they are waited for.
        limit: Longest wait for other ranks, where it must be said beforehand.
        client: A client of ours of WORLD's store.
        transition: Where the seconds are written down.
    """

    pool: Pool
    patience: Callable[[], Patience]
    limit: timedelta
    client: Store
    transition: Transition


class Husks:
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
        husks: What outlives the strategy.

    Attributes:
        name: What users call it.
        step: What the release's main step is called in reports.
    """

    name: Literal["rebuild", "suspend"]
    step: str

    def __init__(self, husks: Husks) -> None:
        self._husks = husks

    @abstractmethod
    def release(self, taken: list[Backends], means: Means) -> Problems:
        """Have all backends give their memory back. All ranks must call.

        Args:
            taken: What was taken off the tables, in the order that all ranks have. It is emptied.
            means: What to work with.
        """

    @abstractmethod
    def restore(
        self, groups: Sequence[Releasable], prefix: str, means: Means, *, in_turn: bool
    ) -> tuple[list[Backends], Problems]:
        """Return backends that work, for all groups, or for those that did not fail. All ranks must call.

        Args:
            groups: Those of the released groups that nobody has destroyed meanwhile, in the order that all ranks have.
            prefix: What keys begin with over which members meet, new for every time.
            means: What to work with.
            in_turn: Whether groups are built one after the other, on all ranks.
        """

    @abstractmethod
    def give_up(self, ready: Sequence[Backends], means: Means) -> Strategy:
        """Drop all backends after a failure on any rank, and return how to go on from there. All ranks must call.

        Args:
            ready: What ``restore`` has returned.
            means: What to work with.
        """

    @abstractmethod
    def settle(self) -> None:
        """Hear that all backends are on the tables again, on all ranks."""


def on_all(
    do: Callable[[Backend, torch.device | None], None], what: str, taken: Sequence[Backends], means: Means
) -> Problems:
    """Do something with all backends, at the same time, and return what went wrong.

    Args:
        do: What to do with a backend, on its group's device.
        what: What it is called in errors ("shutting down").
        taken: The backends, in the order that all ranks have.
        means: What to work with.
    """
    pairs = [(group, backend) for group, backends in taken for backend in backends]
    jobs = [Job(partial(_ignoring_token, do, backend, group.device)) for group, backend in pairs]
    means.pool.run(jobs, means.patience(), in_turn=bool(_second_nccl(taken)))
    return [
        problem(f"{what} {group}", job.error, group)
        for (group, _), job in zip(pairs, jobs, strict=True)
        if job.error is not None
    ]


def end_all(taken: Sequence[Backends], means: Means, husks: Husks) -> Problems:
    """End backends without asking their other members, who may be gone, and let go of them."""
    problems = on_all(torch_backends.abort, "ending", taken, means)
    husks.keep(taken)
    return problems


def _ignoring_token(
    do: Callable[[Backend, torch.device | None], None], backend: Backend, device: torch.device | None, token: object
) -> None:
    do(backend, device)


def problem(what: str, error: BaseException, group: Releasable | None = None) -> Problem:
    """Return in words what went wrong, with how much is free on the group's device."""
    free = None if group is None else devices.free_bytes(group.device)
    left = "" if free is None or group is None else f" ({free / 2**30:.2f} GiB were free on {group.device})"
    return Problem(f"{what}: {error}{left}", isinstance(error, GivenUp) and error.because_of_others)


def empty_cache() -> Problems:
    """Give what torch's allocator holds in reserve back to the device."""
    try:
        devices.empty_cache()
    except Exception as error:
        return [problem("emptying the cache", error)]
    return []


def _second_nccl(taken: Sequence[Backends]) -> list[Backend]:
    backends = (backend for _, backends in taken for backend in backends)
    return [each for each in backends if nccl.is_second_nccl(torch_backends.unwrap(each))]
