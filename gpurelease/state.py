"""Where one WORLD stands on one rank: what is released, how, and what it takes to bring it back."""

from __future__ import annotations

import enum
import weakref
from datetime import timedelta

import torch
from torch.distributed import ProcessGroup

from gpurelease import torch_internals
from gpurelease.groups import ReleasableGroup
from gpurelease.rebuild import Rebuild
from gpurelease.rollcall import RollCall
from gpurelease.settings import ScopeOptions
from gpurelease.standin import StandIn
from gpurelease.strategy import Shells, Strategy


class Phase(enum.Enum):
    """Where a WORLD stands.

    * ``ARMED``: every group has its own backends.
    * ``RELEASING``: backends go off the tables. A later call finds this only if an interrupt broke it off.
    * ``RELEASED``: the agreed groups have placeholders; Gloo stands in for WORLD if it is one of them.
    * ``RESTORING``: backends that work on all ranks go on the tables. The same.
    """

    ARMED = "armed"
    RELEASING = "releasing"
    RELEASED = "released"
    RESTORING = "restoring"


class State:
    """What both ways, ``release`` and ``restore``, read and write.

    Args:
        group: WORLD. It is not kept alive while it is ARMED: a WORLD that is destroyed takes its state with it.

    Attributes:
        phase: Where it stands.
        options: What it was released with the last time.
        rank: This process's rank.
        store: WORLD's store.
        roll_call: How the ranks agree.
        stand_in: Gloo in WORLD's place.
        shells: What outlives strategies.
        strategy: How memory was given back the last time, with what it needs to take it again.
        released: The groups that are released, in the order that all ranks have.
        there_at_release: The groups that were there when the world was released.
        made_while_released: Groups that belong to whoever made them inside a scope: they are never released.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._world = weakref.ref(group)
        self.phase = Phase.ARMED
        self.options = ScopeOptions()
        self.rank = group.rank()
        self.store = torch_internals.store_of(group)
        self.roll_call = RollCall(self.store, group.rank(), group.size())
        self.stand_in = StandIn()
        self.shells = Shells()
        self.strategy: Strategy = Rebuild(self.shells)
        self.released: list[ReleasableGroup] = []
        self.there_at_release: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()
        self.made_while_released: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()

    @property
    def world(self) -> ProcessGroup | None:
        """WORLD, or None once nobody has it any more."""
        return self._world()

    @property
    def timeout(self) -> float:
        """Longest wait for other ranks at a roll call, in seconds: the user's choice, or WORLD's own time-out."""
        return self.options.timeout or self.world_timeout.total_seconds()

    @property
    def world_timeout(self) -> timedelta:
        """WORLD's own time-out."""
        own = None if self.world is None else torch_internals.world_timeout(self.world)
        return own or torch_internals.DEFAULT_TIMEOUT

    @property
    def limit(self) -> timedelta:
        """Longest wait for other ranks between two roll calls: so long that, if it is in vain because another rank has
        failed, this rank still comes to the roll call at which that one waits."""
        return timedelta(seconds=self.timeout / 2)

    def prefix(self, purpose: str) -> str:
        """Return a prefix for keys: the same on all ranks, and never used before."""
        return f"gpurelease/{self.roll_call.token}/{purpose}/{self.roll_call.number}/"

    def delete_keys(self, purpose: str, but: str | None = None) -> None:
        """Delete all keys that were written for a purpose, but for those with one prefix. For one rank to call."""
        torch_internals.delete_keys(self.store, f"gpurelease/{self.roll_call.token}/{purpose}/", but)


class FreeMemory:
    """What becomes free on the groups' device: to look at another would make a context there.

    Args:
        groups: The groups.
    """

    def __init__(self, groups: list[ReleasableGroup]) -> None:
        self._device: torch.device | None = next((group.device for group in groups if group.device is not None), None)
        self._before = torch_internals.free_bytes(self._device)

    def gained(self) -> int | None:
        """Return the bytes that have become free since, or None without a device."""
        free = torch_internals.free_bytes(self._device)
        return None if free is None or self._before is None else free - self._before
