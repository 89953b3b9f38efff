"""What all benchmarks share: the line that says where they ran, and rows that are printed as they come, and kept."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

Spread = dict[str, float]  # the median and the 95th percentile


def spread(values: Iterable[float]) -> Spread:
    """Return the median of some values, and their 95th percentile."""
    values = sorted(values)
    return {"median": statistics.median(values), "p95": values[min(len(values) - 1, round(0.95 * len(values)))]}


def parser(doc: str) -> argparse.ArgumentParser:
    """Return a parser of the arguments that all benchmarks have."""
    made = argparse.ArgumentParser(description=doc.splitlines()[0])
    made.add_argument("--json", type=Path, metavar="FILE", help="where to write the numbers")
    return made


class Sheet:
    """The numbers of one run.

    Args:
        name: The benchmark's.
        nccl: What stands for NCCL ("double", "none").
    """

    def __init__(self, name: str, nccl: str) -> None:
        self._columns: list[str] = []
        self._content: dict[str, Any] = {
            "benchmark": name,
            "torch": torch.__version__,
            "NCCL": nccl,
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "load average": os.getloadavg()[0],
        }
        print(", ".join(f"{key} {value}" for key, value in self._content.items()))
        print("numbers are: median (95th percentile)", flush=True)
        self._content["rows"] = []

    def row(self, **fields: Any) -> None:
        """Print one row, below a header if it has other columns than the one before, and keep it."""
        columns = list(fields)
        if columns != self._columns:
            print("\n" + "  ".join(f"{_title(column):>{_width(column)}}" for column in columns))
            self._columns = columns
        print("  ".join(f"{_text(value):>{_width(column)}}" for column, value in fields.items()), flush=True)
        self._content["rows"].append(fields)

    def write(self, path: Path | None) -> None:
        """Write everything, if a path was given."""
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(self._content, indent=1) + "\n")


def _title(column: str) -> str:
    return column.replace("_", " ")


def _width(column: str) -> int:
    return max(15, len(column))


def _text(value: Any) -> str:
    if isinstance(value, Mapping) and "median" in value:
        return f"{_text(value['median'])} ({_text(value['p95'])})"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_text(part)}" for name, part in value.items())
    return f"{value:.3g}" if isinstance(value, float) else str(value)
