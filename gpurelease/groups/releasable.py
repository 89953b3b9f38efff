"""One group that can be released: its backends go off its table and shells come on, later new backends."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
from torch.distributed.distributed_c10d import ProcessGroup, Store

from gpurelease.errors import group_text
from gpurelease.groups.blueprint import Blueprint
from gpurelease.torch_internals import backends as torch_backends
from gpurelease.torch_internals import books, devices, nccl, stores, tables
from gpurelease.torch_internals.backends import Backend
from gpurelease.torch_internals.tables import Row


@dataclass
class _Part:
    """One of a group's backends: what it was, the shell that stands in its place, and what was set on it."""

    blueprint: Blueprint
    shell: Any
    settings: nccl.Settings | None


class Releasable:
    """A group that can be released. Making one changes nothing; it holds no reference to the group's backends.

    Args:
        group: The group.
        rows: What is to be released: by name of the backend, its rows of the group's table.
        may_suspend: Whether NCCL is to be asked what can be suspended.
        spelled: What the user wrote to release it, for collectives that are refused.

    Attributes:
        group: The group.
        key: Names the group in messages between ranks: short, and the same on all its members.
        order: Where it comes when groups are ended and built, one after the other: see :func:`order_of`.
        connected: Whether its communicators are there now, and so must be there again afterwards.
        device: Its accelerator device on this rank, or None.
        why_not_suspended: Why its backends cannot be suspended, or the empty string.
        in_turn: Whether it must be built again while no other group is.
        memory: Bytes of its communicators that can be suspended, and bytes that cannot, or None if NCCL does not say.
        met_on: What its new backends were built on.
    """

    def __init__(
        self, group: ProcessGroup, rows: Mapping[str, Sequence[Row]], *, may_suspend: bool, spelled: str
    ) -> None:
        self.group = group
        self._spelled = spelled
        self._name, self._ranks = books.name_of(group), books.ranks_of(group)
        self.key = key_of(group)
        self.order = order_of(self._name, self._ranks)
        live = [each[0].backend for each in rows.values()]
        connections = [torch_backends.connection_of(backend) for backend in live]
        self.connected = any(connection.there for connection in connections)
        self._eager = group.bound_device_id is not None
        serves = {row.device for each in rows.values() for row in each}
        self.device = _device_of(group, serves, connections)
        may_be = [
            torch_backends.suspension_of(backend, connected=connection.there)
            for backend, connection in zip(live, connections, strict=True)
            if may_suspend
        ]
        why_not = next((each.why_not for each in may_be if each.why_not), "")
        self.why_not_suspended = f"{self}: {why_not}" if why_not else ""
        told = [each.memory for each in may_be if each.memory is not None]
        self.memory = (sum(gives for gives, _ in told), sum(stays for _, stays in told)) if told else None
        self.met_on: list[Any] = []
        self._recorded = False
        self._parts = [self._part(name, each) for name, each in rows.items()]
        self.in_turn = self._in_turn(live)

    def __str__(self) -> str:
        return group_text(self._name, self.group.group_desc, self._ranks)

    @property
    def backend_names(self) -> list[str]:
        """The names of the backends that are released."""
        return [part.blueprint.backend for part in self._parts]

    def gloo_that_stays(self) -> Backend | None:
        """Return the Gloo backend that the group has beside those to be released ("cpu:gloo,cuda:nccl"), or None."""
        names = books.backend_names(self.group)
        taken = {device for part in self._parts for device in part.blueprint.devices}
        rows = (row for row in tables.read_table(self.group) if row.device not in taken)
        return next((row.backend for row in rows if names.get(row.device) == "gloo"), None)

    def rows(self, of_parts: Sequence[Backend]) -> list[Row]:
        """Return the rows that the group's released backends have, or had, with others in their places."""
        return [
            Row(device, part.blueprint.backend_type, backend)
            for part, backend in zip(self._parts, of_parts, strict=True)
            for device in part.blueprint.devices
        ]

    def take_off(self) -> list[Backend]:
        """Put shells into the table, and return the backends that were there, in ``put_on``'s order."""
        by_device = {row.device: row.backend for row in tables.read_table(self.group)}
        live = [by_device[part.blueprint.devices[0]] for part in self._parts]
        for part, backend in zip(self._parts, live, strict=True):
            torch_backends.set_timeout(part.shell, torch_backends.timeout_of(backend))  # may have changed since
        self._recorded = books.take_recorder(self.group)
        self.put(self.shells)
        return live

    @property
    def shells(self) -> list[Any]:
        """What stands in the places of its backends while it is released."""
        return [part.shell for part in self._parts]

    def build(self, prefix: str, client: Store, limit: timedelta, made: Callable[[Any], None]) -> list[Backend]:
        """Build new backends, without touching the table. All members must call.

        Args:
            prefix: What keys begin with, new for every restore: old keys would be found again.
            client: A client of ours of the store that the members meet on.
            limit: Longest wait for the other members, where it must be said beforehand.
            made: Told of each store that is waited on, so that the wait can be called off.
        """
        built = []
        for part in self._parts:
            own = stores.base_of(books.store_of(self.group))
            meeting = stores.meeting(f"{prefix}{self.key}/{part.blueprint.devices[0]}", own, stores.base_of(client))
            made(meeting)
            options = torch_backends.copy_of_options(torch_backends.options_of(part.shell), self._ranks)
            timeout = torch_backends.timeout_of(part.shell)
            built.append(replace(part.blueprint, options=options, timeout=timeout).build(meeting, limit))
        return built

    def connect(self, built: Sequence[Backend], *, by_kernel: bool) -> None:
        """Make the communicators that the old backends had. All members must call.

        Users rely on it: a pipeline's send/recv as the first operation of an unconnected communicator hangs unless
        all its ranks enter it (pytorch 74701).

        Args:
            built: What ``build`` has returned.
            by_kernel: Whether a collective may have to run for that: not while another group is built.
        """
        if self.connected and self.device is not None:
            for backend in map(torch_backends.unwrap, built):
                nccl.connect(backend, self.device, eager=self._eager, by_kernel=by_kernel)

    def pass_on(self, built: Sequence[Backend]) -> None:
        """Set on backends, once they are connected, what was set on those before them, or meanwhile on their shells."""
        for part, backend in zip(self._parts, built, strict=True):
            tables.pass_on(part.shell, backend)
            nccl.set_again(part.settings, torch_backends.unwrap(backend))

    def put_on(self, ready: Sequence[Backend]) -> None:
        """Put backends into the table, in the places of those that were taken off; the others stay."""
        for part, backend in zip(self._parts, ready, strict=True):
            torch_backends.set_timeout(backend, torch_backends.timeout_of(part.shell))
        self.put(ready)
        if self._recorded:
            books.put_recorder(self.group)

    def put(self, of_parts: Sequence[Backend]) -> None:
        """Have others stand in the places of the group's released backends."""
        tables.write_table(self.group, self.rows(of_parts), tables.device_types(self.group))

    def _in_turn(self, live: Sequence[Backend]) -> bool:
        """Return whether somebody's own code builds its backends, or a kernel is launched to connect one."""
        if not all(part.blueprint.is_built_by_torch for part in self._parts):
            return True
        if not self.connected or self.device is None:
            return False
        inner = map(torch_backends.unwrap, live)
        return not all(nccl.connects_without_kernel(backend, eager=self._eager) for backend in inner)

    def _part(self, name: str, rows: Sequence[Row]) -> _Part:
        backend = rows[0].backend
        inner = torch_backends.unwrap(backend)
        blueprint = Blueprint(
            backend=name,
            devices=tuple(row.device for row in rows),
            backend_type=rows[0].type,
            rank=self.group.rank(),
            size=self.group.size(),
            ranks=self._ranks,
            group_name=self._name,
            timeout=None,
            options=None,
            device=self.device,
            kind=type(inner),
            wrapped=inner is not backend,
        )
        refusal = f"{name!r} of {self} is released by gpurelease's {_how_to_use_it(self._spelled)}. It"
        options = torch_backends.copy_of_options(torch_backends.options_of(inner), self._ranks)
        shell, settings = tables.make_shell(inner, refusal, options), nccl.settings_of(inner)
        if settings is not None:
            tables.set_on_shell(shell, settings.timing, settings.abort_hooks)
        return _Part(blueprint, shell, settings)


def key_of(group: ProcessGroup) -> str:
    """Return what names ``group`` in messages between ranks: short, and the same on all its members."""
    text = f"{books.name_of(group)}:{books.ranks_of(group)}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def order_of(name: str, ranks: Sequence[int]) -> tuple[Any, ...]:
    """Return where a group comes among all groups of a rank: any two ranks have those that they share in one order.

    torch counts the groups that all ranks make, and calls them by that number: that is the order in which they were
    made, family by family, and the members of a family are disjoint. So ranks build side by side, where in any order
    that mixes families (of a hash, say) they wait in long chains. A group that only its members have made has a hash
    for a name: these come after the others, those of one shape together, as a family would.
    """
    if name.isascii() and name.isdigit():
        return (0, int(name))
    shape = [rank - ranks[0] for rank in ranks]
    return (1, len(ranks), shape, hashlib.sha256(name.encode()).hexdigest())


def _how_to_use_it(spelled: str) -> str:
    """Return what the user wrote to release a group, and what to do to use it all the same."""
    if spelled == "sleep_world()":
        return f"{spelled}: call wake_world() on all ranks, or use the group inside `with restored_world():`"
    after = "that call" if spelled.startswith("@") else "that block"
    return f"{spelled}: use the group after {after}, or inside `with restored_world():`"


def _device_of(
    group: ProcessGroup, serves: Collection[str], connections: Sequence[torch_backends.Connection]
) -> torch.device | None:
    accelerator = devices.accelerator()
    if accelerator is None or accelerator.type not in serves:
        return None
    found = next((each.device for each in connections if each.device is not None), None)
    # A group that was never used must not cost a context on the device that happens to be current.
    current = accelerator if devices.has_context(accelerator) else None
    return group.bound_device_id or found or current
