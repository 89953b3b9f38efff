"""Device memory: rebuilding when torch's cache, or somebody else, holds it; and memory registered with NCCL."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from gpurelease import RestoreFailed, is_released, released_world, wake_world
from tests.nccl.double import FIRST, backend_of, communicators, created, held, init_nccl, live, total, used

MIB = 1 << 20
# Devices of 1000 MiB, and communicators of 320 MiB on them.
SMALL = {"SIMGPU_TOTAL_MB": "1000", "SIMGPU_COMM_DYN_MB": "256", "SIMGPU_COMM_PERSIST_MB": "64"}


def cached(rank, size):
    init_nccl(rank, size, backend=FIRST)
    total()
    with released_world(timeout=20) as scope:
        assert scope.report.freed_bytes >= 320 * MIB
        torch.empty(900 * MIB, dtype=torch.uint8, device="cuda")  # as an engine that lets go of its tensors does
        assert used(rank) >= 900 * MIB, "torch's cache was to hold it"
    assert used(rank) < 900 * MIB
    return live(), total()


def test_torch_s_cache_is_emptied_before_communicators_are_built(nccl_ranks):
    """slime 956: the cache held all that was free."""
    assert nccl_ranks(cached, 2, env=SMALL) == [(1, 1)] * 2


def closed_by_who_made_it():
    """Nobody can stop who waits in NCCL for a rank that has failed: what it still gets, its own thread closes."""
    deadline = time.monotonic() + 10
    while (live(), held()) != (0, 0):
        assert time.monotonic() < deadline, (live(), held())
        time.sleep(0.01)


def occupied(rank, size):
    init_nccl(rank, size, backend=FIRST)
    group = dist.new_group([0, 1], backend=FIRST)
    total(), total(group)
    old = backend_of(group)
    with pytest.raises(RestoreFailed) as failure, released_world(timeout=20):
        taken = torch.empty(900 * MIB, dtype=torch.uint8, device="cuda") if rank == 1 else None
    assert (is_released(), dist.get_backend()) == (True, "gloo")
    dist.barrier()
    closed_by_who_made_it()
    with pytest.raises(RestoreFailed):
        wake_world()
    closed_by_who_made_it()
    del taken
    wake_world()
    assert backend_of(group) is not old
    return failure.value.failures, live(), total(), total(group)


def test_without_memory_all_ranks_stay_released_and_are_told_how_much_was_free(nccl_ranks):
    for failures, count, world_sum, group_sum in nccl_ranks(
        occupied, 2, env=SMALL | {"SIMGPU_TIMEOUT": "2"}, timeout=120
    ):
        assert 1 in failures
        assert "building process group" in failures[1]
        assert "unhandled cuda error" in failures[1]
        assert "(0.10 GiB were free on cuda:1)" in failures[1]
        assert (count, world_sum, group_sum) == (2, 1, 1)


def also_in_order(rank, size):
    init_nccl(rank, size, backend=FIRST)
    total()
    weights = [torch.empty(600 * MIB, dtype=torch.uint8, device="cuda")]
    used_when = {}

    class Saver:  # as a memory saver: it takes the weights off the device, and brings them back
        def __enter__(self):
            used_when["entered"] = used(rank), live()
            weights.clear()
            torch.cuda.empty_cache()

        def __exit__(self, *error):
            used_when["left"] = used(rank), live()
            weights.append(torch.empty(600 * MIB, dtype=torch.uint8, device="cuda"))

    with released_world(timeout=20, also=[Saver]):
        engine = torch.empty(900 * MIB, dtype=torch.uint8, device="cuda")
        del engine
        torch.cuda.empty_cache()
    return {when: (bytes_used // MIB, count) for when, (bytes_used, count) in used_when.items()}, live(), total()


def test_a_memory_saver_is_done_before_communicators_are_built(nccl_ranks):
    """slime 1690, miles 3129: groups were rebuilt while weights were paused."""
    expected = {"entered": (600, 0), "left": (0, 0)}
    assert nccl_ranks(also_in_order, 2, env=SMALL) == [(expected, 1, 1)] * 2


# -------------------------------------------------------------------------------------------------- registered memory


def registered():
    return [comm["registered"] for comm in communicators()]


def all_registered(rank, size):
    init_nccl(rank, size, eager=True, backend=FIRST)
    total()
    tensors = [torch.empty(64 * MIB, dtype=torch.uint8, device="cuda") for _ in range(2)]
    before = registered()
    for _ in range(3):
        with released_world(timeout=20):
            assert (live(), held()) == (0, 0)
            torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
            torch.cuda.empty_cache()
        assert registered() == [len(tensors)], "what was there before was to be registered with the new communicator"
    tensors.append(torch.empty(64 * MIB, dtype=torch.uint8, device="cuda"))
    assert registered() == [len(tensors)]
    return before[0] >= 2, total()


def test_memory_that_torch_registers_with_every_communicator(nccl_ranks):
    """shutdown() leaves the communicator on torch's list of those to register with: every allocation and every
    empty_cache() afterwards failed with "NCCL communicator was aborted", and so did the way back."""
    env = {"TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK": "1"}
    assert nccl_ranks(all_registered, 2, env=env) == [(True, 1)] * 2


def pool(rank, size):
    init_nccl(rank, size, eager=True, backend=FIRST)
    group = dist.new_group([0, 1], backend=FIRST)
    total(), total(group)
    memory = torch.cuda.MemPool()

    def allocate():
        with torch.cuda.use_mem_pool(memory):
            return torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")

    tensors = [allocate()]
    backend_of(group).register_mem_pool(memory)
    assert sorted(registered()) == [0, 1]
    for _ in range(3):
        backend_of(group).deregister_mem_pool(memory)
        with released_world(timeout=20):
            assert (live(), held()) == (0, 0)
            tensors.append(allocate())
        backend_of(group).register_mem_pool(memory)
        assert sorted(registered()) == [0, len(tensors)]
    assert total(group) == 1
    return created()


def test_a_memory_pool_is_taken_off_its_group_before_a_scope_and_put_on_after(nccl_ranks):
    """torch does not tell which pools are registered with a group, and registers by itself only what it made itself:
    the README says so. Without ``deregister_mem_pool`` every later allocation in the pool would fail."""
    assert nccl_ranks(pool, 2) == [2 + 3 * 2] * 2
