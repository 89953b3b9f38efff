"""Who waits says for whom, and those that are waited for hear of it."""

from __future__ import annotations

import logging
import threading

import pytest

from gpurelease.agreement import telling
from tests.agreement.test_rollcall import caller, everyone, keys, together, world

LATE = 1.5


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(telling, "FIRST_TOLD_AFTER", 0.3)


def told_of(caplog, ranks, late, timeout=8.0):
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        result = together([caller(ranks[n], n, timeout, after=LATE if n in late else 0.0) for n in range(len(ranks))])
    assert result == [{"sum": sum(range(len(ranks)))}] * len(ranks)
    assert not [thread for thread in threading.enumerate() if thread.name == "gpurelease-telling"]
    return [record.getMessage() for record in caplog.records]


def test_rank_0_says_ever_more_rarely_whom_it_waits_for_and_the_last_hears_of_it(store, caplog):
    ranks = world(store)
    everyone(ranks)
    told = told_of(caplog, ranks, {2})
    seconds = [f"rank 0 is waiting for rank 2 ({waited} s of 8 s)" for waited in (0, 1, 1)]  # 0.3, 0.6 and 1.2
    assert [text for text in told if "is waiting" in text] == seconds
    came, waited = sorted(text for text in told if "is waiting" not in text)[::-1]
    assert came == "rank 2 came last: others have waited more than 1 s for it"
    assert waited in ("rank 0 has waited 1 s for rank 2", "rank 0 has waited 2 s for rank 2")
    everyone(ranks)
    everyone(ranks)
    assert len(keys(store)) <= 5


def test_if_it_is_rank_0_that_is_late_rank_1_says_so_also_the_first_time(store, caplog):
    ranks = world(store, 4)
    for _ in range(2):
        told = told_of(caplog, ranks, {0, 3})
        assert {text.partition(" (")[0] for text in told if " is waiting " in text} <= {
            "rank 1 is waiting for rank 0",
            "rank 1 is waiting for ranks 0 and 3",
        }
        assert any(text.startswith("rank 1 has waited") for text in told)


def test_who_is_in_time_causes_no_words(store, caplog):
    ranks = world(store)
    everyone(ranks)
    caplog.clear()
    everyone(ranks)
    assert not caplog.records
