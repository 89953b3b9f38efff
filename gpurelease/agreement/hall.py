"""Where the ranks of a new WORLD find each other on a store that may have had other WORLDs before.

A store may outlive a WORLD (torchrun's agent store does; pytorch 74666 and 114585 show what stale keys do). So all
keys of a WORLD begin with a token that rank 0 makes afresh. Every other rank is handed it once, under a key that only
that rank can know: it says a fresh word first. Old words are answered too, and nobody is there to read that.

A thread of rank 0 hands it out, the porter: from the first roll call on, until all have come to one. It goes on when
rank 0 was told that another rank has left, and is somewhere else: who comes after that is told so too.
"""

from __future__ import annotations

import _thread
import logging
import threading
import time
import uuid
import weakref
from collections.abc import Callable

from torch.distributed.distributed_c10d import PrefixStore, Store

from gpurelease.agreement.waiting import NotAllCame, value_within

logger = logging.getLogger(__name__)

SERVED_TOGETHER = 40_000  # ranks a second: the porter lets as many come as may in between, and answers them at once
GONE_WITHIN = 2.0  # seconds that rank 0 waits at most for the porter to be gone


class Hall:
    """The way of one rank to the token.

    Args:
        connect: Returns a new client of WORLD's store, for us alone.
        rank: This process's rank.
        size: Number of ranks.
        is_gone: Whether WORLD was destroyed. Words that are said after that are another WORLD's.

    Attributes:
        size: Number of ranks.
        token: The token, or the empty string until it is known.
        number: The number of the roll call that is on, as it was when the token was handed out.
    """

    def __init__(self, connect: Callable[[], Store], rank: int, size: int, is_gone: Callable[[], bool]) -> None:
        self._connect = connect
        self.size = size
        self._is_gone = is_gone
        self._lock = threading.Lock()
        self._porter: threading.Thread | None = None
        self._until = 0.0
        self._served: set[str] = set()  # words
        self._all_have_come = False
        self._is_own_porter = False
        self.token = uuid.uuid4().hex[:12] if rank == 0 else ""
        self.number = 1

    # --------------------------------------------------------------------------------------------------- other ranks

    def enter(self, client: Store, timeout: float) -> None:
        """Be handed the token, unless it is known.

        Args:
            client: A client of WORLD's store, that this thread alone uses.
            timeout: Longest wait for rank 0, in seconds.

        Raises:
            NotAllCame: Rank 0 did not come.
        """
        if self.token:
            return
        nobody = NotAllCame((0,), f"no word from rank 0 within {timeout:g} s")
        if not self._lock.acquire(timeout=timeout):  # another thread of this rank has asked
            raise nobody
        try:
            if self.token:
                return
            hall, word = _hall(client), uuid.uuid4().hex[:12]
            hall.append("words", f"{word}\n")  # type: ignore[attr-defined]
            hall.set("bell", "")
            told = value_within(client, hall, f"token/{word}", timeout)
            if told is None:
                raise nobody
            number, token = told.decode().split()
            self.number = int(number)
            self.token = token  # the last thing: who sees it asks for no lock
        finally:
            self._lock.release()

    # -------------------------------------------------------------------------------------------------------- rank 0

    def open(self, number: int, timeout: float) -> None:
        """Have the token handed to all that come, for rank 0, until it is closed, or for a time.

        Args:
            number: The number of the roll call that is on, or that was given up last.
            timeout: For how long, in seconds.
        """
        with self._lock:
            self.number = max(self.number, number)
            self._until = max(self._until, time.monotonic() + timeout)
            if self.size == 1 or self._porter is not None:
                return
            porter = threading.Thread(
                target=_serve, args=(weakref.ref(self), self._connect), name="gpurelease-porter", daemon=True
            )
            self._porter, self._is_own_porter = porter, False
        try:
            porter.start()
        except RuntimeError:  # there can be no more threads, and all ranks are to hear that
            self._is_own_porter = True
            _serve(weakref.ref(self), self._connect)

    def hand_out(self, room: Store) -> float:
        """Hand the token to those that have come, for the porter.

        Returns:
            How long to wait for others, in seconds; 0 if that is not to be.
        """
        if self._is_gone():
            return 0.0
        room.delete_key("bell")  # before the words are read: who comes after this rings again
        if room.check(["words"]):
            new = set(room.get("words").decode().split()) - self._served
            if new:
                value = f"{self.number} {self.token}"
                room.multi_set([f"token/{word}" for word in new], [value] * len(new))  # type: ignore[attr-defined]
                self._served |= new
        if self._all_have_come:
            self._delete_what_was_said(room)
        with self._lock:
            enough = self._all_have_come or (self._is_own_porter and len(self._served) >= self.size - 1)
            left = 0.0 if enough else max(0.0, self._until - time.monotonic())
            if not left:
                self._porter = None
            return left

    def has_no_porter(self) -> None:
        """Note that the porter has gone, since the store did not answer."""
        with self._lock:
            self._porter = None

    def close(self, client: Store) -> None:
        """Send the porter away, for rank 0, once all ranks have come, and have what was said here deleted."""
        with self._lock:
            self._all_have_come = True
            porter = self._porter
        if porter is None:
            self._delete_what_was_said(_hall(client))
        else:
            _hall(client).set("bell", "")
            porter.join(GONE_WITHIN)

    def _delete_what_was_said(self, room: Store) -> None:
        for key in ["words", "bell", *(f"token/{word}" for word in self._served)]:
            room.delete_key(key)
        self._served.clear()


def _hall(client: Store) -> Store:
    return PrefixStore("gpurelease/hall", client)


def _serve(hall_of: weakref.ref[Hall], connect: Callable[[], Store]) -> None:
    """Be the porter. A WORLD that nobody has any more is not kept alive for this, and wakes it up."""
    try:
        client = connect()
        room = _hall(client)
        while (hall := hall_of()) is not None and (left := hall.hand_out(room)) > 0:
            pause = hall.size / SERVED_TOGETHER
            end = weakref.finalize(hall, _wake, connect)
            end.atexit = False
            del hall
            if value_within(client, room, "bell", left) is not None:
                time.sleep(pause)
            end.detach()
    except RuntimeError:  # torch's DistError and its kin
        logger.debug("the store did not answer the porter", exc_info=True)
        if (hall := hall_of()) is not None:
            hall.has_no_porter()


def _wake(connect: Callable[[], Store]) -> None:
    def ring() -> None:
        try:
            _hall(connect()).set("bell", "")
        except RuntimeError:  # the store is gone, and so is the porter
            logger.debug("the store did not answer", exc_info=True)

    _thread.start_new_thread(ring, ())  # a Thread takes locks, that the thread which collects garbage may have
