"""FSDP2, HSDP and DDP on the real ProcessGroupNCCL.

They go all the way: built, forward, backward and optimizer step. With a layer that computes on the CPU (the double has
no cuBLAS) DDP's numbers are right too; FSDP2 packs its collectives' buffers with kernels, so that of FSDP2 only the
number of collectives and the sharded parameters, which are gathered without kernels, say something.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from gpurelease import released_world
from tests.nccl.double import FIRST, backend_of, communicators, held, init_nccl, live

CYCLES = 3


class OnHost(torch.autograd.Function):
    """A matrix product on the CPU."""

    @staticmethod
    def forward(ctx, inputs, weight):
        ctx.save_for_backward(inputs, weight)
        return (inputs.detach().cpu() @ weight.detach().cpu()).cuda()

    @staticmethod
    def backward(ctx, gradient):
        inputs, weight = (tensor.detach().cpu() for tensor in ctx.saved_tensors)
        return (gradient.cpu() @ weight.T).cuda(), (inputs.T @ gradient.cpu()).cuda()


class Layer(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight.cuda())

    def forward(self, inputs):
        return OnHost.apply(inputs, self.weight)


def ids():
    return {comm["id"] for comm in communicators()}


def collectives(step, *arguments):
    """Call ``step``; return how many collectives it has run on each communicator that it used, and its result."""
    before = {comm["id"]: comm["collectives"] for comm in communicators()}
    result = step(*arguments)
    counts = [comm["collectives"] - before.get(comm["id"], 0) for comm in communicators()]
    return sorted(filter(None, counts)), result


def cycle(groups):
    """Release and restore, and check that the same groups have other communicators, as many as before."""
    count, old_ids, backends = live(), ids(), [backend_of(group) for group in groups]
    with released_world(timeout=20):
        assert (live(), held()) == (0, 0)
    assert live() == count
    assert not ids() & old_ids
    assert all(backend_of(group) is not old for group, old in zip(groups, backends, strict=True))


def on_host(tensor):
    return tensor.detach().cpu().tolist()


def minus_one(tensor):
    """A step of an optimizer whose arithmetic is on the CPU."""
    with torch.no_grad():
        tensor.copy_((tensor.cpu() - 1).cuda())


def fsdp2(rank, size, shape):
    init_nccl(rank, size, backend=FIRST)
    mesh = init_device_mesh("cuda", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    groups = mesh.get_all_groups()
    weights = [torch.arange(16.0).reshape(4, 4), torch.arange(8.0).reshape(4, 2)]
    net = nn.Sequential(*(fully_shard(Layer(weight), mesh=mesh) for weight in weights))
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.Adam(net.parameters())
    inputs = torch.ones(3, 4).cuda()
    seen = []

    def handles():
        found = [layer._get_fsdp_state()._fsdp_param_group.mesh_info for layer in net]
        return [id(each.shard_process_group) for each in found] + [id(group) for group in mesh.get_all_groups()]

    before = handles()
    for number in range(CYCLES + 1):
        if number > 0:
            cycle(groups)
            assert handles() == before
        gathering, full = collectives(lambda: [parameter.full_tensor() for parameter in net.parameters()])
        assert [on_host(each) for each in full] == [on_host(weight - number) for weight in weights]
        forward, outputs = collectives(net, inputs)
        backward, _ = collectives(outputs.backward, torch.ones(3, 2).cuda())
        seen.append((gathering, forward, backward))
        optimizer.step()
        optimizer.zero_grad()
        for parameter in net.parameters():
            minus_one(parameter.to_local())
    return seen, live()


@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=["FSDP2", "HSDP"])
def test_fsdp2_reduces_over_new_communicators(nccl_ranks, shape):
    """xtuner, pytorch 113580: FSDP2 reduced gradients over the dead group, without an error."""
    for seen, count in nccl_ranks(fsdp2, 2 * len(shape), shape=shape, timeout=60):
        # Two layers: each is gathered, gathered again for its backward pass, reduced and scattered; and with HSDP
        # reduced across the replicas.
        assert seen == [([2], [2], [4] if len(shape) == 1 else [2, 4])] * (CYCLES + 1)
        assert count == len(shape)


def ddp(rank, size):
    init_nccl(rank, size, backend=FIRST)
    group = dist.new_group([0, 1], backend=FIRST)
    weight = torch.arange(8.0).reshape(4, 2)
    building, net = collectives(lambda: DistributedDataParallel(Layer(weight + 100 * rank), process_group=group))
    [parameter] = net.parameters()
    assert on_host(parameter) == on_host(weight), "rank 0's parameters were to be broadcast"
    # In C++ too, on the reducer's own handle. Without a hook gradients get into its bucket by way of a kernel; and the
    # kernel that is missing here is the one that makes a mean of the sum.
    net._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    optimizer = torch.optim.Adam(net.parameters())
    seen = []
    for number in range(CYCLES + 1):
        if number > 0:
            cycle([group])
            assert net.process_group is group
        inputs = torch.full((3, 4), 1.0 + rank + 10 * number)
        forward, outputs = collectives(net, inputs.cuda())
        assert on_host(outputs) == on_host(inputs @ (weight - number))
        backward, _ = collectives(outputs.backward, torch.ones(3, 2).cuda())
        assert on_host(parameter.grad) == [[3 * (3.0 + 20 * number)] * 2] * 4
        seen.append((forward, backward))
        optimizer.step()
        optimizer.zero_grad()
        minus_one(parameter)
    return building, seen, live()


def test_ddp_reduces_over_new_communicators(nccl_ranks):
    """The C++ reducer keeps the group for itself."""
    for building, seen, count in nccl_ranks(ddp, 2, timeout=60):
        assert building == [3]  # are the shapes the same everywhere, and rank 0's parameters
        # In the second step, which is the first on a new communicator, it puts its buckets together anew.
        assert seen == [([], [1]), ([2], [1]), ([], [1]), ([], [1])]
        assert count == 1
