"""A few threads that work through jobs in order, for one transition, with a bound on how long anybody waits for them.

Ending, suspending or connecting a communicator may wait until its other members do the same. All ranks start in one
order, so with any number of threads the first group that is not done is being worked on by all its members.

The threads are daemons, which a ``ThreadPoolExecutor``'s are not: a job that never ends, such as the shutdown of a
communicator whose peer has died, must not keep the process from ending.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from gpurelease.errors import GpuReleaseError

logger = logging.getLogger(__name__)

SLICE = 0.25  # seconds between two looks at whether it is time to give up
TO_BE_DONE = 1.0  # seconds that jobs are waited for of which one has failed, for them to leave nothing behind


class GivenUp(GpuReleaseError):
    """A job was not done when nobody wanted to wait for it any longer.

    Attributes:
        because_of_others: Whether it was given up since another rank has failed.
    """

    def __init__(self, text: str, *, because_of_others: bool) -> None:
        self.because_of_others = because_of_others
        super().__init__(text)


class Patience(Protocol):
    """Decides how long jobs are waited for."""

    def worn_out(self, done: int) -> GivenUp | None:
        """Return why nobody wants to wait any longer, or None.

        Args:
            done: How many jobs are done: as long as that grows there is no reason to give up.
        """


class Token:
    """What a job is handed, to hear whether it is still wanted."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._call_off: list[Callable[[], None]] = []
        self.given_up = False

    def on_giving_up(self, call_off: Callable[[], None]) -> None:
        """Have ``call_off`` called when the job is given up: at once, if it is already."""
        with self._lock:
            if not self.given_up:
                self._call_off.append(call_off)
                return
        call_off()

    def give_up(self) -> None:
        """Say that nobody wants the job any more."""
        with self._lock:
            self.given_up = True
            call_off, self._call_off = self._call_off, []
        for each in call_off:
            each()


class Job:
    """Something to do, and what to do about it if it is done too late.

    Args:
        do: What to do; it is handed a :class:`Token`.
        undo: Called with the result, by the thread that made it, if nobody wants that any more.

    Attributes:
        result: What ``do`` has returned, if it was done in time.
        error: What it has raised, or that it was given up; None if it was done.
    """

    def __init__(self, do: Callable[[Token], Any], undo: Callable[[Any], None] = lambda result: None) -> None:
        self._do = do
        self._undo = undo
        self._token = Token()
        self._lock = threading.Lock()
        self._is_over = False
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        """Do it. For a thread of the pool."""
        result, error = None, None
        try:
            if not self._token.given_up:
                result = self._do(self._token)
        except BaseException as raised:
            logger.debug("a job failed", exc_info=True)
            # Without its frames, which hold what the job worked on: a communicator ends with its last reference.
            error = raised.with_traceback(None)
        with self._lock:
            late, self._is_over = self._is_over, True
            if not late:
                self.result, self.error = result, error
        if late and result is not None:
            self._undo(result)

    def give_up(self, why: GivenUp) -> None:
        """Nobody waits for it any longer: it never begins, or what it makes is undone."""
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
            self.error = why
        self._token.give_up()


class Pool:
    """Threads, for one transition.

    Args:
        threads: How many.

    Raises:
        RuntimeError: A thread could not be started. None is left.
    """

    def __init__(self, threads: int) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], bool]] = queue.SimpleQueue()
        self._threads = 0
        try:
            self._grow_to(threads)
        except RuntimeError:
            self.close()
            raise

    def run(
        self, jobs: Sequence[Job], patience: Patience, *, in_turn: bool = False, stop_at_failure: bool = False
    ) -> None:
        """Run jobs, started in order. When this returns each has a result or an error.

        Args:
            jobs: What to run.
            patience: How long to wait.
            in_turn: Whether they run one after the other.
            stop_at_failure: Whether a failure keeps the rest from being started, and those that run from being waited
                for much longer: they may wait for ranks on which they failed, or were not started.
        """
        at_once = min(len(jobs), 1 if in_turn else max(1, self._threads))
        self._grow_to(at_once)
        batch = _Batch(jobs, stop_at_failure=stop_at_failure)
        for _ in range(at_once):
            self._tasks.put(batch.work)
        while not batch.over.wait(SLICE):
            why = batch.in_vain() or patience.worn_out(batch.done)
            if why is not None:
                self._threads -= batch.give_up(why)  # they are left to themselves
                return

    def close(self) -> None:
        """Let the threads go, once they have done what they are at."""
        for _ in range(self._threads):
            self._tasks.put(lambda: False)
        self._threads = 0

    def _grow_to(self, threads: int) -> None:
        while self._threads < threads:
            threading.Thread(target=_work, args=(self._tasks,), name="gpurelease-pool", daemon=True).start()
            self._threads += 1


class _Batch:
    """Jobs that are worked through together."""

    def __init__(self, jobs: Sequence[Job], *, stop_at_failure: bool) -> None:
        self._waiting = deque(jobs)
        self._stop_at_failure = stop_at_failure
        self._lock = threading.Lock()
        self._running: list[Job] = []
        self._left = len(jobs)
        self._failed_at = math.inf
        self.done = 0
        self.over = threading.Event()
        if not jobs:
            self.over.set()

    def work(self) -> bool:
        """Run jobs until there are no more, and return whether the thread is still one of the pool's."""
        while True:
            with self._lock:
                if not self._waiting:
                    return True
                job = self._waiting.popleft()
                self._running.append(job)
            job.run()
            with self._lock:
                if job not in self._running:
                    return False  # it was given up, and this thread with it
                self._running.remove(job)
                self.done += 1
                self._left -= 1
                if job.error is not None and self._stop_at_failure:
                    self._failed_at = min(self._failed_at, time.monotonic())
                    self._drop(GivenUp("a job before it failed", because_of_others=True))
                if not self._left:
                    self.over.set()

    def in_vain(self) -> GivenUp | None:
        """Return that one has failed, if it is time to leave the others to themselves."""
        if time.monotonic() - self._failed_at < TO_BE_DONE:
            return None
        return GivenUp("broken off, since another job has failed", because_of_others=True)

    def give_up(self, why: GivenUp) -> int:
        """Stop waiting, and return how many threads are left to themselves."""
        with self._lock:
            running, self._running = self._running, []
            self._drop(why)
        for job in running:
            job.give_up(why)
        return len(running)

    def _drop(self, why: GivenUp) -> None:
        while self._waiting:
            self._waiting.popleft().give_up(why)
            self._left -= 1


def _work(tasks: queue.SimpleQueue[Callable[[], bool]]) -> None:
    while tasks.get()():
        pass
