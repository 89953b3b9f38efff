"""Rollouts that ``asyncio.gather`` starts together overlap on all ranks, however fast one of them enters its scope."""

from __future__ import annotations

import asyncio

import pytest
import torch.distributed as dist

from gpurelease import releases_world
from gpurelease.transition.passage import Passage
from tests.cycles import POSING
from tests.ranks import init_gloo, run_ranks


def gathered(rank, size, fast):
    init_gloo(rank, size)
    dist.new_group(list(range(size)))
    begin = Passage.begin

    def done_at_once(self, work):
        begin(self, work)
        self.over_within(20)

    @releases_world(**POSING)
    async def rollout(prompt):
        dist.barrier()  # on Gloo, while all ranks are inside
        return prompt

    async def all_of_them():
        return await asyncio.gather(*map(rollout, range(3)))

    with pytest.MonkeyPatch.context() as patch:
        if rank == fast:
            patch.setattr(Passage, "begin", done_at_once)
        return [asyncio.run(all_of_them()) for _ in range(2)]


@pytest.mark.parametrize("fast", [0, 1])
def test_all_results_are_there_also_if_one_rank_is_faster_than_its_event_loop(fast):
    assert run_ranks(gathered, 3, fast=fast) == [[[0, 1, 2]] * 2] * 3
