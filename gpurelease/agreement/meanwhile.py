"""What ranks tell each other between two roll calls: that they are getting on, and that one has failed.

A time-out bounds waiting for others that do nothing. Who waits for long asks whether anybody has got on since it asked
the last time, and who has much to do says now and then that it has. And who fails says so at once, so that others do
not wait in NCCL or Gloo for what will not come. Where all goes well within a second, nobody asks or says anything.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed.distributed_c10d import Store


class Meanwhile:
    """The time before one roll call.

    Args:
        room: Where this WORLD's keys are.
        number: Number of the roll call.
        used: Called when keys are used, for them to be deleted later.
    """

    def __init__(self, room: Store, number: int, used: Callable[[], None]) -> None:
        self._room = room
        self._steps = f"steps/{number}"
        self._trouble = f"trouble/{number}"
        self._used = used
        self._seen = 0

    def get_on(self) -> None:
        """Say that this rank has got on."""
        self._used()
        self._room.add(self._steps, 1)

    def others_get_on(self) -> bool:
        """Return whether any rank has said that it has got on, since this was asked the last time."""
        self._used()
        steps = self._room.add(self._steps, 0)
        got_on, self._seen = steps != self._seen, steps
        return got_on

    def fail(self) -> None:
        """Say that this rank has failed."""
        self._used()
        self._room.set(self._trouble, "")

    def somebody_failed(self) -> bool:
        """Return whether a rank has said that it has failed."""
        return self._room.check([self._trouble])
