"""Fixtures of the unit tests: this process's scopes, over a WORLD that only writes down what is asked of it."""

from __future__ import annotations

import pytest
from torch.distributed import ProcessGroup

from gpurelease.errors import ReleaseFailed, RestoreFailed
from gpurelease.scopes import Scopes
from gpurelease.settings import ScopeOptions
from gpurelease.state import Phase


class FakeWorld:
    """Stands for :class:`gpurelease.world.World`; ``events`` is what it was asked, in order."""

    def __init__(self, group):
        self.group = group
        self.phase = Phase.ARMED
        self.options = ScopeOptions()
        self.is_gone = False
        self.nothing_to_release = False
        self.fail_next = None
        self.events = []
        self.released_with = []

    def release(self, options, report, *, contexts=False, again=False):
        self.options = options
        self.released_with.append(options)
        if self.fail_next:
            self.events.append("release fails")
            self.fail_next = None
            raise ReleaseFailed("no")
        if self.nothing_to_release:
            report.reason = "no rank has a process group to release"
            return
        self.events.append("release")
        self.phase = Phase.RELEASED

    def enter_contexts(self, error, report):
        if error is not None:
            raise error

    def restore(self, report, *, body_failed=False, context_error=None):
        if self.fail_next:
            self.events.append("restore fails")
            self.fail_next = None
            raise RestoreFailed("no")
        self.events.append("restore after an error" if body_failed else "restore")
        self.phase = Phase.ARMED

    def doubt_stand_in(self):
        pass

    def leave(self, interrupt):
        self.events.append(f"leave with {type(interrupt).__name__}")

    def forget(self):
        self.events.append("forget")


@pytest.fixture
def world(mocker):
    """A WORLD that exists, and whose state is a :class:`FakeWorld`."""
    group = ProcessGroup(0, 1)
    mocker.patch("gpurelease.scopes.torch_internals.world", return_value=group)
    mocker.patch("gpurelease.scopes.dist.get_backend", return_value="nccl")
    fake = FakeWorld(group)
    mocker.patch("gpurelease.scopes.World", return_value=fake)
    scopes = Scopes()
    mocker.patch("gpurelease.api.shared", return_value=scopes)
    return fake


@pytest.fixture
def no_world(mocker):
    """A process without a process group."""
    mocker.patch("gpurelease.scopes.torch_internals.world", return_value=None)
    mocker.patch("gpurelease.api.shared", return_value=Scopes())
