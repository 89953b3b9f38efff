"""c10d's Python side: which groups there are, and what is written down about them.

``_world`` is looked up on every call, since torch names it an extension point that may be replaced.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import ProcessGroup, Store

from gpurelease.errors import group_text
from gpurelease.torch_internals.extension import extension
from gpurelease.torch_internals.stores import are_one, base_of


class Books(NamedTuple):
    """What c10d's Python side has written down about a group's backends."""

    backend: str
    config: str


def world() -> ProcessGroup | None:
    """Return WORLD, or None without one."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def groups() -> list[ProcessGroup]:
    """Return the groups that this rank is a member of, in order of creation."""
    return list(distributed_c10d._world.pg_map)  # 2.11 to 2.15


def exists(group: ProcessGroup) -> bool:
    """Return whether ``group`` has not been destroyed."""
    return group in distributed_c10d._world.pg_map  # 2.11 to 2.15


def unlisted_groups(world: ProcessGroup) -> list[ProcessGroup]:
    """Return the groups that somebody holds, and that c10d's books never had.

    ``ProcessGroup.split_group`` and ``merge_remote_group`` make such groups: on a client of their own of the store, and
    with a name that says so. Others that are not in the books were destroyed.
    """
    listed = distributed_c10d._world.pg_map  # 2.11 to 2.15
    of_world = store_of(world)

    def was_never_listed(group: ProcessGroup) -> bool:
        own = group.get_group_store()  # 2.11 to 2.15
        named_so = any(mark in group.group_name for mark in (":split:", ":merge"))
        return named_so or (base_of(own) is not base_of(of_world) and are_one(own, of_world))

    return [group for group in extension().groups_held(ProcessGroup) if group not in listed and was_never_listed(group)]


def text_of(group: ProcessGroup) -> str:
    """Return what errors call ``group``: by its name, and its description or its members."""
    return group_text(name_of(group), group.group_desc, ranks_of(group))


def name_of(group: ProcessGroup) -> str:
    """Return the name by which functional collectives find ``group``."""
    return distributed_c10d._world.pg_names[group]  # 2.11 to 2.15


def ranks_of(group: ProcessGroup) -> tuple[int, ...]:
    """Return the global ranks of ``group``'s members, in group order."""
    return tuple(dist.get_process_group_ranks(group))


def store_of(group: ProcessGroup) -> Store:
    """Return the store that ``group``'s members met on."""
    return distributed_c10d._world.pg_map[group][1]  # 2.11 to 2.15


def read_books(group: ProcessGroup) -> Books:
    """Return what ``dist.get_backend`` and ``dist.get_backend_config`` say of ``group``."""
    return Books(dist.get_backend(group), dist.get_backend_config(group))


def usual_config(backend: str) -> str:
    """Return what is written down about a group that is made with the name of a backend alone."""
    return str(distributed_c10d.BackendConfig(dist.Backend(backend)))  # 2.11 to 2.15


def backend_names(group: ProcessGroup) -> dict[str, str]:
    """Return the name of the backend that serves each device type, as ``group`` was made ("cuda": "nccl")."""
    pairs = (pair.partition(":") for pair in read_books(group).config.split(","))
    return {device: name for device, _, name in pairs}


def write_books(group: ProcessGroup, books: Books) -> None:
    """Change what ``dist.get_backend``, ``new_group`` and others go by."""
    state = distributed_c10d._world  # 2.11 to 2.15
    state.pg_map[group] = (dist.Backend(books.backend), state.pg_map[group][1])
    state.pg_backend_config[group] = books.config


def take_recorder(group: ProcessGroup) -> bool:
    """Take torch's flight recorder off ``group``, and return whether there was one.

    From 2.15 it is attached to each group whose backend does not record by itself, and hooks into that backend: left
    on, it would look for its hooks in another backend later, and end the process with an abort.
    """
    recorders = getattr(distributed_c10d._world, "pg_flight_recorder_hooks", {})  # 2.15
    recorder = recorders.pop(group, None)
    if recorder is not None:
        recorder.remove()
    return recorder is not None


def put_recorder(group: ProcessGroup) -> None:
    """Attach torch's flight recorder to ``group``, whose backend is another one now."""
    c10d: Any = distributed_c10d
    c10d._world.pg_flight_recorder_hooks[group] = c10d.FlightRecorderHook.attach(group, list(ranks_of(group)))  # 2.15


def why_not_now() -> str:
    """Return why no communicator may go at this moment, or the empty string. For the thread that enters a scope."""
    if distributed_c10d._world.pg_coalesce_state:  # 2.11 to 2.15
        return "a coalescing block is open, with collectives queued in it: leave the block first"
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is being captured: the collectives in it would lose their communicators"
    return ""
