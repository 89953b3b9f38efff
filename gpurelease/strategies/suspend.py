"""The strategy "suspend": communicators stay, and give back what of their memory they can.

It takes milliseconds where rebuilding takes seconds. What NCCL cannot suspend stays on the device, and so do the
communicators of two ranks that the first ProcessGroupNCCL makes for send and recv outside a batch: torch suspends only
the one of all members (2.12 to 2.15).
"""

from __future__ import annotations

from collections.abc import Sequence

from gpurelease.groups.releasable import Releasable
from gpurelease.strategies.rebuild import Rebuild
from gpurelease.strategies.strategy import (
    Backends,
    Husks,
    Means,
    Problems,
    Strategy,
    empty_cache,
    end_all,
    on_all,
    problem,
)
from gpurelease.torch_internals import backends as torch_backends


class Suspend(Strategy):
    """Suspend all backends, keep them, and resume them."""

    name = "suspend"
    step = "suspend"

    def __init__(self, husks: Husks) -> None:
        super().__init__(husks)
        self._kept: list[Backends] = []
        # Backends without a communicator have nothing to suspend, and raise if they are asked to.
        self._suspended: list[Backends] = []

    def release(self, taken: list[Backends], means: Means) -> Problems:
        """Suspend all backends that have a communicator."""
        self._kept = list(taken)
        taken.clear()
        self._suspended = [
            Backends(group, [backend for backend in each if torch_backends.connection_of(backend).there])
            for group, each in self._kept
        ]
        return on_all(torch_backends.suspend, "suspending", self._suspended, means) + empty_cache()

    def restore(
        self, groups: Sequence[Releasable], prefix: str, means: Means, *, in_turn: bool
    ) -> tuple[list[Backends], Problems]:
        """Resume all backends, but for groups that were destroyed meanwhile: nobody resumes theirs with us."""
        wanted = {group.key for group in groups}
        gone = [each for each in self._kept if each.group.key not in wanted]
        self._kept = [each for each in self._kept if each.group.key in wanted]
        self._suspended = [each for each in self._suspended if each.group.key in wanted]
        problems = empty_cache()
        end_all(gone, means, self._husks)
        with means.transition.step("resume"):
            problems += on_all(torch_backends.resume, "resuming", self._suspended, means)
        for group, backends in [] if problems else self._kept:
            try:
                group.pass_on(backends)
            except Exception as error:
                problems.append(problem(f"setting on {group} what was set on it meanwhile", error, group))
        return self._kept, problems

    def give_up(self, ready: Sequence[Backends], means: Means) -> Strategy:
        """End all communicators, and go on by building new ones.

        NCCL has the members of a communicator meet to suspend and to resume it. If one has failed, some may be on
        this side of it and some on the other, and none can be brought back together.
        """
        end_all(self._kept, means, self._husks)
        self._kept, self._suspended = [], []
        return Rebuild(self._husks)

    def settle(self) -> None:
        """Let go of the backends: they are the groups' own again."""
        self._kept, self._suspended = [], []
