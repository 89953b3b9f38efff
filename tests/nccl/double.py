"""What a rank asks of the double that it runs on."""

from __future__ import annotations

import ctypes
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from tests import cycles
from tests.ranks import tcp_store


def library() -> Any:
    """Return the double's functions."""
    functions: Any = ctypes.CDLL(None)
    functions.simgpu_comm_bytes.restype = ctypes.c_size_t
    functions.simgpu_used_bytes.restype = ctypes.c_size_t
    return functions


def live() -> int:
    """Return how many communicators of this process are alive."""
    return library().simgpu_live_comms()


def created() -> int:
    """Return how many communicators this process has made."""
    return library().simgpu_created_comms()


def held() -> int:
    """Return the bytes that this process's communicators hold."""
    return library().simgpu_comm_bytes()


def touched() -> list[int]:
    """Return the devices that this process has used: a real one would have got a context on each."""
    return [device for device in range(8) if library().simgpu_touched(device)]


def fault(call: str, times: int = 1, delay_ms: int = 0) -> None:
    """Make the next calls of "init", "destroy" or "abort" in this process fail; or only wait, with a delay."""
    library().simgpu_fault(call.encode(), times, delay_ms)


def init_nccl(rank: int, size: int, *, eager: bool = False, backend: str | None = "nccl", **options: Any) -> Any:
    """Initialise WORLD, each rank on the device of its own number, and return the store."""
    store = tcp_store(rank, size)
    torch.cuda.set_device(rank)
    if eager:
        options["device_id"] = torch.device("cuda", rank)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, **options)
    return store


total = partial(cycles.total, device="cuda")
backend_of = partial(cycles.backend_of, device="cuda")
