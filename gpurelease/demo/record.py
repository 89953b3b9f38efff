"""What is written down of one step of the job."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gpurelease.demo.meter import Change, Sample, Usage


@dataclass(frozen=True)
class Step:
    """One step, as rank 0 saw it.

    Attributes:
        number: From 1.
        reward: Mean reward of all ranks' answers: the share of right digits.
        before: Usage before the rollout.
        after: Usage after the rollout.
        changes: The transitions of the rollout, in order: release, restore, and so on.
        samples: Usage over the time since the step before.
        seconds: When it ended, by the system's monotonic clock.
    """

    number: int
    reward: float
    before: Usage
    after: Usage
    changes: list[Change]
    samples: list[Sample]
    seconds: float

    @property
    def inside(self) -> Usage:
        """Usage when the world had just been released."""
        return next((change.usage for change in self.changes if change.transition.kind == "release"), self.before)

    @property
    def groups(self) -> int:
        """How many process groups of the rank were released."""
        return max((change.transition.groups for change in self.changes), default=0)

    def seconds_to(self, kind: str) -> float:
        """Return the seconds of all transitions of a kind, "release" or "restore"."""
        return sum(change.transition.total_seconds for change in self.changes if change.transition.kind == kind)

    def released_phases(self) -> Iterator[tuple[float, float]]:
        """Yield when each released phase began and ended."""
        for release, restore in zip(self.changes[::2], self.changes[1::2], strict=True):
            yield release.seconds, restore.seconds - restore.transition.total_seconds
