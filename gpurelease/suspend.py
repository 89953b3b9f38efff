"""The strategy "suspend": communicators stay, and give back what of their memory they can.

It takes milliseconds where rebuilding takes seconds. What NCCL cannot suspend stays on the device, and so do the
communicators of two ranks that the first ProcessGroupNCCL makes for send and recv outside a batch: torch suspends only
the one of all members (2.12 to 2.15).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from gpurelease import torch_internals
from gpurelease.groups import ReleasableGroup
from gpurelease.rebuild import Rebuild
from gpurelease.report import Transition
from gpurelease.strategy import Backends, Problems, Shells, Strategy, empty_cache, memory_left, on_all


class Suspend(Strategy):
    """Suspend all backends, keep them, and resume them."""

    name = "suspend"
    step = "suspend"

    def __init__(self, shells: Shells) -> None:
        super().__init__(shells)
        self._kept: list[Backends] = []
        # Backends without a communicator have nothing to suspend, and raise if they are asked to.
        self._suspended: list[Backends] = []

    def release(self, taken: list[Backends], limit: timedelta) -> Problems:
        """Suspend all backends that have a communicator."""
        self._kept = list(taken)
        taken.clear()
        self._suspended = [Backends(group, list(filter(torch_internals.is_connected, bs))) for group, bs in self._kept]
        failed = on_all(torch_internals.suspend, self._suspended, limit)
        return [f"suspending {group}: {error}{memory_left(group)}" for group, error in failed] + empty_cache()

    def restore(
        self, groups: Sequence[ReleasableGroup], prefix: str, limit: timedelta, transition: Transition
    ) -> tuple[list[Backends], Problems]:
        """Resume all backends, but for groups that were destroyed meanwhile: nobody resumes theirs with us."""
        wanted = {group.key for group in groups}
        gone = [each for each in self._kept if each.group.key not in wanted]
        self._kept = [each for each in self._kept if each.group.key in wanted]
        self._suspended = [each for each in self._suspended if each.group.key in wanted]
        problems = empty_cache()
        self._end(gone, limit)
        with transition.step("resume"):
            failed = on_all(torch_internals.resume, self._suspended, limit)
            problems += [f"resuming {group}: {error}{memory_left(group)}" for group, error in failed]
        return self._kept, problems

    def give_up(self, built: list[Backends], limit: timedelta) -> Strategy:
        """End all communicators, and go on by building new ones.

        NCCL has the members of a communicator meet to suspend and to resume it. If one has failed, some may be on
        this side of it and some on the other, and none can be brought back together.
        """
        self._end(self._kept, limit)
        self._kept, self._suspended = [], []
        return Rebuild(self._shells)

    def settle(self) -> None:
        """Let go of the backends: they are the groups' own again."""
        self._kept, self._suspended = [], []

    def _end(self, kept: Sequence[Backends], limit: timedelta) -> None:
        on_all(torch_internals.abort, kept, limit)
        self._shells.keep(kept)
