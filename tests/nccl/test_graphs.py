"""CUDA graphs: NCCL does not end a communicator as long as there is a graph that has captured its collectives."""

from __future__ import annotations

import gc
import time

import torch
import torch.distributed as dist

from gpurelease import ReleaseFailed, is_released, released_world
from tests.nccl.double import FIRST, backend_of, held, init_nccl, live, total


def capture(group=None):
    """Return a graph that adds a tensor up over the ranks, and the tensor."""
    tensor = torch.tensor([1.0]).cuda()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dist.all_reduce(tensor, group=group)
    return graph, tensor


def in_progress(rank, size):
    init_nccl(rank, size, backend=FIRST)
    total()
    before = live(), backend_of(dist.group.WORLD)
    told = []

    def enter():
        try:
            with released_world(timeout=20):
                told.append("it was entered")
        except ReleaseFailed as error:
            told.append(error.failures)

    if rank == 1:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            enter()
    else:
        enter()
    assert (live(), backend_of(dist.group.WORLD), is_released()) == (*before, False)
    with released_world(timeout=20):
        assert (live(), held()) == (0, 0)
    return told, total()


def test_a_capture_in_progress_is_refused_on_all_ranks(nccl_ranks):
    text = "a CUDA graph is being captured: the collectives in it would lose their communicators"
    assert nccl_ranks(in_progress, 2) == [([{1: text}], 1)] * 2


def captured(rank, size):
    init_nccl(rank, size, backend=FIRST)
    group = dist.new_group([0, 1], backend=FIRST)
    total(), total(group)
    graph, tensor = capture(group)
    graph.replay()
    assert tensor.cpu().item() == 2
    old = backend_of(group)
    start = time.monotonic()
    try:
        with released_world(timeout=2):
            told = "it was entered"
    except ReleaseFailed as error:
        told = error.failures
    seconds = time.monotonic() - start
    assert not is_released()
    assert backend_of(group) is not old
    assert total() == total(group) == 1, "the groups were to have new communicators"
    graph.replay()
    assert tensor.cpu().item() == 4, "the graph was to go on with the old communicator"
    assert live() == 3
    del graph, old
    gc.collect()
    deadline = time.monotonic() + 10
    while live() > 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert live() == 2, "without the graph the old communicator was to end"
    with released_world(timeout=20):
        assert (live(), held()) == (0, 0)
    return told, seconds < 10, total(group)


def test_a_graph_with_collectives_is_waited_for_within_the_time_limit_and_nothing_is_lost(nccl_ranks):
    """torch cannot be asked which groups a graph has captured, so this cannot be refused beforehand."""
    text = "shutting down process group '1' (ranks 0 and 1): not done within 2 s"
    for told, in_time, group_sum in nccl_ranks(captured, 2, timeout=120):
        assert told and all(text in each for each in told.values())  # who is told of it first says no more
        assert in_time
        assert group_sum == 1


def deleted_before(rank, size):
    init_nccl(rank, size, backend=FIRST)
    total()
    for _ in range(3):
        graph, tensor = capture()
        graph.replay()
        assert tensor.cpu().item() == size
        graph.reset()
        with released_world(timeout=20):
            assert (live(), held()) == (0, 0)
    return total()


def test_a_graph_that_is_reset_before_the_scope_holds_nothing(nccl_ranks):
    assert nccl_ranks(deleted_before, 2) == [1, 1]
