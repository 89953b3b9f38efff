"""Groups that are not all ours, and those that torch does not list."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore

from gpurelease import released_world, restored_world
from tests.cycles import POSING, backend_of, cycle, refusal, total
from tests.ranks import init_gloo, run_ranks, tcp_store

TRAINERS = 2
WEIGHTS = "weight sync"


def registered(store, rank, size, ranks):
    """Make a group by hand, as frameworks for RL do to send weights to an inference engine, and register it.

    It is a group that torch's ``new_group`` could not make: it may have ranks that WORLD does not have, and any list.

    Args:
        store: Where its members meet.
        rank: This process's rank in the group.
        size: How many members it has.
        ranks: What the list says: the global rank of each member.
    """
    group, _ = dist.distributed_c10d._new_process_group_helper(
        size,
        rank,
        [],
        dist.Backend("gloo"),
        PrefixStore("weights", store),
        group_name=WEIGHTS,
        timeout=timedelta(seconds=30),
    )
    dist.distributed_c10d._world.pg_group_ranks[group] = {global_rank: n for n, global_rank in enumerate(ranks)}
    return group


def summed(group, value):
    tensor = torch.tensor([float(value)])
    group.allreduce([tensor]).wait()
    return tensor.item()


def kept_through_scopes(weights, rank, expected):
    """Go through scopes, and return why ``weights`` was kept; it must work all the time, on the backend that it has."""
    backend = backend_of(weights)
    for _ in range(3):
        before = backend_of(dist.group.WORLD)
        with released_world(**POSING) as scope:
            assert backend_of(dist.group.WORLD) is not before
            assert summed(weights, rank) == expected
            with restored_world():
                assert summed(weights, rank) == expected
        assert total() == 1
        [(name, reason)] = [(report.name, report.reason) for report in scope.report.kept]
        assert name == WEIGHTS
        assert summed(weights, rank) == expected
        assert backend_of(weights) is backend
    return reason


# Job, store of the group, its ranks in the group, and what its list says, for each of four processes: two trainers, who
# are the WORLD that is released, and two engines, who know nothing of a scope.
OTHER_STORE = "its members met on another store than WORLD's"
NOT_WHO = "this is rank {}, and not the one that the group's list of ranks says"


def two_jobs(rank, size, apart):
    """Each job has a WORLD and a store of its own; they share one group, or each trainer one with an engine."""
    name, job_rank = ("trainer", rank) if rank < TRAINERS else ("engine", rank - TRAINERS)
    if apart:  # all under one name, and with the same ranks
        meets, own_rank, members = tcp_store(rank // TRAINERS, 2, f"pair {job_rank}"), rank // TRAINERS, 2
    else:
        meets, own_rank, members = tcp_store(rank, size, "both"), rank, size
    dist.init_process_group("gloo", store=tcp_store(job_rank, TRAINERS, name), rank=job_rank, world_size=TRAINERS)
    weights = registered(meets, own_rank, members, range(members))
    expected = job_rank + (job_rank + TRAINERS) if apart else 6
    reason = None
    if name == "trainer":
        reason = kept_through_scopes(weights, rank, expected)
    else:
        for _ in range(9):
            assert summed(weights, rank) == expected
    weights.barrier().wait()
    return reason


@pytest.mark.parametrize("apart", [False, True], ids=["one group", "a group a pair, under one name"])
def test_a_group_shared_with_another_job_is_kept_and_reported_and_works_inside(apart):
    assert run_ranks(two_jobs, 4, apart=apart) == [OTHER_STORE, OTHER_STORE, None, None]


def with_another_list(rank, size, ranks):
    store = init_gloo(rank, size)
    weights = registered(store, rank, size, ranks)
    return kept_through_scopes(weights, rank, 1)


@pytest.mark.parametrize("ranks", [(1, 0), (5, 6)])
def test_a_group_on_world_s_store_in_which_this_rank_is_not_who_the_list_says_is_kept(ranks):
    assert run_ranks(with_another_list, 2, ranks=ranks) == [NOT_WHO.format(rank) for rank in range(2)]


def one_of_ours_by_hand(rank, size):
    store = init_gloo(rank, size)
    group = registered(store, rank, size, range(size))
    for _ in range(3):
        with cycle(dist.group.WORLD, group):
            assert refusal(group)
        assert summed(group, rank) == 1
    return True


def test_a_group_that_was_registered_by_hand_as_torch_does_it_is_released():
    assert run_ranks(one_of_ours_by_hand, 2) == [True] * 2


# ------------------------------------------------------------------------------------------------------ split in C++


def split(rank, size, when, of_world):
    """Split this rank off WORLD, or off a group, in C++, and return what the next scope's report says."""
    init_gloo(rank, size)
    group = dist.new_group(list(range(size)))

    def split_off():
        # Alone: where two ranks split a group off, torch 2.13 often hangs, without any scope too.
        parent = dist.group.WORLD if of_world else group
        return parent.split_group([rank], timeout=timedelta(seconds=20), group_name=f"split off {rank}")

    if when == "before":
        found = split_off()
    with released_world(**POSING):
        if when == "inside":
            found = split_off()
    if when == "after":
        found = split_off()
    backend = backend_of(found)
    for _ in range(2):
        assert summed(found, rank) == rank
        with released_world(**POSING) as scope:
            assert summed(found, rank) == rank
        assert backend_of(found) is backend
        assert total(group) == 1
    return [report.reason for report in scope.report.kept]


@pytest.mark.parametrize(
    "when, of_world", [("before", True), ("inside", True), ("after", True), ("before", False), ("after", False)]
)
def test_a_group_split_off_in_c_plus_plus_works_is_kept_and_reported(when, of_world):
    reason = "torch.distributed does not list it, as it was made by ProcessGroup.split_group() or the like"
    assert run_ranks(split, 2, when=when, of_world=of_world) == [[reason]] * 2
