"""Gloo in WORLD's place: while WORLD's own backends are released, object collectives, barriers, CPU collectives and
``new_group()`` go on working on the same WORLD object."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed.distributed_c10d import ProcessGroup, Store

from gpurelease.groups.releasable import Releasable
from gpurelease.torch_internals import backends, books, gloo, stores, tables
from gpurelease.torch_internals.backends import Backend
from gpurelease.torch_internals.books import Books
from gpurelease.torch_internals.tables import Row

OWN_GLOO = "WORLD's own"


class StandIn:
    """A Gloo backend, kept for many scopes.

    It connects every rank to every other, once; or, in a large world, and where there are not enough file descriptors,
    two ranks when they first talk. That costs next to nothing at any size. But then ``isend`` too waits until the other
    rank talks to this one, which it does not on NCCL or a Gloo that is connected. So it is not the rule.

    Args:
        gloo: The backend.
        made_in: What tells it from another: the same on all ranks that made it together, and on no others.
        met_on: What it was built on, if it was built.
    """

    def __init__(self, gloo: Backend, made_in: str, met_on: Any | None = None) -> None:
        self.gloo = gloo
        self.made_in = made_in
        self.met_on = met_on


class Absence:
    """What WORLD had before Gloo stood in for it: made while WORLD has shells on its table.

    Gloo serves all device types that WORLD served, so that collectives on device tensors work too, through the host.

    Args:
        world: WORLD.
        stand_in: What stands in.
    """

    def __init__(self, world: Releasable, stand_in: StandIn) -> None:
        self._world = world
        group = world.group
        self._devices = tables.device_types(group)
        self._books = books.read_books(group)
        self._bound_device: torch.device | None = group.bound_device_id
        # With a bound device new_group() would try to split a communicator off WORLD's, which is gone.
        group.bound_device_id = None
        devices = list(dict.fromkeys(["cpu", *self._devices]))
        books.write_books(group, Books("gloo", ",".join(f"{device}:gloo" for device in devices)))
        self._all_devices = devices
        self.serve_by(stand_in)

    def serve_by(self, stand_in: StandIn) -> None:
        """Have another Gloo stand in."""
        self.stand_in = stand_in
        self._timeout = backends.timeout_of(stand_in.gloo)
        rows = self._world.rows([stand_in.gloo] * len(self._world.shells))
        if "cpu" not in self._devices:
            rows.insert(0, Row("cpu", rows[0].type, stand_in.gloo))
        tables.write_table(self._world.group, rows, self._all_devices)

    def looks_meant_for_device(self, group: ProcessGroup) -> bool:
        """Return whether ``group``, made meanwhile, is on Gloo only since WORLD is: its maker may have meant NCCL."""
        return self._books.backend != "gloo" and books.read_books(group).config == books.usual_config("gloo")

    def end(self) -> None:
        """Put WORLD's shells, books and bound device back, with the time-out that WORLD was given meanwhile, if any."""
        group = self._world.group
        group.bound_device_id = self._bound_device
        rows = self._world.rows(self._world.shells)
        if "cpu" not in self._devices:
            # Where there was no row before. It cannot be taken out again, as others may be reading it.
            refusal = f"{self._world} has no backend for device type 'cpu': it"
            # And first, since the last of one type is what a group is asked for by type.
            rows.insert(0, Row("cpu", rows[0].type, tables.make_shell(rows[0].backend, refusal, None)))
        tables.write_table(group, rows, self._devices)
        books.write_books(group, self._books)
        timeout = backends.timeout_of(self.stand_in.gloo)
        if timeout is not None and timeout != self._timeout:
            group.set_timeout(timeout)


def build_stand_in(
    world: ProcessGroup,
    prefix: str,
    client: Store,
    timeout: timedelta,
    limit: timedelta,
    made: Callable[[Any], None],
    *,
    lazily: bool,
) -> StandIn:
    """Build a Gloo backend for WORLD. All ranks must call.

    Args:
        world: WORLD.
        prefix: Prefix of the backend's keys: one that no Gloo backend had before.
        client: A client of ours of WORLD's store.
        timeout: Time-out of its collectives.
        limit: Longest wait for the other ranks here.
        made: Told of the store that is waited on, so that the wait can be called off.
        lazily: Whether two ranks are to connect only when they talk.
    """
    meeting = stores.meeting(prefix, stores.base_of(books.store_of(world)), stores.base_of(client))
    made(meeting)
    made_gloo = gloo.new_default_gloo(meeting, world.rank(), world.size(), timeout, limit, lazily=lazily)
    meeting.settle()
    return StandIn(made_gloo, prefix, meeting)
