"""Groups that are not all ours."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore

from gpurelease import released_world
from tests.cycles import POSING, backend_of, total
from tests.ranks import run_ranks, tcp_store

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
