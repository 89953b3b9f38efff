"""Megatron-Core on eight ranks: all of its groups, and its pipeline schedule as the first to use them again.

Nothing of it is replaced. It does without Transformer Engine and Apex, and says so in warnings.
"""

from __future__ import annotations

from datetime import timedelta
from multiprocessing.forkserver import _forkserver

import pytest
import torch.distributed as dist

from gpurelease import released_world
from tests import cycles, ranks
from tests.nccl.double import FIRST, backend_of, communicators, held, init_nccl, live

pytest.importorskip("megatron", reason="megatron-core is not installed (0.16.1 is what this was written for)")

CYCLES = 3
MIB = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def forked_after_megatron(double):
    usual = list(_forkserver._preload_modules)
    _forkserver._stop()
    ranks._context.set_forkserver_preload([*usual, "tests.nccl.megatron_client"])
    yield
    _forkserver._stop()
    ranks._context.set_forkserver_preload(usual)


def use(groups, device):
    for group in groups:
        assert cycles.total(group, device=device) == sum(dist.get_process_group_ranks(group)), group.group_desc


def kinds():
    return [(comm["size"], comm["device"]) for comm in communicators()]


def megatron(rank, size, sizes, batched, strategy):
    from tests.nccl.megatron_client import Stage, groups, handles, parallel_state

    init_nccl(rank, size, backend=FIRST)
    names = ("tensor_model", "pipeline_model", "context", "expert_model")
    parallel_state.initialize_model_parallel(
        **{f"{name}_parallel_size": parts for name, parts in zip(names, sizes, strict=True)},
        distributed_timeout_minutes=7,
        high_priority_stream_groups=["tp"],
    )
    on_nccl = [group for group in groups() if dist.get_backend(group) == FIRST]
    on_gloo = [group for group in groups() if dist.get_backend(group) == "gloo"]
    stage = Stage(batched)

    def options():
        found = [backend_of(group).options for group in on_nccl]
        return [(each._timeout, each.is_high_priority_stream) for each in found]

    use(on_nccl, "cuda")
    of_groups = live()
    assert of_groups == len(on_nccl)
    stage.step()
    count, before = live(), (kinds(), handles(), options())
    assert options().count((timedelta(minutes=7), True)) == 1
    # torch 2.14 suspends a group's own communicator, and not those of two ranks that its unbatched sends go over.
    of_pairs = count - of_groups
    inside = (0, 0) if strategy == "rebuild" else (count, (64 * of_groups + 320 * of_pairs) * MIB)
    back = of_groups if strategy == "rebuild" else count  # a pair's is made again when the two talk
    for _ in range(CYCLES):
        backends = [backend_of(group) for group in on_nccl]
        with released_world(strategy=strategy, timeout=20) as scope:
            assert (live(), held()) == inside
            assert len(scope.report.released) == len(on_nccl)
            use([dist.group.WORLD, *on_gloo], "cpu")
        assert live() == back
        stage.step()
        use(on_nccl, "cuda")
        use(on_gloo, "cpu")
        assert (kinds(), handles(), options()) == before
        same = [backend_of(group) is old for group, old in zip(on_nccl, backends, strict=True)]
        assert same == [strategy == "suspend"] * len(on_nccl)
    return count


@pytest.mark.parametrize(
    ("strategy", "env"),
    [("rebuild", {}), ("rebuild", {"SIMGPU_DESTROY_MEETS": "1"}), ("suspend", {})],
    ids=["rebuild", "rebuild, destroy meets", "suspend"],
)
@pytest.mark.parametrize(
    ("sizes", "batched", "counts"),
    [
        ((2, 2, 1, 1), True, [18] * 4 + [17] * 4),
        ((2, 2, 1, 1), False, [20] * 4 + [19] * 4),
        ((2, 4, 1, 1), True, [18] * 2 + [16] * 4 + [17] * 2),
        ((2, 4, 1, 1), False, [19] * 2 + [18] * 4 + [18] * 2),
        ((2, 2, 2, 2), True, [18] * 4 + [17] * 4),
    ],
    ids=["TP2 PP2", "TP2 PP2, unbatched", "TP2 PP4", "TP2 PP4, unbatched", "TP2 PP2 CP2 EP2"],
)
def test_all_groups_work_again_and_a_pipeline_comes_first(nccl_ranks, sizes, batched, counts, strategy, env):
    """slime 2208: at PP=4 the teardown of overlapping groups hung; pytorch 74701: so did a send as the first operation
    of a communicator that its other ranks had not joined."""
    assert nccl_ranks(megatron, 8, sizes=sizes, batched=batched, strategy=strategy, env=env, timeout=60) == counts
