"""How long a cycle takes, against what people do without gpurelease: destroy everything and initialise it again.

    python benchmarks/cycle.py [--ranks 4] [--groups 0 8 32] [--cycles 10]

Runs both ways on Gloo, in turns, in the same processes, and prints the median seconds of a cycle on rank 0 and their
ratio. Gloo connects every member to every other; what NCCL takes on a GPU is another question. The other way also
breaks every handle that anybody holds, which no number shows.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from gpurelease import released_world


def make_groups(size: int, count: int) -> list[dist.ProcessGroup]:
    """Make groups of two neighbours, as a pipeline has; all ranks must call."""
    groups = [dist.new_group([first % (size - 1), first % (size - 1) + 1]) for first in range(count)]
    return [group for group in groups if isinstance(group, dist.ProcessGroup)]


def run(rank: int, size: int, folder: str, count: int, cycles: int) -> None:
    """Measure both ways on one rank."""
    torch.set_num_threads(1)
    seconds: dict[str, list[float]] = {"release and restore": [], "destroy and initialise": []}

    def initialise(number: int) -> list[dist.ProcessGroup]:
        store = dist.FileStore(os.path.join(folder, str(number)), size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        return make_groups(size, count)

    groups = initialise(0)
    for number in range(1, cycles + 1):
        dist.barrier()
        start = time.perf_counter()
        with released_world(backends=("gloo",), timeout=60):
            pass
        seconds["release and restore"].append(time.perf_counter() - start)
        dist.barrier()
        start = time.perf_counter()
        groups.clear()
        dist.destroy_process_group()
        groups = initialise(number)
        dist.barrier()
        seconds["destroy and initialise"].append(time.perf_counter() - start)
        with released_world(backends=("gloo",), timeout=60):
            pass  # the first release of a new WORLD builds the Gloo that stands in; it is paid once a job
    if rank == 0:
        ours, theirs = (statistics.median(seconds[way]) for way in seconds)
        print(f"{count:6d} groups   {ours:8.4f} s   {theirs:8.4f} s   {theirs / ours:5.2f}", flush=True)
    dist.destroy_process_group()


def main() -> None:
    """Measure for each number of groups."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--groups", type=int, nargs="+", default=[0, 8, 32])
    parser.add_argument("--cycles", type=int, default=10)
    options = parser.parse_args()
    print(f"{options.ranks} ranks        ours        theirs       theirs / ours")
    for count in options.groups:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(run, (options.ranks, folder, count, options.cycles), nprocs=options.ranks)


if __name__ == "__main__":
    main()
