"""Which groups one rank would release, and which it leaves alone."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from torch.distributed.distributed_c10d import ProcessGroup

from gpurelease.errors import nearest, ranks_text
from gpurelease.groups.blueprint import why_not_rebuilt
from gpurelease.groups.releasable import Releasable, key_of
from gpurelease.options import ScopeOptions
from gpurelease.report import GroupReport
from gpurelease.torch_internals import backends, books, nccl, stores, tables
from gpurelease.torch_internals.tables import Row

logger = logging.getLogger(__name__)

# Groups that were warned of.
_warned: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()


@dataclass
class Plan:
    """What one rank would release, before the ranks have agreed on it.

    Attributes:
        candidates: Groups that this rank would release, in the order that all ranks have.
        kept: Groups that this rank leaves alone, each with the reason.
        unmatched: Names in ``keep=`` that are no group's name or description on this rank.
        names: If there are any, names and descriptions of groups on this rank, those first that look most like them.
    """

    candidates: list[Releasable] = field(default_factory=list)
    kept: list[GroupReport] = field(default_factory=list)
    unmatched: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    def agreed(
        self, kept: Mapping[str, Sequence[int]], *, suspended: bool
    ) -> tuple[list[Releasable], list[GroupReport]]:
        """Return the groups to release, in the order that all ranks have, and what becomes of each group.

        Args:
            kept: Of the candidates that are kept, by key, the global ranks that would have released them.
            suspended: Whether the others are suspended.
        """
        reports = list(self.kept)
        for candidate in self.candidates:
            reason = ""
            if candidate.key in kept:
                others = set(books.ranks_of(candidate.group)) - set(kept[candidate.key])
                reason = f"not released on {ranks_text(sorted(others))}"
            memory = candidate.memory if suspended else None
            reports.append(_describe(candidate.group, reason, candidate.connected, memory))
        return [candidate for candidate in self.candidates if candidate.key not in kept], reports


def plan(world: ProcessGroup, options: ScopeOptions, made_while_released: Collection[ProcessGroup]) -> Plan:
    """Sort this rank's groups into those it would release and those it leaves alone. Changes nothing.

    For the thread that enters the scope: a user's predicate may be asked.

    Args:
        world: WORLD.
        options: What the user asked for.
        made_while_released: Groups that belong to whoever made them inside a scope: they are never released.
    """
    plan = Plan()
    named: set[str] = set()
    for group in books.groups():
        rows = _rows_to_release(group, options)
        reason = _why_kept(world, group, rows, options, named)
        if not reason and group in made_while_released:
            reason = "made while the world was released"
        if reason:
            plan.kept.append(_describe(group, reason))
        else:
            may_suspend = options.strategy != "rebuild"
            plan.candidates.append(Releasable(group, rows, may_suspend=may_suspend, spelled=options.spelled))
    plan.candidates.sort(key=lambda candidate: candidate.order)
    unlisted = (group for group in books.unlisted_groups(world) if _rows_to_release(group, options))
    plan.kept += map(_describe_unlisted, unlisted)
    if not callable(options.keep):
        plan.unmatched = [name for name in options.keep if isinstance(name, str) and name not in named]
        plan.names = nearest(plan.unmatched, named - {"undefined"})  # what torch calls a group without a description
    return plan


def taken_by_others(keys: Collection[str], options: ScopeOptions) -> list[Releasable]:
    """Return this rank's groups with the given keys, whatever it would do with them: they are gone on other ranks.

    Args:
        keys: The keys.
        options: With what they were released there.
    """
    ours = ((group, _rows_to_release(group, options)) for group in books.groups())
    found = [
        Releasable(group, rows, may_suspend=False, spelled=options.spelled)
        for group, rows in ours
        if rows and key_of(group) in keys
    ]
    return sorted(found, key=lambda releasable: releasable.order)


def why_not_now(plan: Plan) -> str:
    """Return why no communicator may go at this moment, or the empty string. For the thread that enters a scope."""
    for candidate in plan.candidates:
        for row in tables.read_table(candidate.group):
            settings = nccl.settings_of(backends.unwrap(row.backend))
            if settings is not None and settings.coalescing:
                return f"a coalescing block is open on {candidate}, with collectives queued in it: end it first"
    return books.why_not_now()


def _why_kept(
    world: ProcessGroup,
    group: ProcessGroup,
    rows: Mapping[str, Sequence[Row]],
    options: ScopeOptions,
    named: set[str],
) -> str:
    """Return why this rank leaves ``group`` alone, or the empty string; and note which names in ``keep=`` it has."""
    named |= {books.name_of(group), group.group_desc}
    if not tables.has_table(group):
        return f"it is a {type(group).__name__}, which has no table of backends"
    if not rows:
        return "no accelerator backend" if options.backends is None else f"no backend of {', '.join(options.backends)}"
    if keeps(options, group):
        return "keep="
    if reason := _why_foreign(world, group):
        return reason
    for name in rows:
        if reason := why_not_rebuilt(name):
            logger.warning("%s holds its communicators: %s", books.text_of(group), reason)
            return reason
    return ""


def keeps(options: ScopeOptions, group: ProcessGroup) -> bool:
    """Return whether ``keep=`` has ``group``: by handle, by name, by description, or by a predicate."""
    if callable(options.keep):
        return bool(options.keep(group))
    names = {books.name_of(group), group.group_desc}
    return any(item is group or (isinstance(item, str) and item in names) for item in options.keep)


def _why_foreign(world: ProcessGroup, group: ProcessGroup) -> str:
    """Return why ``group`` is none of this job's, or the empty string.

    Frameworks register groups by hand, such as one that a trainer shares with its own engine, all under one name and
    with the same ranks: to go by those is to take many such groups for one of ours.
    """
    if not stores.are_one(books.store_of(group), books.store_of(world)):
        return "its members met on another store than WORLD's"
    me, ranks = books.ranks_of(world)[world.rank()], books.ranks_of(group)
    if group.rank() >= len(ranks) or ranks[group.rank()] != me:
        return f"this is rank {me}, and not the one that the group's list of ranks says"
    return ""


def _rows_to_release(group: ProcessGroup, options: ScopeOptions) -> dict[str, list[Row]]:
    """Return, by name of the backend, the rows of ``group``'s table that ``backends=`` means."""
    if not tables.has_table(group):
        return {}
    names = books.backend_names(group) if books.exists(group) else {}
    found: dict[str, list[Row]] = {}
    for row in tables.read_table(group):
        found.setdefault(names.get(row.device) or backends.name_of(row.backend), []).append(row)
    if options.backends is not None:
        return {name: rows for name, rows in found.items() if name in options.backends}
    # Gloo and MPI hold no device memory, whatever device they serve.
    return {
        name: rows
        for name, rows in found.items()
        if name not in ("gloo", "mpi", "fake") and any(row.device != "cpu" for row in rows)
    }


def _describe(
    group: ProcessGroup, reason_kept: str, connected: bool | None = None, memory: tuple[int, int] | None = None
) -> GroupReport:
    return GroupReport(
        name=books.name_of(group),
        description=group.group_desc,
        ranks=books.ranks_of(group),
        backend=books.read_books(group).config,
        released=not reason_kept,
        reason=reason_kept,
        connected=connected,
        suspended_bytes=None if memory is None or reason_kept else memory[0],
        stayed_bytes=None if memory is None or reason_kept else memory[1],
    )


def _describe_unlisted(group: ProcessGroup) -> GroupReport:
    reason = "torch.distributed does not list it, as it was made by ProcessGroup.split_group() or the like"
    if group not in _warned:
        _warned.add(group)
        logger.warning("process group %r holds its communicators: %s", group.group_name, reason)
    rows = tables.read_table(group)
    return GroupReport(
        name=group.group_name,
        description=group.group_desc,
        ranks=tuple(getattr(backends.options_of(rows[0].backend), "global_ranks_in_group", ())),
        backend=",".join(f"{row.device}:{backends.name_of(row.backend)}" for row in rows),
        released=False,
        reason=reason,
    )
