"""What a scope wants of the world."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import torch

from gpurelease import history
from gpurelease.agreement.ballot import Answer, Verdict
from gpurelease.errors import TransitionFailed
from gpurelease.groups.plan import Plan
from gpurelease.options import ScopeOptions
from gpurelease.report import Report, Transition
from gpurelease.transition.world import Phase

logger = logging.getLogger(__name__)


@dataclass
class Aim:
    """What a scope wants of the world, as its caller's thread has prepared it.

    Attributes:
        wants: The phase that the world is to be in.
        options: With what.
        report: Where to write what becomes of each group, and what it takes.
        plan: What this rank would release.
        problem: Why this rank cannot go on, or the empty string.
        narrow: Whether a Gloo for WORLD must not connect this rank to every other.
        contexts: Whether there is an ``also=`` to enter once the world is released.
        context: What an ``also=`` context has raised, or the empty string.
        step: What was done before, by the caller.
        device: The accelerator device that is current in the caller's thread, or None.
        transition: What this rank is at, and the seconds that it has taken.
    """

    wants: Phase
    options: ScopeOptions
    report: Report
    plan: Plan = field(default_factory=Plan)
    problem: str = ""
    narrow: bool = False
    contexts: bool = False
    context: str = ""
    step: str = ""
    device: torch.device | None = None
    transition: Transition = field(init=False)

    def __post_init__(self) -> None:
        self.transition = Transition("release" if self.wants is Phase.RELEASED else "restore")

    def numbers(self) -> Answer:
        """Return what the other ranks are to hear of what this one has done."""
        return {"freed": self.transition.freed_bytes, "worked": round(self.transition.working_seconds, 6)}

    def write_down(self, verdict: Verdict, rank: int) -> None:
        """Write down what was done, in the log too: on rank 0 for all ranks.

        Args:
            verdict: The last verdict.
            rank: This process's rank.
        """
        transition = self.transition
        if verdict.get("freed"):
            transition.freed_bytes_over_ranks = tuple(verdict["freed"])
        if verdict.get("worked"):
            transition.working_seconds_over_ranks = tuple(verdict["worked"])
        self.report.transitions.append(transition)
        notes = self.report.notes() if transition.kind == "release" else ""
        level = logging.INFO if rank == 0 else logging.DEBUG
        logger.log(level, "rank %d %s%s", rank, transition, notes and f"; {notes}")
        history.add(self.report, transition)

    def write_down_failure(self, failure: TransitionFailed, rank: int) -> None:
        """Write down that it failed, in the log too: on rank 0, and on ranks that it is about.

        Args:
            failure: What will be raised.
            rank: This process's rank.
        """
        level = logging.ERROR if rank == 0 or rank in failure.failures else logging.DEBUG
        logger.log(level, "rank %d could not %s the world: %s", rank, self.transition.kind, failure)
        history.add_failure(self.transition.kind)
