"""Run jobs at the same time, with a bound on how long anybody waits for them."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

logger = logging.getLogger(__name__)


def run_all(jobs: Sequence[Callable[[], object]], threads: int, timeout: float) -> list[BaseException | None]:
    """Run all jobs, started in order, and return for each what it raised, or None.

    The threads are daemons, which a ``ThreadPoolExecutor``'s are not: a job that never ends, such as the shutdown
    of a communicator whose peer has died, must not keep the process from ending.

    Args:
        jobs: What to run.
        threads: How many run at the same time at the most.
        timeout: Longest wait for all of them, in seconds. A job that is not done by then counts as failed with
            ``TimeoutError``, and is left to itself.
    """
    outcomes: list[BaseException | None] = [TimeoutError(f"not done within {timeout:g} s")] * len(jobs)
    waiting = deque(enumerate(jobs))

    def work() -> None:
        while waiting:
            try:
                number, job = waiting.popleft()
            except IndexError:  # another thread took the last one
                return
            try:
                job()
                outcomes[number] = None
            except BaseException as error:
                logger.debug("a job failed", exc_info=True)
                # Without its frames, which hold what the job worked on: a communicator ends with its last reference.
                outcomes[number] = error.with_traceback(None)
            finally:
                del job

    workers = [
        threading.Thread(target=work, name=f"gpurelease-{number}", daemon=True)
        for number in range(min(threads, len(jobs)))
    ]
    deadline = time.monotonic() + timeout
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(max(0.0, deadline - time.monotonic()))
    return list(outcomes)
