"""A rank with NCCL groups on its own GPU, for the tests and for the measurement."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

from gpurelease import ReleaseFailed, released_world
from tests import cycles
from tests.ranks import tcp_store

MIB = 1 << 20
CYCLES = 5


def init(rank: int, size: int, groups: int, name: str = "port", **options: Any) -> list[Any]:
    """Initialise WORLD on NCCL, make more groups of all ranks, connect all of them, and return them."""
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", store=tcp_store(rank, size, name), rank=rank, world_size=size, **options)
    made = [dist.group.WORLD, *(dist.new_group(list(range(size)), backend="nccl") for _ in range(groups - 1))]
    for group in made:
        check(group)
    torch.cuda.synchronize()
    return made


def check(group: Any = None, device: str = "cuda") -> None:
    """Add this rank's number up over ``group`` and check the sum."""
    size = dist.get_world_size()
    assert cycles.total(group, device=device) == size * (size - 1) / 2


def free() -> int:
    """Return the bytes that are free on this rank's GPU, without what torch's allocator holds in reserve."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def measure(rank: int, size: int, strategy: str, count: int) -> Any:
    """Return MiB held outside and inside, and what a cycle takes on one rank, in median seconds.

    These are of a release, of a restore, and of both to the first use of every group; and of what people do without
    gpurelease: to destroy everything, and to initialise and use it again.
    """
    before = free()
    groups = init(rank, size, count)
    held, inside, reports, cycles, by_hand = before - free(), 0, [], [], []
    try:
        for _ in range(CYCLES):
            dist.barrier()
            start = time.perf_counter()
            with released_world(strategy=strategy, timeout=60) as scope:
                to_look = time.perf_counter()
                inside = before - free()
                start += time.perf_counter() - to_look
            for group in groups:
                check(group)
            cycles.append(time.perf_counter() - start)
            reports.append(scope.report)
    except ReleaseFailed as error:
        return error.failures[0]
    for number in range(CYCLES):
        dist.barrier()
        start = time.perf_counter()
        groups.clear()
        dist.destroy_process_group()
        groups = init(rank, size, count, f"again-{number}")
        by_hand.append(time.perf_counter() - start)
    seconds = [statistics.median(report.seconds(kind) for report in reports) for kind in ("release", "restore")]
    return held / MIB, inside / MIB, *seconds, statistics.median(cycles), statistics.median(by_hand)
