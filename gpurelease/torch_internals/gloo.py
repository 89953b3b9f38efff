"""How a Gloo backend is made."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import Store

from gpurelease.torch_internals.backends import Backend, start_sequence


def is_lazy() -> bool:
    """Return whether torch's own Gloo backends connect two ranks only when they talk."""
    return os.environ.get("TORCH_GLOO_LAZY_INIT") == "1"


def new_gloo(store: Store, rank: int, size: int, options: Any) -> Backend:
    """Return a new ``ProcessGroupGloo``, connected to all members. All members must call.

    Args:
        store: Where the members meet. It must end a wait in which nothing comes: the options' time-out, which is also
            that of this, is what ``send`` and ``recv`` wait for each other ever after.
        rank: This process's rank in the group.
        size: Number of members.
        options: Its options, for it alone.
    """
    if is_lazy():
        options._devices = _lazy_gloo_devices()  # such a device ends with the backend that it was made for
    backend = distributed_c10d.ProcessGroupGloo(store, rank, size, options)
    start_sequence(backend)
    return backend


def new_default_gloo(
    store: Store, rank: int, size: int, timeout: timedelta, limit: timedelta, *, lazily: bool
) -> Backend:
    """Return a new ``ProcessGroupGloo`` for WORLD as torch makes one for itself: on the interfaces of
    ``GLOO_SOCKET_IFNAME``. All ranks must call.

    Args:
        store: Where the ranks meet. It must end a wait in which nothing comes.
        rank: This process's rank.
        size: Number of ranks.
        timeout: Time-out of its collectives, and of ``send`` and ``recv``.
        limit: Longest wait for the other ranks here, for those that are connected here, if ``lazily``.
        lazily: Whether two ranks are to connect only when they talk.
    """
    kind: Any = distributed_c10d.ProcessGroupGloo
    if lazily:
        options = kind._Options()
        options._devices = _lazy_gloo_devices()
        options._threads = 2 * len(options._devices)
        options._timeout = timeout
        backend = kind(store, rank, size, options)
        _connect_those_that_collectives_need(backend, limit)
    else:
        backend = kind(store, rank, size, timeout)
    # Without them, only the first backend of a process can be split: split_group() ended the process (2.11 to 2.15).
    backend.options.global_ranks_in_group = list(range(size))
    start_sequence(backend)
    return backend


def _connect_those_that_collectives_need(gloo: Backend, limit: timedelta) -> None:
    """Have those ranks meet, while all are here, that talk in most collectives: those at 1, 2, 4, ... from each other.

    Of two ranks that meet one connects, and the other one waits for it five time-outs, if it does not come (seen in
    2.13; gloo 520). After this that is so only where two others talk: in gather, scatter, all_to_all, send and recv.
    """
    options = dist.BarrierOptions()
    options.timeout = limit
    gloo.barrier(options).wait(limit)


def _lazy_gloo_devices() -> list[Any]:
    """Return what a Gloo that connects two ranks when they talk listens on, as torch makes it for itself."""
    kind: Any = distributed_c10d.ProcessGroupGloo  # 2.11 to 2.15
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    devices = [kind.create_device(interface=name, lazy_init=True) for name in names]
    return devices or [kind.create_default_device(lazy_init=True)]
