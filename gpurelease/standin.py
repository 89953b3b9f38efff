"""Gloo in WORLD's place: while WORLD's own backends are released, object collectives, barriers, CPU collectives and
``new_group()`` go on working on the same WORLD object."""

from __future__ import annotations

from datetime import timedelta

import torch
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroup

from gpurelease import torch_internals
from gpurelease.torch_internals import GLOO_TYPE, Backend, Books, Entry, Table


def new_gloo(world: ProcessGroup, prefix: str, timeout: timedelta, limit: timedelta) -> Backend:
    """Build a Gloo backend for WORLD. All ranks must call.

    It connects every rank to every other, once for many scopes. Gloo can also connect two ranks when they first talk,
    which would cost nothing where nobody talks; but then, in every torch of today, a collective to which one rank
    does not come can wait far longer than its time-out (gloo 520), and a body that raises on one rank is just that.
    Very large worlds can have it with ``TORCH_GLOO_LAZY_INIT=1``.

    Args:
        world: WORLD.
        prefix: Prefix of the backend's keys in WORLD's store: one that no Gloo backend had before.
        timeout: Time-out of its collectives.
        limit: Longest wait for the other ranks here.
    """
    store = PrefixStore(prefix, torch_internals.store_of(world))
    return torch_internals.new_default_gloo(store, world.rank(), world.size(), timeout, limit)


class Absence:
    """What WORLD had before Gloo stood in for it, kept to be put back.

    Gloo serves all device types that WORLD served, so that collectives on device tensors work too, through the host.

    Args:
        world: WORLD, with placeholders on its table.
        gloo: The backend that stands in.
    """

    def __init__(self, world: ProcessGroup, gloo: Backend) -> None:
        self._table = torch_internals.read_table(world)
        self._books = torch_internals.read_books(world)
        self._bound_device: torch.device | None = world.bound_device_id
        devices = {"cpu": None} | {entry.device: None for entry in self._table.entries}
        # With a bound device new_group() would try to split a communicator off WORLD's, which is gone.
        world.bound_device_id = None
        torch_internals.write_table(world, Table(GLOO_TYPE, tuple(Entry(d, GLOO_TYPE, gloo) for d in devices)))
        torch_internals.write_books(world, Books("gloo", ",".join(f"{device}:gloo" for device in devices)))

    def end(self, world: ProcessGroup) -> None:
        """Put WORLD's table, books and bound device back as they were."""
        world.bound_device_id = self._bound_device
        torch_internals.write_table(world, self._table)
        torch_internals.write_books(world, self._books)
