"""What is special about torch's three kinds of ProcessGroupNCCL.

The first is ProcessGroupNCCL. With 2.14 came a second, ProcessGroupNCCL2 ("nccl2"), and a lazy variant of that,
ProcessGroupNCCLLazy ("nccl-lazy"); from 2.15 "nccl" means the second unless ``TORCH_DIST_USE_NCCL2=0``.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.distributed import distributed_c10d

from gpurelease.torch_internals.devices import has_context, on_device

_KINDS = tuple(
    getattr(distributed_c10d, name)
    for name in ("ProcessGroupNCCL", "ProcessGroupNCCL2", "ProcessGroupNCCLLazy")
    if hasattr(distributed_c10d, name)
)


def is_nccl(backend: Any) -> bool:
    """Return whether ``backend``, without DETAIL's wrapper, is of one of the three kinds."""
    return isinstance(backend, _KINDS)


def is_first_nccl(backend: Any) -> bool:
    """Return whether ``backend``, without DETAIL's wrapper, is a ProcessGroupNCCL."""
    return isinstance(backend, getattr(distributed_c10d, "ProcessGroupNCCL", ()))


def is_second_nccl(backend: Any) -> bool:
    """Return whether ``backend``, without DETAIL's wrapper, is a ProcessGroupNCCL2 or the lazy variant.

    torch shuts down only one of them at a time: two ranks that begin with different ones can wait for each other
    without end. And its Work objects point to it without keeping it alive: one that is asked, or only dropped, when
    its backend is gone, corrupts memory (2.14 to 2.15).
    """
    return is_nccl(backend) and not is_first_nccl(backend)


def is_connected_nccl(backend: Any) -> bool:
    """Return whether ``backend`` holds a communicator of all its members.

    Communicators of two ranks, which are made for send and recv, do not count: torch makes them again when the two
    ranks talk.
    """
    if is_first_nccl(backend):
        return communicator_device(backend) is not None
    if hasattr(backend, "_comm_ptr"):  # the second and lazy kinds, from 2.15
        return bool(backend._comm_ptr())
    try:  # the same, 2.14
        backend.memory_stats()
    except RuntimeError as error:
        return "not initialized" not in str(error)
    return True


def communicator_device(backend: Any) -> torch.device | None:
    """Return the device that a ProcessGroupNCCL's communicator is on, as far as it can be asked.

    It looks its communicator up by the current device. So each device is made current that has a context: where it
    has none there is no communicator, and it must not get one by being asked.
    """
    if is_first_nccl(backend):
        for device in (torch.device("cuda", index) for index in range(torch.cuda.device_count())):
            if has_context(device):
                with on_device(device):
                    if backend._comm_ptr():  # 2.11 to 2.15
                        return device
    return None


def connect(backend: Any, device: torch.device, *, eager: bool) -> None:
    """Make ``backend``'s communicator now. All members of the group must call.

    Args:
        backend: The backend, without DETAIL's wrapper.
        device: The device to make it on.
        eager: Whether torch did so when the group was made. If not, a collective makes it, as torch would have done:
            a ProcessGroupNCCL that was connected in the other way sends and receives over this communicator, in the
            order of its collectives, where it had one for each two ranks before (2.11 to 2.15), and ranks that each
            send first and receive then would wait for each other.
    """
    with on_device(device):
        if eager or not is_first_nccl(backend):
            backend.eager_connect_single_device(device)
        else:
            backend.allreduce([torch.empty(1, dtype=torch.uint8, device=device)]).wait()


def abort(backend: Any) -> None:
    """Abort a backend, of any kind, without DETAIL's wrapper, whose collectives are done.

    If a ProcessGroupNCCL's watchdog, which looks every 100 ms, has not seen a collective done before it finds its
    communicator aborted, it ends the process, a minute later (2.11 to 2.15).
    """
    if is_first_nccl(backend):
        backend._wait_for_pending_works()  # 2.11 to 2.15
    backend.abort()


def registers_all_memory() -> bool:
    """Return whether torch registers all memory that it allocates with every communicator.

    ``shutdown()`` leaves a communicator on the allocator's list then (2.11 to 2.15), and every later allocation fails:
    "NCCL communicator was aborted". ``abort()`` takes it off.
    """
    value = os.environ.get("TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK", "")  # 2.11 to 2.15
    return value.lower() in ("1", "y", "yes", "t", "true")
