"""Groups that are not all ours, and threads that know of nothing."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore

from gpurelease import released_world
from tests.cycles import POSING, backend_of, total
from tests.ranks import init_gloo, run_ranks, tcp_store

TRAINERS = 2


def shared_group(store, rank, size):
    """Make a group of all processes of two jobs, as frameworks for RL do to send weights to an inference engine.

    What is registered is a group that torch's ``new_group`` could not make: it has ranks that WORLD does not have.
    """
    group, _ = dist.distributed_c10d._new_process_group_helper(
        size,
        rank,
        [],
        dist.Backend("gloo"),
        PrefixStore("weights", store),
        group_name="weight sync",
        timeout=timedelta(seconds=30),
    )
    dist.distributed_c10d._world.pg_group_ranks[group] = {member: member for member in range(size)}
    return group


def two_jobs(rank, size):
    jobs_store = tcp_store(rank, size, "both")
    # Each job has a WORLD and a store of its own.
    name, job_rank = ("trainer", rank) if rank < TRAINERS else ("engine", rank - TRAINERS)
    dist.init_process_group("gloo", store=tcp_store(job_rank, TRAINERS, name), rank=job_rank, world_size=TRAINERS)
    weights = shared_group(jobs_store, rank, size)
    backend = backend_of(weights)

    def sync():
        tensor = torch.tensor([float(rank)])
        weights.allreduce([tensor]).wait()
        return tensor.item()

    reason = None
    for _ in range(3):
        if name == "trainer":
            before = backend_of(dist.group.WORLD)
            with released_world(**POSING) as scope:
                assert backend_of(dist.group.WORLD) is not before
                assert sync() == 6
            assert total() == 1
            [reason] = [(report.name, report.reason) for report in scope.report.kept]
        else:
            assert sync() == 6  # it knows nothing of a scope
        assert sync() == 6
        assert backend_of(weights) is backend
    weights.barrier().wait()
    return reason


def test_a_group_shared_with_another_job_is_kept_and_reported_and_works_inside():
    reason = ("weight sync", "its members met on another store than WORLD's")
    assert run_ranks(two_jobs, 4) == [reason, reason, None, None]


# ------------------------------------------------------------------------------------------------ a background thread


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


def second_thread(rank, size):
    init_gloo(rank, size)
    group = dist.new_group(list(range(size)))
    inside = []

    def enter(name, first):
        first.wait()
        with released_world(**POSING):
            inside.append(name)
            time.sleep(0.2)

    # The same order on all ranks: which of two threads is first is for the program to say.
    first, second = threading.Event(), threading.Event()
    threads = [threading.Thread(target=enter, args=pair) for pair in (("first", first), ("second", second))]
    for thread in threads:
        thread.start()
    first.set()
    while not inside:
        time.sleep(0.01)
    second.set()  # nests in the first, in whichever order they are left
    for thread in threads:
        thread.join(20)
    return inside, total(group)


@pytest.mark.parametrize("size", [1, 2])
def test_a_second_thread_s_scope_is_nested_in_the_first_s(size):
    for inside, group_sum in run_ranks(second_thread, size):
        assert inside == ["first", "second"]
        assert group_sum == size * (size - 1) / 2
