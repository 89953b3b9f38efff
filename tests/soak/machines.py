"""What the soak runs on: Gloo that poses as the accelerator's backend."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from tests import cycles
from tests.ranks import init_gloo
from tests.soak.events import Trouble
from tests.soak.model import Model
from tests.soak.outcomes import Group


class Posing:
    """Real ranks over Gloo, and ``backends=("gloo",)``."""

    options: ClassVar[Mapping[str, Any]] = {"backends": ("gloo",)}
    backend = "gloo"

    def start(self, rank: int, size: int, timeout: timedelta) -> Any:
        """Initialise WORLD and return its store."""
        return init_gloo(rank, size, timeout=timeout)

    def on_this_thread(self, rank: int) -> None:
        """Do what a thread must do before it runs collectives."""

    def hurry(self, trouble: Trouble | None) -> None:
        """Get ready for what goes wrong in the next transition, or for nothing to go wrong."""

    def tensor(self, value: float) -> Any:
        return torch.tensor([value])

    def backend_of(self, group: Any) -> Any:
        return cycles.backend_of(group)

    def communicators(self) -> tuple[int, int] | None:
        """Return how many communicators this process has, and the bytes they hold, or None where none are counted."""
        return None

    def expected_communicators(self, groups: Iterable[Group], model: Model) -> tuple[int, int] | None:
        """Return what :meth:`communicators` should return, for the groups of this process."""
        return None

    def total(self, group: Any, value: float) -> float:
        """All-reduce ``value`` over ``group``."""
        tensor = self.tensor(value)
        dist.all_reduce(tensor, group=group)
        return tensor.cpu().item()


def machine(backend: str) -> Posing:
    """Return the machine for ``--backend``."""
    if backend == "gloo":
        return Posing()
    from tests.soak.machine_nccl import Double

    return Double()


def forget_world() -> None:
    """Let WORLD go without shutting it down: a rank has died, and the others would wait for it."""
    dist.distributed_c10d._world.pg_map.clear()
    dist.distributed_c10d._update_default_pg(None)
