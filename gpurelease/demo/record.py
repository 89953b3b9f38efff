"""What is written down of one step of the job."""

from __future__ import annotations

from dataclasses import dataclass

from gpurelease import Transition
from gpurelease.demo.meter import Sample, Usage


@dataclass(frozen=True)
class Step:
    """One step, as rank 0 saw it.

    Attributes:
        number: From 1.
        reward: Mean reward of all ranks' answers: the share of right digits.
        before: Usage before the rollout.
        inside: Usage in the rollout's first released phase.
        after: Usage after the rollout.
        transitions: The rollout's releases and restores.
        samples: Usage over the time since the step before.
        seconds: When it ended, by the system's monotonic clock.
    """

    number: int
    reward: float
    before: Usage
    inside: Usage
    after: Usage
    transitions: list[Transition]
    samples: list[Sample]
    seconds: float

    @property
    def groups(self) -> int:
        """How many process groups of the rank were released."""
        return max((transition.groups for transition in self.transitions), default=0)

    def seconds_to(self, kind: str) -> float:
        """Return the seconds of all transitions of a kind, "release" or "restore"."""
        return sum(transition.total_seconds for transition in self.transitions if transition.kind == kind)
