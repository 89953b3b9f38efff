"""The job's steps as text: a line each while it runs, a table and a summary when it is done."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from gpurelease.demo.record import Step

BAR = 30  # characters for a reward of one
WIDTH = 100  # characters in a line of prose


def progress(step: Step, steps: int) -> str:
    """Return one line on a step that has just been done."""
    width = len(str(steps))
    bar = "#" * round(step.reward * BAR)
    return (
        f"step {step.number:{width}d} of {steps}  reward {step.reward:.2f} |{bar:{BAR}}|  {step.groups} groups "
        f"released in {step.report.seconds('release'):.3f} s, restored in {step.report.seconds('restore'):.3f} s"
    )


def table(steps: Sequence[Step]) -> str:
    """Return a row for each step, under a head of two lines."""
    names = list(steps[0].before.figures)
    head = f"{'':4}  {'':6}  {'groups':>8}  {'seconds to':^16}" + "".join(f"   {name:^24}" for name in names)
    head += f"\n{'step':>4}  {'reward':>6}  {'released':>8}  {'release':>7}  {'restore':>7}"
    head += f"   {'before':>8}{'inside':>8}{'after':>8}" * len(names)
    return "\n".join([head, *map(_row, steps)])


def summary(steps: Sequence[Step]) -> str:
    """Return what there is to see in the table, in words."""
    first, last = steps[0], steps[-1]
    learned = f"The reward went from {first.reward:.2f} to {last.reward:.2f}"
    if not last.groups:
        return f"{learned}. Nothing was released; is GPURELEASE_DISABLE set?"
    falls = [
        f"{name} went from {last.before.figures[name]:.0f} to {last.inside.figures[name]:.0f} and back to "
        f"{last.after.figures[name]:.0f}"
        for name in last.before.figures
    ]
    return textwrap.fill(
        f"{learned}, while every rollout ran with the trainer's {last.groups} process groups released, but for the "
        f"weight sync in its middle. In the last one, on rank 0, {', and '.join(falls)}. The Gloo that stands in for "
        "WORLD was made in the first one, and kept.",
        width=WIDTH,
    )


def _row(step: Step) -> str:
    row = f"{step.number:4d}  {step.reward:6.3f}  {step.groups:8d}"
    row += f"  {step.report.seconds('release'):7.3f}  {step.report.seconds('restore'):7.3f}"
    for name in step.before.figures:
        row += "   " + "".join(f"{usage.figures[name]:8.0f}" for usage in (step.before, step.inside, step.after))
    return row
