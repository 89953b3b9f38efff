"""Nothing happens on a device that is not the group's: there it would make a context of half a gigabyte, on each rank
(pytorch 159262)."""

from __future__ import annotations

import asyncio

import torch
import torch.distributed as dist

from gpurelease import released_world
from tests.nccl.double import FIRST, backend_of, communicators, held, live, touched
from tests.ranks import tcp_store

CYCLES = 3


def init(rank, size, **options):
    """Initialise WORLD without a word on devices: the current device is 0 on every rank."""
    store = tcp_store(rank, size)
    dist.init_process_group(FIRST, store=store, rank=rank, world_size=size, **options)


def reduce_on(device, group=None):
    tensor = torch.tensor([1.0]).to(device)
    dist.all_reduce(tensor, group=group)
    return tensor.cpu().item()


def another_device(rank, size, how):
    init(rank, size)
    device = torch.device("cuda", rank + 2)
    group = dist.new_group([0, 1], backend=FIRST)
    assert reduce_on(device) == reduce_on(device, group) == size
    before = [(comm["device"], comm["made_on"]) for comm in communicators()]
    assert before == [(rank + 2, rank + 2)] * 2

    async def in_coroutine():
        async with released_world(timeout=20):
            assert (live(), held()) == (0, 0)

    for _ in range(CYCLES):
        if how == "coroutine":
            asyncio.run(in_coroutine())
        else:
            with released_world(timeout=20):
                assert (live(), held()) == (0, 0)
        assert [(comm["device"], comm["made_on"]) for comm in communicators()] == before
        assert reduce_on(device) == reduce_on(device, group) == size
        assert live() == 2, "the new communicator was on another device: using the group made a third"
    return torch.cuda.current_device(), touched()


def test_a_communicator_comes_back_on_its_device_though_another_is_current(nccl_ranks):
    """A group that was made without ``device_id=`` has no device of its own: its communicator has."""
    assert nccl_ranks(another_device, 2, how="with") == [(0, [2]), (0, [3])]


def test_a_coroutine_s_worker_thread_uses_no_other_device(nccl_ranks):
    """A new thread's current device is 0, and only to set it makes a context there."""
    assert nccl_ranks(another_device, 2, how="coroutine") == [(0, [2]), (0, [3])]


def current_at_entry(rank, size):
    init(rank, size)
    torch.cuda.set_device(rank + 2)
    device = torch.device("cuda", rank + 2)
    assert reduce_on(device) == size
    with torch.cuda.device(rank + 4), released_world(timeout=20):
        pass
    return [comm["device"] for comm in communicators()], touched(), torch.cuda.current_device()


def test_the_device_that_is_current_at_entry_does_not_matter(nccl_ranks):
    """A scope that is entered in a ``with torch.cuda.device()`` block, say around an engine on another GPU."""
    assert nccl_ranks(current_at_entry, 2) == [([2], [2, 4], 2), ([3], [3, 5], 3)]


def never_used(rank, size):
    init(rank, size)
    group = dist.new_group([0, 1], backend=FIRST)
    old = backend_of(group)
    for _ in range(CYCLES):
        with released_world(timeout=20) as scope:
            assert len(scope.report.released) == 2
    assert backend_of(group) is not old
    return live(), touched()


def test_groups_that_were_never_used_cost_no_context(nccl_ranks):
    assert nccl_ranks(never_used, 2) == [(0, [])] * 2
