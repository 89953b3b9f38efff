"""The accelerator: which device is current, what is free on it, and not to touch another one."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def accelerator() -> torch.device | None:
    """Return this process's current accelerator device, or None on a machine without one."""
    if not torch.accelerator.is_available():
        return None
    device = torch.accelerator.current_accelerator()
    return None if device is None else torch.device(device.type, torch.accelerator.current_device_index())


def has_context(device: torch.device) -> bool:
    """Return whether this process has a context on ``device``; if it cannot be asked, True."""
    if device.type != "cuda":
        return True
    has_primary_context = torch._C._cuda_hasPrimaryContext  # type: ignore[attr-defined]  # 2.11 to 2.15
    return torch.cuda.is_initialized() and has_primary_context(device.index)


def on_device(device: torch.device | None) -> AbstractContextManager[object]:
    """Return a context in which ``device`` is current on this thread; None changes nothing."""
    if device is None or device.index == torch.accelerator.current_device_index():
        return nullcontext()  # setting it again would make its context, if it has none (CUDA 12)
    return torch.accelerator.device_index(device.index)


def memory(device: torch.device | None) -> tuple[int, int, int] | None:
    """Return what is free on ``device`` and what it has in all, as the device itself counts them, and what of the rest
    torch's caching allocator holds for this process, all in bytes; or None without a device that can be asked."""
    module: Any = None if device is None else torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):  # CUDA and XPU have it
        return None
    return (*module.mem_get_info(device), module.memory_reserved(device))


def free_bytes(device: torch.device | None) -> int | None:
    """Return the bytes that are free on ``device``, as the device itself counts them, or None without one."""
    asked = memory(device)
    return None if asked is None else asked[0]


def empty_cache() -> None:
    """Give the blocks that the caching allocator holds in reserve back to the device."""
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def drain(devices: Iterable[torch.device | None]) -> None:
    """Wait until all that was queued on the devices is done."""
    for device in {device for device in devices if device is not None}:
        with on_device(device):  # on a thread of ours: torch 2.11 would make a context on the device it comes back to
            torch.accelerator.synchronize(device)
