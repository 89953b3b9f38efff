"""Rebuilding the real ProcessGroupNCCL: no communicator and no byte inside, the same ones and options afterwards."""

from __future__ import annotations

import time
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from gpurelease import ReleaseFailed, RestoreFailed, is_released, released_world, restore_world, restored_world
from tests.nccl.double import backend_of, fault, held, init_nccl, live, total, touched
from tests.ranks import tcp_store

CYCLES = 3


@contextmanager
def cycle(*groups, **options):
    """Release and restore, and check what was held before, inside and after."""
    before, backends = (live(), held()), [backend_of(group) for group in groups]
    with released_world(timeout=20, **options) as scope:
        assert (live(), held()) == (0, 0)
        assert (dist.get_backend(), is_released()) == ("gloo", True)
        yield scope
    assert (live(), held()) == before
    for group, old in zip(groups, backends, strict=True):
        assert backend_of(group) is not old
        assert backend_of(group).name() == "nccl"


# ---------------------------------------------------------------------------------------------------- kinds of groups


def kinds_of_groups(rank, size, eager):
    init_nccl(rank, size, eager=eager)
    world = dist.group.WORLD
    pair = [dist.new_group([low, low + 1], group_desc="pair") for low in (0, 2)][rank // 2]
    local = dist.new_group([rank ^ 1, rank], use_local_synchronization=True)
    square = init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "tp"))
    alone = [dist.new_group([member]) for member in range(size)][rank]
    groups = [world, pair, local, square.get_group("dp"), square.get_group("tp"), alone]
    if eager:
        groups.append(dist.split_group(world, [[0, 1], [2, 3]]))
    pair_sum, across_sum = 4 * (rank // 2) + 1, 2 * (rank % 2) + 2

    def use():
        sums = [6, pair_sum, pair_sum, across_sum, pair_sum, rank] + ([pair_sum] if eager else [])
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
    dist.init_process_group("nccl", store=store, rank=rank, world_size=size)
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
    init_nccl(rank, size)
    never, partly, pipeline = (dist.new_group([0, 1, 2, 3]) for _ in range(3))
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


def second_nccl(rank, size):
    init_nccl(rank, size, backend="nccl2")
    backend = backend_of(dist.group.WORLD)
    assert total() == 1
    with released_world(timeout=20) as scope:
        assert not is_released()
        assert total() == 1
    assert backend_of(dist.group.WORLD) is backend
    return scope.report.kept[0].reason


def test_the_second_process_group_nccl_is_kept_and_reported_and_not_built_wrongly(nccl_ranks):
    text = "'nccl2' is torch's second ProcessGroupNCCL here, not known yet: set TORCH_DIST_USE_NCCL2=0"
    assert nccl_ranks(second_nccl, 2) == [text] * 2


def detail(rank, size):
    init_nccl(rank, size)
    for _ in range(CYCLES):
        assert total() == 1
        before, old = live(), backend_of(dist.group.WORLD)
        with released_world(timeout=20):
            assert (live(), held()) == (0, 0)
        new = backend_of(dist.group.WORLD)
        assert (live(), type(new).__name__) == (before, "_ProcessGroupWrapper")
        assert new.wrapped_pg is not old.wrapped_pg
    return total()


def test_under_the_debug_wrapper(nccl_ranks):
    assert nccl_ranks(detail, 2, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}) == [1, 1]


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
        seen.append(
            (
                [int(backend_of(g).options._timeout.total_seconds()) for g in (dist.group.WORLD, group, changed)],
                (now.is_high_priority_stream, now.config.cga_cluster_size, now.config.max_ctas),
                (group.group_desc, group.group_name, now.group_name, list(now.global_ranks_in_group)),
            )
        )
    return seen


def test_options_are_those_the_groups_had(nccl_ranks):
    """slime 2095, 2284, 1487, miles 1594."""
    expected = ([111, 222, 444], (True, 2, 7), ("tensor parallel", "1", "1", [0, 1]))
    assert nccl_ranks(options, 2) == [[expected] * CYCLES] * 2


def hooks(rank, size):
    init_nccl(rank, size)
    group = dist.new_group([0, 1])
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


def overlapping(rank, size):
    init_nccl(rank, size)
    chains = [dist.new_group([first, first + 1]) for first in range(size - 1)]  # each rank is in two, as in a pipeline
    halves = [dist.new_group(list(range(first, size, 2))) for first in (0, 1)]
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


@pytest.mark.parametrize("size", [4, 8])
def test_overlapping_groups_when_destroying_is_a_rendezvous(nccl_ranks, size):
    counts = nccl_ranks(overlapping, size, env={"SIMGPU_DESTROY_MEETS": "1"}, timeout=180)
    assert counts == [3, *[4] * (size - 2), 3]


def in_flight(rank, size):
    init_nccl(rank, size)
    group = dist.new_group([0, 1])
    works = []
    for _ in range(CYCLES):
        tensors = [torch.tensor([float(rank)]).cuda() for _ in range(5)]
        works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
        with released_world(timeout=20):
            assert (live(), held()) == (0, 0)
        for work in works:
            work.wait()
        assert [tensor.cpu().item() for tensor in tensors] == [1.0] * 5
    return total(group)


def test_collectives_in_flight_at_entry_are_done(nccl_ranks):
    assert nccl_ranks(in_flight, 2) == [1, 1]


def capturing(rank, size):
    from tests.nccl.double import library

    init_nccl(rank, size)
    total()
    before = live(), backend_of(dist.group.WORLD)
    if rank == 1:
        library().simgpu_set_capturing(1)
    try:
        with released_world(timeout=20):
            return "it was entered"
    except ReleaseFailed as error:
        told = error.failures
    library().simgpu_set_capturing(0)
    assert (live(), backend_of(dist.group.WORLD)) == before
    with cycle(dist.group.WORLD):
        pass
    return told


def test_a_capture_in_progress_is_refused_on_all_ranks(nccl_ranks):
    text = "a CUDA graph is being captured: the collectives in it would lose their communicators"
    assert nccl_ranks(capturing, 2) == [{1: text}] * 2


# ------------------------------------------------------------------------------------------------------------- faults


def failing_connection(rank, size):
    init_nccl(rank, size)
    group = dist.new_group([0, 1, 2])
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
    restore_world()
    assert live() == 2
    return told, total(), total(group)


def test_a_communicator_that_cannot_be_made_fails_all_and_can_be_tried_again(nccl_ranks):
    for failures, world_sum, group_sum in nccl_ranks(failing_connection, 3, env={"SIMGPU_TIMEOUT": "3"}, timeout=120):
        assert "building process group" in failures[1]
        assert "NCCL error" in failures[1]
        assert "GiB were free on cuda:1" in failures[1]
        assert (world_sum, group_sum) == (3, 3)


def flat(rank, size, cycles):
    from tests.ranks import descriptors, threads

    store = init_nccl(rank, size)
    group = dist.new_group([0, 1])
    total(), total(group)
    seen = []
    for number in range(1, cycles + 1):
        with released_world(timeout=20):
            pause = 1.0 if number % 10 == 0 else 0.0  # a watchdog's thread ends a moment after its backend
            time.sleep(pause)
            inside = descriptors(), threads(), live(), held()
        total(), total(group)
        dist.barrier()
        if pause:
            time.sleep(pause)
            seen.append((*inside, descriptors(), threads(), live(), held(), len(store.list_keys())))
        dist.barrier()
    return seen


def test_nothing_grows_over_many_cycles(nccl_ranks):
    """pytorch 107298, Megatron 6897: a kept handle kept the communicator."""
    for seen in nccl_ranks(flat, 2, cycles=40, timeout=180):
        assert {row[2:4] for row in seen} == {(0, 0)}
        assert len(seen) == 4
        assert len(set(seen)) == 1, seen
