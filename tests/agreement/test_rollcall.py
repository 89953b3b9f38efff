"""The roll call, with threads for ranks and one store between them."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from gpurelease.agreement import ballot, rollcall
from gpurelease.agreement.rollcall import RollCall
from gpurelease.agreement.waiting import NotAllCame
from gpurelease.torch_internals.stores import client_of
from tests.agreement.conftest import a_store


def together(calls):
    """Run one call per rank at the same time; return results, or the exceptions, by rank."""

    def run(call):
        try:
            return call()
        except NotAllCame as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))


def total(answers):
    return {"sum": sum(answer["n"] for answer in answers)}


def caller(roll_call, n, timeout=5.0, after=0.0):
    def call():
        time.sleep(after)
        return roll_call.call({"n": n}, total, timeout)

    return call


def everyone(roll_calls, timeout=5.0):
    return together([caller(r, n, timeout) for n, r in enumerate(roll_calls)])


def world(store, size=3):
    return [RollCall(lambda: client_of(store), rank, size) for rank in range(size)]


def keys(store):
    return [key for key in store.list_keys() if "gpurelease" in key]


# ------------------------------------------------------------------------------------------------------------ together


def test_all_read_one_verdict_of_all_answers(any_store):
    ranks = world(any_store)
    for _ in range(3):
        assert everyone(ranks) == [{"sum": 3}] * 3
    assert len({rank.token for rank in ranks}) == 1


def test_the_number_of_keys_does_not_grow(store):
    ranks = world(store)
    counts = []
    for _ in range(20):
        everyone(ranks)
        counts.append(len(keys(store)))
    assert len(set(counts[1:])) == 1 and counts[-1] <= 5, counts


def test_a_rank_may_be_the_only_one(any_store):
    [alone] = world(any_store, 1)
    assert [alone.call({"n": 4}, total, 1.0) for _ in range(3)] == [{"sum": 4}] * 3


def test_the_last_to_come_concludes_whichever_rank_it_is(store):
    ranks = world(store)
    everyone(ranks)
    for last in range(3):
        concluded = []

        def call(n, last=last, concluded=concluded):
            time.sleep(0.3 * (n == last))
            return ranks[n].call({"n": n}, lambda answers: concluded.append(n) or total(answers), 5.0)

        assert together([lambda n=n: call(n) for n in range(3)]) == [{"sum": 3}] * 3
        assert concluded == [last]


def test_a_conclusion_that_fails_fails_everywhere(any_store):
    ranks = world(any_store)
    results = together([lambda r=r: r.call({}, lambda answers: 1 / 0, 5.0) for r in ranks])
    assert len({str(error) for error in results}) == 1
    assert "failed to conclude the roll call: ZeroDivisionError('division by zero')" in str(results[0])
    assert everyone(ranks) == [{"sum": 3}] * 3


# ------------------------------------------------------------------------------------------------------------- missing


@pytest.mark.parametrize("late", [0, 2])
@pytest.mark.parametrize("first_time", [True, False])
def test_a_rank_that_does_not_come_is_named_by_all_others_in_time(store, late, first_time):
    ranks = world(store)
    if not first_time:
        everyone(ranks)
    start = time.monotonic()
    results = together([caller(r, 0, 0.5) for n, r in enumerate(ranks) if n != late])
    assert time.monotonic() - start < 4
    assert [error.missing for error in results] == [(late,)] * 2
    assert f"no word from rank {late} within 0.5 s" in results[0].reason


@pytest.mark.parametrize("late", [0, 2])
@pytest.mark.parametrize("late_comes_first", [True, False])
def test_whoever_tries_again_meets_whatever_was_missed(store, late, late_comes_first):
    ranks = world(store)
    everyone(ranks)
    for _ in range(3):  # it misses three
        together([caller(r, 0, 0.2) for n, r in enumerate(ranks) if n != late])
    lag = [0.4 * ((n == late) != late_comes_first) for n in range(3)]
    assert together([caller(r, n, after=lag[n]) for n, r in enumerate(ranks)]) == [{"sum": 3}] * 3
    assert everyone(ranks) == [{"sum": 3}] * 3


def test_a_rank_that_waits_alone_and_then_is_late_itself_is_met_too(store):
    """Each misses what the other came to, in turns: they are never a roll call apart."""
    ranks = world(store, 2)
    everyone(ranks)
    for n in (0, 1, 1, 0, 1):
        assert together([caller(ranks[n], n, 0.2)])[0].missing == (1 - n,)
    assert everyone(ranks) == [{"sum": 1}] * 2


def test_a_rank_late_for_the_very_first_roll_call_joins_the_next(store):
    ranks = world(store)
    together([caller(r, 0, 0.2) for r in ranks[:2]])
    assert everyone(ranks) == [{"sum": 3}] * 3


def test_one_outcome_when_time_is_up_and_the_last_comes_at_once(store):
    """A rank that gives up and one that concludes at the same instant must not believe different things."""
    outcomes = set()
    for lag in (0.0, 0.28, 0.29, 0.3, 0.31, 0.32, 0.7):
        ranks = world(store)
        everyone(ranks)
        first, second, last = together(
            [caller(ranks[0], 0, 0.3), caller(ranks[1], 1, 0.3), caller(ranks[2], 2, 0.1, after=lag)]
        )
        assert type(first) is type(second)
        assert type(last) is type(first) or last.missing == (0, 1), "it is late, and joins the next one"
        outcomes.add(type(first))
    assert outcomes == {dict, NotAllCame}, "the race was not met from both sides"


def test_one_rank_gives_up_for_all_of_whom_the_time_is_up(store, mocker):
    """n ranks that each look for all others would be n x n requests (1,024 ranks raised 23 s after the time-out)."""
    ranks = world(store, 6)
    everyone(ranks)
    read = mocker.spy(ballot.Ballot, "conclude")
    results = together([caller(r, n, 0.5) for n, r in enumerate(ranks[:5])])
    assert [error.missing for error in results] == [(5,)] * 5
    assert read.call_count == 1


def test_a_rank_that_dies_while_it_concludes_does_not_keep_the_others(store, mocker):
    ranks = world(store)
    everyone(ranks)
    conclude, dead = ballot.Ballot.conclude, threading.Event()

    def dies(self, *args):
        if self._rank == 2 and not dead.is_set():
            dead.set()
            raise NotAllCame((), "dead")
        return conclude(self, *args)

    mocker.patch.object(ballot.Ballot, "conclude", dies)
    # Whoever's time is up first finds that all have answered.
    others = [caller(ranks[0], 0, 1.0), caller(ranks[1], 1, 1.0)]
    first, second, last = together([*others, caller(ranks[2], 2, 2.0, after=0.3)])
    assert (first, second, str(last)) == ({"sum": 3}, {"sum": 3}, "dead")


def test_waiting_goes_on_while_others_get_on(store):
    ranks = world(store, 2)
    everyone(ranks)
    busy = ranks[1].meanwhile()

    def works_for_long():
        for _ in range(8):
            time.sleep(0.2)
            busy.get_on()
        return caller(ranks[1], 1)()

    waits = ranks[0].meanwhile()
    answer = lambda: ranks[0].call({"n": 0}, total, 0.6, waits.others_get_on)  # noqa: E731
    assert together([answer, works_for_long]) == [{"sum": 1}] * 2

    waits = ranks[0].meanwhile()
    start = time.monotonic()
    [error] = together([lambda: ranks[0].call({"n": 0}, total, 0.6, waits.others_get_on)])
    assert error.missing == (1,)
    assert 0.6 <= time.monotonic() - start < 1.6
    assert everyone(ranks) == [{"sum": 1}] * 2
    everyone(ranks)
    assert len(keys(store)) <= 5, keys(store)


# ------------------------------------------------------------------------------------------------------------- leaving


def test_a_rank_that_left_is_named_at_once_with_its_reason(any_store):
    ranks = world(any_store)
    everyone(ranks)
    for before in (True, False):
        if before:
            ranks[1].leave("rank 1 left", 5.0)
        else:
            threading.Timer(0.3, ranks[1].leave, ("rank 1 left", 5.0)).start()
        start = time.monotonic()
        results = together([caller(ranks[0], 0, 30.0), caller(ranks[2], 2, 30.0)])
        assert time.monotonic() - start < 4
        assert [(e.missing, e.reason) for e in results] == [((1,), "rank 1 left")] * 2
        assert everyone(ranks) == [{"sum": 3}] * 3


@pytest.mark.parametrize("lag", [1.2, 2.0])
def test_a_rank_that_comes_long_after_the_others_were_told_is_told_too(store, lag):
    ranks = world(store)
    everyone(ranks)
    ranks[1].leave("rank 1 left", 5.0)
    start = time.monotonic()
    results = together([caller(ranks[0], 0, 30.0), caller(ranks[2], 2, 30.0, after=lag)])
    assert time.monotonic() - start < lag + 4
    assert [(e.missing, e.reason) for e in results] == [((1,), "rank 1 left")] * 2
    assert everyone(ranks) == [{"sum": 3}] * 3


def test_a_rank_that_comes_long_after_the_others_were_told_meets_those_that_try_again(store):
    ranks = world(store)
    everyone(ranks)
    ranks[1].leave("rank 1 left", 5.0)
    assert caller_fails(ranks[0], "rank 1 left")
    # Who left is the last to be back.
    calls = [caller(r, n, 30.0, after=lag) for n, (r, lag) in enumerate(zip(ranks, (0.0, 2.0, 0.5), strict=True))]
    assert together(calls) == [{"sum": 3}] * 3
    assert everyone(ranks) == [{"sum": 3}] * 3


def caller_fails(roll_call, reason):
    [error] = together([caller(roll_call, 0)])
    return isinstance(error, NotAllCame) and error.reason == reason


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_leaves_the_very_first_roll_call_is_named_at_once(any_store, who):
    ranks = world(any_store)
    start = time.monotonic()
    leaving = threading.Thread(target=ranks[who].leave, args=("left", 10.0), daemon=True)
    leaving.start()
    results = together([caller(r, n, 10.0, after=0.2 * n) for n, r in enumerate(ranks) if n != who])
    assert time.monotonic() - start < 5
    assert [(e.missing, e.reason) for e in results] == [((who,), "left")] * 2
    assert everyone(ranks) == [{"sum": 3}] * 3


@pytest.mark.parametrize("who", range(3))
def test_whoever_comes_to_the_very_first_after_the_others_were_told_is_told_too(any_store, who):
    """Also by rank 0, which was told, and hands out the token all the same."""
    ranks = world(any_store)
    first, last = (rank for rank in range(3) if rank != who)
    threading.Timer(0.3, ranks[who].leave, ("Ctrl-C", 8.0)).start()
    started = time.monotonic()
    told = together([caller(ranks[first], 0, 8.0), caller(ranks[last], 0, 8.0, after=2.0)])
    assert time.monotonic() - started < 4.5
    assert [(error.missing, error.reason) for error in told] == [((who,), "Ctrl-C")] * 2
    assert everyone(ranks) == [{"sum": 3}] * 3


def porters():
    return [thread for thread in threading.enumerate() if thread.name == "gpurelease-porter"]


def until(true):
    deadline = time.monotonic() + 5
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_nobody_hands_out_a_token_once_all_have_come_or_the_world_is_gone(store):
    ranks = world(store)
    everyone(ranks)
    assert not porters()
    ranks = world(store)
    ranks[0].leave("Ctrl-C", 60.0)
    assert len(porters()) == 1
    del ranks[:]
    until(lambda: not porters())
    assert everyone(world(store)) == [{"sum": 3}] * 3


def test_a_destroyed_world_s_porter_does_not_answer_the_next_one(store):
    destroyed = threading.Event()
    [old] = [RollCall(lambda: client_of(store), 0, 3, destroyed.is_set)]
    old.leave("Ctrl-C", 60.0)
    destroyed.set()  # and somebody still has it
    new = world(store)
    assert everyone(new) == [{"sum": 3}] * 3
    assert {rank.token for rank in new} == {new[0].token} != {old.token}
    until(lambda: not porters())


def test_a_rank_that_leaves_is_a_vote_against_the_roll_call_that_it_is_in(store):
    ranks = world(store)
    everyone(ranks)
    threading.Timer(0.3, ranks[1].leave, ("left", 5.0)).start()
    results = together([caller(ranks[0], 0, 30.0), caller(ranks[1], 1, 30.0)])
    assert [error.reason for error in results] == ["left"] * 2
    assert everyone(ranks) == [{"sum": 3}] * 3


def test_leaving_is_no_vote_once_there_is_a_verdict(store, mocker):
    ranks = world(store, 2)
    everyone(ranks)
    have_read, counted = ballot.Ballot.have_read, []

    def slowly(self, verdict):
        if self._rank == 1:
            counted.append(ranks[1].leave("left", 5.0))
        have_read(self, verdict)

    mocker.patch.object(ballot.Ballot, "have_read", slowly)
    verdict = lambda answers: {"sum": 7, "last": True}  # noqa: E731
    assert together([lambda r=r: r.call({"n": 0}, verdict, 5.0) for r in ranks]) == [{"sum": 7, "last": True}] * 2
    assert counted == [False]
    mocker.stopall()
    assert everyone(ranks) == [{"sum": 1}] * 2


@pytest.mark.parametrize("size, who", [(2, 1), (4, 0)])
@pytest.mark.parametrize("leaver_comes_first", [True, False])
@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_rank_that_left_before_others_came_meets_them_at_the_next(size, who, times, leaver_comes_first):
    """It left once or more, each time without anybody there; the others may have come to none of it."""
    ranks = world(dist.HashStore(), size)
    everyone(ranks)
    for _ in range(times):
        ranks[who].leave("left", 5.0)
    others = [(n, each) for n, each in enumerate(ranks) if n != who]
    if times > 1:
        # They hear of the first, and of what has followed at the same time.
        told = together([caller(each, n) for n, each in others])
        assert [getattr(error, "reason", error) for error in told] == ["left"] * len(others)
    lag = [0.3 * ((n == who) != leaver_comes_first) for n in range(size)]
    expected = [{"sum": sum(range(size))}] * size
    assert together([caller(r, n, after=lag[n]) for n, r in enumerate(ranks)]) == expected
    assert everyone(ranks) == expected


@pytest.mark.parametrize("size", [2, 4])
def test_whoever_skipped_some_and_left_others_is_met_at_the_next(size):
    """One rank skips what the others wait for in vain, or leaves once more than they know: in turns."""
    ranks = world(a_store("tcp", None), size)
    everyone(ranks)
    expected = [{"sum": sum(range(size))}] * size
    for who, skipped, left in [(size - 1, 1, 0), (0, 3, 1), (size - 1, 2, 1), (0, 1, 0)]:
        others = [(n, each) for n, each in enumerate(ranks) if n != who]
        for _ in range(skipped):
            told = together([caller(each, n, 0.1) for n, each in others])
            assert [error.missing for error in told] == [(who,)] * len(others)
        for _ in range(left):
            ranks[who].leave("left", 5.0)
        lag = [0.2 * (n == who) for n in range(size)]
        assert together([caller(r, n, after=lag[n]) for n, r in enumerate(ranks)]) == expected


def test_a_rank_that_left_may_come_back_after_all_others_were_told(store):
    ranks = world(store)
    everyone(ranks)
    ranks[1].leave("left", 5.0)
    together([caller(ranks[0], 0), caller(ranks[2], 2)])
    assert together([caller(r, n, after=0.3 * (n == 1)) for n, r in enumerate(ranks)]) == [{"sum": 3}] * 3


def test_a_rank_that_hears_late_of_who_left_does_not_spoil_the_next_for_the_others(store):
    ranks = world(store)
    everyone(ranks)
    threading.Timer(0.2, ranks[1].leave, ("left", 5.0)).start()
    results = together([caller(ranks[0], 0, 30.0), caller(ranks[2], 2, 30.0, after=0.5)])
    assert [(e.missing, e.reason) for e in results] == [((1,), "left")] * 2
    assert everyone(ranks) == [{"sum": 3}] * 3


# ----------------------------------------------------------------------------------------------------------- the store


def test_an_old_world_s_keys_never_answer(any_store):
    """pytorch 74666, 114585: re-initialising on the same store read the last generation's address and hung."""
    old = world(any_store)
    everyone(old)
    together([caller(r, 0, 0.2) for r in old[:2]])  # leaves a verdict behind
    first = world(any_store)
    together([caller(r, 0, 0.2) for r in first[1:]])  # leaves words behind
    for _ in range(3):
        new = world(any_store)
        assert everyone(new) == [{"sum": 3}] * 3
        assert new[0].token != old[0].token
        old = new


def test_a_store_that_is_gone_is_named():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", store.port, is_master=False)
    rank = RollCall(lambda: client, 1, 2)
    del store
    with pytest.raises(NotAllCame, match="WORLD's store does not answer; its host, usually rank 0, may be gone"):
        rank.call({}, lambda answers: {}, 5.0)


def test_what_a_thread_has_answered_that_was_left_waiting_is_no_second_answer(store):
    """The store did not answer it, and the rank comes again: with another client, and perhaps another answer."""
    ranks = world(store, 2)
    everyone(ranks)
    left = threading.Thread(target=lambda: together([caller(ranks[1], 70, 3.0)]), daemon=True)
    left.start()
    time.sleep(0.3)
    again = ranks[1].successor()
    assert together([caller(ranks[0], 0, after=0.3), caller(again, 1)]) == [{"sum": 1}] * 2
    left.join(5)
    assert everyone([ranks[0], again]) == [{"sum": 1}] * 2


def test_a_verdict_that_nobody_has_read_here_is_passed_over(store):
    ranks = world(store, 2)
    everyone(ranks)
    left = threading.Thread(target=lambda: together([caller(ranks[1], 70, 3.0)]), daemon=True)
    left.start()
    time.sleep(0.3)
    again = ranks[1].successor()
    assert caller(ranks[0], 0)() == {"sum": 70}
    assert together([caller(ranks[0], 0), caller(again, 1)]) == [{"sum": 1}] * 2


# What torch's TCPStore.cpp sends: a get is a WAIT and a GET.
REQUESTS = {"get": 2, "multi_get": 2}


class Counting:
    """A store that counts the requests of a TCPStore's client that it stands before."""

    def __init__(self, client):
        self._client = client
        self.requests = 0

    def __getattr__(self, name):
        attribute = getattr(self._client, name)
        if not callable(attribute) or name in ("set_timeout", "clone"):
            return attribute

        def counted(*args):
            self.requests += REQUESTS.get(name, 1)
            return attribute(*args)

        return counted


@pytest.fixture
def counted(mocker):
    """Have the roll call ask over stores that count."""
    counting = []

    def prefix(prefix, client):
        inner = Counting(dist.PrefixStore(prefix, client))
        counting.append(inner)
        return inner

    mocker.patch.object(ballot, "PrefixStore", prefix)
    mocker.patch.object(rollcall, "PrefixStore", prefix)
    mocker.patch("gpurelease.agreement.hall.PrefixStore", prefix)

    def take():
        requests = sum(each.requests for each in counting)
        counting.clear()
        return requests

    return take


def test_a_few_requests_a_rank_however_long_the_last_takes_to_come(counted):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    size = 32
    ranks = world(store, size)
    everyone(ranks, 20.0)
    assert counted() <= 14 * size, "the very first: every rank is handed the token"
    for lag in (0.0, 1.5):
        together([caller(r, n, 20.0, after=lag * (n == 5)) for n, r in enumerate(ranks)])
        assert counted() <= 5 * size
    together([caller(r, n, 1.0) for n, r in enumerate(ranks[1:], 1)])
    assert counted() <= 8 * size, "at a time-out"


def test_a_few_requests_a_rank_of_a_thousand(counted):
    """They do not grow with the ranks.

    Over a HashStore, as a thousand clients of a server take long to connect where its host's name server is slow. It
    has to be asked to wait, which a TCPStore's client has not: one request more for each of the two waits.
    """
    size = 1024
    ranks = world(dist.HashStore(), size)
    everyone(ranks, 60.0)
    assert counted() <= 12 * size
    for lag in (0.0, 1.0):
        together([caller(r, n, 60.0, after=lag * (n == 500)) for n, r in enumerate(ranks)])
        assert counted() <= 6 * size
