"""A plan that has not changed is not described again, and one that has is."""

from __future__ import annotations

import json

import pytest
import torch.distributed as dist

from gpurelease import released_world
from gpurelease.agreement.ballot import Ballot
from tests.cycles import POSING, backend_of, total
from tests.ranks import init_gloo, run_ranks


def said(monkey):
    """Return the list that the sizes of all answers of this rank go to, and in it whether they describe groups."""
    answers = []
    answer = Ballot.answer

    def listens(self, what, **more):
        answers.append((len(json.dumps(what)), "groups" in what))
        return answer(self, what, **more)

    monkey.setattr(Ballot, "answer", listens)
    return answers


def scopes(rank, size):
    init_gloo(rank, size)
    groups = [dist.new_group(list(range(size))) for _ in range(30)]
    seen = []

    def scope(*kept):
        answers.clear()
        before = [backend_of(group) for group in groups]
        with released_world(**POSING, keep=kept) as opened:
            inside = [each.name for each in opened.report.groups if not each.released]
            assert total() == 3
        released = [backend_of(group) is not old for group, old in zip(groups, before, strict=True)]
        assert released == [group not in kept for group in groups] and len(inside) == len(kept)
        seen.append([describes for _, describes in answers])
        return [length for length, _ in answers]

    with pytest.MonkeyPatch.context() as monkey:
        answers = said(monkey)
        first = scope()
        again = scope()
        scope(groups[3])
        scope(groups[3])
        groups.append(dist.new_group([0, 1, 2]))
        scope()
        dist.destroy_process_group(groups.pop(0))
        scope()
        last = scope()
    return seen, max(first) > 1000, max(again) < 400 and max(last) < 400


def one_rank_changes(rank, size):
    """Only one rank has another plan: the others have said theirs before, and say it again."""
    init_gloo(rank, size)
    group = dist.new_group(list(range(size)))
    for _ in range(2):
        with released_world(**POSING):
            pass
    old = backend_of(group)
    with released_world(**POSING, keep=[group] if rank == 1 else []) as scope:
        [kept] = [each for each in scope.report.groups if not each.released]
    assert backend_of(group) is old
    with released_world(**POSING):
        pass
    assert backend_of(group) is not old
    return kept.reason, total(group)


def test_a_plan_is_described_when_it_is_new_and_else_not():
    full, short = [True, True, False, False, False], [False] * 4
    results = run_ranks(scopes, 3)
    for seen, first_is_long, others_are_short in results:
        assert (first_is_long, others_are_short) == (True, True)
        assert seen[0] == full  # once for the stand-in, and once it stands in
        assert seen[1] == short
        assert [any(each) for each in seen] == [True, False, True, False, True, True, False], seen


def test_if_one_rank_has_another_plan_all_describe_theirs():
    reasons = [("not released on rank 1", 3)] * 3
    reasons[1] = ("keep=", 3)
    assert run_ranks(one_rank_changes, 3) == reasons
