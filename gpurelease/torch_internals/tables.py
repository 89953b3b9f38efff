"""A group's C++ side: the table of its backends."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NamedTuple

from torch.distributed.distributed_c10d import ProcessGroup

from gpurelease.torch_internals.backends import Backend, timeout_of, unwrap
from gpurelease.torch_internals.extension import backend_table

GLOO_TYPE = int(ProcessGroup.BackendType.GLOO)  # type: ignore[call-overload]


class Entry(NamedTuple):
    """One row of a group's table: which backend serves a device type."""

    device: str
    type: int
    backend: Backend


class Table(NamedTuple):
    """A group's backends, and which type of them is its default."""

    default_type: int
    entries: tuple[Entry, ...]


def has_table(group: ProcessGroup) -> bool:
    """Return whether ``group`` is torch's own container of backends, and not a backend that poses as a group."""
    return type(group) is ProcessGroup


def read_table(group: ProcessGroup) -> Table:
    """Return ``group``'s table. It holds references to the backends."""
    default_type, entries = backend_table.read_table(group)
    return Table(default_type, tuple(Entry(*entry) for entry in entries))


def write_table(group: ProcessGroup, table: Table) -> None:
    """Replace ``group``'s table. Its name, description and bound device are set on every backend in it."""
    backend_table.write_table(group, table.default_type, list(table.entries))


def placeholder(rank: int, size: int, name: str, like: Backend) -> Any:
    """Return a backend that refuses every collective with "Backend NAME does not support ...".

    Args:
        rank: The rank within the group that it answers with.
        size: The size of the group that it answers with.
        name: What it calls itself.
        like: The backend it stands for; time-outs set on the one are set on the options of the other.
    """
    return backend_table.placeholder(rank, size, name, unwrap(like))


def copy_hook(from_placeholder: Backend, to: Backend) -> None:
    """Register with a new backend the completion hook that the old one had, if it had one."""
    backend_table.copy_hook(from_placeholder, unwrap(to))


def world_timeout(world: ProcessGroup) -> timedelta | None:
    """Return the time-out of WORLD's collectives, whoever serves them now, or None if no backend tells."""
    return next(filter(None, (timeout_of(entry.backend) for entry in read_table(world).entries)), None)
