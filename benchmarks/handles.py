"""What is paid outside a scope, and inside: a collective through a handle, a nested scope, a plan; and the memory.

    python -m benchmarks.handles [--cycles 300] [--json FILE]

One rank alone, but for the memory. A collective is compared in CPU microseconds of its caller: before the first cycle,
after many, and in a process that has never imported gpurelease. All are to be 1.00 of the last, within noise, of which
the 95th percentile gives an idea.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from benchmarks import bare
from benchmarks.double import MEGATRON, init, make_groups, ranks_on_double, use
from benchmarks.sheet import Sheet, parser, spread
from gpurelease import released_world
from gpurelease.groups.plan import plan
from gpurelease.options import ScopeOptions
from tests.nccl.double import FIRST, held

TIMES, GROUPS = 300, 64
SHARED = "/dev/shm"  # where ranks on the double meet if they can


def without() -> list[float]:
    """Return the microseconds of a collective in a process that has never imported gpurelease."""
    with tempfile.TemporaryDirectory(dir=SHARED if os.path.isdir(SHARED) else None) as folder:
        command = [sys.executable, "-m", "benchmarks.bare", FIRST]
        run = subprocess.run(
            command, env={**os.environ, "SIMGPU_DIR": folder}, check=True, stdout=subprocess.PIPE, text=True
        )
    return json.loads(run.stdout)


def with_it(rank: int, size: int, cycles: int) -> dict[str, list[float]]:
    """Return the microseconds of a collective before the first cycle and after many."""
    group = bare.init(FIRST)
    taken = {"before the first cycle": bare.microseconds(group)}
    for _ in range(cycles):
        with released_world(timeout=60):
            pass
    use([group])
    taken[f"after {cycles} cycles"] = bare.microseconds(group)
    return taken


def nested(rank: int, size: int) -> list[float]:
    """Return the microseconds of a scope inside another."""
    init(rank, size)
    with released_world(timeout=60):
        return timed(lambda: released_world().__enter__().__exit__(None, None, None))


def planning(rank: int, size: int, groups: int) -> list[float]:
    """Return the microseconds in which a rank looks at its groups, for what it would release."""
    init(rank, size)
    mine = [dist.group.WORLD, *(dist.new_group([0]) for _ in range(groups - 1))]
    use(mine)
    return timed(lambda: plan(dist.group.WORLD, ScopeOptions(), ()))


def timed(do: Callable[[], Any]) -> list[float]:
    """Return the microseconds that each of many calls took."""
    seconds = []
    for _ in range(TIMES):
        start = time.perf_counter()
        do()
        seconds.append(time.perf_counter() - start)
    return [1e6 * each for each in seconds]


def memory(rank: int, size: int, strategy: str) -> list[float]:
    """Return the megabytes that communicators hold before a scope, inside it and after it."""
    init(rank, size)
    groups = make_groups(rank, size)
    use(groups)
    before = held()
    with released_world(strategy=strategy, timeout=60):
        inside = held()
    use(groups)
    return [each / 1e6 for each in (before, inside, held())]


def main() -> None:
    """Measure all four."""
    arguments = parser(__doc__)
    arguments.add_argument("--cycles", type=int, default=300)
    options = arguments.parse_args()
    sheet = Sheet("handles", "double")
    with ranks_on_double() as run:
        taken = {"without the library": without(), **run(with_it, 1, cycles=options.cycles)[0]}
        usual = spread(taken["without the library"])["median"]
        for when, microseconds in taken.items():
            numbers = spread(microseconds)
            sheet.row(collective=when, CPU_us=numbers, of_without=numbers["median"] / usual)
        sheet.row(other="a nested scope", us=spread(run(nested, 1)[0]))
        sheet.row(other=f"a plan of {GROUPS} groups", us=spread(run(planning, 1, groups=GROUPS)[0]))
        for strategy in ("rebuild", "suspend"):
            before, inside, after = run(memory, 8, strategy=strategy)[0]
            sheet.row(strategy=strategy, groups=MEGATRON, MB_before=before, MB_inside=inside, MB_after=after)
    sheet.write(options.json)


if __name__ == "__main__":
    main()
