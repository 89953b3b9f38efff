"""Where the ranks of a new WORLD find each other on a store that may have had other WORLDs before.

A store may outlive a WORLD (torchrun's agent store does; pytorch 74666 and 114585 show what stale keys do). So all
keys of a WORLD begin with a token that rank 0 makes afresh. Every other rank is handed it once, under a key that only
that rank can know: it says a fresh word first. Old words are answered too, and nobody is there to read that.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable

from torch.distributed.distributed_c10d import PrefixStore, Store

from gpurelease.agreement.waiting import NotAllCame, value_within

SERVED_TOGETHER = 40_000  # ranks a second: rank 0 lets as many come as may in between, and answers them at once


class Hall:
    """The way of one rank to the token.

    Args:
        rank: This process's rank.
        size: Number of ranks.

    Attributes:
        token: The token, or the empty string until it is known.
        number: The number of the roll call that is on, as it was when the token was handed out.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._size = size
        self.token = uuid.uuid4().hex[:12] if rank == 0 else ""
        self.number = 1
        self._served: set[str] = set()

    def enter(self, client: Store, timeout: float) -> None:
        """Be handed the token, unless it is known.

        Args:
            client: A client of WORLD's store.
            timeout: Longest wait for rank 0, in seconds.

        Raises:
            NotAllCame: Rank 0 did not come.
        """
        if self.token:
            return
        hall, word = _hall(client), uuid.uuid4().hex[:12]
        hall.append("words", f"{word}\n")  # type: ignore[attr-defined]
        hall.set("bell", "")
        told = value_within(client, hall, f"token/{word}", timeout)
        if told is None:
            raise NotAllCame((0,), f"no word from rank 0 within {timeout:g} s")
        token, number = told.decode().split()
        self.token, self.number = token, int(number)

    def serve(self, client: Store, number: int, deadline: float, is_over: Callable[[], bool]) -> None:
        """Hand the token to all that come, for rank 0.

        Args:
            client: A client of WORLD's store.
            number: The number of the roll call that is on.
            deadline: When to stop, by the monotonic clock.
            is_over: Asked each time that somebody has come, or has rung: whether to stop.
        """
        if self._size == 1:
            return
        hall = _hall(client)
        while (left := deadline - time.monotonic()) > 0 and value_within(client, hall, "bell", left) is not None:
            time.sleep(self._size / SERVED_TOGETHER)
            hall.delete_key("bell")  # before the words are read: who comes after this rings again
            if hall.check(["words"]):
                new = [word for word in hall.get("words").decode().split() if word not in self._served]
                if new:
                    keys = [f"token/{word}" for word in new]
                    hall.multi_set(keys, [f"{self.token} {number}"] * len(new))  # type: ignore[attr-defined]
                    self._served.update(new)
            if is_over():
                return

    @property
    def has_served_all(self) -> bool:
        """Whether as many have been handed the token as there are other ranks."""
        return len(self._served) >= self._size - 1

    def ring(self, client: Store) -> None:
        """Have rank 0 look up: there is a verdict."""
        _hall(client).set("bell", "")

    def clear(self, client: Store) -> None:
        """Delete what was said here, for rank 0, once all have come."""
        hall = _hall(client)
        for key in ["words", "bell", *(f"token/{word}" for word in self._served)]:
            hall.delete_key(key)
        self._served.clear()


def _hall(client: Store) -> Store:
    return PrefixStore("gpurelease/hall", client)
