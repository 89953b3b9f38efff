"""The threads of a transition: in order, in time, and nothing that was given up comes back."""

from __future__ import annotations

import threading
import time

import pytest

from gpurelease.agreement.meanwhile import Meanwhile
from gpurelease.strategies.patience import Bounded, WhileSomebodyGetsOn
from gpurelease.strategies.pool import GivenUp, Job, Pool


@pytest.fixture
def pool():
    pool = Pool(3)
    yield pool
    pool.close()


def threads():
    return sum(thread.name == "gpurelease-pool" for thread in threading.enumerate())


def until(condition):
    deadline = time.monotonic() + 5
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def raises(error):
    def do(token):
        raise error

    return do


def test_each_job_has_what_it_returned_or_raised(pool):
    jobs = [Job(lambda token: 1), Job(raises(OSError("no"))), Job(lambda token: 3)]
    pool.run(jobs, Bounded(5))
    assert [job.result for job in jobs] == [1, None, 3]
    assert [repr(job.error) for job in jobs] == ["None", "OSError('no')", "None"]
    assert jobs[1].error.__traceback__ is None, "frames hold what a job has worked on"
    pool.run([], Bounded(0.001))


def test_jobs_are_started_in_order_and_no_more_than_may_be_at_once(pool):
    running, most, order, lock = 0, 0, [], threading.Lock()

    def job(number):
        def do(token):
            nonlocal running, most
            with lock:
                order.append(number)
                running += 1
                most = max(most, running)
            time.sleep(0.01)
            with lock:
                running -= 1

        return Job(do)

    for in_turn in (False, True):
        most = 0
        order.clear()
        pool.run([job(number) for number in range(12)], Bounded(5), in_turn=in_turn)
        assert order == list(range(12))
        assert most == (1 if in_turn else 3)


@pytest.mark.parametrize("in_turn", [True, False])
def test_the_first_failure_ends_the_rest_if_that_is_wanted(pool, in_turn):
    ran, never = [], threading.Event()
    hangs = Job(lambda token: never.wait(5)) if not in_turn else Job(lambda token: None)
    fails = Job(lambda token: time.sleep(0.2) or raises(OSError("no"))(token))
    jobs = [hangs, fails, Job(lambda token: time.sleep(0.6)), *(Job(ran.append) for _ in range(4))]
    started = time.monotonic()
    pool.run(jobs, Bounded(5), in_turn=in_turn, stop_at_failure=True)
    assert time.monotonic() - started < 3, "it was not to be waited for much longer"
    assert ran == [], "nothing was to begin after a failure"
    given_up = [isinstance(job.error, GivenUp) and job.error.because_of_others for job in jobs]
    # What runs has a moment to be done.
    assert given_up == ([False, False, True] if in_turn else [True, False, False]) + [True] * 4
    never.set()


def test_a_failure_is_no_reason_to_stop_otherwise(pool):
    ran = []
    pool.run([Job(raises(OSError("no"))), *(Job(ran.append) for _ in range(4))], Bounded(5), in_turn=True)
    assert len(ran) == 4


def test_what_never_began_never_runs_and_what_is_done_too_late_is_undone(pool):
    ran, undone, called_off, never = [], [], [], threading.Event()

    def hangs(token):
        token.on_giving_up(lambda: called_off.append("at once"))
        never.wait(5)
        token.on_giving_up(lambda: called_off.append("later"))
        return "too late"

    jobs = [Job(hangs, undone.append) for _ in range(3)] + [Job(ran.append)]
    started = time.monotonic()
    pool.run(jobs, Bounded(0.3))
    assert time.monotonic() - started < 1.5
    assert {str(job.error) for job in jobs} == {"not done within 0.3 s"}
    assert called_off == ["at once"] * 3
    never.set()
    assert until(lambda: len(undone) == 3) and undone == ["too late"] * 3
    assert called_off == ["at once"] * 3 + ["later"] * 3
    assert ran == [] and [job.result for job in jobs] == [None] * 4


def test_a_pool_that_has_lost_threads_goes_on_with_new_ones_and_leaves_none(pool):
    never = threading.Event()
    pool.run([Job(lambda token: never.wait(5)) for _ in range(3)], Bounded(0.1))
    job = Job(lambda token: "works")
    pool.run([job], Bounded(5))
    assert job.result == "works"
    never.set()
    pool.close()
    assert until(lambda: threads() == 0)


def test_a_pool_that_cannot_have_all_its_threads_has_none(mocker):
    start, started = threading.Thread.start, []

    def limited(self):
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(self)
        start(self)

    mocker.patch.object(threading.Thread, "start", limited)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        Pool(3)
    assert until(lambda: threads() == 0)


class Room(dict):
    """Stands for a store."""

    def add(self, key, value):
        self[key] = self.get(key, 0) + value
        return self[key]

    def set(self, key, value):
        self[key] = value

    def check(self, keys):
        return all(key in self for key in keys)


def test_jobs_that_go_on_are_not_cut_off_however_long_all_take(pool):
    room = Room()
    jobs = [Job(lambda token: time.sleep(0.3)) for _ in range(6)]
    pool.run(jobs, WhileSomebodyGetsOn(0.8, Meanwhile(room, 1, lambda: None), lambda seconds: None), in_turn=True)
    assert [job.error for job in jobs] == [None] * 6
    assert 1 <= room["steps/1"] <= 6, "others are told, and not each time"


def test_a_job_that_waits_for_others_is_not_cut_off_while_they_get_on(pool):
    room = Room()
    meanwhile = Meanwhile(room, 1, lambda: None)
    done = threading.Event()
    job = Job(lambda token: done.wait(10))

    def others():
        for _ in range(10):
            time.sleep(0.2)
            room.add("steps/1", 1)
        done.set()

    threading.Thread(target=others).start()
    pool.run([job], WhileSomebodyGetsOn(0.6, meanwhile, lambda seconds: None))
    assert job.error is None


def test_a_job_that_does_not_get_on_is_given_up_in_time_or_at_once_if_another_rank_fails(pool):
    never = threading.Event()
    room = Room()
    meanwhile = Meanwhile(room, 1, lambda: None)
    started = time.monotonic()
    job = Job(lambda token: never.wait(10))
    pool.run([job], WhileSomebodyGetsOn(1.0, meanwhile, lambda seconds: None))
    assert 1.0 <= time.monotonic() - started < 2.5
    assert str(job.error) == "not done within 1 s" and not job.error.because_of_others

    started = time.monotonic()
    job = Job(lambda token: never.wait(10))
    meanwhile.fail()
    pool.run([job], WhileSomebodyGetsOn(30.0, meanwhile, lambda seconds: None))
    assert time.monotonic() - started < 3
    assert job.error.because_of_others
    never.set()
