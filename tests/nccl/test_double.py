"""The double itself: what the other tests rely on, that it counts, fails and hangs where the real thing would."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from tests.nccl.double import (
    FIRST,
    backend_of,
    communicators,
    created,
    delay,
    fault,
    held,
    init_nccl,
    library,
    live,
    total,
    touched,
    used,
)

MIB = 1 << 20


def counts(rank, size):
    init_nccl(rank, size, backend=FIRST)
    before = live(), held(), touched()
    group = dist.new_group([0, 1], backend=FIRST)
    total(), total(group)
    while_used = live(), held(), created()
    on_device = used(rank) >= held()
    dist.destroy_process_group(group)
    return before, while_used, on_device, (live(), held(), created()), touched()


def test_communicators_and_bytes_are_counted(nccl_ranks):
    env = {"SIMGPU_COMM_DYN_MB": "10", "SIMGPU_COMM_PERSIST_MB": "5"}
    for rank, seen in enumerate(nccl_ranks(counts, 2, env=env)):
        assert seen == ((0, 0, [rank]), (2, 30 * MIB, 2), True, (1, 15 * MIB, 2), [rank])


def contexts(rank, size):
    seen = [touched()]
    for step in (
        lambda: torch.cuda.device_count(),
        lambda: torch.empty(1, device="cuda:3"),
        lambda: torch.cuda.set_device(5),
        lambda: torch.cuda.mem_get_info(6),
    ):
        step()
        seen.append(touched())
    return seen, [torch._C._cuda_hasPrimaryContext(device) for device in range(8)]


def test_a_device_that_is_used_has_a_context(nccl_ranks):
    """As from CUDA 12, where to set a device makes its context."""
    [(seen, has_context)] = nccl_ranks(contexts, 1)
    assert seen == [[], [], [3], [3, 5], [3, 5, 6]]
    assert [device for device in range(8) if has_context[device]] == [3, 5, 6]


def faults(rank, size):
    init_nccl(rank, size, backend=FIRST)
    total()
    fault("collective", after=1, times=2)
    worked = []
    for _ in range(4):
        try:
            total()
            worked.append(True)
        except dist.DistBackendError as error:
            assert "NCCL error" in str(error)
            worked.append(False)
    delay("collective", 0.3)
    start = time.monotonic()
    total()
    return worked, time.monotonic() - start >= 0.3


def test_chosen_calls_fail_or_come_late(nccl_ranks):
    assert nccl_ranks(faults, 2) == [([True, False, False, True], True)] * 2


def time_passes(rank, size):
    init_nccl(rank, size, backend=FIRST)
    total()
    tensor = torch.tensor([1.0]).cuda()
    start = time.monotonic()
    work = dist.all_reduce(tensor, async_op=True)
    done_at_once = work.is_completed()
    torch.cuda.synchronize()
    return done_at_once, work.is_completed(), time.monotonic() - start >= 0.5


def test_a_collective_takes_its_time_on_the_device(nccl_ranks):
    assert nccl_ranks(time_passes, 2, env={"SIMGPU_COLLECTIVE_MS": "500"}) == [(False, True, True)] * 2


def opposite_orders(rank, size):
    init_nccl(rank, size, backend=FIRST)
    groups = [dist.new_group([0, 1], backend=FIRST) for _ in range(2)]
    for group in groups:
        total(group)
    for group in groups if rank == 0 else reversed(groups):
        backend_of(group).shutdown()


def test_destroying_in_opposite_orders_hangs_where_destroying_is_a_rendezvous(nccl_ranks):
    """slime 2208: what the double has to be able to show."""
    env = {"SIMGPU_DESTROY_MEETS": "1", "SIMGPU_DESTROY_TIMEOUT": "1"}
    nccl_ranks(opposite_orders, 2, env=env, dies={0: 66, 1: 66})


def misuse(rank, size):
    init_nccl(rank, size, backend=FIRST)
    total()
    assert library().ncclCommDestroy(None) != 0


def test_a_communicator_that_is_used_after_its_end_fails_the_test(nccl_ranks):
    with pytest.raises(AssertionError, match="a communicator was used that was gone"):
        nccl_ranks(misuse, 1)


def arithmetic(rank, size):
    init_nccl(rank, size, backend=FIRST)
    values = torch.tensor([rank + 1.0, 2.0, -rank])
    sums = {}
    for name in ("SUM", "AVG", "MIN", "MAX", "PRODUCT"):
        tensor = values.cuda()
        dist.all_reduce(tensor, op=getattr(dist.ReduceOp, name))
        sums[name] = tensor.cpu().tolist()
    narrow = values.bfloat16().cuda()
    dist.all_reduce(narrow)
    gathered = [torch.zeros(3).cuda() for _ in range(size)]
    dist.all_gather(gathered, values.cuda())
    scattered = torch.zeros(1).cuda()
    dist.reduce_scatter_tensor(scattered, torch.tensor([1.0 + rank, 10.0 + rank]).cuda())
    return sums, narrow.cpu().tolist(), [each.cpu().tolist() for each in gathered], scattered.cpu().item()


def test_collectives_compute(nccl_ranks):
    results = nccl_ranks(arithmetic, 2)
    sums, narrow, gathered, _ = results[0]
    assert sums == {
        "SUM": [3, 4, -1],
        "AVG": [1.5, 2, -0.5],
        "MIN": [1, 2, -1],
        "MAX": [2, 2, 0],
        "PRODUCT": [2, 4, 0],
    }
    assert narrow == [3, 4, -1]
    assert gathered == [[1, 2, 0], [2, 2, -1]]
    assert [result[3] for result in results] == [3, 21]


def configuration(rank, size):
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = 7
    init_nccl(rank, size, backend=FIRST, pg_options=options)
    dist.all_reduce(torch.tensor([1.0]).cuda(), async_op=True).wait()  # else it runs on the current stream
    [comm] = communicators()
    return comm["size"], comm["device"], comm["config"]["max_ctas"], comm["config"]["min_ctas"], comm["priority"] < 0


def test_what_a_communicator_was_made_with(nccl_ranks):
    assert nccl_ranks(configuration, 2) == [(2, rank, 7, None, True) for rank in range(2)]
