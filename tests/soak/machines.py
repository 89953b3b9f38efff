"""What the soak runs on: Gloo that poses as the accelerator's backend, or the real ProcessGroupNCCL on its double."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

from gpurelease.groups.releasable import Releasable
from tests import cycles

WORLD_TIMEOUT = timedelta(seconds=60)


class Posing:
    """Real ranks over Gloo, and ``backends=("gloo",)``."""

    options: ClassVar[Mapping[str, Any]] = {"backends": ("gloo",)}
    backend = "gloo"
    device = "cpu"

    def start(self, rank: int, size: int, store: Any) -> None:
        """Initialise WORLD."""
        dist.init_process_group(self.backend, store=store, rank=rank, world_size=size, timeout=WORLD_TIMEOUT)

    def on_this_thread(self, rank: int) -> None:
        """Do what a thread must do before it runs collectives."""

    def backend_of(self, group: Any) -> Any:
        return cycles.backend_of(group, self.device)

    def total(self, group: Any) -> float:
        """All-reduce this rank's number over ``group``."""
        return cycles.total(group, device=self.device)

    def communicators(self) -> dict[str, int]:
        """Return how many communicators this process has, and the bytes they hold, where they are counted."""
        return {}

    @contextmanager
    def next_build(self, seconds: float = 0.0) -> Iterator[None]:
        """Have the next backend that is built on this rank come late, or fail if there is no time given."""
        build, is_first = Releasable.build, [True]

        def builds(*args: Any) -> Any:
            if is_first and is_first.pop():
                time.sleep(seconds)
                if not seconds:
                    raise OSError("injected")
            return build(*args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Releasable, "build", builds)
            yield


class Double(Posing):
    """Each rank is on the device of its own number."""

    options: ClassVar[Mapping[str, Any]] = {}
    device = "cuda"

    def __init__(self) -> None:
        from tests.nccl import double

        self._double = double
        self.backend = double.FIRST
        os.environ["SIMGPU_TIMEOUT"] = "4"  # less than a slow build: who waits for one in vain is done before it

    def start(self, rank: int, size: int, store: Any) -> None:
        self.on_this_thread(rank)
        super().start(rank, size, store)

    def on_this_thread(self, rank: int) -> None:
        torch.cuda.set_device(rank)

    def communicators(self) -> dict[str, int]:
        return {"communicators": self._double.live(), "their bytes": self._double.held()}

    @contextmanager
    def next_build(self, seconds: float = 0.0) -> Iterator[None]:
        if seconds:
            self._double.delay("init", seconds)
        else:
            self._double.fault("init")
        yield


def machine(backend: str) -> Posing:
    """Return the machine for ``--backend``."""
    return Double() if backend == "nccl" else Posing()


@contextmanager
def runner(backend: str) -> Iterator[Callable[..., list[Any]]]:
    """Give what runs ranks on the machine for ``--backend``."""
    import tempfile
    from pathlib import Path

    from tests.ranks import run_ranks

    if backend == "gloo":
        yield run_ranks
        return
    from tests.nccl.build import build, double_ranks, preloaded

    with tempfile.TemporaryDirectory(prefix="simgpu-") as folder:
        out = Path(folder)
        build(out)
        with preloaded(out), double_ranks("soak", out) as run:
            yield run
