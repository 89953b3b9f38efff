"""The strategy "rebuild": shut the backends down, and later build new ones. It gives back everything."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from functools import partial

from gpurelease import torch_internals
from gpurelease.groups import ReleasableGroup
from gpurelease.parallel import run_all
from gpurelease.report import Transition
from gpurelease.strategy import Backends, Problems, Strategy, empty_cache, memory_left, on_all


class Rebuild(Strategy):
    """Shut all backends down, drop them, and build new ones from their options."""

    name = "rebuild"
    step = "tear down"

    def release(self, taken: list[Backends], limit: timedelta) -> Problems:
        """Shut all backends down, at the same time, and drop them."""
        failed = on_all(torch_internals.shut_down, taken, limit)
        self._shells.keep(taken)
        taken.clear()
        return [f"shutting down {group}: {error}" for group, error in failed] + empty_cache()

    def restore(
        self, groups: Sequence[ReleasableGroup], prefix: str, limit: timedelta, transition: Transition
    ) -> tuple[list[Backends], Problems]:
        """Build and connect new backends for all groups; the first failure ends it.

        Each is made in a thread that is left to itself after ``limit``: NCCL itself waits for a member that does not
        come without end.
        """
        built: list[Backends] = []
        problems, done, interrupted = empty_cache(), 0, threading.Event()
        try:
            for group in groups:
                job = partial(self._build, group, prefix, limit, transition, built, interrupted)
                [error] = run_all([job], 1, limit.total_seconds())
                if error is not None:
                    problems.append(f"building {group}: {error}{memory_left(group)}")
                    break
                done += 1
        except BaseException:  # Ctrl-C: nobody else knows of what was built
            interrupted.set()
            self.release(built[:done], limit)
            raise
        return list(built), problems

    def give_up(self, built: list[Backends], limit: timedelta) -> Strategy:
        """Shut down what was built. Building can be tried again."""
        self.release(built, limit)
        return self

    def settle(self) -> None:
        """Nothing is left to let go of."""

    def _build(
        self,
        group: ReleasableGroup,
        prefix: str,
        limit: timedelta,
        transition: Transition,
        built: list[Backends],
        interrupted: threading.Event,
    ) -> None:
        with torch_internals.on_device(group.device):
            with transition.step("build"):
                built.append(Backends(group, group.build(prefix, 0.9 * limit)))
            last = built[-1]
            with transition.step("connect"):
                group.connect(last.backends, 0.9 * limit)
            group.inherit(last.backends)
        if interrupted.is_set():
            self.release([last], limit)
