"""Which groups are released, and one released group: its backends are off the table, placeholders are on it."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroup

from gpurelease import torch_internals
from gpurelease.rebuilders import Blueprint, can_rebuild
from gpurelease.report import GroupReport
from gpurelease.rollcall import ranks_text
from gpurelease.settings import ScopeOptions
from gpurelease.torch_internals import Backend, Entry, Table


@dataclass(frozen=True)
class Plan:
    """What one rank would release, before the ranks have agreed on it.

    Attributes:
        candidates: Groups that this rank would release.
        kept: Groups that this rank leaves alone, each with the reason.
        unmatched: Names in ``keep=`` that are no group's name or description on this rank.
    """

    candidates: list[Candidate]
    kept: list[GroupReport]
    unmatched: list[str]

    def agreed(self, kept: Mapping[str, Sequence[int]]) -> list[GroupReport]:
        """Return what becomes of each group.

        Args:
            kept: Of the candidates that are kept, by key, the global ranks that would have released them.
        """
        reports = list(self.kept)
        for candidate in self.candidates:
            reason = ""
            if candidate.key in kept:
                others = set(torch_internals.ranks_of(candidate.group)) - set(kept[candidate.key])
                reason = f"not released on {ranks_text(sorted(others))}"
            reports.append(describe(candidate.group, reason))
        return reports


@dataclass(frozen=True)
class Candidate:
    """A group that this rank would release, with the backends that would go.

    Attributes:
        group: The group.
        key: Names the group in messages between ranks: short, and the same on all its members.
        backends: Per backend that would go, its name and its rows of the table.
        connected: Whether any of these backends holds a communicator now.
    """

    group: ProcessGroup
    key: str
    backends: dict[str, list[Entry]]
    connected: bool


def plan(options: ScopeOptions, made_while_released: Collection[ProcessGroup]) -> Plan:
    """Sort this rank's groups into those it would release and those it leaves alone. Changes nothing.

    Args:
        options: What the user asked for.
        made_while_released: Groups that belong to whoever made them inside a scope: they are never released.
    """
    candidates: list[Candidate] = []
    kept: list[GroupReport] = []
    used: set[str] = set()
    for group in torch_internals.groups():
        if not torch_internals.has_table(group):
            kept.append(describe(group, f"it is a {type(group).__name__}, which has no backends of its own to release"))
            continue
        backends = _backends_to_release(group, options.backends)
        stuck = [name for name in backends if not can_rebuild(name)]
        if not backends:
            wanted = "accelerator" if options.backends is None else "/".join(options.backends)
            kept.append(describe(group, f"no {wanted} backend"))
        elif group in made_while_released:
            kept.append(describe(group, "made while the world was released"))
        elif _is_kept(group, options.keep, used):
            kept.append(describe(group, "keep="))
        elif stuck:
            kept.append(describe(group, f"backend {stuck[0]!r} cannot be built again: see register_rebuilder()"))
        else:
            rows = [entry for entries in backends.values() for entry in entries]
            connected = any(torch_internals.is_connected(entry.backend) for entry in rows)
            candidates.append(Candidate(group, _key(group), backends, connected))
    names = () if callable(options.keep) else options.keep
    return Plan(candidates, kept, [name for name in names if isinstance(name, str) and name not in used])


class ReleasedGroup:
    """A group whose backends are off the table until :meth:`put_on`. It holds no reference to them.

    Attributes:
        group: The group, the same object as ever.
        key: Names the group in messages between ranks.
        connected: Whether all members held a communicator, so that all must have one again.
        device: Its accelerator device on this rank, or None.
    """

    def __init__(self, candidate: Candidate, connected: bool) -> None:
        self.group = candidate.group
        self.key = candidate.key
        self.connected = connected
        self._text = f"{torch_internals.name_of(self.group)!r} ({self.group.group_desc})"
        table = torch_internals.read_table(candidate.group)
        gone = {id(entry.backend) for entries in candidate.backends.values() for entry in entries}
        self._default_type = table.default_type
        self._stay = tuple(entry for entry in table.entries if id(entry.backend) not in gone)
        self._blueprints = [_blueprint(self.group, name, entries) for name, entries in candidate.backends.items()]
        self.device = _device_of(self.group, self._blueprints)
        self._placeholders = tuple(
            Entry(entry.device, entry.type, placeholder)
            for name, entries in candidate.backends.items()
            for placeholder in [_placeholder(self.group, name, entries[0].backend)]
            for entry in entries
        )

    def __str__(self) -> str:
        return f"process group {self._text}"

    def take_off(self) -> list[Backend]:
        """Put placeholders into the table, and return the backends that were there, each once."""
        table = torch_internals.read_table(self.group)
        torch_internals.write_table(self.group, Table(self._default_type, self._stay + self._placeholders))
        stay = {id(entry.backend) for entry in self._stay}
        return list({id(entry.backend): entry.backend for entry in table.entries if id(entry.backend) not in stay}.values())

    def build(self, generation: str, timeout: timedelta) -> list[Backend]:
        """Build new backends, one per blueprint, without touching the table. All members must call.

        Args:
            generation: Prefix of the new backends' keys, new for every restore: the old ones would be found again.
            timeout: Longest wait for the other members.
        """
        store = torch_internals.store_of(self.group)
        return [
            blueprint.build(PrefixStore(f"{generation}/{blueprint.devices[0]}", store), timeout)
            for blueprint in self._blueprints
        ]

    def connect(self, backends: list[Backend]) -> None:
        """Make the communicators that the old backends had. All members must call, on their own devices.

        Users rely on it: a pipeline's send/recv as the first operation of an unconnected communicator hangs unless
        all its ranks enter it (pytorch 74701).
        """
        if self.connected and self.device is not None:
            for backend in backends:
                torch_internals.unwrap(backend).eager_connect_single_device(self.device)

    def put_on(self, backends: list[Backend]) -> None:
        """Put new backends into the table, in the places of the old ones."""
        new = tuple(
            Entry(device, blueprint.type, backend)
            for blueprint, backend in zip(self._blueprints, backends, strict=True)
            for device in blueprint.devices
        )
        torch_internals.write_table(self.group, Table(self._default_type, self._stay + new))


def describe(group: ProcessGroup, reason_kept: str) -> GroupReport:
    """Return the group in words; with no reason it counts as released."""
    return GroupReport(
        name=torch_internals.name_of(group),
        description=group.group_desc,
        ranks=torch_internals.ranks_of(group),
        backend=torch_internals.read_books(group).config,
        released=not reason_kept,
        reason=reason_kept,
    )


def _backends_to_release(group: ProcessGroup, backends: tuple[str, ...] | None) -> dict[str, list[Entry]]:
    names = backend_names(group)
    found: dict[str, list[Entry]] = {}
    for entry in torch_internals.read_table(group).entries:
        found.setdefault(names.get(entry.device, "unknown"), []).append(entry)
    if backends is None:
        # Gloo holds no device memory whatever device it serves; "fake" holds nothing.
        return {
            name: entries
            for name, entries in found.items()
            if name not in ("gloo", "mpi", "fake") and any(entry.device != "cpu" for entry in entries)
        }
    return {name: entries for name, entries in found.items() if name in backends}


def backend_names(group: ProcessGroup) -> dict[str, str]:
    """Return the name of the backend that serves each device type ("cuda": "nccl"), as the group was made."""
    pairs = (pair.partition(":") for pair in torch_internals.read_books(group).config.split(","))
    return {device: name for device, _, name in pairs}


def _is_kept(group: ProcessGroup, keep: Any, used: set[str]) -> bool:
    if callable(keep):
        return bool(keep(group))
    names = {torch_internals.name_of(group), group.group_desc}
    matched = [item for item in keep if item is group or (isinstance(item, str) and item in names)]
    used.update(item for item in matched if isinstance(item, str))
    return bool(matched)


def _key(group: ProcessGroup) -> str:
    text = f"{torch_internals.name_of(group)}:{torch_internals.ranks_of(group)}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _blueprint(group: ProcessGroup, name: str, entries: list[Entry]) -> Blueprint:
    backend = entries[0].backend
    inner = torch_internals.unwrap(backend)
    return Blueprint(
        backend=name,
        devices=tuple(entry.device for entry in entries),
        type=entries[0].type,
        rank=group.rank(),
        size=group.size(),
        ranks=torch_internals.ranks_of(group),
        group_name=torch_internals.name_of(group),
        timeout=torch_internals.timeout_of(backend),
        options=torch_internals.options_of(inner),
        wrapped=inner is not backend,
    )


def _placeholder(group: ProcessGroup, backend: str, like: Backend) -> Backend:
    text = (
        f"{backend!r} of process group {torch_internals.name_of(group)!r} ({group.group_desc}) is released by "
        "gpurelease: use the group after the released_world() scope, or inside restored_world(). It"
    )
    return torch_internals.placeholder(group.rank(), group.size(), text, like)


def _device_of(group: ProcessGroup, blueprints: list[Blueprint]) -> torch.device | None:
    accelerator = torch_internals.accelerator()
    if accelerator is None or not any(accelerator.type in blueprint.devices for blueprint in blueprints):
        return None
    return group.bound_device_id or accelerator
