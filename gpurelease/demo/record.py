"""What is written down of one step of the job."""

from __future__ import annotations

from dataclasses import dataclass

from gpurelease import Report
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
        report: Of the rollout's scope: its releases and restores.
        samples: Usage over the time since the step before.
        seconds: When it ended, by the system's monotonic clock.
    """

    number: int
    reward: float
    before: Usage
    inside: Usage
    after: Usage
    report: Report
    samples: list[Sample]
    seconds: float

    @property
    def groups(self) -> int:
        """How many process groups of the rank were released."""
        return max((transition.groups for transition in self.report.transitions), default=0)
