"""A collective through a handle: run as a script, in a process that has never imported gpurelease."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

CALLS, BLOCKS = 200, 15


def init(backend: str) -> Any:
    """Initialise a WORLD of one rank, and return a group that has a communicator."""
    torch.set_num_threads(1)
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    group = dist.new_group([0], backend=backend)
    dist.all_reduce(torch.zeros(1).cuda(), group=group)
    return group


def microseconds(group: Any) -> list[float]:
    """Return the CPU microseconds that a collective takes its caller, in the mean of each of some blocks of calls.

    The group has one member, so that nobody waits for anybody: what is left is the way through the handle.
    """
    tensor, blocks = torch.zeros(1).cuda(), []
    for _ in range(BLOCKS):
        start = time.thread_time()
        for _ in range(CALLS):
            dist.all_reduce(tensor, group=group)
        blocks.append(1e6 * (time.thread_time() - start) / CALLS)
        torch.cuda.synchronize()
    return blocks


if __name__ == "__main__":
    group = init(sys.argv[1])
    assert "gpurelease" not in sys.modules
    print(json.dumps(microseconds(group)))
