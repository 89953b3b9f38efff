"""What something took a rank, and what that makes over all ranks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.sheet import spread
from gpurelease import Report


def timed(do: Callable[[], Any]) -> dict[str, Any]:
    """Do something on all ranks together, and return the seconds and CPU seconds, and how they are made up."""
    dist.barrier()
    torch.cuda.synchronize()
    cpu, start = time.process_time(), time.perf_counter()
    steps = do()
    return {"seconds": time.perf_counter() - start, "CPU seconds": time.process_time() - cpu, "steps": steps}


def seconds_by_step(report: Report) -> dict[str, float]:
    """Return what the steps of a scope took, those of the release and of the restore together."""
    seconds: dict[str, float] = {}
    for transition in report.transitions:
        for step, took in transition.seconds.items():
            seconds[step] = seconds.get(step, 0.0) + took
    return seconds


def over_ranks(rounds: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Return what rounds took: the slowest rank; and of CPU seconds and of milliseconds by step, the mean of ranks."""
    by_step: dict[str, list[float]] = {}
    for ranks in rounds:
        for step in ranks[0]["steps"]:
            by_step.setdefault(step, []).append(statistics.mean(each["steps"].get(step, 0.0) for each in ranks))
    return {
        "seconds": spread(max(each["seconds"] for each in ranks) for ranks in rounds),
        "CPU_seconds": spread(statistics.mean(each["CPU seconds"] for each in ranks) for ranks in rounds),
        "steps_ms": {step: 1000 * statistics.median(seconds) for step, seconds in by_step.items()},
    }
