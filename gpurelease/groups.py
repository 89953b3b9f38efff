"""Which groups are released, and what becomes of one: its backends go off the table, placeholders and later new
backends come on."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroup

from gpurelease import torch_internals
from gpurelease.rebuilders import Blueprint, why_not_rebuilt
from gpurelease.report import GroupReport
from gpurelease.rollcall import ranks_text
from gpurelease.settings import ScopeOptions
from gpurelease.torch_internals import Backend, Entry, Table

logger = logging.getLogger(__name__)


class ReleasableGroup:
    """A group that can be released. Making one changes nothing; it holds no reference to the group's backends.

    Args:
        group: The group.
        backends: What is to be released: by name of the backend, its rows of the group's table.
        may_suspend: Whether NCCL is to be asked what can be suspended.

    Attributes:
        group: The group.
        key: Names the group in messages between ranks: short, and the same on all its members.
        connected: Whether its communicators are there now, and so must be there again afterwards.
        device: Its accelerator device on this rank, or None.
        why_not_suspended: Why its backends cannot be suspended, or the empty string.
        memory: Bytes of its communicators that can be suspended, and bytes that cannot, or None if NCCL does not say.
    """

    def __init__(self, group: ProcessGroup, backends: Mapping[str, Sequence[Entry]], *, may_suspend: bool) -> None:
        self.group = group
        self._name, ranks = torch_internals.name_of(group), torch_internals.ranks_of(group)
        self.key = hashlib.sha256(f"{self._name}:{ranks}".encode()).hexdigest()[:16]
        rows = [entry for entries in backends.values() for entry in entries]
        self.connected = any(torch_internals.is_connected(entry.backend) for entry in rows)
        self.device = _device_of(group, rows)
        live = [entries[0].backend for entries in backends.values()] if may_suspend else []
        why_not = next(filter(None, map(torch_internals.why_not_suspended, live)), "")
        self.why_not_suspended = f"{self}: {why_not}" if why_not else ""
        told = [memory for memory in map(torch_internals.memory_of, live) if memory is not None]
        self.memory = (sum(gives for gives, _ in told), sum(stays for _, stays in told)) if told else None
        self._eager = group.bound_device_id is not None
        self._recorded = False
        self._blueprints = [_blueprint(group, name, entries, self.device) for name, entries in backends.items()]
        self._devices = {entry.device for entry in rows}
        self._placeholders = [
            torch_internals.placeholder(group.rank(), group.size(), self._refusal(name), entries[0].backend)
            for name, entries in backends.items()
        ]

    def __str__(self) -> str:
        return f"process group {self._name!r} ({self.group.group_desc})"

    def gloo_that_stays(self) -> Backend | None:
        """Return the Gloo backend that the group has beside those to be released ("cpu:gloo,cuda:nccl"), or None."""
        names = torch_internals.backend_names(self.group)
        return next((entry.backend for entry in self._staying() if names.get(entry.device) == "gloo"), None)

    def take_off(self) -> list[Backend]:
        """Put placeholders into the table, and return the backends that were there, in ``put_on``'s order."""
        entries = torch_internals.read_table(self.group).entries
        by_device = {entry.device: entry.backend for entry in entries}
        self._recorded = torch_internals.take_recorder(self.group)
        self._put(self._placeholders)
        return [by_device[blueprint.devices[0]] for blueprint in self._blueprints]

    def build(self, prefix: str, timeout: timedelta) -> list[Backend]:
        """Build new backends, without touching the table. All members must call.

        Args:
            prefix: Prefix of the new backends' keys, new for every restore: the old keys would be found again.
            timeout: Longest wait for the other members.
        """
        store = torch_internals.store_of(self.group)
        backends = []
        with torch_internals.waiting_at_most(store, timeout):
            for blueprint in self._blueprints:
                backends.append(blueprint.build(PrefixStore(prefix + blueprint.devices[0], store), timeout))
        return backends

    def connect(self, backends: Sequence[Backend], timeout: timedelta) -> None:
        """Make the communicators that the old backends had. All members must call.

        Users rely on it: a pipeline's send/recv as the first operation of an unconnected communicator hangs unless
        all its ranks enter it (pytorch 74701).

        Args:
            backends: What ``build`` has returned.
            timeout: Longest wait for the other members.
        """
        if self.connected and self.device is not None:
            with torch_internals.waiting_at_most(torch_internals.store_of(self.group), timeout):
                for backend in map(torch_internals.unwrap, backends):
                    torch_internals.connect(backend, self.device, eager=self._eager)

    def inherit(self, backends: Sequence[Backend]) -> None:
        """Give new backends what was set on the old ones or on their placeholders: the completion hooks."""
        for placeholder, backend in zip(self._placeholders, backends, strict=True):
            torch_internals.copy_hook(placeholder, backend)

    def put_on(self, backends: Sequence[Backend]) -> None:
        """Put backends into the table, in the places of those that were taken off; the others stay."""
        self._put(backends)
        if self._recorded:
            torch_internals.put_recorder(self.group)

    def _put(self, backends: Sequence[Backend]) -> None:
        new = tuple(
            Entry(device, blueprint.backend_type, backend)
            for blueprint, backend in zip(self._blueprints, backends, strict=True)
            for device in blueprint.devices
        )
        default_type = torch_internals.read_table(self.group).default_type
        torch_internals.write_table(self.group, Table(default_type, (*self._staying(), *new)))

    def _staying(self) -> list[Entry]:
        entries = torch_internals.read_table(self.group).entries
        return [entry for entry in entries if entry.device not in self._devices]

    def _refusal(self, backend: str) -> str:
        return (
            f"{backend!r} of {self} is released by gpurelease: use the group after the released_world() scope, or "
            "inside restored_world(). It"
        )


@dataclass
class Plan:
    """What one rank would release, before the ranks have agreed on it.

    Attributes:
        candidates: Groups that this rank would release.
        kept: Groups that this rank leaves alone, each with the reason.
        unmatched: Names in ``keep=`` that are no group's name or description on this rank.
    """

    candidates: list[ReleasableGroup] = field(default_factory=list)
    kept: list[GroupReport] = field(default_factory=list)
    unmatched: list[str] = field(default_factory=list)

    def agreed(
        self, kept: Mapping[str, Sequence[int]], *, suspended: bool
    ) -> tuple[list[ReleasableGroup], list[GroupReport]]:
        """Return the groups to release, in the order that all ranks have, and what becomes of each group.

        Args:
            kept: Of the candidates that are kept, by key, the global ranks that would have released them.
            suspended: Whether the others are suspended.
        """
        reports = list(self.kept)
        for candidate in self.candidates:
            reason = ""
            if candidate.key in kept:
                others = set(torch_internals.ranks_of(candidate.group)) - set(kept[candidate.key])
                reason = f"not released on {ranks_text(sorted(others))}"
            reports.append(
                _describe(candidate.group, reason, candidate.connected, candidate.memory if suspended else None)
            )
        agreed = (candidate for candidate in self.candidates if candidate.key not in kept)
        return sorted(agreed, key=lambda group: group.key), reports


def plan(options: ScopeOptions, made_while_released: Collection[ProcessGroup]) -> Plan:
    """Sort this rank's groups into those it would release and those it leaves alone. Changes nothing.

    Args:
        options: What the user asked for.
        made_while_released: Groups that belong to whoever made them inside a scope: they are never released.
    """
    plan = Plan()
    named: set[str] = set()
    for group in torch_internals.groups():
        backends = _backends_to_release(group, options.backends)
        reason = _why_kept(group, backends, options, named)
        if not reason and group in made_while_released:
            reason = "made while the world was released"
        if reason:
            plan.kept.append(_describe(group, reason))
        else:
            may_suspend = options.strategy != "rebuild"
            plan.candidates.append(ReleasableGroup(group, backends, may_suspend=may_suspend))
    if not callable(options.keep):
        plan.unmatched = [name for name in options.keep if isinstance(name, str) and name not in named]
    return plan


def _why_kept(
    group: ProcessGroup, backends: Mapping[str, Sequence[Entry]], options: ScopeOptions, named: set[str]
) -> str:
    """Return why this rank leaves ``group`` alone, or the empty string; and note which names in ``keep=`` it has."""
    names = {torch_internals.name_of(group), group.group_desc}
    named |= names
    if callable(options.keep):
        keep = bool(options.keep(group))
    else:
        keep = any(item is group or (isinstance(item, str) and item in names) for item in options.keep)
    if keep:
        return "keep="
    if not torch_internals.has_table(group):
        return f"it is a {type(group).__name__}, which has no table of backends"
    if not backends:
        return "no accelerator backend" if options.backends is None else f"no backend of {', '.join(options.backends)}"
    for name in backends:
        if reason := why_not_rebuilt(name):
            logger.warning("process group %r holds its communicators: %s", torch_internals.name_of(group), reason)
            return reason
    return ""


def _backends_to_release(group: ProcessGroup, wanted: tuple[str, ...] | None) -> dict[str, list[Entry]]:
    if not torch_internals.has_table(group):
        return {}
    names = torch_internals.backend_names(group)
    found: dict[str, list[Entry]] = {}
    for entry in torch_internals.read_table(group).entries:
        found.setdefault(names.get(entry.device, "unknown"), []).append(entry)
    if wanted is not None:
        return {name: entries for name, entries in found.items() if name in wanted}
    # Gloo and MPI hold no device memory, whatever device they serve.
    return {
        name: entries
        for name, entries in found.items()
        if name not in ("gloo", "mpi", "fake") and any(entry.device != "cpu" for entry in entries)
    }


def _describe(
    group: ProcessGroup, reason_kept: str, connected: bool | None = None, memory: tuple[int, int] | None = None
) -> GroupReport:
    return GroupReport(
        name=torch_internals.name_of(group),
        description=group.group_desc,
        ranks=torch_internals.ranks_of(group),
        backend=torch_internals.read_books(group).config,
        released=not reason_kept,
        reason=reason_kept,
        connected=connected,
        suspended_bytes=None if memory is None or reason_kept else memory[0],
        stayed_bytes=None if memory is None or reason_kept else memory[1],
    )


def _blueprint(group: ProcessGroup, name: str, entries: Sequence[Entry], device: torch.device | None) -> Blueprint:
    backend = entries[0].backend
    inner = torch_internals.unwrap(backend)
    return Blueprint(
        backend=name,
        devices=tuple(entry.device for entry in entries),
        backend_type=entries[0].type,
        rank=group.rank(),
        size=group.size(),
        ranks=torch_internals.ranks_of(group),
        group_name=torch_internals.name_of(group),
        timeout=torch_internals.timeout_of(backend),
        options=torch_internals.options_of(inner),
        device=device,
        kind=type(inner),
        wrapped=inner is not backend,
    )


def _device_of(group: ProcessGroup, rows: Sequence[Entry]) -> torch.device | None:
    accelerator = torch_internals.accelerator()
    if accelerator is None or all(entry.device != accelerator.type for entry in rows):
        return None
    backends = (torch_internals.unwrap(entry.backend) for entry in rows if entry.device == accelerator.type)
    found = next(filter(None, map(torch_internals.communicator_device, backends)), None)
    # A group that was never used must not cost a context on the device that happens to be current.
    current = accelerator if torch_internals.has_context(accelerator) else None
    return group.bound_device_id or found or current
