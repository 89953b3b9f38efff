"""What becomes of groups of all kinds: on other backends, kept, and destroyed."""

from __future__ import annotations

from datetime import timedelta
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import gpurelease
from gpurelease import (
    Blueprint,
    ReleaseFailed,
    is_released,
    register_rebuilder,
    released_world,
    restored_world,
)
from tests.cycles import POSING, backend_of, refusal, total
from tests.ranks import init_gloo, run_ranks, tcp_store


def reason_kept(scope, group):
    return next(report.reason for report in scope.report.groups if report.name == group.group_name)


def init_posing(rank, size, name="posing", extended=False):
    """Initialise WORLD on an out-of-tree backend: Gloo under another name, as the accelerator's backend would be."""

    def create(store, rank, size, timeout):
        return dist.ProcessGroupGloo(store, rank, size, timeout)

    def create_extended(about, options):
        assert list(about.global_ranks_in_group) in ([], list(range(about.group_size)))
        return dist.ProcessGroupGloo(about.store, about.group_rank, about.group_size, about.timeout)

    dist.Backend.register_backend(name, create_extended if extended else create, extended, devices=["cpu"])
    dist.init_process_group(name, store=tcp_store(rank, size), rank=rank, world_size=size)


def gloo_groups_are_left_alone(rank, size, extended):
    init_posing(rank, size, extended=extended)
    gloo = dist.new_group([0, 1, 2, 3], backend="gloo")
    posing = dist.new_group([0, 1, 2, 3])
    backend = backend_of(gloo)
    for _ in range(3):
        before = backend_of(posing)
        with released_world(backends=("posing",), timeout=20) as scope:
            assert dist.get_backend() == "gloo"
            assert total() == total(gloo) == 6
            assert backend_of(gloo) is backend
            assert "'posing' of process group" in refusal(posing)
            assert reason_kept(scope, gloo) == "no backend of posing"
            assert sorted(report.name for report in scope.report.released) == ["0", posing.group_name]
        assert (dist.get_backend(), dist.get_backend_config()) == ("posing", "cpu:posing")
        assert total() == total(gloo) == total(posing) == 6
        assert backend_of(gloo) is backend
        assert backend_of(posing) is not before
    return True


def test_groups_on_gloo_alone_work_inside_and_keep_their_backend():
    """And an out-of-tree backend is built again by the creator that it was registered with."""
    assert run_ranks(gloo_groups_are_left_alone, extended=False) == [True] * 4


def test_an_out_of_tree_backend_with_the_extended_interface():
    assert run_ranks(gloo_groups_are_left_alone, extended=True) == [True] * 4


def own_rebuilder(rank, size):
    init_posing(rank, size)
    seen = []

    def rebuild(blueprint, store, timeout):
        seen.append((blueprint.backend, blueprint.devices, blueprint.rank, blueprint.size, blueprint.ranks))
        return dist.ProcessGroupGloo(store, blueprint.rank, blueprint.size, timeout)

    register_rebuilder("posing", rebuild)
    with released_world(backends=("posing",), timeout=20):
        pass
    assert total() == 1
    return seen


def test_a_registered_rebuilder_is_used():
    assert run_ranks(own_rebuilder, size=2) == [[("posing", ("cpu",), rank, 2, (0, 1))] for rank in range(2)]


class OutOfTree(dist.ProcessGroupGloo):
    """A backend for a device that torch does not know: it holds memory until it is shut down."""

    held: ClassVar[list[OutOfTree]] = []

    def __init__(self, store, rank, size, timeout):
        super().__init__(store, rank, size, timeout)
        self.held.append(self)

    def shutdown(self):
        self.held.remove(self)
        super().shutdown()


def out_of_tree(rank, size):
    dist.Backend.register_backend("out-of-tree", OutOfTree, devices=["privateuseone"])
    backend = "cpu:gloo,privateuseone:out-of-tree"
    dist.init_process_group(backend, store=tcp_store(rank, size), rank=rank, world_size=size)
    group = dist.new_group([0, 1])
    gloo = backend_of(group)
    for _ in range(3):
        before = list(OutOfTree.held)
        assert len(before) == 2
        with released_world(timeout=20) as scope:
            assert OutOfTree.held == []
            assert [report.backend for report in scope.report.released] == [backend] * 2
            assert total() == total(group) == 1
        assert len(OutOfTree.held) == 2 and not set(map(id, before)) & set(map(id, OutOfTree.held))
        assert backend_of(group, "privateuseone") is OutOfTree.held[1]
        assert backend_of(group) is gloo
    with pytest.raises(ReleaseFailed) as failure, released_world(strategy="suspend", timeout=20):
        raise AssertionError("it was entered")
    assert len(OutOfTree.held) == 2
    return failure.value.failures[1]


def test_a_backend_for_a_device_of_its_own_is_released_without_being_named():
    for text in run_ranks(out_of_tree, size=2):
        assert text.startswith("strategy='suspend' is not supported: process group '0' (default_pg): ")
        assert "does not support getMemoryStats" in text


def test_xccl_is_built_from_the_options_it_had(mocker):
    """torch's own creator makes fresh options. There is no XCCL to try it on here."""
    xccl = mocker.patch.object(dist.distributed_c10d, "ProcessGroupXCCL", create=True)
    mocker.patch.object(torch, "__version__", torch.torch_version.TorchVersion("2.14.0"))
    options, store = object(), dist.HashStore()
    blueprint = Blueprint("xccl", ("xpu",), 1, 3, 8, tuple(range(8)), "0", None, options, None, object, wrapped=False)
    assert blueprint.build(store, timedelta(seconds=1)) is xccl.return_value
    xccl.assert_called_once_with(store, 3, 8, options)


def detail(rank, size):
    init_gloo(rank, size)
    group = dist.new_group([0, 1])
    assert type(backend_of(group)).__name__ == "_ProcessGroupWrapper"
    for _ in range(3):
        before = backend_of(group)
        with released_world(**POSING):
            assert "is released by gpurelease" in refusal(group)
        after = backend_of(group)
        assert type(after).__name__ == "_ProcessGroupWrapper"
        assert after is not before and after.wrapped_pg is not before.wrapped_pg
        assert total() == total(group) == 1
    return True


def test_the_debug_wrapper_is_seen_through_and_put_on_again():
    assert run_ranks(detail, size=2, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}) == [True] * 2


class Poser(dist.ProcessGroup):
    """A backend that poses as a whole group, as torch lets Python backends do."""


def posers(rank, size):
    dist.Backend.register_backend("poser", lambda store, rank, size, timeout: Poser(rank, size), devices=["cpu"])
    init_gloo(rank, size)
    group = dist.new_group([0, 1], backend="poser")
    assert type(group) is Poser
    for backends in (("gloo",), ("gloo", "poser")):
        with released_world(backends=backends, timeout=20) as scope:
            reasons = [report.reason for report in scope.report.kept]
    assert total() == 1
    return reasons


def test_a_python_subclass_of_process_group_is_kept_and_reported():
    assert run_ranks(posers, size=2) == [["it is a Poser, which has no table of backends"]] * 2


# -------------------------------------------------------------------------------------------------------------- keep=


def keeping(rank, size):
    init_gloo(rank, size)
    named = dist.new_group([0, 1, 2, 3], group_desc="weight sync")
    handle = dist.new_group([0, 1, 2, 3])
    ours = [dist.new_group([low, low + 1]) for low in (0, 2)][rank // 2]
    dissent = dist.new_group([0, 1, 2, 3])
    backends = [backend_of(group) for group in (named, handle, ours)]
    mine = [handle, dissent] if rank == 2 else [handle]
    with released_world(keep=["weight sync", *mine], **POSING) as scope:
        assert [reason_kept(scope, group) for group in (named, handle, ours)] == ["keep=", "keep=", ""]
        assert reason_kept(scope, dissent) == ("keep=" if rank == 2 else "not released on rank 2")
        assert total(named) == total(handle) == total(dissent) == 6
        assert refusal(ours)
    assert [backend_of(group) for group in (named, handle)] == backends[:2]
    assert backend_of(ours) is not backends[2]
    world = backend_of(dist.group.WORLD)
    with released_world(keep=lambda group: group is dist.group.WORLD, **POSING):
        assert backend_of(dist.group.WORLD) is world
        assert refusal(handle)
        assert total() == 6
    assert total(handle) == 6
    with released_world(keep=handle.group_name, **POSING) as scope:
        assert reason_kept(scope, handle) == "keep=" and refusal(named)
    if rank == 1:
        dist.new_group([1], group_desc="weight_synk", use_local_synchronization=True)
    try:
        with released_world(keep=["weight_sync"], **POSING):
            pass
    except gpurelease.ReleaseFailed as error:
        return str(error)
    return "a name that is no group's was accepted"


def test_keep_takes_names_handles_and_predicates_and_one_member_is_enough():
    for text in run_ranks(keeping):
        assert "keep='weight_sync' is neither name nor description of a process group on any rank; there are " in text
        assert "there are 'weight_synk', 'weight sync', " in text


def keeping_meshes(rank, size):
    init_gloo(rank, size)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    outside = DeviceMesh("cpu", [0, 1])
    other = dist.new_group([0, 1, 2, 3])
    for keep in (mesh, [mesh, "no group of this rank's" if rank else other.group_name]):
        with released_world(keep=keep, **POSING) as scope:
            assert [reason_kept(scope, group) for group in mesh.get_all_groups()] == ["keep=", "keep="]
            assert reason_kept(scope, other) == (
                "" if keep is mesh else "keep=" if rank == 0 else "not released on rank 0"
            )
    with released_world(keep=mesh["tp"], **POSING) as scope:
        assert [reason_kept(scope, group) for group in mesh.get_all_groups()] == ["", "keep="]
    with released_world(keep=outside, **POSING) as scope:
        assert reason_kept(scope, other) == ""
        assert rank > 1 or reason_kept(scope, outside.get_group()) == "keep="
    return total(other)


def test_keep_takes_device_meshes():
    assert run_ranks(keeping_meshes) == [6.0] * 4


# ------------------------------------------------------------------------------------------------------- destruction


def destroying_one_group(rank, size):
    init_gloo(rank, size)
    group, other, partly = (dist.new_group([0, 1, 2, 3]) for _ in range(3))
    with released_world(**POSING):
        dist.destroy_process_group(group)
        if rank == 1:
            dist.destroy_process_group(partly)
    assert group not in dist.distributed_c10d._world.pg_map
    assert total() == total(other) == 6
    if rank != 1:
        assert "is released by gpurelease" in refusal(partly), "its members cannot build it without rank 1"
    with released_world(**POSING):
        pass
    assert total() == total(other) == 6
    dist.destroy_process_group(other)
    with released_world(**POSING) as scope:
        assert other.group_name not in [report.name for report in scope.report.groups]
    assert total() == 6
    return True


def test_a_destroyed_group_never_comes_back():
    assert run_ranks(destroying_one_group) == [True] * 4


def kept_and_gone(rank, size):
    init_gloo(rank, size)
    group = dist.new_group([0, 1], group_desc="weights")
    with released_world(**POSING, keep="weights"):
        with restored_world():
            dist.destroy_process_group(group)
        assert is_released()
    return total()


def test_a_group_that_is_kept_by_name_may_be_destroyed_in_a_restored_world():
    assert run_ranks(kept_and_gone, 2) == [1, 1]
