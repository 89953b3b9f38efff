"""What a cycle becomes with more groups, with more ranks, and after many others.

    python -m benchmarks.growth [--cycles 3000] [--json FILE]

Ranks share the cores of one machine here, and with them what a cycle costs the CPU: CPU seconds are what a rank would
have to spend on a core of its own.
"""

from __future__ import annotations

import resource
import time
from typing import Any

import torch.distributed as dist

from benchmarks.double import MEGATRON, communicators_take, init, make_groups, ranks_on_double, use
from benchmarks.sheet import Sheet, parser, spread
from benchmarks.timing import over_ranks, seconds_by_step, timed
from gpurelease import released_world
from tests.nccl.double import held
from tests.ranks import descriptors, threads

SMALL = {"SIMGPU_COMM_DYN_MB": "16", "SIMGPU_COMM_PERSIST_MB": "4"}  # for 512 communicators to fit on a device
LAST = 50  # cycles that the time of a cycle is told of, after many others


def cycle() -> dict[str, float]:
    """Go through a cycle, and return the seconds of its steps."""
    with released_world(timeout=60) as scope:
        pass
    return seconds_by_step(scope.report)


def of_some(rank: int, size: int, groups: int, ms_each: int, cycles: int) -> list[dict[str, Any]]:
    """Return what cycles took with some groups."""
    init(rank, size)
    use(make_groups(rank, size, groups))
    communicators_take(ms_each / 1000)
    cycle()
    return [timed(cycle) for _ in range(cycles)]


def after_many(rank: int, size: int, marks: list[int]) -> list[dict[str, Any]]:
    """Go through many cycles, and return what this process held at some of them, and what the last ones had taken."""
    init(rank, size)
    groups = make_groups(rank, size, 4)
    use(groups)
    cycle()  # builds the Gloo that stands in for WORLD
    seen, seconds = [], []
    for number in range(1, max(marks) + 1):
        start = time.perf_counter()
        cycle()
        seconds.append(time.perf_counter() - start)
        if number in marks:
            dist.barrier()
            use(groups)
            store = dist.distributed_c10d._world.pg_map[dist.group.WORLD][1]
            seen.append(
                {
                    "cycles": number,
                    "seconds": spread(seconds[-LAST:]),
                    "resident_MB": resident() / 1e6,
                    "device_MB": held() / 1e6,
                    "descriptors": descriptors(),
                    "threads": threads(),
                    "keys": store.num_keys(),
                }
            )
    return seen


def resident() -> int:
    """Return the bytes of memory that this process has."""
    with open("/proc/self/statm") as pages:
        return int(pages.read().split()[1]) * resource.getpagesize()


def main() -> None:
    """Measure all three ways of growing."""
    arguments = parser(__doc__)
    arguments.add_argument("--cycles", type=int, default=3000)
    options = arguments.parse_args()
    sheet = Sheet("growth", "double")
    with ranks_on_double() as run:
        counts = [(4, groups, ms_each) for ms_each in (0, 30) for groups in (4, 8, 16, 64, 256, 512)]
        sizes = [(size, MEGATRON, 30) for size in (2, 4, 8)]
        for size, groups, ms_each in counts + sizes:
            cycles = 7 if groups < 256 else 3
            by_rank = run(of_some, size, timeout=300, env=SMALL, groups=groups, ms_each=ms_each, cycles=cycles)
            took = over_ranks(list(map(list, zip(*by_rank, strict=True))))
            sheet.row(ranks=size, groups=groups, ms_each=ms_each, **took)
        marks = [mark for mark in (10, 100, 300, 1000, 3000) if mark <= options.cycles]
        for row in run(after_many, 2, timeout=400, marks=marks)[0]:
            sheet.row(**row)
    sheet.write(options.json)


if __name__ == "__main__":
    main()
