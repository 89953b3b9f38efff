"""The job over time, as one picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gpurelease.demo.record import Step
from gpurelease.demo.task import DIGITS

REWARD, RELEASED = "#1b7837", "#fdd9a0"
USAGES = ("#2166ac", "#762a83")


def draw(steps: Sequence[Step], path: Path) -> None:
    """Draw the reward, and what rank 0 held, over the same time; the released phases are shaded.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    start = steps[0].samples[0].seconds
    figure = Figure(figsize=(12, 6.5), layout="constrained")
    learning, holding = figure.subplots(2, sharex=True)

    learning.set_title("A policy learns while its trainer's process groups come and go", loc="left", weight="bold")
    learning.plot([s.seconds - start for s in steps], [s.reward for s in steps], ".-", color=REWARD)
    learning.axhline(1 / DIGITS, color="grey", linestyle=":")
    learning.text(0, 1 / DIGITS, " chance", color="grey", va="bottom")
    learning.set(ylabel="reward (share of right digits)", ylim=(0, 1))

    samples = [sample for step in steps for sample in step.samples]
    times = [sample.seconds - start for sample in samples]
    for name, color in zip(samples[0].usage.figures, USAGES, strict=False):
        holding.plot(times, [sample.usage.figures[name] for sample in samples], color=color, label=name)
    for begin, end in (phase for step in steps for phase in step.released_phases()):
        holding.axvspan(begin - start, end - start, color=RELEASED, linewidth=0)
    holding.set(xlabel="seconds", ylabel="held by rank 0 (shaded: released)", xlim=(0, None))
    holding.set_ylim(bottom=0)
    holding.legend(loc="lower right", ncols=2)

    for panel in (learning, holding):
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", alpha=0.3)
    FigureCanvasAgg(figure).print_png(path)
