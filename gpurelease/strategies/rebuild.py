"""The strategy "rebuild": shut the backends down, and later build new ones. It gives back everything."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from gpurelease.groups.releasable import Releasable
from gpurelease.strategies.pool import THREADS, Job, Token
from gpurelease.strategies.strategy import Backends, Means, Problems, Strategy, empty_cache, on_all, problem
from gpurelease.torch_internals import backends as torch_backends
from gpurelease.torch_internals import devices
from gpurelease.torch_internals.backends import Backend


class Rebuild(Strategy):
    """Shut all backends down, drop them, and build new ones from their options."""

    name = "rebuild"
    step = "tear down"

    def release(self, taken: list[Backends], means: Means) -> Problems:
        """Shut all backends down, at the same time, and drop them."""
        problems = on_all(torch_backends.shut_down, "shutting down", taken, means)
        self._husks.keep(taken)
        taken.clear()
        return problems + empty_cache()

    def restore(
        self, groups: Sequence[Releasable], prefix: str, means: Means, *, in_turn: bool
    ) -> tuple[list[Backends], Problems]:
        """Build and connect new backends for all groups, side by side where that is safe; the first failure ends it.

        A communicator is a rendezvous. All ranks begin theirs in one order, so the first group that is not done has
        all its members on it, and no number of threads can deadlock; but only while no kernel is in flight that waits
        for another rank's, and that somebody may wait for who waits for the device.

        Each is made in a thread that is left to itself when the time is up: NCCL itself waits for a member that does
        not come without end. What it makes too late it shuts down.
        """
        problems = empty_cache()
        jobs = [
            Job(partial(self._build, group, prefix, means, in_turn), undo=partial(_shut_down, group))
            for group in groups
        ]
        with means.transition.step("build"):
            means.pool.run(jobs, means.patience(), at_once=1 if in_turn else THREADS, stop_at_failure=True)
        ready = []
        for group, job in zip(groups, jobs, strict=True):
            if job.error is None:
                ready.append(Backends(group, job.result))
            else:
                problems.append(problem(f"building {group}", job.error, group))
        return ready, problems

    def give_up(self, ready: Sequence[Backends], means: Means) -> Strategy:
        """Shut down what was built. Building can be tried again."""
        self.release(list(ready), means)
        return self

    def settle(self) -> None:
        """Nothing is left to let go of."""

    def _build(self, group: Releasable, prefix: str, means: Means, in_turn: bool, token: Token) -> list[Backend]:
        meetings: list[Any] = []

        def met_on(meeting: Any) -> None:
            meetings.append(meeting)
            token.on_giving_up(meeting.call_off)

        with devices.on_device(group.device):
            built = group.build(prefix, means.client, means.limit, met_on)
            try:
                group.connect(built, by_kernel=in_turn)
                group.pass_on(built)
                for meeting in meetings:
                    meeting.settle()
            except BaseException:
                _shut_down(group, built)
                raise
        return built


def _shut_down(group: Releasable, built: Sequence[Backend]) -> None:
    """End backends that nobody has got to see."""
    for backend in built:
        torch_backends.abort(backend, group.device)
