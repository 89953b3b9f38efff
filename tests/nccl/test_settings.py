"""What was set on live backends, or is set on released groups, is set on those that replace them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from gpurelease import ReleaseFailed, is_released, released_world
from gpurelease.torch_internals import nccl
from tests.nccl.double import FIRST, HAS_SECOND, backend_of, init_nccl, total

CYCLES = 3
KINDS = [FIRST, "nccl2"] if HAS_SECOND else [FIRST]


def heard() -> None:
    """An abort hook."""


def set_timing(group):
    group._enable_collectives_timing()


def set_nan_check(group):
    backend_of(group)._set_enable_nan_check(True)


def set_rendezvous(group):
    group.use_pg_for_symm_mem_rendezvous = True


def set_abort_hook(group):
    group.register_abort_hook(7, heard)


def timing(group):
    work = dist.all_reduce(torch.ones(1).cuda(), group=group, async_op=True)
    work.wait()
    torch.cuda.synchronize()
    try:
        work._get_duration()
    except RuntimeError as error:
        assert "not timed" in str(error) or "enable" in str(error).lower(), error
        return False
    return True


def nan_check(group):
    return nccl.settings_of(backend_of(group)).nan_check


def rendezvous(group):
    return group.use_pg_for_symm_mem_rendezvous


def abort_hook(group):
    return 7 in nccl.settings_of(backend_of(group)).abort_hooks


# What can be set on each kind, how, and how it shows.
SETTINGS = {
    FIRST: {"timing": (set_timing, timing), "NaN check": (set_nan_check, nan_check)},
    "nccl2": {"timing": (set_timing, timing), "abort hook": (set_abort_hook, abort_hook)},
}
if HAS_SECOND:
    for of_kind in SETTINGS.values():
        of_kind["rendezvous"] = (set_rendezvous, rendezvous)
ON_RELEASED = ("timing", "rendezvous", "abort hook")  # the NaN check is set on a backend, and a shell has none


def carried_over(rank, size, kind, inside, strategy):
    settings = SETTINGS[kind]
    init_nccl(rank, size, backend=kind)
    chosen, other = (dist.new_group([0, 1], backend=kind) for _ in range(2))
    groups = [dist.group.WORLD, chosen]
    for group in (*groups, other):
        total(group)

    later = [name for name in settings if inside and name in ON_RELEASED]
    for name, (set_on, _) in settings.items():
        set_on(groups[0])
        if name not in later:
            set_on(chosen)
    seen = []
    for _ in range(CYCLES):
        with released_world(strategy=strategy, timeout=20):
            for name in later:  # WORLD's would be Gloo's
                settings[name][0](chosen)
        seen.append({name: [bool(shows(group)) for group in (*groups, other)] for name, (_, shows) in settings.items()})
    return seen


@pytest.mark.parametrize("strategy", ["rebuild", "suspend"])
@pytest.mark.parametrize("inside", [False, True], ids=["before", "inside"])
@pytest.mark.parametrize("kind", KINDS)
def test_settings_are_carried_over(nccl_ranks, kind, inside, strategy):
    expected = {name: [True, True, False] for name in SETTINGS[kind]}
    assert nccl_ranks(carried_over, 2, kind=kind, inside=inside, strategy=strategy) == [[expected] * CYCLES] * 2


def taken_back(rank, size, strategy):
    init_nccl(rank, size, backend="nccl2")
    group = dist.new_group([0, 1], backend="nccl2")
    total(group)
    for hook in (7, 8):
        group.register_abort_hook(hook, heard)
    with released_world(strategy=strategy, timeout=20):
        group.unregister_abort_hook(7)
    left = nccl.settings_of(backend_of(group)).abort_hooks  # and torch's own, from 2.15
    return [hook for hook in (7, 8) if hook in left]


@pytest.mark.skipif(not HAS_SECOND, reason="ProcessGroupNCCL2 came with torch 2.14")
@pytest.mark.parametrize("strategy", ["rebuild", "suspend"])
def test_a_hook_that_is_unregistered_inside_is_gone_afterwards(nccl_ranks, strategy):
    assert nccl_ranks(taken_back, 2, strategy=strategy) == [[8]] * 2


def coalescing(rank, size):
    init_nccl(rank, size, backend=FIRST)
    group = dist.new_group([0, 1], backend=FIRST)
    total(group)
    told = "it was entered"
    if rank == 1:
        group._start_coalescing(torch.device("cuda"))
    try:
        with released_world(timeout=20):
            pass
    except ReleaseFailed as error:
        told = error.failures
    if rank == 1:
        group._end_coalescing(torch.device("cuda"))
    assert not is_released()
    with released_world(timeout=20):
        pass
    return told, total(group)


def test_an_open_coalescing_block_is_refused_on_all_ranks(nccl_ranks):
    """torch's books tell only of ``_coalescing_manager``; the group's own calls are asked of the backend."""
    text = (
        "a coalescing block is open on process group '1' (ranks 0 and 1), with collectives queued in it: end it first"
    )
    assert nccl_ranks(coalescing, 2) == [({1: text}, 1)] * 2
