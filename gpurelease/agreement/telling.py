"""Saying in the log whom this rank waits for, while it does."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from gpurelease.agreement.ballot import Answer, Answers, Ballot
from gpurelease.errors import ranks_text

logger = logging.getLogger(__name__)

FIRST_TOLD_AFTER = 5.0  # seconds; then after twice as many, and so on
TELLS_LAST_WITHIN = 1.0  # seconds that a request under way has to end, once the wait is over


class Telling:
    """Tells now and then, while this is entered, in a thread: the wait itself is one request to the store.

    Args:
        tell: Called with the seconds that were waited. It may raise a RuntimeError, when the store does not answer;
            then it is not called again.
    """

    def __init__(self, tell: Callable[[float], None]) -> None:
        self._tell = tell
        self._is_over = threading.Event()
        self._started = time.monotonic()

    def _go(self) -> None:
        after = FIRST_TOLD_AFTER
        while not self._is_over.wait(self._started + after - time.monotonic()):
            try:
                self._tell(time.monotonic() - self._started)
            except RuntimeError:
                logger.debug("the store did not answer", exc_info=True)
                return
            after *= 2

    def __enter__(self) -> None:
        self._thread = threading.Thread(target=self._go, name="gpurelease-telling", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # there can be no more threads: then nobody is told
            self._is_over.set()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._is_over.is_set():
            self._is_over.set()
            self._thread.join(TELLS_LAST_WITHIN)


class Waiting:
    """What rank 0 tells of a roll call; rank 1, while rank 0 has not come. They ask for all: the store is spared.

    Those that are waited for find it in the answers.

    Args:
        ballot: Returns the roll call, over a client for this alone. None: it is rank 0 that has not come to the first.
        answer: What this rank has answered.
    """

    def __init__(self, ballot: Callable[[], Ballot] | None, answer: Answer) -> None:
        self._make_ballot = ballot
        self._ballot: Ballot | None = None
        self._answer = answer
        self._missing: list[int] = []

    @contextmanager
    def told(self, rank: int, timeout: float) -> Iterator[None]:
        """Have it told while this is entered, and in the end who came.

        Args:
            rank: This process's rank.
            timeout: The longest wait, in seconds.
        """
        if rank > 1:
            yield
            return
        started = time.monotonic()
        with Telling(lambda waited: self._tell(rank, waited, timeout)):
            yield
        waited = time.monotonic() - started
        if self._missing:
            logger.warning("rank %d has waited %.0f s for %s", rank, waited, ranks_text(self._missing))

    def _tell(self, rank: int, waited: float, timeout: float) -> None:
        missing = [0]
        if self._make_ballot is not None:
            self._ballot = self._ballot or self._make_ballot()
            missing = self._ballot.missing()
        if not missing or (rank == 1 and 0 not in missing):
            return
        self._missing = missing
        of = f"{waited:,.0f} s of {timeout:,.0f} s"
        logger.warning("rank %d is waiting for %s (%s)", rank, ranks_text(missing), of)
        if self._ballot is not None:
            self._ballot.answer({**self._answer, "waited": round(waited)}, again=True)


def tell_of_having_come_last(rank: int, answers: Answers) -> None:
    """Say so where others have said that they were waiting."""
    waited = max((answer.get("waited", 0) for answer in answers), default=0)
    if waited:
        logger.warning("rank %d came last: others have waited more than %d s for it", rank, waited)
