"""Gloo in WORLD's place: what works on it, and when it is no longer trusted."""

from __future__ import annotations

import asyncio
import logging
import time
from datetime import timedelta
from functools import partial

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from gpurelease import (
    is_released,
    released_world,
    wake_world,
)
from gpurelease.groups.releasable import Releasable
from tests.cycles import POSING, backend_of, cycle, total
from tests.groups.test_kinds import OutOfTree, init_posing, reason_kept
from tests.ranks import init_gloo, logged, run_ranks, tcp_store


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


def timeout_of_world(rank, size):
    init_gloo(rank, size)
    seen = []
    for seconds in (77, 88):
        with released_world(**POSING):
            dist.group.WORLD.set_timeout(timedelta(seconds=seconds))
        for _ in range(2):
            seen.append(backend_of(dist.group.WORLD).options._timeout)
            with released_world(**POSING):
                pass
    return [int(each.total_seconds()) for each in seen]


def test_a_time_out_that_is_set_on_world_inside_is_world_s_afterwards():
    assert run_ranks(timeout_of_world, 2) == [[77, 77, 88, 88]] * 2


def init_for_both(rank, size):
    """Initialise WORLD as NCCL's does it: on a backend for devices, that serves the host through Gloo."""
    dist.Backend.register_backend("both", OutOfTree, devices=["privateuseone"])
    backend = "cpu:gloo,privateuseone:both"
    dist.init_process_group(backend, store=tcp_store(rank, size), rank=rank, world_size=size)


def made_inside(rank, size, init, backend):
    """Make groups in all ways inside scopes of a WORLD that is not on Gloo, and return what was warned of, by scope."""
    init(rank, size)
    warnings, by_scope = logged(logging.WARNING), []
    everybody = list(range(size))

    def with_a_backend_named():
        dist.new_group(everybody, backend="cpu:gloo", group_desc="for the host")

    def mesh():
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))

    def groups():
        dist.new_group(everybody, group_desc="all")
        dist.new_group([rank], use_local_synchronization=True, group_desc="alone")

    for make in (with_a_backend_named, groups, mesh) if backend == "posing" else (with_a_backend_named, mesh, groups):
        with released_world(backends=(backend,), timeout=20):
            make()
        by_scope.append([text for _, _, text in warnings])
        warnings.clear()
    return by_scope


@pytest.mark.parametrize(
    "init, backend, names",
    [(partial(init_posing, extended=True), "posing", ("all", "alone")), (init_for_both, "both", ("rows", "columns"))],
)
def test_groups_and_meshes_made_inside_on_gloo_are_warned_of_once_by_name(init, backend, names):
    for named, [warning], once_more in run_ranks(made_inside, 4, init=init, backend=backend):
        assert named == once_more == []
        assert "made inside a released scope without a backend named, and so on Gloo, where they stay" in warning
        assert all(f"{name})" in warning for name in names) and "host" not in warning


def on_gloo_anyway(rank, size):
    init_gloo(rank, size)
    warnings = logged(logging.WARNING)
    with released_world(**POSING):
        dist.new_group([0, 1])
    return warnings


def test_where_world_is_on_gloo_nobody_is_warned_of_groups_on_gloo():
    assert run_ranks(on_gloo_anyway, 2) == [[], []]


# ------------------------------------------------------------------------------------------------------------- in doubt


def one_body_raises(rank, size):
    init_gloo(rank, size)
    group = dist.new_group(list(range(size)))
    try:
        with released_world(**POSING):
            if rank == 1:
                raise ValueError("only here")
            time.sleep(0.2)
        told = "fine"
    except ValueError as error:
        told = str(error)
    assert not is_released()
    # Its Gloo is not trusted any more: a collective may have been left in the middle.
    with released_world(**POSING):
        dist.barrier()
        assert total() == 3
    return told, total(), total(group)


def test_a_body_that_raises_on_one_rank_only_does_not_hang_the_others():
    told = [text for text, *sums in run_ranks(one_body_raises, 3) if sums == [3.0, 3.0]]
    assert told == ["fine", "only here", "fine"]


def collective_left_in_the_middle(rank, size):
    from datetime import timedelta

    init_gloo(rank, size, timeout=timedelta(seconds=2))
    try:
        with released_world(**POSING):
            if rank == 1:
                raise ValueError("before the barrier")
            dist.barrier()
    except (ValueError, RuntimeError) as error:
        told = type(error).__name__
    assert not is_released()
    with released_world(**POSING):
        dist.barrier()
        assert total() == 3
    return told, total()


def test_a_gloo_that_a_left_collective_has_broken_is_built_anew():
    results = run_ranks(collective_left_in_the_middle, 3)
    assert results == [("RuntimeError", 3.0), ("ValueError", 3.0), ("RuntimeError", 3.0)]


def fails_once(*args):
    """Stand for ``Releasable.build`` once."""
    Releasable.build = fails_once.real
    raise OSError("injected")


fails_once.real = Releasable.build


class Suppresses:
    """A context for ``also=`` that swallows what the body raises, asynchronously too."""

    def __enter__(self):
        pass

    def __exit__(self, kind, error, trace):
        return isinstance(error, (ValueError, RuntimeError))

    async def __aenter__(self):
        self.__enter__()

    async def __aexit__(self, *error):
        return self.__exit__(*error)


async def swallowed(options, body):
    async with released_world(**options):
        body()


def left_in_the_middle(rank, size, case):
    init_gloo(rank, size, timeout=timedelta(seconds=2))
    also = {"also": [Suppresses]} if case != "swallowed on one rank" or rank == 1 else {}

    def body():
        if rank == 1:
            raise KeyboardInterrupt if case == "interrupt" else ValueError
        dist.barrier()

    try:
        if case.startswith("swallowed"):
            if case == "swallowed in async with":
                asyncio.run(swallowed(POSING | also, body))
            elif case == "swallowed in an inner scope":
                with released_world(**POSING), released_world(**POSING | also):
                    body()
            else:
                with released_world(**POSING | also):
                    body()
        else:
            with released_world(**POSING):
                if case == "nested":
                    try:
                        with released_world(**POSING):
                            body()
                    except (ValueError, RuntimeError):
                        pass
                else:
                    if case == "retry":
                        Releasable.build = fails_once
                    body()
    except (KeyboardInterrupt, ValueError, RuntimeError):
        pass
    if is_released():
        wake_world()
    assert total() == 3
    with released_world(**POSING):
        return total()


@pytest.mark.parametrize(
    "case",
    [
        "nested",
        "interrupt",
        "retry",
        "swallowed",
        "swallowed on one rank",
        "swallowed in an inner scope",
        "swallowed in async with",
    ],
)
def test_a_gloo_in_which_a_collective_was_left_is_never_used_again(case):
    """The error is caught in the outer scope, or swallowed by ``also=``; it is an interrupt; or restoring fails too."""
    assert run_ranks(left_in_the_middle, 3, case=case) == [3] * 3
