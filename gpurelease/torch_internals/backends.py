"""What a backend can be asked and told, of whatever kind it is, and how one is made."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import Store

from gpurelease.torch_internals import nccl
from gpurelease.torch_internals.devices import on_device
from gpurelease.torch_internals.extension import extension

Backend = Any  # torch._C._distributed_c10d.Backend, or a Python subclass of it

DEFAULT_TIMEOUT = distributed_c10d.default_pg_timeout  # 2.11 to 2.15
_COUNTS_BY_ITSELF = torch.__version__ >= torch.torch_version.TorchVersion("2.14")


def unwrap(backend: Backend) -> Backend:
    """Look through the wrapper that ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` puts around each backend."""
    while hasattr(backend, "wrapped_pg"):  # _ProcessGroupWrapper, 2.11 to 2.15
        backend = backend.wrapped_pg
    return backend


def wrap(backend: Backend, store: Store, group_name: str, timeout: timedelta | None) -> Backend:
    """Put DETAIL's wrapper around ``backend``. All members of the group must call: it makes a Gloo mesh."""
    return distributed_c10d._create_process_group_wrapper(  # 2.11 to 2.15
        wrapped_pg=backend,
        store_prefix=group_name,
        store=store,
        rank=backend.rank(),
        world_size=backend.size(),
        timeout=timeout or DEFAULT_TIMEOUT,
    )


# ------------------------------------------------------------------------------------------------------------- asked


def name_of(backend: Backend) -> str:
    """Return the name of ``backend``'s kind: "nccl"."""
    return unwrap(backend).name().lower()  # 2.11 to 2.15


def options_of(backend: Backend) -> Any | None:
    """Return the options that ``backend`` was made with and ``set_timeout`` has kept current, or None."""
    try:
        return backend.options
    except (AttributeError, RuntimeError):
        return None


def copy_of_options(options: Any | None, ranks: Sequence[int]) -> Any | None:
    """Return a copy of a backend's options, for a new backend to be made with.

    A backend changes the options that it is made with, and a build that was given up may go on doing so: so each has a
    copy of its own. The copy says what ranks are in the group (without them ``split_group`` crashes: torch takes all
    ranks for granted only in the first backend that a process makes), and nothing of a parent, whose communicator it
    would keep alive. Options that torch does not let anybody copy, of a backend out of tree, are returned as they are.
    """
    if options is None:
        return None
    gloo: Any = distributed_c10d.ProcessGroupGloo
    if isinstance(options, gloo._Options):  # 2.11 to 2.15
        copied: Any = gloo._Options()
        for name in ("_devices", "_threads", "_timeout", "group_name", "global_ranks_in_group"):
            setattr(copied, name, getattr(options, name))
    else:
        try:
            copied = copy.copy(options)  # ProcessGroupNCCL.Options, 2.11 to 2.15
        except TypeError:
            return options
    if hasattr(copied, "global_ranks_in_group"):
        copied.global_ranks_in_group = list(ranks)  # 2.11 to 2.15
    forget_parent(copied)
    return copied


def forget_parent(options: Any) -> None:
    """Have options that a backend was split with no longer keep its parent's backend alive."""
    if hasattr(options, "split_from"):  # ProcessGroupNCCL.Options, 2.11 to 2.15
        options.split_from = None


def timeout_of(backend: Backend) -> timedelta | None:
    """Return ``backend``'s time-out, or None if it does not tell."""
    return getattr(options_of(unwrap(backend)), "_timeout", None)  # 2.11 to 2.15


class Connection(NamedTuple):
    """What a backend holds now.

    Attributes:
        there: Whether it holds a communicator of all its members, and not only the means to make one.
        device: The device that this is on, as far as that can be told.
    """

    there: bool
    device: torch.device | None


def connection_of(backend: Backend) -> Connection:
    """Return what ``backend`` holds now."""
    backend = unwrap(backend)
    if nccl.is_first_nccl(backend):
        device = nccl.communicator_device(backend)
        return Connection(device is not None, device)
    if nccl.is_nccl(backend):
        return Connection(nccl.is_connected_second(backend), None)
    is_initialized = getattr(backend, "_is_initialized", None)  # ProcessGroupXCCL, 2.11 to 2.15
    return Connection(True if is_initialized is None else bool(is_initialized()), None)


class Suspension(NamedTuple):
    """What suspending a backend would do.

    Attributes:
        why_not: Why it cannot be suspended; empty if it can, or has nothing to suspend.
        memory: The bytes that it would give back, and those that would stay; None if it does not tell.
    """

    why_not: str
    memory: tuple[int, int] | None


def suspension_of(backend: Backend, *, connected: bool) -> Suspension:
    """Return what suspending ``backend`` would do.

    It is asked for its memory, which comes from the same place: NCCL 2.29.7 and up, through torch 2.12 and up.

    Args:
        backend: The backend.
        connected: Whether it has a communicator.
    """
    backend = unwrap(backend)
    if not hasattr(backend, "suspend") or not hasattr(extension(), "suspend"):
        return Suspension(f"torch {torch.__version__} cannot suspend backends: 2.12 is the first that can", None)
    if not connected:
        return Suspension("", None)
    try:
        stats = backend.memory_stats()  # 2.12 to 2.15
        return Suspension("", (stats["suspend"], stats["persist"]))
    except KeyError:
        return Suspension("", None)
    except RuntimeError as error:
        return Suspension(str(error).partition("\n")[0], None)


# -------------------------------------------------------------------------------------------------------------- told


def shut_down(backend: Backend, device: torch.device | None) -> None:
    """Shut ``backend`` down, with its own device current: NCCL would else touch device 0 (pytorch 159262)."""
    inner = unwrap(backend)
    with on_device(device):
        if nccl.is_first_nccl(inner) and nccl.registers_all_memory():
            nccl.abort(inner)
        else:
            inner.shutdown()
    forget_parent(options_of(inner))


def set_timeout(backend: Backend, timeout: timedelta | None) -> None:
    """Set ``backend``'s time-out, unless it is that already."""
    if timeout is not None and timeout_of(backend) != timeout:
        unwrap(backend).set_timeout(timeout)  # 2.11 to 2.15


def abort(backend: Backend, device: torch.device | None) -> None:
    """End ``backend``'s communicators without asking their other members. Its collectives must be done."""
    inner = unwrap(backend)
    with on_device(device):
        if nccl.is_nccl(inner):
            nccl.abort(inner)
        else:
            inner.shutdown()


def suspend(backend: Backend, device: torch.device | None) -> None:
    """Give back what memory ``backend``'s communicators can. All members must call: NCCL has them meet."""
    with on_device(device):
        extension().suspend(unwrap(backend))


def resume(backend: Backend, device: torch.device | None) -> None:
    """Take back the memory that ``suspend`` gave. All members must call: NCCL has them meet."""
    with on_device(device):
        extension().resume(unwrap(backend))


# -------------------------------------------------------------------------------------------------------------- made


def new_nccl(kind: type, store: Store, rank: int, size: int, options: Any, device: torch.device | None) -> Backend:
    """Return a new backend of one of torch's kinds of ProcessGroupNCCL.

    Which kind a name means depends on the version and the environment, and ``split_group`` of a ProcessGroupNCCLLazy
    gives a ProcessGroupNCCL2. So the kind is that of the old backend.

    From 2.15 all but the first kind connect here, unless ``options.lazy_init``; they would else guess a device.
    """
    takes_device = hasattr(options, "lazy_init") and kind is not distributed_c10d.ProcessGroupNCCL  # from 2.15
    with on_device(device):
        backend = kind(store, rank, size, options, device) if takes_device else kind(store, rank, size, options)
    start_sequence(backend)
    return backend


def new_xccl(store: Store, rank: int, size: int, options: Any) -> Backend:
    """Return a new ``ProcessGroupXCCL``, from the options of an old one: torch's own creator makes fresh ones."""
    backend = distributed_c10d.ProcessGroupXCCL(store, rank, size, options)  # 2.11 to 2.15
    start_sequence(backend)
    return backend


def new_from_plugin(
    name: str,
    store: Store,
    rank: int,
    size: int,
    ranks: Sequence[int],
    group_name: str,
    timeout: timedelta | None,
    options: Any,
) -> Backend:
    """Return a new backend of the kind that ``Backend.register_backend`` registered as ``name``."""
    plugin = dist.Backend._plugins[name.upper()]  # 2.11 to 2.15
    timeout = timeout or DEFAULT_TIMEOUT
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, size, timeout)
    about = distributed_c10d._DistributedBackendOptions()  # type: ignore[attr-defined]  # 2.11 to 2.15
    about.store, about.group_rank, about.group_size = store, rank, size
    about.timeout, about.group_id, about.global_ranks_in_group = timeout, group_name, list(ranks)
    return plugin.creator_fn(about, options)


def has_plugin(name: str) -> bool:
    """Return whether ``Backend.register_backend`` was called with ``name``."""
    return name.upper() in dist.Backend._plugins  # 2.11 to 2.15


def start_sequence(backend: Backend) -> None:
    """Have ``backend`` count its collectives. From 2.14 torch does this itself, and warns when it is asked to."""
    if not _COUNTS_BY_ITSELF:
        backend._set_sequence_number_for_group()
