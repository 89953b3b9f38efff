"""Where one WORLD stands on one rank: what is released, how, and what it takes to bring it back."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed import ProcessGroup

from gpurelease.agreement.rollcall import RollCall
from gpurelease.errors import ReleaseFailed, RestoreFailed, TransitionFailed, ranks_text
from gpurelease.groups.releasable import Releasable
from gpurelease.groups.standin import Absence, StandIn
from gpurelease.options import ScopeOptions, bounded
from gpurelease.report import Memory, Report
from gpurelease.strategies.rebuild import Rebuild
from gpurelease.strategies.strategy import Husks, Strategy
from gpurelease.torch_internals import backends, books, devices, stores, tables


class Phase(enum.Enum):
    """Where a WORLD stands.

    * ``ARMED``: every group has its own backends.
    * ``RELEASED``: the agreed groups have shells on their tables; Gloo stands in for WORLD if it is one of them.
    """

    ARMED = "armed"
    RELEASED = "released"


class Decided(NamedTuple):
    """What the ranks have decided to release.

    Attributes:
        number: Number of the roll call in which they did.
        digest: Of what this rank had said in it: as long as that is the same on all ranks, they decide the same.
        verdict: What they decided.
    """

    number: int
    digest: str
    verdict: dict[str, Any]


class World:
    """One WORLD on one rank.

    Args:
        group: WORLD. It is not kept alive while it is ARMED: a WORLD that is destroyed takes this with it.

    Attributes:
        phase: Where it stands.
        generation: Number of the roll call whose verdict brought it there: the same on all ranks that heard it.
        settled: Whether all ranks stood there at the last roll call: not if that was given up, or not read.
        options: What it was released with the last time.
        report: That of the scope that has released it the last time.
        rank: This process's rank in WORLD.
        roll_call: How the ranks agree.
        decided: What the ranks have decided to release the last time.
        released: The groups that are released, in the order that all ranks have.
        strategy: How memory was given back the last time, with what it needs to take it again.
        absence: What WORLD had before Gloo stood in for it, while it does.
        stand_in: A Gloo that stands in for WORLD, or did so and waits to do so again.
        doubts: Whether a collective may have been left in its middle on that, which breaks its connections.
        husks: What outlives strategies.
        there_at_release: The groups that were there when the world was released.
        made_while_released: Groups that belong to whoever made them inside a scope: they are never released.
        met_on: With their groups, what backends were built on, for their keys to be deleted when they are gone.
        obsolete: The same of backends that are gone.
        has_warned: Whether somebody was told of groups that were made on Gloo inside a scope.
        has_warned_of_nothing: Whether somebody was told that the options of a scope leave nothing to release.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = weakref.ref(group)
        store = books.store_of(group)
        self.phase = Phase.ARMED
        self.generation = 0
        self.settled = True
        self.options = ScopeOptions()
        self.report = Report()
        self.rank = group.rank()
        own = self._group
        self.roll_call = RollCall(lambda: stores.client_of(store), group.rank(), group.size(), lambda: _is_gone(own()))
        self.decided: Decided | None = None
        self.released: list[Releasable] = []
        self.husks = Husks()
        self.strategy: Strategy = Rebuild(self.husks)
        self.absence: Absence | None = None
        self.stand_in: StandIn | None = None
        self.doubts = False
        self.there_at_release: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()
        self.made_while_released: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()
        self.met_on: list[tuple[weakref.ref[ProcessGroup], list[Any]]] = []
        self.obsolete: list[Any] = []
        self.has_warned = False
        self.has_warned_of_nothing = False

    @property
    def group(self) -> ProcessGroup | None:
        """WORLD, or None once nobody has it any more."""
        return self._group()

    @property
    def is_gone(self) -> bool:
        """Whether WORLD was destroyed. Another group may be the default one meanwhile: that says nothing."""
        return _is_gone(self.group)

    @property
    def is_released(self) -> bool:
        """Whether the groups are released."""
        return self.phase is Phase.RELEASED

    def releasable(self) -> Releasable | None:
        """Return WORLD itself, if it is released."""
        return next((each for each in self.released if each.group is self.group), None)

    def outdate(self, taken: Collection[int]) -> None:
        """Note whose keys can be deleted: those of groups that are gone, or whose backends are.

        Args:
            taken: The latter, by ``id()``.
        """
        there = []
        for group, met_on in self.met_on:
            alive = group()
            if alive is None or id(alive) in taken or not books.exists(alive):
                self.obsolete += met_on
            else:
                there.append((group, met_on))
        self.met_on = there

    def timeout(self, options: ScopeOptions) -> float:
        """Return the longest wait for other ranks, in seconds: the user's choice, or WORLD's own time-out."""
        if options.timeout is not None:
            return options.timeout
        group = self.group
        own = None if group is None else tables.group_timeout(group)
        seconds = (own or backends.DEFAULT_TIMEOUT).total_seconds()
        return bounded(seconds if seconds > 0 else backends.DEFAULT_TIMEOUT.total_seconds())

    def prefix(self, purpose: str, number: int) -> str:
        """Return a prefix for keys: the same on all ranks, and never used before.

        Args:
            purpose: What for.
            number: Number of the roll call whose verdict asks for it.
        """
        return f"gpurelease/{self.roll_call.token}/{purpose}/{number}/"

    def failure(
        self,
        wanted: Phase,
        why: str = "",
        *,
        failures: Mapping[int, str] | None = None,
        missing: Sequence[int] = (),
        undoing: str = "",
    ) -> TransitionFailed:
        """Return what this rank raises if it could not be brought to a phase. Its class goes by where it stands now.

        Args:
            wanted: The phase.
            why: The reason in one sentence, or empty if ``failures`` has it.
            failures: What went wrong, by rank.
            missing: The ranks that did not come.
            undoing: What this was a way back from, if it was.
        """
        failures = failures or {}
        what = "release" if wanted is Phase.RELEASED else "restore"
        reason = f": {why}" if why else f", for what happened on {ranks_text(sorted(failures))}"
        end = ":" if failures else "."
        kind = RestoreFailed if self.is_released else ReleaseFailed
        text = f"The ranks could not {what} the world together{reason}{f' ({undoing})' if undoing else ''}{end}"
        return kind(text, failures, missing)

    def forget(self) -> None:
        """Let go of what a destroyed WORLD left behind."""
        self.released = []
        self.strategy = Rebuild(self.husks)
        self.absence = self.stand_in = None
        self.phase = Phase.ARMED


def _is_gone(group: ProcessGroup | None) -> bool:
    return group is None or not books.exists(group)


class MemoryBefore:
    """The memory of the groups' device, as it is before something is done: to look at another would make a context.

    Args:
        groups: The groups.
    """

    def __init__(self, groups: list[Releasable]) -> None:
        self._device: torch.device | None = next((group.device for group in groups if group.device is not None), None)
        self._before = devices.memory(self._device)

    def until_now(self) -> Memory | None:
        """Return what it was and what it is now, or None without a device."""
        now = devices.memory(self._device)
        if now is None or self._before is None:
            return None
        return Memory(now[1], self._before[0], now[0], self._before[2] - now[2])
