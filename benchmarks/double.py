"""Ranks with NCCL groups on the double of CUDA and NCCL."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.nccl.build import build, double_ranks, preloaded
from tests.nccl.double import FIRST
from tests.ranks import tcp_store

# Members of each group of a family, and how far they are apart, as Megatron has them on 8 ranks.
FAMILIES = [(2, 1), (2, 2), (2, 4), (4, 1), (4, 2), (8, 1)]
MEGATRON = 18  # communicators of a rank, with WORLD's


@contextmanager
def ranks_on_double() -> Iterator[Callable[..., list[Any]]]:
    """Give :func:`tests.ranks.run_ranks` on the double, that is built first."""
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder))
        with preloaded(Path(folder)), double_ranks("bench", Path(folder)) as run:
            yield run


def init(rank: int, size: int, name: str = "port", *, eager: bool = False) -> None:
    """Initialise WORLD on the first ProcessGroupNCCL, each rank on the device of its own number."""
    torch.cuda.set_device(rank)
    device = {"device_id": torch.device("cuda", rank)} if eager else {}
    dist.init_process_group(FIRST, store=tcp_store(rank, size, name), rank=rank, world_size=size, **device)


def make_groups(rank: int, size: int, count: int = MEGATRON) -> list[Any]:
    """Make families of groups in turns, as Megatron does, all ranks all of them; return WORLD and this rank's."""
    families = [(members, apart) for members, apart in FAMILIES if members * apart <= size]
    mine = [dist.group.WORLD]
    for number in range(count - 1):
        members, apart = families[number % len(families)]
        for first in range(size):
            if first // apart % members == 0:
                ranks = list(range(first, first + members * apart, apart))
                group = dist.new_group(ranks, backend=FIRST)
                if rank in ranks:
                    mine.append(group)
    return mine


def use(groups: Sequence[Any]) -> None:
    """Run a collective on each group, and wait for it."""
    for group in groups:
        dist.all_reduce(torch.zeros(1).cuda(), group=group)
    torch.cuda.synchronize()


def communicators_take(seconds: float) -> None:
    """Have every communicator that this process makes take a time, once its members have met."""
    os.environ["SIMGPU_INIT_MS"] = f"{seconds * 1000:.0f}"
