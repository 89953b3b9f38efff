"""The world meanwhile: what works inside a scope, and what becomes of groups that come and go."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist

import gpurelease
from gpurelease import (
    Blueprint,
    ReleaseFailed,
    ScopeMisuse,
    is_released,
    register_rebuilder,
    release_world,
    released_world,
    releases_world,
    restore_world,
    restored_world,
)
from tests.cycles import POSING, backend_of, cycle, refusal, total
from tests.flat import check, many_cycles
from tests.ranks import init_gloo, run_ranks, tcp_store


def reason_kept(scope, group):
    return next(report.reason for report in scope.report.groups if report.name == group.group_name)


# ------------------------------------------------------------------------------------------------------------ inside


def gloo_stands_in(rank, size):
    init_gloo(rank, size)
    world = dist.group.WORLD
    old = dist.new_group(list(range(size)))
    made_inside = []
    for number in range(3):
        with cycle(world, old):
            assert (dist.get_backend(), dist.get_backend(world)) == ("gloo", "gloo")
            assert (dist.get_rank(), dist.get_world_size(), world.size()) == (rank, size, size)
            objects = [None] * size
            dist.all_gather_object(objects, rank)
            assert objects == [0, 1, 2, 3]
            dist.barrier()
            dist.monitored_barrier()
            assert total() == 6
            made_inside.append(dist.new_group([0, 1, 2, 3]))
            assert [total(group) for group in made_inside] == [6] * (number + 1)
        assert [total(group) for group in made_inside] == [6] * (number + 1)
    kept = [backend_of(group) for group in made_inside]
    with released_world(**POSING) as scope:
        assert [backend_of(group) for group in made_inside] == kept
        assert [total(group) for group in made_inside] == [6] * 3
        assert {reason_kept(scope, group) for group in made_inside} == {"made while the world was released"}
    return True


def test_gloo_stands_in_and_groups_made_inside_are_never_released():
    assert run_ranks(gloo_stands_in) == [True] * 4


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
    try:
        with released_world(keep=["weight_sync"], **POSING):
            pass
    except gpurelease.ReleaseFailed as error:
        return str(error)
    return "a name that is no group's was accepted"


def test_keep_takes_names_handles_and_predicates_and_one_member_is_enough():
    for text in run_ranks(keeping):
        assert "keep='weight_sync' is neither name nor description of a process group on any rank" in text


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


def destroying_the_world(rank, size):
    init_gloo(rank, size)
    dist.new_group([0, 1])
    with released_world(**POSING) as scope:
        dist.destroy_process_group()
        assert not is_released()
    assert not dist.is_initialized()
    assert "destroyed" in scope.report.reason

    store = tcp_store(rank, size, "second")
    for _ in range(2):  # a second WORLD, twice on one store, as under torchrun's agent
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        for _ in range(2):
            with cycle(dist.group.WORLD):
                assert total() == 6
            assert total() == 6
        dist.barrier()
        dist.destroy_process_group()
        store = dist.PrefixStore("again", store)

    store = tcp_store(rank, size, "third")
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    with released_world(**POSING):
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=tcp_store(rank, size, "fourth"), rank=rank, world_size=size)
        assert not is_released()
        assert total() == 6
        with cycle(dist.group.WORLD):
            assert is_released()
    assert total() == 6
    return True


def test_destroying_the_world_inside_and_outside_and_initialising_it_again():
    assert run_ranks(destroying_the_world) == [True] * 4


def again_and_again(rank, size):
    store = tcp_store(rank, size)
    for number in range(3):
        dist.init_process_group("gloo", store=dist.PrefixStore(str(number), store), rank=rank, world_size=size)
        with cycle(dist.group.WORLD):
            pass
        assert total() == 6
        dist.destroy_process_group()
    return True


def test_initialising_again_and_again():
    assert run_ranks(again_and_again) == [True] * 4


# ----------------------------------------------------------------------------------------------- scopes on real ranks


def every_kind_of_scope(rank, size):
    init_gloo(rank, size)
    group = dist.new_group([0, 1, 2, 3])
    log = []

    @releases_world(**POSING)
    def rollout(depth=1):
        log.append(bool(refusal(group)))
        with restored_world():
            log.append(total(group))
        log.append(bool(refusal(group)))
        return rollout(depth - 1) if depth else "samples"

    @releases_world(**POSING)
    async def async_rollout():
        await asyncio.sleep(0.01)
        log.append(bool(refusal(group)))
        async with restored_world():
            log.append(total(group))
        return "samples"

    async def main():
        async with released_world(**POSING):
            return await async_rollout()

    with released_world(**POSING) as scope:
        assert rollout() == "samples"
    assert [t.kind for t in scope.report.transitions] == ["release", *["restore", "release"] * 2, "restore"]
    assert scope.report.seconds("restore") > 0
    assert log == [True, 6.0, True] * 2
    log.clear()
    assert asyncio.run(main()) == "samples"
    assert log == [True, 6.0]
    assert total(group) == 6
    release_world(**POSING)
    assert refusal(group)
    restore_world()
    assert total(group) == 6
    try:
        with released_world(**POSING):
            raise ValueError(f"rank {rank}")
    except ValueError as error:
        assert str(error) == f"rank {rank}"
    assert total() == total(group) == 6
    return True


def test_decorated_async_nested_inverse_and_split_scopes_on_real_ranks():
    assert run_ranks(every_kind_of_scope) == [True] * 4


def imported_twice(rank, size):
    """miles 545: wrapped twice, memory grew with each cycle until it ran out."""
    init_gloo(rank, size)
    first = gpurelease.released_world
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "gpurelease"}
    spec = importlib.util.spec_from_file_location(
        "gpurelease", Path(gpurelease.__file__), submodule_search_locations=[str(Path(gpurelease.__file__).parent)]
    )
    second = importlib.util.module_from_spec(spec)
    sys.modules["gpurelease"] = second
    spec.loader.exec_module(second)
    assert kept["gpurelease"] is not second
    assert second.released_world is first and second.ReleaseFailed is ReleaseFailed
    with first(**POSING):
        assert second.is_released()
        with second.released_world() as scope:
            assert second.release_depth() == 2
        assert "nested in" in scope.report.reason
        assert second.is_released()
    assert not second.is_released()
    assert total() == 1
    return True


def test_two_imports_share_one_state():
    assert run_ranks(imported_twice, size=2) == [True] * 2


# ---------------------------------------------------------------------------------------------------- wrong moments


def open_coalescing_block(rank, size):
    init_gloo(rank, size)
    group = dist.new_group([0, 1])
    backend = backend_of(group)
    tensor = torch.ones(1)
    with dist.distributed_c10d._coalescing_manager(group=group):
        dist.all_reduce(tensor, group=group)
        try:
            with released_world(**POSING):
                return "it was entered"
        except gpurelease.ReleaseFailed as error:
            text = str(error)
    assert tensor.item() == 2, "the queued collective was lost"
    assert backend_of(group) is backend
    with cycle(group):
        pass
    return text


def test_an_open_coalescing_block_is_refused_before_anything_changes():
    for text in run_ranks(open_coalescing_block, size=2):
        assert "a coalescing block is open" in text and "every group works as before" in text


def forked(rank, size):
    init_gloo(rank, size)
    with cycle(dist.group.WORLD):
        pass
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            released_world(**POSING).__enter__()
            text = "it was entered"
        except ScopeMisuse as error:
            text = str(error)
        os.write(write, text.encode())
        os._exit(0)
    os.waitpid(child, 0)
    return os.read(read, 1000).decode()


def test_a_forked_child_is_refused():
    assert "was forked off rank 0" in run_ranks(forked, size=1)[0]


# -------------------------------------------------------------------------------------------------------------- flat


def flat(rank, size, cycles):
    def use(group):
        assert total(group) == size * (size - 1) / 2

    return many_cycles(init_gloo(rank, size), cycles, 50, [POSING], use)


def test_nothing_grows_over_many_cycles_of_all_kinds():
    """pytorch 107298: 42 descriptors and 18 threads a cycle. Resident memory moves by some MiB in either direction."""
    for left, resident in run_ranks(flat, cycles=300, timeout=240):
        check(left, resident, noise=8 << 10)


def one_line(rank, size):
    init_gloo(rank, size)
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append((record.levelname, record.name, record.getMessage()))
    logging.getLogger("gpurelease").addHandler(handler)
    logging.getLogger("gpurelease").setLevel(logging.INFO)
    with released_world(**POSING), released_world():
        pass
    return lines


def test_one_info_line_per_transition():
    for rank, lines in enumerate(run_ranks(one_line, size=2)):
        assert [(level, name) for level, name, _ in lines] == [("INFO", "gpurelease.transition.steps")] * 2
        assert lines[0][2].startswith(f"rank {rank} released 1 process group in ")
        assert lines[1][2].startswith(f"rank {rank} restored 1 process group in ")


def nothing(rank, size):
    init_gloo(rank, size)
    with released_world(timeout=20) as scope:
        assert not is_released()
        assert total() == 1
    return scope.report.reason, [report.reason for report in scope.report.groups]


def test_a_machine_without_an_accelerator_has_nothing_to_release():
    expected = ("no rank has a process group to release", ["no accelerator backend"])
    assert run_ranks(nothing, size=2) == [expected] * 2
