"""How long rebuilding takes, in units of one communicator, if every rank works through its groups as the pool does."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

import pytest

from gpurelease.groups.releasable import order_of
from gpurelease.options import THREADS


def megatron(tp: int, pp: int, cp: int, dp: int) -> list[tuple[int, ...]]:
    """Return the members of Megatron's groups, in order of creation: family by family, each made by all ranks."""
    sizes = {"tp": tp, "cp": cp, "dp": dp, "pp": pp}  # the first changes fastest from rank to rank
    strides = dict(zip(sizes, itertools.accumulate(sizes.values(), lambda a, b: a * b, initial=1), strict=False))

    def family(*over: str) -> list[tuple[int, ...]]:
        def offsets(names: Sequence[str]) -> list[int]:
            ways = itertools.product(*(range(0, sizes[name] * strides[name], strides[name]) for name in names))
            return sorted(map(sum, ways))

        rest = [name for name in sizes if name not in over]
        return [tuple(base + offset for offset in offsets(over)) for base in offsets(rest)]

    ends = [(pipeline[0], pipeline[-1]) for pipeline in family("pp")]
    families = [
        *(family(*over) for over in (("tp", "cp", "dp", "pp"), ("dp",), ("dp", "cp"), ("cp",), ("tp", "pp"), ("tp",))),
        family("pp"),
        ends,
        *(family(*over) for over in (("tp", "dp"), ("tp", "cp"), ("tp", "cp", "dp"))),
    ]
    return [members for each in families for members in each if len(members) > 1]


def units(groups: Sequence[tuple[int, ...]], order: Sequence[int], threads: int) -> int:
    """Return when the last rank is done.

    A rank's thread that is free takes the next of its groups; a communicator takes one unit from when all are at it.
    """
    waiting: dict[int, list[int]] = {rank: [] for rank in range(max(map(max, groups)) + 1)}
    for number in reversed(order):
        for rank in groups[number]:
            waiting[rank].append(number)
    missing = [len(members) for members in groups]
    events: list[tuple[int, int]] = []
    now = 0

    def take(rank: int) -> None:
        if waiting[rank]:
            number = waiting[rank].pop()
            missing[number] -= 1
            if not missing[number]:
                heapq.heappush(events, (now + 1, number))

    for rank in waiting:
        for _ in range(threads):
            take(rank)
    while events:
        now, number = heapq.heappop(events)
        for rank in groups[number]:
            take(rank)
    assert not any(missing), "a deadlock"
    return now


SIZES = [(2, 2, 1, 2), (2, 4, 1, 1), (2, 2, 2, 2), (8, 4, 1, 4), (8, 8, 2, 8), (8, 16, 2, 16)]


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: "x".join(map(str, sizes)))
@pytest.mark.parametrize("names", ["counted", "hashed"])
def test_megatron_s_groups_are_back_after_four_units(sizes, names):
    groups = megatron(*sizes)
    name = str if names == "counted" else (lambda number: f"{number * 2654435761 % 2**32:08x}x")
    order = sorted(range(len(groups)), key=lambda number: order_of(name(number), groups[number]))
    assert units(groups, order, THREADS) <= 4


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_no_number_of_threads_can_deadlock(threads):
    groups = megatron(2, 4, 1, 2)
    for seed in range(20):  # in whatever order, as long as it is one
        order = sorted(range(len(groups)), key=lambda number: hash((seed, number)))
        assert units(groups, order, threads) >= 1
