"""Threads that know of nothing, and use groups meanwhile."""

from __future__ import annotations

import threading
import time

import torch
import torch.distributed as dist

from gpurelease import released_world
from tests.cycles import POSING
from tests.ranks import init_gloo, run_ranks


def background(rank, size, cycles):
    init_gloo(rank, size)
    alone = [dist.new_group([member]) for member in range(size)][rank]
    counts = {"done": 0, "refused": 0}
    strange, stop = [], threading.Event()

    def reduce_on_and_on():
        while not stop.is_set():
            try:
                dist.all_reduce(torch.ones(1), group=alone)
                counts["done"] += 1
            except RuntimeError as error:
                if "is released by gpurelease" in str(error):
                    counts["refused"] += 1
                else:
                    strange.append(str(error))

    thread = threading.Thread(target=reduce_on_and_on)
    thread.start()
    for _ in range(cycles):
        with released_world(**POSING):
            time.sleep(0.005)
        time.sleep(0.005)
    stop.set()
    thread.join(10)
    return thread.is_alive(), counts["done"] > cycles, counts["refused"] > cycles, strange


def test_a_background_thread_gets_the_placeholder_s_error_and_nothing_else():
    for alive, done, refused, strange in run_ranks(background, 2, cycles=100):
        assert (alive, done, refused) == (False, True, True)
        assert strange == []
