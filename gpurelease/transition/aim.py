"""What a scope wants of the world."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from gpurelease.groups.plan import Plan
from gpurelease.options import ScopeOptions
from gpurelease.report import Report, Transition
from gpurelease.transition.world import Phase


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
