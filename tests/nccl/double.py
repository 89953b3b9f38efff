"""What a rank asks of the double that it runs on."""

from __future__ import annotations

import ctypes
import functools
import json
import traceback
from typing import Any

import torch
import torch.distributed as dist

from tests import cycles
from tests.ranks import tcp_store


@functools.cache
def library() -> Any:
    """Return the double's functions."""
    functions: Any = ctypes.CDLL(None)
    functions.simgpu_comm_bytes.restype = ctypes.c_size_t
    functions.simgpu_used_bytes.restype = ctypes.c_size_t
    functions.simgpu_communicators.restype = ctypes.c_char_p
    return functions


def on_double(rank: int, size: int, body: Any, **kwargs: Any) -> Any:
    """Call ``body`` on a rank, and check what must be so after every test."""
    told = ""
    try:
        result = body(rank, size, **kwargs)
    except Exception:
        told = traceback.format_exc()
    if told:
        # Raised again without the frames whose locals would be printed: to print a CUDA tensor takes kernels, and as
        # these do nothing, it can take for ever.
        raise AssertionError(told)
    assert library().simgpu_misused() == 0, "a communicator was used that was gone or suspended"
    assert library().simgpu_killed() == 0, "a communicator was aborted before its collectives were done"
    return result


def live() -> int:
    """Return how many communicators of this process are alive."""
    return library().simgpu_live_comms()


def created() -> int:
    """Return how many communicators this process has made."""
    return library().simgpu_created_comms()


def held() -> int:
    """Return the bytes that this process's communicators hold."""
    return library().simgpu_comm_bytes()


def communicators() -> list[dict[str, Any]]:
    """Return what this process's live communicators are: by size, device, NCCL config, and so on."""
    found = json.loads(library().simgpu_communicators())
    return sorted(found, key=lambda comm: (comm["size"], comm["device"], comm["id"]))


def touched() -> list[int]:
    """Return the devices that this process has used: a real one would have got a context on each."""
    return [device for device in range(8) if library().simgpu_touched(device)]


def used(device: int) -> int:
    """Return the bytes that are used on a device by this process: by communicators, and by torch's allocator."""
    return library().simgpu_used_bytes(device)


def fault(call: str, *, after: int = 0, times: int = 1) -> None:
    """Make calls in this process fail, once ``after`` calls have gone well; ``tests/simgpu/README.rst`` names them."""
    library().simgpu_fault(call.encode(), after, times, 0)


def delay(call: str, seconds: float, *, after: int = 0, times: int = 1) -> None:
    """Make calls in this process come late, once ``after`` calls were in time."""
    library().simgpu_fault(call.encode(), after, times, int(seconds * 1000))


def init_nccl(rank: int, size: int, *, eager: bool = False, backend: str | None = "nccl", **options: Any) -> Any:
    """Initialise WORLD, each rank on the device of its own number, and return the store."""
    store = tcp_store(rank, size)
    torch.cuda.set_device(rank)
    if eager:
        options["device_id"] = torch.device("cuda", rank)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, **options)
    return store


def pass_along(group: Any) -> float:
    """Receive a number from the rank before, send one more to the next, and return what came: 0 on the first."""
    rank = dist.get_rank(group)
    tensor = torch.tensor([0.0]).cuda()
    if rank > 0:
        dist.recv(tensor, rank - 1, group=group)
    if rank < dist.get_world_size(group) - 1:
        dist.send(tensor.cpu().add(1).cuda(), rank + 1, group=group)
    return tensor.cpu().item()


total = functools.partial(cycles.total, device="cuda")
backend_of = functools.partial(cycles.backend_of, device="cuda")

# "nccl" means torch's first ProcessGroupNCCL, or from 2.15 its second one, which came with 2.14.
HAS_SECOND = hasattr(dist.distributed_c10d, "ProcessGroupNCCL2")
FIRST = "nccl-legacy" if HAS_SECOND else "nccl"
# From 2.15 the second one connects when a group is made, and takes the device from LOCAL_RANK if none is named.
CONNECTS_AT_ONCE = dist.is_nccl_available() and hasattr(dist.ProcessGroupNCCL.Options, "lazy_init")
