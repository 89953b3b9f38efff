"""What is special about torch's three kinds of ProcessGroupNCCL.

The first is ProcessGroupNCCL. With 2.14 came a second, ProcessGroupNCCL2 ("nccl2"), and a lazy variant of that,
ProcessGroupNCCLLazy ("nccl-lazy"); from 2.15 "nccl" means the second unless ``TORCH_DIST_USE_NCCL2=0``.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from typing import Any, NamedTuple

import torch
from torch.distributed import distributed_c10d

from gpurelease.torch_internals.devices import has_context, on_device
from gpurelease.torch_internals.extension import extension

logger = logging.getLogger(__name__)

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


def is_connected_second(backend: Any) -> bool:
    """Return whether ``backend``, of the second kind or the lazy one, holds a communicator of all its members.

    Communicators of two ranks, which are made for send and recv, do not count: torch makes them again when the two
    ranks talk.
    """
    if hasattr(backend, "_comm_ptr"):  # 2.15
        return bool(backend._comm_ptr())
    try:  # 2.14
        backend.memory_stats()
    except RuntimeError as error:
        return "not initialized" not in str(error)
    return True


def communicator_device(backend: Any) -> torch.device | None:
    """Return the device that a ProcessGroupNCCL's communicator of all its members is on, or None without one.

    It looks its communicator up by the current device. So each device is made current that has a context: where it
    has none there is no communicator, and it must not get one by being asked. Communicators of two ranks, which are
    made for send and recv, do not count: torch makes them again when the two ranks talk.
    """
    if not torch.cuda.is_initialized():
        return None
    current = torch.cuda.current_device()
    for index in sorted(range(torch.cuda.device_count()), key=lambda index: index != current):  # it is usually there
        device = torch.device("cuda", index)
        if has_context(device):
            with on_device(device):
                if backend._comm_ptr():  # 2.11 to 2.15
                    return device
    return None


def connects_without_kernel(backend: Any, *, eager: bool) -> bool:
    """Return whether :func:`connect` launches no kernel to connect a backend like ``backend``.

    Where one is in flight that waits for another rank's, whoever waits for the device waits for that rank too. So
    side by side only what launches none can be connected.

    Args:
        backend: One that is connected, without DETAIL's wrapper.
        eager: Whether torch connected it when the group was made.
    """
    if eager or not is_first_nccl(backend):
        return True
    estimates = getattr(backend, "_supports_time_estimate", None)  # 2.15
    if estimates is None:
        estimates = getattr(backend, "supports_time_estimate", False)  # 2.11 to 2.14
    # NCCL would say that it is still at it, which torch takes for a failure.
    nonblocking = backend.options.config.blocking == 0 or os.environ.get("TORCH_NCCL_USE_COMM_NONBLOCKING") == "1"
    return bool(estimates) and not nonblocking


def connect(backend: Any, device: torch.device, *, eager: bool, by_kernel: bool) -> None:
    """Make ``backend``'s communicator now. All members of the group must call.

    A ProcessGroupNCCL that torch has not connected eagerly is connected by a collective, as torch would have done: one
    that was connected in the other way sends and receives over this communicator, in the order of its collectives,
    where it had one for each two ranks before (2.11 to 2.15), and ranks that each send first and receive then would
    wait for each other. The collective is only estimated, as by torch's compiler, if that is possible: NCCL then
    connects, plans, and launches nothing; what it has planned it forgets with the group (``groupLaunch`` and
    ``ncclGroupCommJoin`` in its group.cc and group.h, 2.22 to 2.30).

    Args:
        backend: The backend, without DETAIL's wrapper.
        device: The device to make it on.
        eager: Whether torch did so when the group was made.
        by_kernel: Whether the collective is to run.
    """
    with on_device(device):
        if eager or not is_first_nccl(backend):
            backend.eager_connect_single_device(device)
            return
        tensor = torch.empty(1, dtype=torch.uint8, device=device)
        if by_kernel:
            backend.allreduce([tensor]).wait()
            return
        backend._start_time_estimate()  # 2.11 to 2.15
        try:
            backend.allreduce([tensor])
        except BaseException:
            with contextlib.suppress(
                RuntimeError
            ):  # it may have left NCCL's group already; this thread must not stay in
                backend._end_time_estimate()
            raise
        backend._end_time_estimate()


def abort(backend: Any) -> None:
    """Abort a backend, of any kind, without DETAIL's wrapper, whose collectives are done.

    If a ProcessGroupNCCL's watchdog, which looks every 100 ms, has not seen a collective done before it finds its
    communicator aborted, it ends the process, a minute later (2.11 to 2.15).
    """
    if is_first_nccl(backend):
        extension().wait_for_pending_works(backend)
    backend.abort()


class Settings(NamedTuple):
    """What was set on a live ProcessGroupNCCL, of any kind, beside its options.

    Attributes:
        timing: Whether collectives are timed.
        nan_check: Whether tensors are checked for NaN; None if it has no such check of its own.
        coalescing: Whether a coalescing block is open on it.
        abort_hooks: What is called before it aborts, by number.
    """

    timing: bool
    nan_check: bool | None
    coalescing: bool
    abort_hooks: dict[int, Any]


def settings_of(backend: Any) -> Settings | None:
    """Return what was set on ``backend``, without DETAIL's wrapper; None if it cannot be asked."""
    module = _settings_module() if is_nccl(backend) else None
    return None if module is None else Settings(*module.read(backend))


def set_again(settings: Settings | None, backend: Any) -> None:
    """Set on a new backend what was set on the one that it replaces, as far as its shell does not do it."""
    if settings is not None and settings.nan_check is not None:
        backend._set_enable_nan_check(settings.nan_check)  # 2.11 to 2.15


@functools.cache
def _settings_module() -> Any | None:
    """Return the extension that reads these settings: it is not there where torch's headers of NCCL and CUDA were
    not."""
    try:
        from gpurelease import _nccl_settings
    except ImportError as error:
        logger.debug("collectives timing, NaN check and abort hooks set on live groups are not carried over: %s", error)
        return None
    same = _nccl_settings.built_for.partition("+")[0] == torch.__version__.partition("+")[0]
    return _nccl_settings if same else None


def registers_all_memory() -> bool:
    """Return whether torch registers all memory that it allocates with every communicator.

    ``shutdown()`` leaves a communicator on the allocator's list then (2.11 to 2.15), and every later allocation fails:
    "NCCL communicator was aborted". ``abort()`` takes it off.
    """
    value = os.environ.get("TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK", "")  # 2.11 to 2.15
    return value.lower() in ("1", "y", "yes", "t", "true")
