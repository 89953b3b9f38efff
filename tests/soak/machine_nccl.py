"""What the soak runs on with ``--backend nccl``: the real ProcessGroupNCCL, on the double of CUDA and NCCL."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from tests.nccl import double
from tests.soak.events import WORLD, Trouble
from tests.soak.machines import Posing
from tests.soak.model import Model
from tests.soak.outcomes import Group

PERSISTENT, SUSPENDABLE = 64 << 20, 256 << 20  # SIMGPU_COMM_PERSIST_MB, and SIMGPU_COMM_DYN_MB from two ranks on
PATIENT, HURRIED = "30", "2"  # seconds that the double waits for a rank: less than scopes do where one fails


class Double(Posing):
    """Each rank is on the device of its own number."""

    options: ClassVar[Mapping[str, Any]] = {}
    backend = "nccl"

    def start(self, rank: int, size: int, timeout: timedelta) -> Any:
        return double.init_nccl(rank, size, timeout=timeout)

    def on_this_thread(self, rank: int) -> None:
        torch.cuda.set_device(rank)

    def hurry(self, trouble: Trouble | None) -> None:
        in_vain = trouble is not None and trouble.what != "slow"
        os.environ["SIMGPU_TIMEOUT"] = HURRIED if in_vain else PATIENT

    def tensor(self, value: float) -> Any:
        return torch.tensor([value]).cuda()

    def backend_of(self, group: Any) -> Any:
        return double.backend_of(group)

    def communicators(self) -> tuple[int, int] | None:
        return double.live(), double.held()

    def expected_communicators(self, groups: Iterable[Group], model: Model) -> tuple[int, int] | None:
        held = []
        for group in groups:
            if not group.connected or not (group.backend == "nccl" or group.name == WORLD):
                continue
            if group.name in model.released:
                held += [PERSISTENT] * model.suspended
            elif not model.refuses(group):
                held.append(PERSISTENT + SUSPENDABLE * (len(group.members) > 1))
        # What was suspended when its group was destroyed is ended with the scope.
        held += [PERSISTENT for group, on in model.gone if group.connected and dist.get_rank() in on]
        return len(held), sum(held)
