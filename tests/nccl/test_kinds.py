"""All of torch's kinds of ProcessGroupNCCL, under all names that lead to them: each is built again as what it was."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from gpurelease import released_world
from tests.cycles import total as total_on_host
from tests.nccl.double import (
    CONNECTS_AT_ONCE,
    FIRST,
    HAS_SECOND,
    backend_of,
    communicators,
    held,
    init_nccl,
    live,
    pass_along,
    total,
    touched,
)

CYCLES = 3
# Name of the backend, and TORCH_DIST_USE_NCCL2.
CASES = [("nccl", "0")]
if HAS_SECOND:
    CASES += [("nccl", "1"), ("nccl2", "0"), ("nccl-lazy", "0"), ("nccl-legacy", "0")]


def names(rank, size, name, eager):
    init_nccl(rank, size, eager=eager, backend=name)
    world = dist.group.WORLD
    groups = [world, dist.new_group([0, 1], backend=name), dist.new_group([0, 1], backend=name)]
    if eager:
        groups.append(dist.split_group(world, [[0, 1]]))
    unused = groups.pop(2)
    assert [total(group) for group in groups] == [1] * len(groups)
    kinds = [type(backend_of(group)) for group in (*groups, unused)]
    books = dist.get_backend(), dist.get_backend_config(), dist.get_backend(unused)
    count = live()
    for _ in range(CYCLES):
        before = [backend_of(group) for group in (*groups, unused)]
        with released_world(timeout=20) as scope:
            assert (live(), held()) == (0, 0)
            assert len(scope.report.released) == len(before)
            assert total_on_host() == 1
        after = [backend_of(group) for group in (*groups, unused)]
        assert not {id(backend) for backend in before} & {id(backend) for backend in after}
        assert [type(backend) for backend in after] == kinds
        assert live() == count
        assert [total(group) for group in groups] == [1] * len(groups)
        assert live() == count, "using a group that was connected made another communicator"
    assert (dist.get_backend(), dist.get_backend_config(), dist.get_backend(unused)) == books
    assert touched() == [rank]
    assert total(unused) == 1
    return [kind.__name__ for kind in kinds], count, live()


@pytest.mark.parametrize("eager", [False, True], ids=["lazy", "eager"])
@pytest.mark.parametrize(("name", "second"), CASES)
def test_each_kind_is_built_again_as_what_it_was(nccl_ranks, name, second, eager):
    """From torch 2.15 "nccl" is another class: one that was built as the other ended the process with an abort."""
    results = nccl_ranks(names, 2, name=name, eager=eager, env={"TORCH_DIST_USE_NCCL2": second})
    kinds, count, in_the_end = results[0]
    assert results[1] == results[0]
    expected = {"nccl2": "ProcessGroupNCCL2", "nccl-lazy": "ProcessGroupNCCLLazy", "nccl-legacy": "ProcessGroupNCCL"}
    if name == "nccl":
        expected[name] = "ProcessGroupNCCL2" if second == "1" else "ProcessGroupNCCL"
    # A split of a ProcessGroupNCCLLazy is none itself, and in eager mode new_group() splits.
    splits = "ProcessGroupNCCL2" if name == "nccl-lazy" and eager else expected[name]
    at_once = eager or (CONNECTS_AT_ONCE and expected[name] != "ProcessGroupNCCL")
    assert kinds[0] == expected[name]
    assert set(kinds[1:]) == {splits} or CONNECTS_AT_ONCE
    assert (count, in_the_end) == ((len(kinds), len(kinds)) if at_once else (2, 3))


def pairs(rank, size):
    init_nccl(rank, size, backend="nccl-lazy")
    assert total() == 1

    def pass_on():
        tensor = torch.tensor([7.0 + rank]).cuda()
        dist.send(tensor, 1) if rank == 0 else dist.recv(tensor, 0)
        return tensor.cpu().item()

    seen = []
    for _ in range(CYCLES):
        seen.append((pass_on(), live(), backend_of(dist.group.WORLD)._num_active_channels()))
        with released_world(timeout=20):
            assert (live(), held()) == (0, 0)
        assert live() == 1
    return seen


@pytest.mark.skipif(not HAS_SECOND, reason="nccl-lazy came with torch 2.14")
def test_communicators_of_pairs_go_too_and_come_back_when_the_pair_talks(nccl_ranks):
    assert nccl_ranks(pairs, 2) == [[(7.0, 2, 1)] * CYCLES] * 2


# --------------------------------------------------------------------------------------------- send and recv, 2 ranks


def pipeline(rank, size, with_collective):
    init_nccl(rank, size, backend=FIRST)
    group = dist.new_group(list(range(size)), backend=FIRST)

    if with_collective:
        total(group)
    assert pass_along(group) == rank
    sizes = [comm["size"] for comm in communicators()]
    for _ in range(CYCLES):
        with released_world(timeout=20):
            assert (live(), held()) == (0, 0)
        assert [comm["size"] for comm in communicators()] == ([size] if with_collective else [])
        assert pass_along(group) == rank
        assert [comm["size"] for comm in communicators()] == sizes
    return sizes


@pytest.mark.parametrize("with_collective", [False, True], ids=["p2p only", "both"])
def test_sends_keep_communicators_of_their_own(nccl_ranks, with_collective):
    """A group of many that was connected in torch's eager way would send over the communicator of its collectives, in
    their order: what ran side by side before could wait for each other (and a group that only sends would hold a
    communicator that it never had)."""
    extra = [4] if with_collective else []
    ends, middle = [2, *extra], [2, 2, *extra]
    assert nccl_ranks(pipeline, with_collective=with_collective) == [ends, middle, middle, ends]
