"""WORLDs that come and go, and what many cycles leave behind."""

from __future__ import annotations

import logging

import torch.distributed as dist

from gpurelease import (
    is_released,
    released_world,
)
from tests.cycles import POSING, cycle, total
from tests.flat import check, many_cycles
from tests.ranks import init_gloo, logged, run_ranks, tcp_store


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


def nothing(rank, size):
    init_gloo(rank, size)
    with released_world(timeout=20) as scope:
        assert not is_released()
        assert total() == 1
    return scope.report.reason, [report.reason for report in scope.report.groups]


def test_a_machine_without_an_accelerator_has_nothing_to_release():
    expected = ("no rank has a process group to release", ["no accelerator backend"])
    assert run_ranks(nothing, size=2) == [expected] * 2


def nothing_unexpectedly(rank, size):
    lines, reasons = logged(logging.INFO), []
    for options in [{"backends": "ucc"}, {"backends": ("gloo",), "keep": lambda group: True}, {}, {"keep": "ours"}]:
        store = tcp_store(rank, size, str(len(reasons)))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        dist.new_group([0, 1], group_desc="ours")
        for _ in range(2):
            with released_world(timeout=20, **options) as scope:
                assert not is_released()
        reasons.append(scope.report.reason)
        dist.destroy_process_group()
    return lines, reasons


def test_a_scope_that_does_nothing_for_what_was_asked_of_it_warns_once_in_each_world_on_rank_0():
    reasons = [
        "no rank has a process group to release that has a backend of ucc",
        "no rank has a process group to release, but for those in keep=",
        "no rank has a process group to release",
        "no rank has a process group to release",
    ]
    warnings = [("WARNING", "gpurelease.transition.nothing", f"nothing is released: {each}") for each in reasons[:2]]
    assert run_ranks(nothing_unexpectedly, size=2) == [(warnings, reasons), ([], reasons)]


def one_line(rank, size):
    init_gloo(rank, size)
    lines = logged(logging.INFO)
    with released_world(**POSING), released_world():
        pass
    return lines


def test_one_info_line_per_transition():
    lines, of_others = run_ranks(one_line, size=2)
    assert of_others == []
    assert [(level, name) for level, name, _ in lines] == [("INFO", "gpurelease.transition.aim")] * 2
    assert lines[0][2].startswith("rank 0 released 1 process group in ")
    assert lines[1][2].startswith("rank 0 restored 1 process group in ")


def flat(rank, size, cycles):
    def use(group):
        assert total(group) == size * (size - 1) / 2

    return many_cycles(init_gloo(rank, size), cycles, 30, [POSING], use)


def test_nothing_grows_over_many_cycles_of_all_kinds():
    """pytorch 107298: 42 descriptors and 18 threads a cycle. Resident memory moves by some MiB in either direction."""
    for left, resident in run_ranks(flat, cycles=150, timeout=240):
        check(left, resident, noise=8 << 10)
