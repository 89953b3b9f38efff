"""What tests on ranks share: a cycle of a released scope with Gloo posing as the accelerator's backend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from gpurelease import released_world

POSING = {"backends": ("gloo",), "timeout": 20}


def backend_of(group: Any, device: str = "cpu") -> Any:
    """Return the backend that serves a device type's tensors of ``group`` now."""
    return group._get_backend(torch.device(device))


def total(group: Any = None, value: float | None = None, device: str = "cpu") -> float:
    """All-reduce this rank's number, or ``value``, over ``group``, and return the sum."""
    tensor = torch.tensor([float(dist.get_rank() if value is None else value)]).to(device)
    dist.all_reduce(tensor, group=group)
    return tensor.cpu().item()


@contextmanager
def cycle(*groups: Any) -> Iterator[None]:
    """Release and restore the world, and check that each of ``groups`` was released and has a new backend after it.

    A stale Gloo group silently goes on working, so identity is what tells.
    """
    world = dist.group.WORLD
    before = [backend_of(group) for group in groups]
    with released_world(**POSING) as scope:
        assert scope.report.reason == "", scope.report
        assert dist.group.WORLD is world
        for group, old in zip(groups, before, strict=True):
            assert backend_of(group) is not old, "a group was not released"
            if group is not world:
                assert refusal(group), "a released group went on working"
        yield
    assert dist.group.WORLD is world
    after = [backend_of(group) for group in groups]
    assert all(new is not old for new, old in zip(after, before, strict=True)), "a group kept its old backend"
    assert all(backend.name() == "gloo" for backend in after), [backend.name() for backend in after]


def refusal(group: Any) -> str:
    """Return the error with which ``group`` refuses a collective, or the empty string if it does not."""
    try:
        dist.all_reduce(torch.ones(1), group=group)
    except RuntimeError as error:
        return str(error)
    return ""
