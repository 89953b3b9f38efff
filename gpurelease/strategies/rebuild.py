"""The strategy "rebuild": shut the backends down, and later build new ones. It gives back everything."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from gpurelease.groups.releasable import Releasable
from gpurelease.strategies.pool import Job, Token
from gpurelease.strategies.strategy import Backends, Means, Problems, Strategy, empty_cache, on_all, problem
from gpurelease.torch_internals import backends as torch_backends
from gpurelease.torch_internals import devices, stores
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
        jobs = []
        for group in groups:
            group.met_on = []
            attempt = _Attempt(group, prefix, means, in_turn=in_turn)
            jobs.append(Job(attempt.build, undo=attempt.undo))
        with means.transition.step("build"):
            means.pool.run(jobs, means.patience(), in_turn=in_turn, stop_at_failure=True)
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


class _Attempt:
    """Building one group's backends, in a thread that may be left to itself.

    Args:
        group: The group.
        prefix: What the keys begin with over which its members meet.
        means: What to work with.
        in_turn: Whether no other group is built meanwhile.
    """

    def __init__(self, group: Releasable, prefix: str, means: Means, *, in_turn: bool) -> None:
        self._group = group
        self._prefix = prefix
        self._means = means
        self._in_turn = in_turn
        self._met_on = group.met_on  # the group's next attempt has another list

    def build(self, token: Token) -> list[Backend]:
        """Build, connect, and return them."""
        group, means = self._group, self._means

        def met_on(meeting: Any) -> None:
            self._met_on.append(meeting)
            token.on_giving_up(meeting.call_off)

        built: list[Backend] = []
        with devices.on_device(group.device):
            try:
                built = group.build(self._prefix, means.client, means.limit, met_on)
                group.connect(built, by_kernel=self._in_turn)
                group.pass_on(built)
            except BaseException:
                self._end(built)
                if token.given_up:
                    self._delete_keys()
                raise
        for meeting in self._met_on:
            meeting.settle()
        return built

    def undo(self, built: list[Backend]) -> None:
        """End what nobody has got to see."""
        self._end(built)
        self._delete_keys()

    def _end(self, built: Sequence[Backend]) -> None:
        for backend in built:
            torch_backends.abort(backend, self._group.device)

    def _delete_keys(self) -> None:
        """Delete what was written too late for anybody else to do so."""
        for meeting in self._met_on:
            with contextlib.suppress(RuntimeError):  # the store may be gone
                stores.delete_keys(meeting, self._means.client)
