"""The numbers of a folder as pictures beside them: ``python -m benchmarks.draw FOLDER``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

Rows = list[dict[str, Any]]


def cycle(rows: Rows, figure: Figure) -> None:
    """A bar for each way, cut into steps; a panel for each world."""
    worlds = list(dict.fromkeys((row["world"], row["ms_each"]) for row in rows))
    panels = figure.subplots(2, len(worlds) // 2, squeeze=False)
    steps = list(dict.fromkeys(step for row in rows for step in row["steps_ms"]))
    for number, (world, ms_each) in enumerate(worlds):
        panel = panels[number % 2][number // 2]
        for row in rows:
            if (row["world"], row["ms_each"]) != (world, ms_each):
                continue
            left = 0.0
            for step, ms in row["steps_ms"].items():
                label = step if number == 0 else None
                panel.barh(row["way"], ms, left=left, color=colormaps["tab20"](steps.index(step)), label=label)
                left += ms
            panel.text(left, row["way"], f" {row['of_torch']:.2f}", va="center")
        panel.set_title(f"{world}, {ms_each} ms for a communicator", loc="left")
        panel.margins(x=0.15)
        panel.invert_yaxis()
    handles = {
        label: handle for each in panels.flat for handle, label in zip(*each.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles))
    figure.suptitle("Milliseconds of a cycle by step, and the whole as a part of torch's")


def growth(rows: Rows, figure: Figure) -> None:
    """The time of a cycle over groups, over ranks, and after many others."""
    over_groups, over_ranks, over_cycles = figure.subplots(1, 3)
    counted = [row for row in rows if "groups" in row]
    size = counted[-1]["groups"]  # with which ranks grow
    for ms_each in (0, 30):
        chosen = [row for row in counted if row["ms_each"] == ms_each and row["groups"] != size]
        line(over_groups, chosen, "groups", "seconds", f"{ms_each} ms for a communicator")
    line(over_groups, chosen, "groups", "CPU_seconds", "CPU, of a rank")
    line(over_ranks, [row for row in counted if row["groups"] == size and row["ms_each"]], "ranks", "seconds", "")
    line(over_cycles, [row for row in rows if "cycles" in row], "cycles", "seconds", "")
    over_groups.set(title="Seconds of a cycle", xlabel="groups of a rank", xscale="log", yscale="log")
    over_ranks.set(title=f"with {size} groups", xlabel="ranks on this machine", ylim=0)
    over_cycles.set(title="after others", xlabel="cycles", xscale="log", ylim=0)


def rollcall(rows: Rows, figure: Figure) -> None:
    """What grows with the ranks in a roll call, and what does not."""
    panels = figure.subplots(1, 2)
    for panel, which in zip(panels, ("first", "later"), strict=True):
        chosen = [row for row in rows if row["roll_call"] == which]
        for field in ("server_CPU_ms", "concluding_CPU_ms", "rank_CPU_ms", "requests_a_rank"):
            line(panel, chosen, "ranks", field, field.replace("_", " "))
        panel.set(title=f"A roll call: {which}", xlabel="simulated ranks", xscale="log", yscale="log")


def line(panel: Any, rows: Rows, over: str, field: str, label: str) -> None:
    """Draw the medians of a field, up to the 95th percentiles."""
    values = [row[field] for row in rows]
    places = [row[over] for row in rows]
    panel.plot(places, [value["median"] for value in values], ".-", label=label)
    panel.fill_between(places, [value["median"] for value in values], [value["p95"] for value in values], alpha=0.2)
    if label:
        panel.legend()
    panel.grid(alpha=0.3)


DRAWN: dict[str, Callable[[Rows, Figure], None]] = {"cycle": cycle, "growth": growth, "rollcall": rollcall}


def main() -> None:
    """Draw what is there."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("folder", type=Path)
    folder = arguments.parse_args().folder
    for name, draw in DRAWN.items():
        path = folder / f"{name}.json"
        if path.exists():
            figure = Figure(figsize=(14, 5), layout="constrained")
            FigureCanvasAgg(figure)
            draw(json.loads(path.read_text())["rows"], figure)
            figure.savefig(folder / f"{name}.png")
            print(folder / f"{name}.png")


if __name__ == "__main__":
    main()
