"""How a backend is built again: one registry, from the backend's name to the function that builds it.

NCCL, XCCL and Gloo are here. A backend that was registered with ``torch.distributed.Backend.register_backend`` is
built by the creator it was registered with. :func:`register_rebuilder` is for what that creator cannot know: torch
hands it a store, ranks and a time-out, and a backend without an ``options`` property does not tell its time-out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed.distributed_c10d import Store

from gpurelease.errors import InvalidOption
from gpurelease.torch_internals import backends, gloo
from gpurelease.torch_internals.backends import Backend


@dataclass(frozen=True)
class Blueprint:
    """What a released backend was, read off the live one: all that is needed to build it again.

    Attributes:
        backend: Its name, as in ``init_process_group(backend=...)``.
        devices: The device types it serves ("cuda").
        backend_type: torch's number for its type.
        rank: This process's rank in the group.
        size: Number of members.
        ranks: The members' global ranks, in group order.
        group_name: torch's name of the group.
        timeout: The backend's time-out, or None if it does not tell.
        options: A copy of the options that it was made with (``ProcessGroupNCCL.Options``), for the new backend alone;
            ``set_timeout`` had kept them current. None if it has none.
        device: Its accelerator device on this rank, or None.
        kind: Its Python class: "nccl" is one of two, by torch's version and environment.
        wrapped: Whether ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` had put its wrapper around it.
    """

    backend: str
    devices: tuple[str, ...]
    backend_type: int
    rank: int
    size: int
    ranks: tuple[int, ...]
    group_name: str
    timeout: timedelta | None
    options: Any
    device: torch.device | None
    kind: type
    wrapped: bool

    @property
    def is_built_by_torch(self) -> bool:
        """Whether it is built by code of torch's that several threads may be in."""
        return _rebuilders.get(self.backend) in (rebuild_nccl, rebuild_gloo)

    def build(self, store: Store, timeout: timedelta) -> Backend:
        """Build the backend on a store that nothing was built on before. All members must call.

        Args:
            store: Where its members meet.
            timeout: Longest wait for the other members, where building waits for them.
        """
        backend = _rebuilders.get(self.backend, rebuild_plugin)(self, store, timeout)
        if self.wrapped:
            backend = backends.wrap(backend, store, self.group_name, self.timeout)
        return backend


Rebuilder = Callable[[Blueprint, Store, timedelta], Backend]


def register_rebuilder(backend: str, rebuild: Rebuilder) -> None:
    """Say how backends called ``backend`` are built again after they were released.

    Args:
        backend: The name, as in ``Backend.register_backend``.
        rebuild: Called on every member, from a thread of gpurelease, with the blueprint, an empty store, and the
            longest time it may wait for the other members. Returns a new backend, that need not be connected yet.

    Raises:
        InvalidOption: ``rebuild`` cannot be called.

    Example:
        >>> register_rebuilder("mine", lambda blueprint, store, timeout: MyBackend(store, blueprint.ranks))
    """
    if not callable(rebuild):
        raise InvalidOption(f"register_rebuilder({backend!r}, ...) takes a function, and got {rebuild!r}")
    _rebuilders[backend.lower()] = rebuild


def why_not_rebuilt(name: str) -> str:
    """Return why backends called ``name`` cannot be built again, or the empty string if they can."""
    if name in _rebuilders or backends.has_plugin(name):
        return ""
    return f"backend {name!r} cannot be built again: see register_rebuilder()"


def rebuild_nccl(blueprint: Blueprint, store: Store, timeout: timedelta) -> Backend:
    """Build NCCL of the same kind, from the options that the old backend had."""
    return backends.new_nccl(blueprint.kind, store, blueprint.rank, blueprint.size, blueprint.options, blueprint.device)


def rebuild_xccl(blueprint: Blueprint, store: Store, timeout: timedelta) -> Backend:
    """Build XCCL from the options that the old backend had."""
    return backends.new_xccl(store, blueprint.rank, blueprint.size, blueprint.options)


def rebuild_gloo(blueprint: Blueprint, store: Store, timeout: timedelta) -> Backend:
    """Build Gloo from the options that the old backend had. It waits for others as long as the store does."""
    return gloo.new_gloo(store, blueprint.rank, blueprint.size, blueprint.options)


def rebuild_plugin(blueprint: Blueprint, store: Store, timeout: timedelta) -> Backend:
    """Build a backend through the creator that it was registered with."""
    return backends.new_from_plugin(
        blueprint.backend,
        store,
        blueprint.rank,
        blueprint.size,
        blueprint.ranks,
        blueprint.group_name,
        blueprint.timeout,
        blueprint.options,
    )


_rebuilders: dict[str, Rebuilder] = {
    "nccl": rebuild_nccl,
    "nccl2": rebuild_nccl,
    "nccl-lazy": rebuild_nccl,
    "nccl-legacy": rebuild_nccl,
    "xccl": rebuild_xccl,
    "gloo": rebuild_gloo,
}
