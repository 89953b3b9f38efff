"""The roll call, with threads for ranks and one store between them."""

from __future__ import annotations

import _thread
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from gpurelease.rollcall import NotAllCame, RollCall


@pytest.fixture(params=["hash", "file", "tcp"])
def store(request, tmp_path):
    if request.param == "hash":
        return dist.HashStore()
    if request.param == "file":
        return dist.FileStore(str(tmp_path / "store"), 1)
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def together(calls, *args):
    """Run one call per rank at the same time; return results, or the exceptions, by rank."""

    def run(call):
        try:
            return call(*args)
        except NotAllCame as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))


def caller(roll_call, answer, timeout=5.0):
    return lambda: roll_call.call(answer, lambda answers: {"sum": sum(a["n"] for a in answers)}, timeout)


def everyone(roll_calls, timeout=5.0):
    return together([caller(r, {"n": n}, timeout) for n, r in enumerate(roll_calls)])


def world(store, size=3):
    return [RollCall(store, rank, size) for rank in range(size)]


def test_all_read_one_verdict_of_all_answers(store):
    ranks = world(store)
    for _ in range(3):
        assert everyone(ranks) == [{"sum": 3}] * 3
    assert len({rank.token for rank in ranks}) == 1


def test_the_number_of_keys_does_not_grow(store):
    ranks = world(store)
    counts = []
    for _ in range(20):
        everyone(ranks)
        counts.append(len(store.list_keys()))
    assert len(set(counts[1:])) == 1, counts


@pytest.mark.parametrize("late", [0, 2])
@pytest.mark.parametrize("first_time", [True, False])
def test_a_rank_that_does_not_come_is_named_by_all_others_in_time(store, late, first_time):
    ranks = world(store)
    if not first_time:
        everyone(ranks)
    start = time.monotonic()
    results = together([caller(r, {"n": 0}, 0.5) for n, r in enumerate(ranks) if n != late])
    assert time.monotonic() - start < 2.5
    assert [error.missing for error in results] == [(late,)] * 2
    assert f"no word from rank {late} within 0.5 s" in results[0].reason


@pytest.mark.parametrize("late", [0, 2])
def test_a_late_rank_is_told_and_the_next_roll_call_is_whole(store, late):
    ranks = world(store)
    everyone(ranks)
    others = [r for n, r in enumerate(ranks) if n != late]
    for _ in range(3):  # it misses three
        together([caller(r, {"n": 0}, 0.2) for r in others])
    with pytest.raises(NotAllCame) as told:
        caller(ranks[late], {"n": 0}, 5.0)()
    assert told.value.missing == (late,)
    assert everyone(ranks) == [{"sum": 3}] * 3


def test_a_rank_late_for_the_very_first_roll_call_joins_the_one_that_is_on(store):
    ranks = world(store)
    together([caller(r, {"n": 0}, 0.2) for r in ranks[:2]])
    assert everyone(ranks) == [{"sum": 3}] * 3


def test_a_rank_that_left_is_named_at_once_with_its_reason(store):
    ranks = world(store)
    everyone(ranks)
    ranks[1].leave("rank 1 left with KeyboardInterrupt")
    start = time.monotonic()
    results = together([caller(r, {"n": 0}, 30.0) for r in (ranks[0], ranks[2])])
    assert time.monotonic() - start < 5
    assert [(e.missing, e.reason) for e in results] == [((1,), "rank 1 left with KeyboardInterrupt")] * 2
    assert everyone(ranks) == [{"sum": 3}] * 3


def test_an_old_world_s_keys_never_answer(store):
    """pytorch 74666, 114585: re-initialising on the same store read the last generation's address and hung."""
    old = world(store)
    everyone(old)
    together([caller(r, {"n": 0}, 0.2) for r in old[:2]])  # leaves a verdict and a word behind
    for _ in range(3):
        new = world(store)
        assert everyone(new) == [{"sum": 3}] * 3
        assert new[0].token != old[0].token
        old = new


def test_one_outcome_when_time_is_up_and_the_verdict_is_reached_at_once(store):
    """A rank that gives up and a rank that concludes at the same instant must not believe different things."""
    outcomes = set()
    for delay in (0.0, 0.28, 0.29, 0.3, 0.31, 0.32, 0.7):
        ranks = world(store)
        everyone(ranks)
        slow = caller(ranks[2], {"n": 2}, 0.3)
        calls = [
            caller(ranks[0], {"n": 0}, 0.3),
            caller(ranks[1], {"n": 1}, 0.3),
            lambda delay=delay, slow=slow: time.sleep(delay) or slow(),
        ]
        results = together(calls)
        kinds = {type(result) for result in results}
        assert len(kinds) == 1, results
        outcomes |= kinds
    assert outcomes == {dict, NotAllCame}, "the race was not met from both sides"


def test_an_answer_that_is_taken_back_while_rank_0_collects_holds_nobody_up(store):
    """Its rank has given up in between. Rank 0 would wait for the key for as long as the store does, five minutes."""
    calls = world(store)
    everyone(calls)
    room = calls[0]._room

    class Room:
        def check(self, keys):
            there = room.check(keys)
            if there and len(keys) > 1:
                calls[1]._propose({"missing": [0], "reason": "its time was up"})
                room.delete_key(keys[1])
            return there

        def __getattr__(self, name):
            return getattr(room, name)

    calls[0]._room = Room()
    started = time.monotonic()
    assert [str(error) for error in everyone(calls)] == ["its time was up"] * 3
    assert time.monotonic() - started < 4
    calls[0]._room = room
    assert everyone(calls) == [{"sum": 3}] * 3


def test_a_conclusion_that_fails_fails_everywhere(store):
    ranks = world(store)
    results = together([lambda r=r: r.call({}, lambda answers: 1 / 0, 5.0) for r in ranks])
    assert [e.reason for e in results] == [
        "rank 0 failed to conclude the roll call: ZeroDivisionError('division by zero')"
    ] * 3


def test_a_store_that_is_gone_is_named():
    class Gone(dist.HashStore):
        pass

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", store.port, is_master=False)
    rank = RollCall(client, 1, 2)
    del store
    with pytest.raises(NotAllCame, match="WORLD's store does not answer; its host, usually rank 0, may be gone"):
        rank.call({}, lambda answers: {}, 5.0)


def test_a_waiting_rank_can_be_interrupted(store):
    rank = RollCall(store, 0, 2)
    # A job in the background of a shell, as CI may be, was started with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    start = time.monotonic()
    try:
        threading.Timer(0.3, _thread.interrupt_main).start()
        with pytest.raises(KeyboardInterrupt):
            rank.call({}, lambda answers: {}, 10.0)
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - start < 3
