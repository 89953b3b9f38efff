"""The job over time, as one picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gpurelease.demo.record import Step
from gpurelease.demo.task import DIGITS

REWARD, RELEASED = "#1b7837", "#fdd9a0"
HELD = ("#2166ac", "#762a83")


def draw(steps: Sequence[Step], path: Path) -> None:
    """Draw the reward, and below it what rank 0 held over the same time, with the released phases shaded.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    samples = [sample for step in steps for sample in step.samples]
    start, end = samples[0].seconds, steps[-1].seconds
    times = [sample.seconds - start for sample in samples]
    figure = Figure(figsize=(12, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    learning, holding = figure.subplots(2, sharex=True)

    learning.set_title("Reward: share of right digits", loc="left")
    learning.plot([step.seconds - start for step in steps], [step.reward for step in steps], ".-", color=REWARD)
    learning.axhline(1 / DIGITS, color="grey", linestyle=":")
    learning.text(end - start, 1 / DIGITS, "chance", color="grey", ha="right", va="bottom")
    learning.set_ylim(0, 1)

    holding.set_title("Held by rank 0; shaded: the process groups are released", loc="left")
    released = [sample.released for sample in samples]
    everywhere = holding.get_xaxis_transform()  # from the bottom of the panel, 0, to its top, 1
    holding.fill_between(times, 0, 1, where=released, step="post", transform=everywhere, color=RELEASED, linewidth=0)
    for name, color in zip(samples[0].usage.figures, HELD, strict=False):
        figures = [sample.usage.figures[name] for sample in samples]
        holding.step(times, figures, where="post", color=color)
        holding.text(end - start, figures[-1], f" {name}", color=color, va="center")
    holding.set(xlabel="seconds", xlim=(0, 1.08 * (end - start)))
    holding.set_ylim(bottom=0)

    for panel in (learning, holding):
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", alpha=0.3)
    figure.savefig(path)
