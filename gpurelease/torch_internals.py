"""The one file that touches what torch.distributed keeps to itself.

Every private name is here, with the torch versions for which it was seen to hold; the rest of the package speaks of
groups, tables and books only. ``_world`` is looked up on every call, since torch names it an extension point that
may be replaced.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroup, Store

from gpurelease.errors import NotBuilt

Backend = Any  # torch._C._distributed_c10d.Backend, or a Python subclass of it

_SOURCE = Path(__file__).resolve().parent.parent
_MEND = (
    f"python -m pip install --no-deps --no-build-isolation -e {_SOURCE}"
    if (_SOURCE / "setup.py").exists()
    else "python -m pip install --no-deps --no-cache-dir --force-reinstall gpurelease"
)

try:
    from gpurelease import _backend_table
except ImportError as error:
    raise NotBuilt(
        f"gpurelease's C++ extension cannot be loaded into torch {torch.__version__}: it is missing, or was built for "
        f"another torch or Python ({error}). Build it for this one: {_MEND}"
    ) from error

if _backend_table.built_for.partition("+")[0] != torch.__version__.partition("+")[0]:
    raise NotBuilt(
        f"gpurelease was built for torch {_backend_table.built_for}, and this is torch {torch.__version__}. "
        f"Build it again: {_MEND}"
    )


class Entry(NamedTuple):
    """One row of a group's table: which backend serves a device type."""

    device: str
    type: int
    backend: Backend


class Table(NamedTuple):
    """A group's backends, and which type of them is its default."""

    default_type: int
    entries: tuple[Entry, ...]


class Books(NamedTuple):
    """What c10d's Python side has written down about a group's backends."""

    backend: str
    config: str


# ------------------------------------------------------------------------------------------------ groups and books


def world() -> ProcessGroup | None:
    """Return WORLD, or None without one."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def groups() -> list[ProcessGroup]:
    """Return the groups that this rank is a member of, in order of creation."""
    return list(distributed_c10d._world.pg_map)  # 2.11 to 2.15


def exists(group: ProcessGroup) -> bool:
    """Return whether ``group`` has not been destroyed."""
    return group in distributed_c10d._world.pg_map  # 2.11 to 2.15


def name_of(group: ProcessGroup) -> str:
    """Return the name by which functional collectives find ``group``."""
    return distributed_c10d._world.pg_names[group]  # 2.11 to 2.15


def ranks_of(group: ProcessGroup) -> tuple[int, ...]:
    """Return the global ranks of ``group``'s members, in group order."""
    return tuple(dist.get_process_group_ranks(group))


def store_of(group: ProcessGroup) -> Store:
    """Return the store that ``group``'s members met on."""
    return distributed_c10d._world.pg_map[group][1]  # 2.11 to 2.15


def delete_keys(store: Store, marker: str) -> None:
    """Delete all keys that contain ``marker`` from the store at the bottom of ``store``, if it can list its keys."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    try:
        keys = store.list_keys()  # 2.11 to 2.15
    except (AttributeError, RuntimeError):  # a store of somebody's own
        return
    for key in keys:
        if marker in key:
            store.delete_key(key)


def read_books(group: ProcessGroup) -> Books:
    """Return what ``dist.get_backend`` and ``dist.get_backend_config`` say of ``group``."""
    return Books(dist.get_backend(group), dist.get_backend_config(group))


def backend_names(group: ProcessGroup) -> dict[str, str]:
    """Return the name of the backend that serves each device type, as ``group`` was made ("cuda": "nccl")."""
    pairs = (pair.partition(":") for pair in read_books(group).config.split(","))
    return {device: name for device, _, name in pairs}


def write_books(group: ProcessGroup, books: Books) -> None:
    """Change what ``dist.get_backend``, ``new_group`` and others go by."""
    state = distributed_c10d._world  # 2.11 to 2.15
    state.pg_map[group] = (dist.Backend(books.backend), state.pg_map[group][1])
    state.pg_backend_config[group] = books.config


# ---------------------------------------------------------------------------------------------------------- tables


def has_table(group: ProcessGroup) -> bool:
    """Return whether ``group`` is torch's own container of backends, and not a backend that poses as a group."""
    return type(group) is ProcessGroup


def read_table(group: ProcessGroup) -> Table:
    """Return ``group``'s table. It holds references to the backends."""
    default_type, entries = _backend_table.read_table(group)
    return Table(default_type, tuple(Entry(*entry) for entry in entries))


def write_table(group: ProcessGroup, table: Table) -> None:
    """Replace ``group``'s table. Its name, description and bound device are set on every backend in it."""
    _backend_table.write_table(group, table.default_type, list(table.entries))


def placeholder(rank: int, size: int, name: str, like: Backend) -> Backend:
    """Return a backend that refuses every collective with "Backend NAME does not support ...".

    Args:
        rank: The rank within the group that it answers with.
        size: The size of the group that it answers with.
        name: What it calls itself.
        like: The backend it stands for; time-outs set on the one are set on the options of the other.
    """
    return _backend_table.placeholder(rank, size, name, unwrap(like))


def copy_hook(from_placeholder: Backend, to: Backend) -> None:
    """Register with a new backend the completion hook that the old one had, if it had one."""
    _backend_table.copy_hook(from_placeholder, unwrap(to))


GLOO_TYPE = int(ProcessGroup.BackendType.GLOO)  # type: ignore[call-overload]
DEFAULT_TIMEOUT = distributed_c10d.default_pg_timeout  # 2.11 to 2.15


# -------------------------------------------------------------------------------------------------------- backends


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


def options_of(backend: Backend) -> Any | None:
    """Return the options that ``backend`` was made with and ``set_timeout`` has kept current, or None."""
    try:
        return backend.options
    except (AttributeError, RuntimeError):
        return None


def timeout_of(backend: Backend) -> timedelta | None:
    """Return ``backend``'s time-out, or None if it does not tell."""
    return getattr(options_of(unwrap(backend)), "_timeout", None)  # 2.11 to 2.15


def world_timeout(world: ProcessGroup) -> timedelta | None:
    """Return the time-out of WORLD's collectives, whoever serves them now, or None if no backend tells."""
    return next(filter(None, (timeout_of(entry.backend) for entry in read_table(world).entries)), None)


def is_connected(backend: Backend) -> bool:
    """Return whether ``backend`` holds a communicator, and not only the means to make one."""
    is_initialized = getattr(unwrap(backend), "_is_initialized", None)  # ProcessGroupNCCL, 2.11 to 2.15
    return True if is_initialized is None else bool(is_initialized())


def connect(backend: Backend, device: torch.device) -> None:
    """Make ``backend``'s communicator now. All members of the group must call."""
    with on_device(device):
        unwrap(backend).eager_connect_single_device(device)


def is_nccl2(name: str, backend: Backend) -> bool:
    """Return whether ``backend`` is of the second ProcessGroupNCCL, which came with 2.14 ("nccl2", "nccl-lazy").

    From 2.15 it is what "nccl" means, unless ``TORCH_DIST_USE_NCCL2=0``. It has no ``_is_initialized``, chooses its
    device by itself, and carries torch's flight recorder as a hook: building the first one in its place ends the
    process with an abort when the group is destroyed (seen on 2.15.0).
    """
    legacy = getattr(distributed_c10d, "ProcessGroupNCCL", None)
    return name in ("nccl2", "nccl-lazy") or (
        name == "nccl" and legacy is not None and not isinstance(unwrap(backend), legacy)
    )


def new_nccl(store: Store, rank: int, size: int, options: Any) -> Backend:
    """Return a new, unconnected ``ProcessGroupNCCL``."""
    backend = distributed_c10d.ProcessGroupNCCL(store, rank, size, options)
    _start_sequence(backend)
    return backend


def new_gloo(store: Store, rank: int, size: int, options: Any, limit: timedelta) -> Backend:
    """Return a new ``ProcessGroupGloo``, connected to all members within ``limit``. All members must call."""
    kept = options._timeout  # 2.11 to 2.15
    options._timeout = limit
    try:
        backend = distributed_c10d.ProcessGroupGloo(store, rank, size, options)
    finally:
        options._timeout = kept
    backend._set_default_timeout(kept)  # 2.11 to 2.15
    _start_sequence(backend)
    return backend


def new_default_gloo(store: Store, rank: int, size: int, timeout: timedelta, limit: timedelta) -> Backend:
    """Return a new ``ProcessGroupGloo`` as torch makes one for itself: on the interfaces of ``GLOO_SOCKET_IFNAME``, and
    connecting at first use if ``TORCH_GLOO_LAZY_INIT`` says so. All ranks must call.

    Args:
        store: Where the ranks meet.
        rank: This process's rank.
        size: Number of ranks.
        timeout: Time-out of its collectives.
        limit: Longest wait for the other ranks here.
    """
    backend = distributed_c10d.ProcessGroupGloo(store, rank, size, limit)
    backend._set_default_timeout(timeout)  # 2.11 to 2.15
    _start_sequence(backend)
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


def _start_sequence(backend: Backend) -> None:
    # From 2.14 torch does this itself, and warns when it is asked to.
    if torch.__version__ < torch.torch_version.TorchVersion("2.14"):
        backend._set_sequence_number_for_group()


# --------------------------------------------------------------------------------------------------------- devices


def accelerator() -> torch.device | None:
    """Return this process's current accelerator device, or None on a machine without one."""
    if not torch.accelerator.is_available():
        return None
    device = torch.accelerator.current_accelerator()
    return None if device is None else torch.device(device.type, torch.accelerator.current_device_index())


def on_device(device: torch.device | None) -> AbstractContextManager[object]:
    """Return a context in which ``device`` is current on this thread; None changes nothing."""
    return nullcontext() if device is None else torch.accelerator.device_index(device.index)


def free_bytes(device: torch.device | None) -> int | None:
    """Return the bytes that are free on ``device``, as the device itself counts them, or None without one."""
    if device is None:
        return None
    mem_get_info = getattr(torch.get_device_module(device), "mem_get_info", None)  # CUDA, XPU
    return None if mem_get_info is None else mem_get_info(device)[0]


def empty_cache() -> None:
    """Give the blocks that the caching allocator holds in reserve back to the device."""
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def drain(devices: Iterable[torch.device | None]) -> None:
    """Wait until all that was queued on the devices is done."""
    for device in {device for device in devices if device is not None}:
        torch.accelerator.synchronize(device)


def shut_down(backend: Backend, device: torch.device | None) -> None:
    """Shut ``backend`` down, with its own device current: NCCL would else touch device 0 (pytorch 159262)."""
    with on_device(device):
        unwrap(backend).shutdown()
    options: Any = options_of(unwrap(backend))
    if hasattr(options, "split_from"):  # ProcessGroupNCCL.Options, 2.11 to 2.15
        options.split_from = None  # it would keep the parent's backend alive, and is never split from again


def why_not_now() -> str:
    """Return why no communicator may go at this moment, or the empty string."""
    if distributed_c10d._world.pg_coalesce_state:  # 2.11 to 2.15
        return "a coalescing block is open, with collectives queued in it: leave the block first"
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is being captured: the collectives in it would lose their communicators"
    return ""
