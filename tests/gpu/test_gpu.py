"""What the tests over the double promise, on the real thing: memory goes and comes, and every group works again."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from gpurelease import ReleaseFailed, is_released, released_world, restored_world
from tests.gpu.client import MIB, check, free, init

CYCLES = 3
GROUPS = 4


def backend_of(group):
    return group._get_backend(torch.device("cuda"))


def memory(rank, size, strategy, eager):
    options = {"device_id": torch.device("cuda", rank)} if eager else {}
    before = free()
    groups = init(rank, size, GROUPS, **options)
    held = before - free()
    seen = []
    for _ in range(CYCLES):
        backends = [backend_of(group) for group in groups]
        with released_world(strategy=strategy, timeout=30) as scope:
            inside = before - free()
            check(device="cpu")
            with pytest.raises(RuntimeError, match="is released by gpurelease"):
                check(groups[-1])
        for group in groups:
            check(group)
        same = [backend_of(group) is old for group, old in zip(groups, backends, strict=True)]
        assert same == [scope.report.strategy == "suspend"] * GROUPS
        seen.append((inside, before - free()))
    print(scope.report, "held", held, "inside and after", seen)
    return held, seen, scope.report.freed_bytes


@pytest.mark.parametrize("eager", [False, True], ids=["lazy", "eager"])
@pytest.mark.parametrize("strategy", ["rebuild", "auto"])
def test_memory_goes_and_comes_and_groups_work_again(gpu_ranks, strategy, eager):
    for held, seen, freed in gpu_ranks(memory, strategy=strategy, eager=eager):
        for inside, after in seen:
            assert inside <= held
            assert abs(after - held) < 64 * MIB, "a cycle was to take what the one before had"
        assert freed is not None
        if strategy == "rebuild":
            assert seen[-1][0] <= max(seen[0][0], 64 * MIB), "what is left inside was not to grow"


def small_things(rank, size):
    _, group = init(rank, size, 2, timeout=timedelta(seconds=111))
    handle, tensor = id(group), torch.tensor([float(rank)]).cuda()
    works = [dist.all_reduce(tensor.clone(), group=group, async_op=True) for _ in range(5)]
    with released_world(timeout=30):
        group.set_timeout(timedelta(seconds=222))
        with restored_world():
            check(group)
        engine = dist.new_group(list(range(size)), backend="nccl")
        check(engine)
    assert all(work.is_completed() for work in works)
    with pytest.raises(ZeroDivisionError), released_world(timeout=30):
        _ = 1 / 0
    for each in (None, group, engine):
        check(each)
    devices = [torch._C._cuda_hasPrimaryContext(device) for device in range(torch.cuda.device_count())]
    return int(backend_of(group).options._timeout.total_seconds()), id(group) == handle, devices.count(True)


def test_a_scope_on_a_gpu(gpu_ranks):
    """Options, handles, work in flight, groups made inside; and no context on another device (pytorch 159262)."""
    for result in gpu_ranks(small_things):
        assert result == (222, True, 1)


def graphs(rank, size):
    groups = init(rank, size, 2)
    tensor = torch.ones(1).cuda()
    told = []

    def enter():
        try:
            with released_world(timeout=30):
                told.append("it was entered")
        except ReleaseFailed as error:
            told.append(error.failures)

    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        tensor += 0
        enter()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dist.all_reduce(tensor, group=groups[1])
    graph.replay()
    graph.reset()
    with released_world(timeout=30):
        assert is_released()
    check(groups[1])
    return told


def test_a_capture_in_progress_is_refused_and_a_graph_that_is_reset_holds_nothing(gpu_ranks):
    text = "a CUDA graph is being captured: the collectives in it would lose their communicators"
    for told in gpu_ranks(graphs):
        assert [set(failures.values()) for failures in told] == [{text}]
