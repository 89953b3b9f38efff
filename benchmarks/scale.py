"""What a user pays at any number of ranks: a simple model, fitted to what the other benchmarks have measured.

    python -m benchmarks.scale FOLDER        the folder with cycle.json, growth.json and rollcall.json

A cycle of a rank with G groups, of N ranks on machines of their own, is

    a + b G                 what a rank itself has to do: CPU seconds of growth's cycles, over numbers of groups
    + c ceil(G / 8) T       its communicators, T seconds each, 8 at a time: what growth's cycles took longer with T
    + 4 (d + e N)           the roll calls of a cycle: CPU seconds of the server and of who concludes, over numbers of
                            ranks, since the server answers one after the other

a to e are least squares. The first scope pays more: (f + g N) for the first roll call with all that is told there, and
Gloo for WORLD, which is not in here.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy

ROLL_CALLS = 4  # of a cycle
THREADS = 8
GROUPS, SECONDS_EACH = 18, (0.03, 0.3)
RANKS = (8, 64, 512, 4096)


def fitted(columns: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Return how much of each column, none of them less than nothing, gives the values with the least squares.

    Errors count in proportion, or the largest would be all that counts.
    """
    weights = 1 / numpy.array(values)
    left = list(range(len(columns)))
    while True:
        matrix = numpy.array([columns[number] for number in left]).T
        found, *_ = numpy.linalg.lstsq(matrix * weights[:, None], numpy.array(values) * weights, rcond=None)
        if all(each >= 0 for each in found):
            shares = dict(zip(left, found, strict=True))
            return [float(shares.get(number, 0.0)) for number in range(len(columns))]
        left.remove(left[int(numpy.argmin(found))])


class Model:
    """The model, fitted.

    Args:
        growth: The rows of ``growth``.
        rollcall: The rows of ``rollcall``.
    """

    def __init__(self, growth: list[dict[str, Any]], rollcall: list[dict[str, Any]]) -> None:
        counted = [row for row in growth if "ms_each" in row]
        size = counted[0]["ranks"]
        by_groups: dict[int, dict[int, dict[str, Any]]] = {}
        for row in counted:
            if row["ranks"] == size:
                by_groups.setdefault(row["groups"], {})[row["ms_each"]] = row
        both = {groups: rows for groups, rows in by_groups.items() if {0, 30} <= rows.keys()}
        cpu = [rows[0]["CPU_seconds"]["median"] for rows in both.values()]
        self.fixed, self.each = fitted([[1.0] * len(both), list(map(float, both))], cpu)
        longer = [rows[30]["seconds"]["median"] - rows[0]["seconds"]["median"] for rows in both.values()]
        [self.rounds] = fitted([[0.03 * math.ceil(groups / THREADS) for groups in both]], longer)
        self.first, self.later = (self._roll_call(rollcall, which) for which in ("first", "later"))

    def _roll_call(self, rows: list[dict[str, Any]], which: str) -> tuple[float, float]:
        rows = [row for row in rows if row["roll_call"] == which]
        seconds = [(row["server_CPU_ms"]["median"] + row["concluding_CPU_ms"]["median"]) / 1000 for row in rows]
        at_rest, each = fitted([[1.0] * len(rows), [row["ranks"] for row in rows]], seconds)
        return at_rest, each

    def cycle(self, ranks: int, groups: int, seconds_each: float) -> tuple[float, float, float]:
        """Return the seconds of a cycle: of the rank's own work, its communicators, and the roll calls."""
        communicators = self.rounds * math.ceil(groups / THREADS) * seconds_each
        return self.fixed + self.each * groups, communicators, ROLL_CALLS * (self.later[0] + self.later[1] * ranks)

    def more_at_first(self, ranks: int) -> float:
        """Return how many seconds the first roll call of a job takes longer."""
        return self.first[0] - self.later[0] + (self.first[1] - self.later[1]) * ranks


def main() -> None:
    """Fit, and print the table."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("folder", type=Path)
    folder = arguments.parse_args().folder
    rows = {name: json.loads((folder / f"{name}.json").read_text())["rows"] for name in ("growth", "rollcall")}
    model = Model(rows["growth"], rows["rollcall"])
    print(f"a {1000 * model.fixed:.1f} ms, b {1000 * model.each:.2f} ms a group, c {model.rounds:.2f}")
    for name, (at_rest, each) in (("later", model.later), ("first", model.first)):
        print(f"roll call, {name}: {1000 * at_rest:.1f} ms + {1e6 * each:.0f} us a rank")
    print(f"\nmilliseconds of a cycle with {GROUPS} groups")
    print("  ranks  ms each    own work  communicators  roll calls     all  more at first")
    for seconds_each in SECONDS_EACH:
        for ranks in RANKS:
            parts = [1000 * part for part in model.cycle(ranks, GROUPS, seconds_each)]
            own, communicators, roll_calls = parts
            print(
                f"{ranks:7}  {1000 * seconds_each:7.0f}  {own:10.0f}  {communicators:13.0f}  {roll_calls:10.0f}"
                f"  {sum(parts):6.0f}  {1000 * model.more_at_first(ranks):13.0f}"
            )


if __name__ == "__main__":
    main()
