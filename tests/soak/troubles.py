"""How a rank is made to fail: one table of the functions that are in the way of a transition's steps."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from gpurelease.groups.releasable import Releasable
from gpurelease.scopes import reaching
from gpurelease.torch_internals import backends, devices
from tests.soak.events import LATE_BY, SLOW_BY, Trouble

# Step -> what does it: the owner, and the name it has there.
HOOKS: dict[str, tuple[Any, str]] = {
    "plan": (reaching, "plan"),
    "stand-in": (backends, "new_default_gloo"),
    "drain": (devices, "drain"),
    "take off": (Releasable, "take_off"),
    "shut down": (backends, "shut_down"),
    "empty cache": (devices, "empty_cache"),
    "build": (Releasable, "build"),
    "connect": (Releasable, "connect"),
    "suspend": (backends, "suspend"),
    "resume": (backends, "resume"),
}


class Troubled:
    """Has a trouble happen, if it is this rank's: now if it is in coming, else at its step until :meth:`stop`.

    Args:
        trouble: What happens, or None.
        rank: This rank.
        timeout: The time-out that a late rank passes, in seconds.
    """

    def __init__(self, trouble: Trouble | None, rank: int, timeout: float) -> None:
        self._trouble = trouble
        self._undo: Callable[[], None] | None = None
        if trouble is None or trouble.rank != rank:
            return
        if trouble.step == "coming":
            _happen(trouble, timeout)
            return
        owner, name = HOOKS[trouble.step]
        real, self._calls = getattr(owner, name), _Calls(trouble.after)

        def hooked(*args: Any, **kwargs: Any) -> Any:
            if not self._calls.is_the_one():
                return real(*args, **kwargs)
            if trouble.what == "raises after":
                real(*args, **kwargs)
            _happen(trouble, timeout)
            return real(*args, **kwargs)

        setattr(owner, name, hooked)
        self._undo = partial(setattr, owner, name, real)

    def stop(self) -> list[str]:
        """Stop it, and return what is wrong if it never happened."""
        if self._undo is None:
            return []
        self._undo()
        self._undo = None
        if self._calls.happened:
            return []
        return [f"{self._trouble}: expected to happen, found only {self._calls.seen} calls"]


def _happen(trouble: Trouble, timeout: float) -> None:
    if trouble.what == "slow":
        time.sleep(SLOW_BY)
    elif trouble.what == "late":
        time.sleep(timeout + LATE_BY)
    elif trouble.what == "interrupted":
        raise KeyboardInterrupt
    elif trouble.what == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        raise OSError("injected")


class _Calls:
    """Counts calls from any thread."""

    def __init__(self, after: int) -> None:
        self.after = after
        self.seen = 0
        self._lock = threading.Lock()

    def is_the_one(self) -> bool:
        with self._lock:
            self.seen += 1
            return self.seen == self.after + 1

    @property
    def happened(self) -> bool:
        return self.seen > self.after
