"""How long jobs are waited for: a time-out bounds waiting for others, and standing still, not work that goes on."""

from __future__ import annotations

import time
from collections.abc import Callable

from gpurelease.agreement.meanwhile import Meanwhile
from gpurelease.strategies.pool import GivenUp

ASK_AFTER = 1.0  # seconds of standing still after which it is asked, and as often, whether another rank has failed


class Bounded:
    """Waits as long as it is told.

    Args:
        seconds: How long.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._end = time.monotonic() + seconds

    def worn_out(self, done: int) -> GivenUp | None:
        """Return that it is time to give up, or None."""
        if time.monotonic() < self._end:
            return None
        return GivenUp(f"not done within {self._seconds:g} s", because_of_others=False)


class WhileSomebodyGetsOn:
    """Waits as long as this rank or another one gets on, and for the time-out after that.

    A member of a group that is built waits for the others, who may be building others first: that takes what it takes.

    Args:
        timeout: Seconds.
        meanwhile: What ranks tell each other.
        may_take: Told how long asking them may take. Raises GivenUp if nobody waits for this rank any longer.
    """

    def __init__(self, timeout: float, meanwhile: Meanwhile, may_take: Callable[[float], None]) -> None:
        self._timeout = timeout
        self._ask_after = min(ASK_AFTER, timeout / 2)
        self._meanwhile = meanwhile
        self._may_take = may_take
        self._done = 0
        self._quiet = 0
        self._got_on = self._told = self._asked = self._looked = time.monotonic()

    def worn_out(self, done: int) -> GivenUp | None:
        """Return why nobody wants to wait any longer, or None."""
        try:
            self._may_take(self._timeout)
            return self._in_vain(done, time.monotonic())
        except GivenUp as why:
            return why
        except RuntimeError as error:  # torch's DistError and its kin
            silent = str(error).partition("\n")[0]
            return GivenUp(f"WORLD's store does not answer ({silent})", because_of_others=False)

    def _in_vain(self, done: int, now: float) -> GivenUp | None:
        if done != self._done:
            self._done, self._quiet, self._got_on = done, 0, now
            if now - self._told > self._ask_after / 2:
                self._told = now
                self._meanwhile.get_on()
            return None
        look = now - max(self._got_on, self._looked) >= self._timeout / 2
        if not look and now - max(self._got_on, self._asked) < self._ask_after:
            return None
        self._asked = now
        if self._meanwhile.somebody_failed():
            return GivenUp("broken off, since another rank has failed", because_of_others=True)
        if look:
            self._looked = now
            self._quiet = 0 if self._meanwhile.others_get_on() else self._quiet + 1
        if self._quiet < 2:
            return None
        return GivenUp(f"not done within {self._timeout:g} s", because_of_others=False)
