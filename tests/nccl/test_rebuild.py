"""Rebuilding the real ProcessGroupNCCL: no communicator and no byte inside, the same ones and options afterwards."""

from __future__ import annotations

import re
import time
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from gpurelease import ReleaseFailed, RestoreFailed, is_released, released_world, restored_world, wake_world
from gpurelease.groups.releasable import Releasable
from tests.nccl.double import (
    FIRST,
    HAS_SECOND,
    backend_of,
    communicators,
    delay,
    fault,
    held,
    init_nccl,
    live,
    total,
    touched,
)
from tests.ranks import tcp_store

CYCLES = 3
BACKENDS = [FIRST, "nccl2"] if HAS_SECOND else [FIRST]


@contextmanager
def cycle(*groups, left=0):
    """Release and restore, and check what was held before, inside and after; ``left`` communicators stay."""
    before, backends = (live(), held()), [backend_of(group) for group in groups]
    with released_world(timeout=20) as scope:
        assert live() == left
        assert held() == left * before[1] // before[0]
        assert (dist.get_backend(), is_released()) == ("gloo", True)
        yield scope
    assert (live(), held()) == before
    for group, old in zip(groups, backends, strict=True):
        assert backend_of(group) is not old
        assert type(backend_of(group)) is type(old)


# ---------------------------------------------------------------------------------------------------- kinds of groups


def kinds_of_groups(rank, size, eager):
    init_nccl(rank, size, eager=eager)
    world = dist.group.WORLD
    pair = [dist.new_group([low, low + 1], group_desc="pair") for low in (0, 2)][rank // 2]
    local = dist.new_group([rank ^ 1, rank], use_local_synchronization=True)
    square = init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "tp"))
    alone = [dist.new_group([member]) for member in range(size)][rank]
    groups = [world, pair, local, square.get_group("dp"), square.get_group("tp"), alone]
    groups.append(square._flatten("all").get_group())
    if eager:
        half = dist.split_group(world, [[0, 1], [2, 3]])
        groups += [half, dist.split_group(half, [[0], [1]])]
    pair_sum, across_sum = 4 * (rank // 2) + 1, 2 * (rank % 2) + 2

    def use():
        sums = [6, pair_sum, pair_sum, across_sum, pair_sum, rank, 6] + ([pair_sum, rank] if eager else [])
        assert [total(group) for group in groups] == sums

    use()
    count = live()
    bound = [group.bound_device_id for group in groups]
    for _ in range(CYCLES):
        with cycle(*groups) as scope:
            objects = [None] * size
            dist.all_gather_object(objects, rank)
            assert objects == [0, 1, 2, 3]
            assert len(scope.report.released) == len({id(group) for group in groups})
        use()
        assert live() == count
        assert [group.bound_device_id for group in groups] == bound
        assert [backend_of(group).options.split_from for group in groups] == [None] * len(groups)
    assert touched() == [rank], "another device was used: it would have got a context"
    return count


@pytest.mark.parametrize("eager", [False, True], ids=["lazy", "eager"])
def test_all_kinds_of_groups(nccl_ranks, eager):
    counts = nccl_ranks(kinds_of_groups, timeout=120, eager=eager)
    assert min(counts) >= 5


def other_devices(rank, size):
    import asyncio

    store = tcp_store(rank, size)
    device = torch.device("cuda", rank + 1)
    # Nobody has called set_device(): the current device is 0 on every rank.
    dist.init_process_group("nccl", store=store, rank=rank, world_size=size, device_id=device)
    group = dist.new_group([0, 1])

    def use():
        for each in (None, group):
            tensor = torch.tensor([1.0]).to(device)
            dist.all_reduce(tensor, group=each)
            assert tensor.cpu().item() == size

    use()
    before = touched()
    for _ in range(CYCLES):
        with released_world(timeout=20):
            assert (live(), held()) == (0, 0)
        use()

    async def main():
        async with released_world(timeout=20):
            assert (live(), held()) == (0, 0)

    asyncio.run(main())
    use()
    torch.cuda.set_device(device)
    asyncio.run(main())
    use()
    assert torch.cuda.current_device() == rank + 1
    return before, touched()


def unbound_devices(rank, size):
    """As many trainers do: ``set_device()``, and no ``device_id=``. A new thread's current device is 0 all the same."""
    import asyncio

    store = tcp_store(rank, size)
    torch.cuda.set_device(rank + 1)
    dist.init_process_group(FIRST, store=store, rank=rank, world_size=size)
    total()

    async def main():
        async with released_world(timeout=20):
            assert (live(), held()) == (0, 0)

    for _ in range(CYCLES):
        asyncio.run(main())
        assert total() == 1
        with released_world(timeout=20):
            pass
        assert total() == 1
    return touched()


def test_no_other_device_is_used_by_a_scope_in_a_coroutine(nccl_ranks):
    assert nccl_ranks(unbound_devices, 2) == [[1], [2]]


def test_no_other_device_is_used(nccl_ranks):
    """pytorch 159262: teardown on the wrong current device made a context on GPU 0."""
    for rank, (before, after) in enumerate(nccl_ranks(other_devices, 2)):
        assert before == after
        assert rank + 1 in after


def unused_and_partly_used(rank, size):
    init_nccl(rank, size, backend=FIRST)
    never, partly, pipeline = (dist.new_group([0, 1, 2, 3], backend=FIRST) for _ in range(3))
    total(pipeline)
    if rank < 2:  # a point-to-point communicator of two ranks, in a group of four
        tensor = torch.tensor([7.0]).cuda()
        dist.send(tensor, 1, group=partly) if rank == 0 else dist.recv(tensor, 0, group=partly)
    before = live()
    connected = [backend_of(group)._is_initialized() for group in (never, partly, pipeline)]
    for _ in range(CYCLES):
        with released_world(timeout=20):
            assert (live(), held()) == (0, 0)
        now = [backend_of(group)._is_initialized() for group in (never, partly, pipeline)]
        assert now == [False, False, True], "only what all members had connected is connected again"
        assert live() == 1
        # The first operation of the new communicator is a send that not all ranks take part in (pytorch 74701).
        tensor = torch.tensor([float(rank)]).cuda()
        if rank < 2:
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, tensor, 1 - rank, group=pipeline),
                    dist.P2POp(dist.irecv, into := torch.tensor([0.0]).cuda(), 1 - rank, group=pipeline),
                ]
            )
            for work in works:
                work.wait()
            assert into.cpu().item() == 1 - rank
        assert total(pipeline) == 6
    assert total(never) == total(partly) == 6
    return before, connected


def test_groups_that_were_never_used_stay_unconnected_and_used_ones_are_connected_by_all(nccl_ranks):
    results = nccl_ranks(unused_and_partly_used, timeout=120)
    assert results[0] == (2, [False, True, True])
    assert results[3] == (1, [False, False, True])


def mixed(rank, size, backend):
    init_nccl(rank, size, backend=backend)
    world = dist.group.WORLD
    config, gloo = dist.get_backend_config(), world._get_backend(torch.device("cpu"))
    for _ in range(CYCLES):
        assert total() == 6
        with cycle(world):
            tensor = torch.ones(1)
            dist.all_reduce(tensor)
            assert tensor.item() == size
        assert world._get_backend(torch.device("cpu")) is gloo
        assert (dist.get_backend_config(), dist.get_backend()) == (config, "cpu:gloo,cuda:nccl")
        dist.barrier()
    return config


def test_a_mixed_world_loses_its_nccl_only_and_lends_its_gloo(nccl_ranks):
    assert nccl_ranks(mixed, backend="cpu:gloo,cuda:nccl") == ["cpu:gloo,cuda:nccl"] * 4


def unnamed(rank, size):
    init_nccl(rank, size, backend=None)
    names = dist.get_backend(), dist.get_backend_config()
    for _ in range(CYCLES):
        assert total() == 6
        with cycle(dist.group.WORLD):
            pass
        assert (dist.get_backend(), dist.get_backend_config()) == names
    return total()


def test_a_world_whose_backend_was_not_named(nccl_ranks):
    assert nccl_ranks(unnamed) == [6] * 4


def detail(rank, size, eager):
    init_nccl(rank, size, eager=eager)
    groups = [dist.group.WORLD, dist.new_group([0, 1])]
    for _ in range(CYCLES):
        assert [total(group) for group in groups] == [1, 1]
        before, old = live(), [backend_of(group).wrapped_pg for group in groups]
        with released_world(timeout=20):
            assert (live(), held()) == (0, 0)
        assert live() == before
        new = [backend_of(group) for group in groups]
        assert [type(backend).__name__ for backend in new] == ["_ProcessGroupWrapper"] * 2
        assert [type(backend.wrapped_pg) for backend in new] == [type(backend) for backend in old]
        assert not {id(backend.wrapped_pg) for backend in new} & {id(backend) for backend in old}
    return [total(group) for group in groups]


@pytest.mark.parametrize("eager", [False, True], ids=["lazy", "eager"])
def test_under_the_debug_wrapper(nccl_ranks, eager):
    assert nccl_ranks(detail, 2, eager=eager, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}) == [[1, 1]] * 2


def local_ring(rank, size):
    """Each rank makes only the two groups that it is a member of."""
    init_nccl(rank, size)
    beside = [[0, 1], [0, 1], [2, 3], [2, 3]][rank]
    across = [[0, 3], [1, 2], [1, 2], [0, 3]][rank]
    groups = {sum(ranks): dist.new_group(ranks, use_local_synchronization=True) for ranks in (beside, across)}
    for expected, group in groups.items():
        assert total(group) == expected
    count = live()
    for _ in range(CYCLES):
        with cycle(*groups.values()):
            pass
        assert live() == count
        for expected, group in groups.items():
            assert total(group) == expected
    return count


def test_groups_that_only_their_members_know(nccl_ranks):
    """pytorch 129965: making all groups again on all ranks, as others do, hangs."""
    counts = nccl_ranks(local_ring, env={"SIMGPU_DESTROY_MEETS": "1"})
    assert counts in ([2] * 4, [3] * 4)  # with WORLD's, where torch connects at once


def kept(rank, size):
    init_nccl(rank, size)
    weight_sync = dist.new_group([0, 1], group_desc="weight sync")
    other = dist.new_group([0, 1])
    total(), total(weight_sync), total(other)
    old = backend_of(weight_sync)
    [bytes_of_one] = {held() // live()}
    for _ in range(CYCLES):
        with released_world(timeout=20, keep=["weight sync"]):
            assert (live(), held()) == (1, bytes_of_one)
            assert total(weight_sync) == 1
        assert backend_of(weight_sync) is old
        assert total() == total(other) == 1
    return live()


def test_a_kept_group_goes_on_and_the_others_give_their_memory_back(nccl_ranks):
    assert nccl_ranks(kept, 2) == [3, 3]


# ------------------------------------------------------------------------------------------------------------ options


def options(rank, size):
    init_nccl(rank, size, timeout=timedelta(seconds=111))
    mine = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    mine.config.cga_cluster_size = 2
    mine.config.max_ctas = 7
    group = dist.new_group([0, 1], pg_options=mine, timeout=timedelta(seconds=222), group_desc="tensor parallel")
    changed = dist.new_group([0, 1])
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=333), changed)
    seen = []
    for _ in range(CYCLES):
        total(group), total(changed), total()
        with cycle(dist.group.WORLD, group, changed):
            changed.set_timeout(timedelta(seconds=444))
        now = backend_of(group).options
        dist.all_reduce(torch.tensor([1.0]).cuda(), group=group, async_op=True).wait()  # on a stream of the group's
        seen.append(
            (
                sorted((c["config"]["max_ctas"] or 0, c["config"]["cga_cluster_size"] or 0) for c in communicators()),
                sorted(c["priority"] < 0 for c in communicators()),
                [int(backend_of(g).options._timeout.total_seconds()) for g in (dist.group.WORLD, group, changed)],
                (now.is_high_priority_stream, now.config.cga_cluster_size, now.config.max_ctas),
                (group.group_desc, group.group_name, now.group_name, list(now.global_ranks_in_group)),
            )
        )
    return seen


def test_options_are_those_the_groups_had(nccl_ranks):
    """slime 2095, 2284, 1487, miles 1594."""
    made_with = [(0, 0), (0, 0), (7, 2)], [False, False, True]
    expected = (*made_with, [111, 222, 444], (True, 2, 7), ("tensor parallel", "1", "1", [0, 1]))
    assert nccl_ranks(options, 2) == [[expected] * CYCLES] * 2


def hooks(rank, size):
    init_nccl(rank, size, backend=FIRST)
    group = dist.new_group([0, 1], backend=FIRST)
    heard = []

    def hook(info):
        time.sleep(0.2)
        heard.append(str(info.op_type))

    group._register_on_completion_hook(hook)
    for number in range(1, CYCLES + 1):
        total(group)
        with cycle(group):
            assert len(heard) == number, "a collective that was done before was not told of"
    total(group)
    group._wait_for_pending_works()
    assert group._has_hooks()
    dist.destroy_process_group(group)
    return heard


def test_completion_hooks_go_on_hearing(nccl_ranks):
    heard = nccl_ranks(hooks, 2, env={"TORCH_NCCL_ENABLE_TIMING": "1"})
    assert [len(each) for each in heard] == [CYCLES + 1] * 2
    assert "ALLREDUCE" in heard[0][0].upper()


# ------------------------------------------------------------------------------------------------------------- inside


def new_groups_inside(rank, size, eager):
    init_nccl(rank, size, eager=eager)
    total()
    made = []
    for number in range(CYCLES):
        with released_world(timeout=20) as scope:
            engine = dist.new_group([0, 1], backend="nccl")
            gloo = dist.new_group([1, 2, 3])
            made.append((engine, gloo))
            if rank < 2:
                assert [total(group) for group, _ in made] == [1] * len(made)
            assert live() == (len(made) if rank < 2 else 0)
            if rank > 0:
                tensor = torch.ones(1)
                dist.all_reduce(tensor, group=gloo)
                assert tensor.item() == 3
        assert total() == 6
        if rank < 2:
            assert total(engine) == 1
            assert live() == 1 + len(made)
            reasons = [report.reason for report in scope.report.kept if report.backend == "cuda:nccl"]
            assert reasons == ["made while the world was released"] * number
    return True


@pytest.mark.parametrize("eager", [False, True], ids=["lazy", "eager"])
def test_groups_made_inside_by_members_and_others_are_the_engine_s(nccl_ranks, eager):
    """In eager mode new_group() would have every rank split a communicator off WORLD's, which is gone."""
    results = nccl_ranks(new_groups_inside, eager=eager, timeout=120)
    assert results == [True] * 4


def inverse(rank, size):
    init_nccl(rank, size)
    group = dist.new_group([0, 1])
    total(), total(group)
    with released_world(timeout=20):
        with restored_world():
            assert live() == 2
            assert total(group) == 1
        assert live() == 0
        with pytest.raises(RuntimeError, match=r"'nccl' of process group '1' .* is released by gpurelease"):
            total(group)
    assert live() == 2
    return total(group)


def test_restored_world_inside(nccl_ranks):
    assert nccl_ranks(inverse, 2) == [1, 1]


# ----------------------------------------------------------------------------------------------- overlap and in flight


def overlapping(rank, size, backend):
    init_nccl(rank, size, backend=backend)
    # Each rank is in two chains, as in a pipeline.
    chains = [dist.new_group([first, first + 1], backend=backend) for first in range(size - 1)]
    halves = [dist.new_group(list(range(first, size, 2)), backend=backend) for first in (0, 1)]
    mine = [group for group in (*chains, *halves) if isinstance(group, dist.ProcessGroup)]
    if rank % 2:  # destroying in a rank's own order of use would deadlock here (slime 2208)
        mine.reverse()
    for group in sorted(mine, key=lambda group: int(group.group_name)):
        total(group)
    total()
    count = live()
    for _ in range(CYCLES):
        with cycle(dist.group.WORLD, *mine):
            pass
        assert live() == count
        for group in sorted(mine, key=lambda group: int(group.group_name)):
            total(group)
    return count


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [4, 8])
def test_overlapping_groups_when_destroying_is_a_rendezvous(nccl_ranks, size, backend):
    """slime 2208: at PP=4 the ranks tore overlapping groups down in different orders, and waited for each other."""
    env = {"SIMGPU_DESTROY_MEETS": "1"}
    counts = nccl_ranks(overlapping, size, backend=backend, env=env, timeout=180)
    assert counts == [3, *[4] * (size - 2), 3]


def in_flight(rank, size, backend):
    init_nccl(rank, size, backend=backend)
    group = dist.new_group([0, 1], backend=backend)
    total(group)
    seconds = []
    for _ in range(CYCLES):
        tensors = [torch.tensor([float(rank)]).cuda() for _ in range(5)]
        works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
        assert not works[-1].is_completed()
        start = time.monotonic()
        with released_world(timeout=20):
            seconds.append(time.monotonic() - start)
            assert (live(), held()) == (0, 0)
            assert all(work.is_completed() for work in works)
        for work in works:
            work.wait()
        assert [tensor.cpu().item() for tensor in tensors] == [1.0] * 5
    return min(seconds), total(group)


@pytest.mark.parametrize("backend", BACKENDS)
def test_collectives_in_flight_at_entry_are_done(nccl_ranks, backend):
    """Each takes 100 ms on the device; the double fails the test if one was cut off. Their Work can be asked later, and
    the loop's variable holds one until the next cycle's loop, though the second ProcessGroupNCCL's points to a backend
    that it does not keep alive."""
    for seconds, group_sum in nccl_ranks(in_flight, 2, backend=backend, env={"SIMGPU_COLLECTIVE_MS": "100"}):
        assert 0.4 < seconds < 5
        assert group_sum == 1


# ----------------------------------------------------------------------------------------------------------- barriers


def slow_rank(rank, size):
    init_nccl(rank, size)
    groups = [dist.new_group([member], backend=FIRST) for member in range(size)]
    mine = groups[rank]
    assert total(mine) == rank
    # Only the groups of one rank are released: nobody waits for anybody but at a roll call.
    with released_world(timeout=20, keep=lambda group: group.size() > 1):
        if rank == 1:
            delay("init", 0.7)
    back = time.monotonic()
    connected = live()
    if rank == 1:
        delay("destroy", 0.7)
    with released_world(timeout=20, keep=lambda group: group.size() > 1):
        inside = time.monotonic()
    return back, inside, connected


def test_nobody_is_back_or_inside_before_all_are_done(nccl_ranks):
    """miles 384, 705: a fast rank used a group that a slow one was still building, and failed after 1,600 steps;
    slime 2208, pytorch 119196: one re-entered rendezvous while others shut down."""
    results = nccl_ranks(slow_rank, 2)
    for moments in zip(*[result[:2] for result in results], strict=True):
        assert max(moments) - min(moments) < 0.5, "one rank was there long before the other"
    assert len({connected for _, _, connected in results}) == 1


# ------------------------------------------------------------------------------------------------------------- faults


def failing_teardown(rank, size, call, left):
    init_nccl(rank, size, backend=FIRST)
    group = dist.new_group([0, 1], backend=FIRST)
    total(), total(group)
    old = backend_of(group)
    if rank == 1:
        fault(call)
    with pytest.raises(ReleaseFailed) as failure, released_world(timeout=10):
        raise AssertionError("it was entered")
    assert (is_released(), dist.get_backend()) == (False, FIRST)
    # The device is waited for before anything is changed.
    assert (backend_of(group) is old) == (call == "synchronize")
    assert total() == total(group) == 1
    left = left if rank == 1 else 0
    deadline = time.monotonic() + 10
    while live() > 2 + left and time.monotonic() < deadline:
        time.sleep(0.01)  # a backend that could not be shut down aborts its communicator at its end
    with cycle(dist.group.WORLD, group, left=left):
        pass
    assert live() == 2 + left
    return failure.value.failures, total(group)


@pytest.mark.parametrize(
    ("call", "text", "left"),
    [
        ("synchronize", "waiting for the device: .*illegal memory access", 0),
        ("finalize", "shutting down process group .*: NCCL error", 0),
        ("destroy", "shutting down process group .*: NCCL error", 1),  # torch does not try a second time
    ],
    ids=["synchronize", "finalize", "destroy"],
)
def test_a_teardown_that_fails_on_one_rank_fails_on_all_and_the_world_is_as_before(nccl_ranks, call, text, left):
    """verl's fork, xtuner: the other ranks went on in a mixed state."""
    for failures, group_sum in nccl_ranks(failing_teardown, 2, call=call, left=left, timeout=120):
        assert list(failures) == [1]
        assert re.search(text, failures[1])
        assert group_sum == 1


def failing_connection(rank, size):
    init_nccl(rank, size, backend=FIRST)
    group = dist.new_group([0, 1, 2], backend=FIRST)
    total(), total(group)
    told = None
    try:
        with released_world(timeout=10):
            if rank == 1:
                fault("init")
    except RestoreFailed as error:
        told = error.failures
    assert (is_released(), live(), held(), dist.get_backend()) == (True, 0, 0, "gloo")
    dist.barrier()
    wake_world()
    assert live() == 2
    return told, total(), total(group)


def test_a_communicator_that_cannot_be_made_fails_all_and_can_be_tried_again(nccl_ranks):
    for failures, world_sum, group_sum in nccl_ranks(failing_connection, 3, env={"SIMGPU_TIMEOUT": "3"}, timeout=120):
        assert "building process group" in failures[1]
        assert "NCCL error" in failures[1]
        assert "GiB were free on cuda:1" in failures[1]
        assert (world_sum, group_sum) == (3, 3)


def failing_before_others_wait(rank, size, failing):
    init_nccl(rank, size, backend=FIRST)
    group = dist.new_group(list(range(size)), backend=FIRST)
    total(), total(group)
    build, told = Releasable.build, None

    def fails(*args):
        raise OSError("injected")

    try:
        with released_world(timeout=4):
            if rank == failing:
                Releasable.build = fails
            started = time.monotonic()
    except RestoreFailed as error:
        told = error.failures
    in_time = time.monotonic() - started < 7
    Releasable.build = build
    started = time.monotonic()
    wake_world()
    return told, in_time, time.monotonic() - started < 5, total(), total(group)


@pytest.mark.parametrize("failing", [0, 2])
def test_ranks_that_wait_for_one_that_failed_do_so_within_the_limit_and_hold_nothing_up_then(nccl_ranks, failing):
    """They wait in the store for NCCL's id, for as long as the store's own time-out, and hold it meanwhile."""
    for told, in_time, again_in_time, *sums in nccl_ranks(failing_before_others_wait, 3, failing=failing, timeout=90):
        assert "injected" in told[failing]
        assert (in_time, again_in_time, sums) == (True, True, [3, 3])
