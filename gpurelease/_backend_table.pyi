from typing import Any

from torch.distributed import ProcessGroup

built_for: str
"""The version of torch that the extension was compiled for."""

def read_table(group: ProcessGroup) -> tuple[int, list[tuple[str, int, Any]]]:
    """Return the default backend type, and for each device type its backend's type and the backend."""

def write_table(group: ProcessGroup, default_type: int, entries: list[tuple[str, int, Any]]) -> None:
    """Replace the whole table. The group's name, description and bound device are set on each backend."""

def placeholder(rank: int, size: int, name: str, like: Any) -> Any:
    """Return a backend that refuses every collective, shares ``like``'s options and keeps its completion hook."""

def copy_hook(from_backend: Any, to_backend: Any) -> None:
    """Register the completion hook that one backend has, if it has one, with another backend."""

def suspend(backend: Any) -> None:
    """Call the backend's ``suspend()`` without the GIL. Not there before torch 2.12."""

def resume(backend: Any) -> None:
    """Call the backend's ``resume()`` without the GIL. Not there before torch 2.12."""
