"""Processes that are forked off a rank: they never speak for it, and never wait for its peers."""

from __future__ import annotations

import os

import torch.distributed as dist

from gpurelease import (
    ScopeMisuse,
    released_world,
)
from tests.cycles import POSING, cycle
from tests.ranks import init_gloo, run_ranks


def forked(rank, size):
    init_gloo(rank, size)
    with cycle(dist.group.WORLD):
        pass
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            released_world(**POSING).__enter__()
            text = "it was entered"
        except ScopeMisuse as error:
            text = str(error)
        os.write(write, text.encode())
        os._exit(0)
    os.waitpid(child, 0)
    return os.read(read, 1000).decode()


def test_a_forked_child_is_refused():
    assert "was forked off rank 0" in run_ranks(forked, size=1)[0]
