"""Waiting for a key of a store, with a bound."""

from __future__ import annotations

import time
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from gpurelease.options import bounded
from gpurelease.torch_internals.stores import base_of

# How long our own clients wait for a key that is known to be there.
FOR_AN_ANSWER = timedelta(minutes=5)


class NotAllCame(Exception):
    """Some ranks did not come to a roll call in time, or left it.

    Attributes:
        missing: Their global ranks; none, if it is the store that does not answer.
        reason: One sentence.
    """

    def __init__(self, missing: tuple[int, ...], reason: str) -> None:
        self.missing = missing
        self.reason = reason
        super().__init__(reason)


def value_within(client: Store, store: Store, key: str, timeout: float) -> bytes | None:
    """Wait in the server until a key is there, and return its value, or None if it has not come in time.

    Args:
        client: The client below ``store``.
        store: The client, or a prefix over it.
        key: The key.
        timeout: Longest wait, in seconds.

    Raises:
        RuntimeError: The store does not answer.
    """
    limit = timedelta(seconds=bounded(timeout))
    is_ours = isinstance(base_of(client), TCPStore)  # other stores' clones may be the store itself
    started = time.monotonic()
    try:
        if is_ours:
            client.set_timeout(limit)  # saves a request
        else:
            store.wait([key], limit)
        return store.get(key)
    except RuntimeError:
        # torch's stores have no class of their own for this (a FileStore raises a RuntimeError), but all of them wait.
        if time.monotonic() - started < 0.9 * limit.total_seconds():
            raise
        return None
    finally:
        if is_ours:
            client.set_timeout(FOR_AN_ANSWER)
