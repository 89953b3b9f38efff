"""Gloo in WORLD's place: while WORLD's own backends are released, object collectives, barriers, CPU collectives and
``new_group()`` go on working on the same WORLD object."""

from __future__ import annotations

from datetime import timedelta

import torch
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroup

from gpurelease import torch_internals
from gpurelease.groups import ReleasableGroup
from gpurelease.torch_internals import GLOO_TYPE, Backend, Books, Entry, Table


class StandIn:
    """A Gloo backend, kept for many scopes, and what WORLD had before it stood in.

    It connects every rank to every other, once. Gloo can also connect two ranks when they first talk, which would
    cost nothing where nobody talks; but then, in every torch of today, a collective to which one rank does not come
    can wait far longer than its time-out (gloo 520), and a body that raises on one rank is just that. Very large
    worlds can have it with ``TORCH_GLOO_LAZY_INIT=1``.

    Attributes:
        is_doubted: Whether a collective may have been left in its middle, which breaks the connections.
    """

    def __init__(self) -> None:
        self._gloo: Backend | None = None
        self._absence: _Absence | None = None
        self._timeout: timedelta | None = None
        self.is_doubted = False

    @property
    def is_ready(self) -> bool:
        """Whether there is a Gloo backend."""
        return self._gloo is not None

    def prepare(self, world: ReleasableGroup, prefix: str, timeout: timedelta, limit: timedelta) -> None:
        """Have a Gloo backend: WORLD's own if it has one that stays, else a new one. All ranks must call.

        Args:
            world: WORLD.
            prefix: Prefix of the backend's keys in WORLD's store: one that no Gloo backend had before.
            timeout: Time-out of its collectives.
            limit: Longest wait for the other ranks here.
        """
        self._gloo = world.gloo_that_stays()
        if self._gloo is None:
            group = world.group
            store = PrefixStore(prefix, torch_internals.store_of(group))
            self._gloo = torch_internals.new_default_gloo(store, group.rank(), group.size(), timeout, limit)

    def begin(self, world: ProcessGroup) -> None:
        """Stand in for WORLD, which has placeholders on its table."""
        self._absence = _Absence(world, self._gloo)
        self._timeout = torch_internals.timeout_of(self._gloo)

    def end(self, world: ProcessGroup | None) -> timedelta | None:
        """Put WORLD's table, books and bound device back as they were before ``begin``, if it was called.

        Returns:
            The time-out that WORLD was given meanwhile, or None.
        """
        if self._absence is None or world is None:
            return None
        self._absence.end(world)
        self._absence = None
        timeout = torch_internals.timeout_of(self._gloo)
        return timeout if timeout != self._timeout else None

    def drop(self) -> None:
        """Let go of the backend: the next scope has a new one."""
        self._gloo = self._absence = None
        self.is_doubted = False


class _Absence:
    """What WORLD had before Gloo stood in for it.

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
