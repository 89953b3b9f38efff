"""A group's C++ side: the table of its backends, and the shells that stand in it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from torch.distributed.distributed_c10d import ProcessGroup

from gpurelease.torch_internals.backends import Backend, timeout_of, unwrap
from gpurelease.torch_internals.extension import extension


class Row(NamedTuple):
    """One row of a group's table: which backend serves a device type."""

    device: str
    type: int
    backend: Backend


def has_table(group: ProcessGroup) -> bool:
    """Return whether ``group`` is torch's own container of backends, and not a backend that poses as a group."""
    return type(group) is ProcessGroup


def read_table(group: ProcessGroup) -> list[Row]:
    """Return the rows that ``group`` was made with, as they are now. They hold references to the backends."""
    return [Row(*row) for row in extension().read_table(group)]


def device_types(group: ProcessGroup) -> list[str]:
    """Return the device types that ``group`` says it serves."""
    return [device.type for device in group._device_types]  # 2.11 to 2.15


def write_table(group: ProcessGroup, rows: Iterable[Row], devices: Sequence[str]) -> None:
    """Put rows in the places of those that are there. Other threads may read the table at any moment.

    Args:
        group: The group.
        rows: What stands there from now on. Old backends must be held until readers have references of their own.
        devices: The device types that the group says it serves from now on.
    """
    extension().write_table(group, list(rows), list(devices))


def make_shell(live: Backend, refusal: str, options: Any | None) -> Any:
    """Return what stands in the place of ``live``: it keeps what was set on it, and refuses collectives.

    Args:
        live: The backend.
        refusal: What the shell calls itself in "Backend NAME does not support ...".
        options: What it answers with when it is asked for options, and what time-outs that are set meanwhile go to.
    """
    return extension().make_shell(unwrap(live), refusal, options)


def set_on_shell(shell: Any, timing: bool, abort_hooks: Mapping[int, Any]) -> None:
    """Set on a shell what was set on the live backend, and can be set on the shell too."""
    shell.timing = timing
    for number, hook in abort_hooks.items():
        shell.register_abort_hook(number, hook)  # 2.14 to 2.15


def pass_on(shell: Any, to: Backend) -> None:
    """Set on a new backend what was set on the old one, or on its shell since."""
    shell.pass_on(unwrap(to))


def split_count(group: ProcessGroup) -> int:
    """Return how many groups without a description of their own were split off ``group`` in C++."""
    return extension().split_count(group)


def group_timeout(group: ProcessGroup) -> timedelta | None:
    """Return the time-out of ``group``'s collectives, whoever serves them now, or None if no backend tells."""
    return next(filter(None, (timeout_of(row.backend) for row in read_table(group))), None)
