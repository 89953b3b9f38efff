"""A short soak, and what it stands on: that a seed gives one episode, that all can happen, and that it would tell."""

from __future__ import annotations

from collections import Counter

import pytest

from gpurelease.groups.releasable import Releasable
from tests.ranks import run_ranks
from tests.soak.__main__ import Soak, kinds
from tests.soak.events import HOWS, TROUBLES, Scope, Trouble, draw
from tests.soak.rank import run_episode

SEED = 7


def test_a_short_soak():
    soak = Soak(SEED, events_each=8)
    assert soak.run(12), soak.failure
    assert soak.episodes >= 1 and soak.events >= 8, soak


def test_a_seed_gives_one_episode():
    assert draw(3, 5, 4, "gloo", 30) == draw(3, 5, 4, "gloo", 30) != draw(3, 6, 4, "gloo", 30)


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_all_that_can_happen_does(backend):
    found = Counter(kind for number in range(60) for event in draw(1, number, 3, backend, 12) for kind in kinds(event))
    troubles = {f"{what} at {where}" for what, places in TROUBLES.items() for where in places}
    expected = {*HOWS, *troubles, "released", "restored", "NewGroup", "DestroyGroup", "SetTimeout"}
    assert set(found) == expected
    assert min(found.values()) >= 2, found


# What is broken on rank 1, and a word of what the soak says of it.
BROKEN = {
    "a group is not put on again": "does not work|released by gpurelease",
    "a failed build is swallowed": "raised",
    "a scope is left open": "still open|still released",
}


def broken(rank, size, what, events):
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1 and what == "a group is not put on again":
            put_on = Releasable.put_on
            patch.setattr(Releasable, "put_on", lambda self, ready: self.group.size() == 2 or put_on(self, ready))
        elif what == "a failed build is swallowed":
            patch.setattr("tests.soak.machines.Posing.next_build", lambda *args: pytest.MonkeyPatch.context())
        elif what == "a scope is left open":
            patch.setattr("gpurelease.scopes.book.Book.close", lambda self, frame: None)
        return run_episode(rank, size, events, "gloo")


@pytest.mark.parametrize("what", BROKEN)
def test_it_tells_what_is_wrong(what):
    events = [Scope("with", trouble=Trouble("build fails", "exit", 1, 0.0))]
    with pytest.raises(AssertionError, match=BROKEN[what]):
        run_ranks(broken, 3, what=what, events=events, timeout=40)
