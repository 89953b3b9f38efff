"""Everything that holds a process group goes on working, over several cycles, and on the group's new backend."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed import all_reduce as bound_before
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import P2POp, _coalescing_manager, _set_pg_timeout
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from gpurelease import released_world, restored_world, sleep_world, wake_world
from tests.cycles import POSING, backend_of, cycle, refusal, total
from tests.ranks import init_gloo, run_ranks

CYCLES = 3


# ------------------------------------------------------------------------------------------------------- raw handles


def raw_handles(rank, size):
    init_gloo(rank, size)
    world = dist.group.WORLD

    def with_default_argument(group=dist.group.WORLD):
        return total(group)

    everyone = dist.new_group(list(range(size)), group_desc="everyone")
    pairs = [dist.new_group([low, low + 1]) for low in range(0, size, 2)]
    pair = pairs[rank // 2]
    alone = [dist.new_group([member]) for member in range(size)][rank]
    local = dist.new_group([rank ^ 1, rank], use_local_synchronization=True)
    held = {"world": world, "everyone": everyone, "pair": pair, "alone": alone, "local": local}
    ids = {name: id(group) for name, group in held.items()}
    books = [(dist.get_backend(g), dist.get_backend_config(g), g.group_name, g.group_desc) for g in held.values()]
    first_of_pair = 2 * (rank // 2)
    for _ in range(CYCLES):
        with cycle(*held.values()):
            assert total(world) == 6
        assert total(world) == with_default_argument() == total(everyone) == 6
        tensor = torch.tensor([float(rank)])
        bound_before(tensor)
        assert tensor.item() == 6
        assert total(pair) == total(local) == 2 * first_of_pair + 1
        assert total(alone) == rank
        assert {name: id(group) for name, group in held.items()} == ids
        now = [(dist.get_backend(g), dist.get_backend_config(g), g.group_name, g.group_desc) for g in held.values()]
        assert now == books
    return True


def test_raw_handles_work_wherever_they_are_kept():
    assert run_ranks(raw_handles) == [True] * 4


def one_rank(rank, size):
    init_gloo(rank, size)
    group = dist.new_group([0])
    for _ in range(CYCLES):
        with cycle(dist.group.WORLD, group):
            assert total() == 0
        assert total(group, value=3) == 3
    return True


def test_a_world_of_one_rank_works_the_same_way():
    """slime 928, miles 253: one-rank groups broke single-GPU runs."""
    assert run_ranks(one_rank, size=1) == [True]


# -------------------------------------------------------------------------------------------------------- operations


def operations(rank, size):
    init_gloo(rank, size)
    group = dist.new_group(list(range(size)))
    for number in range(CYCLES):
        with cycle(dist.group.WORLD, group):
            gathered = [None] * size
            dist.all_gather_object(gathered, {"rank": rank, "cycle": number})
            assert [item["rank"] for item in gathered] == [0, 1, 2, 3]
        # A send and a receive as the first operation of the new backend (pytorch 74701).
        out, into = torch.full((2,), float(rank)), torch.empty(2)
        works = dist.batch_isend_irecv(
            [
                P2POp(dist.isend, out, (rank + 1) % size, group=group),
                P2POp(dist.irecv, into, (rank - 1) % size, group=group),
            ]
        )
        for work in works:
            work.wait()
        assert into.tolist() == [float((rank - 1) % size)] * 2

        tensor = torch.ones(4)
        work = dist.all_reduce(tensor, group=group, async_op=True)
        work.wait()
        assert tensor.tolist() == [4.0] * 4

        objects = [{"from": 2}] if rank == 2 else [None]
        dist.broadcast_object_list(objects, src=2, group=group)
        assert objects == [{"from": 2}]

        many = [torch.full((3,), float(rank + i)) for i in range(3)]
        with _coalescing_manager(group=group):
            for one in many:
                dist.all_reduce(one, group=group)
        assert [one[0].item() for one in many] == [6.0, 10.0, 14.0]

        shard = torch.empty(1)
        dist.reduce_scatter_tensor(shard, torch.arange(4.0), group=group)
        assert shard.item() == 4.0 * rank
        dist.barrier(group=group)
        dist.monitored_barrier(group=group)
    return True


def test_point_to_point_async_object_and_coalesced_operations():
    assert run_ranks(operations) == [True] * 4


def functional(rank, size):
    init_gloo(rank, size)
    group = dist.new_group(list(range(size)))
    name = group.group_name
    for _ in range(CYCLES):
        with cycle(group):
            assert dist.distributed_c10d._resolve_process_group(name) is group
        by_group = funcol.all_reduce(torch.ones(2) * rank, "sum", group)
        by_name = torch.ops._c10d_functional.wait_tensor(
            torch.ops._c10d_functional.all_reduce(torch.ones(2) * rank, "sum", name)
        )
        assert by_group.tolist() == by_name.tolist() == [6.0, 6.0]
    return True


def test_functional_collectives_by_group_and_by_name():
    """xtuner: "Could not resolve the process group registered under the name"."""
    assert run_ranks(functional) == [True] * 4


def compiled(rank, size):
    init_gloo(rank, size)
    group = dist.new_group(list(range(size)))
    compilations = []

    def backend(graph, inputs):
        compilations.append(graph)
        return graph

    @torch.compile(fullgraph=True, backend=backend)
    def step(tensor):
        return funcol.all_reduce(tensor * 2, "sum", group) + 1

    assert step(torch.ones(2)).tolist() == [9.0, 9.0]
    for _ in range(CYCLES):
        with cycle(group):
            pass
        assert step(torch.ones(2)).tolist() == [9.0, 9.0]
    return len(compilations)


def test_compiled_code_with_a_collective_is_not_compiled_again():
    assert run_ranks(compiled, timeout=120) == [1] * 4


# ----------------------------------------------------------------------------------------- meshes and their tensors


def meshes(rank, size):
    init_gloo(rank, size)
    line = init_device_mesh("cpu", (size,), mesh_dim_names=("all",))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    flat = square["dp", "tp"]._flatten("both")
    sub = square["tp"]
    groups = [line.get_group(), square.get_group("dp"), square.get_group("tp"), flat.get_group()]
    tensor = torch.arange(16.0).reshape(4, 4)
    sharded = distribute_tensor(tensor.clone(), square, [Shard(0), Shard(1)])
    for _ in range(CYCLES):
        with cycle(*{id(group): group for group in groups}.values()):
            pass
        assert [line.get_group(), square.get_group("dp"), sub.get_group(), flat.get_group()] == groups
        assert total(groups[0]) == total(groups[3]) == 6
        assert total(groups[2]) == (1 if rank < 2 else 5)
        assert init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"].get_group().size() == 2
        assert torch.equal(sharded.full_tensor(), tensor)
        rows = sharded.redistribute(square, [Shard(1), Shard(0)])
        assert torch.equal(rows.redistribute(square, [Replicate(), Replicate()]).to_local(), tensor)
        assert isinstance(rows, DTensor)
    return True


def test_device_meshes_and_their_tensors():
    """A mesh over all ranks (WORLD itself or a group of its own), a square one, its slices, and a flattened one."""
    assert run_ranks(meshes) == [True] * 4


# ---------------------------------------------------------------------------------------------------------- training


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def train(net, optimizer, rank, between, steps=CYCLES + 1):
    """Train for some steps with a cycle between any two, and return the losses, bit for bit."""
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + rank)
        batch = torch.randn(6, 8, generator=generator)
        loss = net(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        between()
    return losses


def same_as_without_a_scope(rank, size, wrap, groups_of):
    init_gloo(rank, size)

    def run(between):
        net = wrap(model())
        optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
        return train(net, optimizer, rank, lambda: between(net))

    def with_cycle(net):
        with cycle(*groups_of(net)):
            pass

    plain = run(lambda net: None)
    cycled = run(with_cycle)
    assert len(set(plain)) == len(plain), "the losses do not change: nothing is trained"
    return plain == cycled, plain, cycled


def sharded(net, mesh):
    net.mesh = mesh
    for layer in (net[0], net[2]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def fsdp_1d(net):
    return sharded(net, init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)))


def hsdp(net):
    return sharded(net, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def mesh_groups(net):
    return net.mesh.get_all_groups()


def ddp(net):
    net = DistributedDataParallel(net, process_group=dist.new_group(list(range(4))))
    net.hooked = []

    def hook(state, bucket):
        net.hooked.append(bucket.index())
        future = dist.all_reduce(bucket.buffer(), group=net.process_group, async_op=True).get_future()
        return future.then(lambda done: done.value()[0] / 4)

    net.register_comm_hook(None, hook)
    return net


def ddp_without_hook(net):
    return DistributedDataParallel(net)


def ddp_group(net):
    return [net.process_group]


def losses_are_equal(wrap, groups_of):
    for rank, (equal, plain, cycled) in enumerate(
        run_ranks(same_as_without_a_scope, timeout=120, wrap=wrap, groups_of=groups_of)
    ):
        assert equal, f"rank {rank}: {plain} without scopes, {cycled} with them"


def test_fsdp2_trains_bit_for_bit_as_without_a_scope():
    """xtuner, pytorch 113580: FSDP2 reduced gradients over the dead group, without an error."""
    losses_are_equal(fsdp_1d, mesh_groups)


def test_hsdp_trains_bit_for_bit_as_without_a_scope():
    losses_are_equal(hsdp, mesh_groups)


def test_ddp_trains_bit_for_bit_as_without_a_scope():
    """The C++ reducer keeps the group for itself."""
    losses_are_equal(ddp_without_hook, ddp_group)


def test_ddp_with_a_communication_hook_trains_bit_for_bit_as_without_a_scope():
    losses_are_equal(ddp, ddp_group)


def whole_model(rank, size):
    """FSDP2's gradients against those of the whole batch on one rank: sums, not only equality with itself."""
    init_gloo(rank, size)
    net = fsdp_1d(model())
    whole = copy.deepcopy(model())
    batches = [torch.randn(6, 8, generator=torch.Generator().manual_seed(r)) for r in range(size)]
    whole(torch.cat(batches)).square().mean().backward()
    for _ in range(CYCLES):
        with cycle(*mesh_groups(net)):
            pass
        net.zero_grad()
        net(batches[rank]).square().mean().backward()
        for sharded, reference in zip(net.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(sharded.grad.full_tensor(), reference.grad)
    return True


def test_fsdp2_gradients_are_those_of_the_whole_batch():
    assert run_ranks(whole_model) == [True] * 4


# ----------------------------------------------------------------------------------------------------------- options


def timeouts(rank, size):
    from datetime import timedelta

    init_gloo(rank, size, timeout=timedelta(seconds=111))
    changed = dist.new_group(list(range(size)), timeout=timedelta(seconds=222))
    set_inside = dist.new_group(list(range(size)), timeout=timedelta(seconds=333))
    _set_pg_timeout(timedelta(seconds=444), changed)
    for _ in range(CYCLES):
        with cycle(dist.group.WORLD, changed, set_inside):
            assert backend_of(dist.group.WORLD).options._timeout == timedelta(seconds=111)
            set_inside.set_timeout(timedelta(seconds=555))
        groups = (dist.group.WORLD, changed, set_inside)
        seen = [int(backend_of(group).options._timeout.total_seconds()) for group in groups]
        assert seen == [111, 444, 555], seen
    return True


def test_timeouts_are_those_that_were_set_last():
    """slime 2095, 2284, miles 1594: after a cycle groups fell back to torch's default."""
    assert run_ranks(timeouts) == [True] * 4


class Trainer:
    """Has a rollout that asks what a released group says."""

    @released_world(**POSING)
    def rollout(self, group):
        return refusal(group)


def texts_of_the_refusal(rank, size):
    init_gloo(rank, size)
    group = dist.new_group(list(range(size)), group_desc="expert parallel")
    texts = []
    with released_world(**POSING):
        texts.append(refusal(group))
        assert (dist.get_backend(group), group.size(), group.rank()) == ("gloo", size, rank)
        with restored_world():
            assert total(group) == 6
        texts.append(refusal(group))
    texts.append(Trainer().rollout(group))
    sleep_world(**POSING)
    with released_world():
        texts.append(refusal(group))
    wake_world()
    assert total(group) == 6
    return texts


def test_a_released_group_says_what_released_it_and_what_to_do():
    what = "'gloo' of process group '1' (expert parallel) is released by gpurelease's "
    to_do = [
        "released_world(): use the group after that block, or inside `with restored_world():`. It",
        "released_world(): use the group after that block, or inside `with restored_world():`. It",
        "@released_world on Trainer.rollout(): use the group after that call, or inside `with restored_world():`. It",
        "sleep_world(): call wake_world() on all ranks, or use the group inside `with restored_world():`. It",
    ]
    for texts in run_ranks(texts_of_the_refusal):
        for text, words in zip(texts, to_do, strict=True):
            assert f"{what}{words} does not support allreduce" in text
