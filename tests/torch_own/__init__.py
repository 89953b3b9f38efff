"""torch's own tests of its process groups, gone through with gpurelease at work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Outcome(NamedTuple):
    """What became of one test: "passed" (on all ranks), "skipped" or "failed", why, and how many cycles it had."""

    outcome: str
    why: str
    cycles: int


def outcomes(*arguments: str, ranks: int, timeout: float) -> dict[str, Outcome]:
    """Run :mod:`tests.torch_own.suite`, and return what became of each test.

    Args:
        *arguments: What it is told.
        ranks: Number of ranks.
        timeout: Seconds after which it fails.
    """
    command = [sys.executable, "-m", "tests.torch_own.suite", *arguments]
    environment = {**os.environ, "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr[-5000:]
    lines = map(json.loads, done.stdout.splitlines())
    return {name: Outcome(*rest) for name, *rest in lines}


def assert_cycles_change_nothing(with_cycles: Mapping[str, Outcome], *, ranks: int, timeout: float) -> None:
    """Check that each test ends as it does without cycles, of which those that pass need not be asked.

    Args:
        with_cycles: What became of the tests with cycles.
        ranks: Number of ranks.
        timeout: Seconds that the others may take without cycles.
    """
    passed = {name: each for name, each in with_cycles.items() if each.outcome == "passed"}
    assert all(each.cycles for each in passed.values()), [name for name, each in passed.items() if not each.cycles]
    without = {}
    if others := with_cycles.keys() - passed.keys():
        without = outcomes(*sorted(others), ranks=ranks, timeout=timeout)
    changed = [name for name, each in without.items() if each.outcome != with_cycles[name].outcome]
    assert not changed, "\n".join(f"{name}: without {without[name]}, with {with_cycles[name]}" for name in changed)


def that_want_more_ranks(skipped: Mapping[str, Outcome], why: str) -> Iterable[str]:
    """Return the names of tests that were skipped for a reason that begins with ``why``."""
    return sorted(name for name, each in skipped.items() if each.outcome == "skipped" and each.why.startswith(why))
