"""The strategy "suspend": communicators stay, and give back what of their memory they can.

It takes milliseconds where rebuilding takes seconds. What NCCL cannot suspend stays on the device, and so do the
communicators of two ranks that the first ProcessGroupNCCL makes for send and recv outside a batch: torch suspends only
the one of all members (2.12 to 2.15).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import torch

from gpurelease import torch_internals
from gpurelease.groups import ReleasableGroup
from gpurelease.parallel import run_all
from gpurelease.rebuild import Rebuild
from gpurelease.report import Transition
from gpurelease.strategy import THREADS, Backends, Problems, Shells, Strategy, empty_cache, memory_left
from gpurelease.torch_internals import Backend


class _Member(NamedTuple):
    """One backend with its group."""

    group: ReleasableGroup
    backend: Backend


class Suspend(Strategy):
    """Suspend all backends, keep them, and resume them."""

    name = "suspend"
    step = "suspend"

    def __init__(self, shells: Shells) -> None:
        super().__init__(shells)
        self._kept: list[Backends] = []
        # Backends without a communicator have nothing to suspend, and raise if they are asked to.
        self._suspended: list[_Member] = []

    def release(self, taken: list[Backends], limit: timedelta) -> Problems:
        """Suspend all backends that have a communicator."""
        self._kept = list(taken)
        taken.clear()
        self._suspended = [m for m in _members(self._kept) if torch_internals.is_connected(m.backend)]
        return _on_all(torch_internals.suspend, "suspending", self._suspended, limit) + empty_cache()

    def restore(
        self, groups: Sequence[ReleasableGroup], prefix: str, limit: timedelta, transition: Transition
    ) -> tuple[list[Backends], Problems]:
        """Resume all backends, but for groups that were destroyed meanwhile: nobody resumes theirs with us."""
        wanted = {group.key for group in groups}
        gone = [m for m in _members(self._kept) if m.group.key not in wanted]
        self._kept = [backends for backends in self._kept if backends.group.key in wanted]
        self._suspended = [m for m in self._suspended if m.group.key in wanted]
        problems = empty_cache()
        self._end(gone, limit)
        with transition.step("resume"):
            problems += _on_all(torch_internals.resume, "resuming", self._suspended, limit)
        return self._kept, problems

    def give_up(self, built: list[Backends], limit: timedelta) -> Strategy:
        """End all communicators, and go on by building new ones.

        NCCL has the members of a communicator meet to suspend and to resume it. If one has failed, some may be on
        this side of it and some on the other, and none can be brought back together.
        """
        self._end(_members(self._kept), limit)
        self._kept, self._suspended = [], []
        return Rebuild(self._shells)

    def settle(self) -> None:
        """Let go of the backends: they are the groups' own again."""
        self._kept, self._suspended = [], []

    def _end(self, members: Sequence[_Member], limit: timedelta) -> None:
        _on_all(torch_internals.abort, "ending", members, limit)
        self._shells.keep([member.backend for member in members])


def _members(kept: Sequence[Backends]) -> list[_Member]:
    return [_Member(group, backend) for group, backends in kept for backend in backends]


def _on_all(
    do: Callable[[Backend, torch.device | None], None], doing: str, members: Sequence[_Member], limit: timedelta
) -> Problems:
    """Do something with all backends, at the same time, and return what went wrong."""
    second = any(torch_internals.is_second_nccl(torch_internals.unwrap(member.backend)) for member in members)
    jobs = [partial(do, member.backend, member.group.device) for member in members]
    outcomes = run_all(jobs, 1 if second else THREADS, limit.total_seconds())
    return [
        f"{doing} {member.group}: {error}{memory_left(member.group)}"
        for member, error in zip(members, outcomes, strict=True)
        if error is not None
    ]
