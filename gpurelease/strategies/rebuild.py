"""The strategy "rebuild": shut the backends down, and later build new ones. It gives back everything."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from gpurelease.groups.releasable import Releasable
from gpurelease.strategies.pool import Job, Token
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

    def restore(self, groups: Sequence[Releasable], prefix: str, means: Means) -> tuple[list[Backends], Problems]:
        """Build and connect new backends for all groups, one after the other; the first failure ends it.

        Each is made in a thread that is left to itself when the time is up: NCCL itself waits for a member that does
        not come without end. What it makes too late it shuts down.
        """
        problems = empty_cache()
        jobs = [Job(partial(self._build, group, prefix, means), undo=partial(_shut_down, group)) for group in groups]
        means.pool.run(jobs, means.patience(), at_once=1)
        ready = []
        for group, job in zip(groups, jobs, strict=True):
            if job.error is None:
                ready.append(Backends(group, job.result))
            else:
                problems.append(problem(f"building {group}", job.error, group))
                break
        return ready, problems

    def give_up(self, ready: Sequence[Backends], means: Means) -> Strategy:
        """Shut down what was built. Building can be tried again."""
        self.release(list(ready), means)
        return self

    def settle(self) -> None:
        """Nothing is left to let go of."""

    def _build(self, group: Releasable, prefix: str, means: Means, token: Token) -> list[Backend]:
        def met_on(meeting: Any) -> None:
            token.on_giving_up(meeting.call_off)

        with devices.on_device(group.device):
            with means.transition.step("build"):
                built = group.build(prefix, means.client, means.limit, met_on)
            try:
                with means.transition.step("connect"):
                    group.connect(built)
                group.pass_on(built)
            except BaseException:
                _shut_down(group, built)
                raise
        return built


def _shut_down(group: Releasable, built: Sequence[Backend]) -> None:
    """End backends that nobody has got to see."""
    for backend in built:
        torch_backends.abort(backend, group.device)
