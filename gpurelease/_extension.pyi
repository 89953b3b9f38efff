from collections.abc import Callable
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, ProcessGroup, Store

built_for: str
"""The version of torch that the extension was compiled for."""

def read_table(group: ProcessGroup) -> list[tuple[str, int, Any]]:
    """Return for each device type that the group was made with its backend's type, and the backend."""

def write_table(group: ProcessGroup, rows: list[tuple[str, int, Any]], devices: list[str]) -> None:
    """Put rows in the places of those that are there, and say which device types the group says it serves."""

def split_count(group: ProcessGroup) -> int:
    """Return how many groups were split off the group in C++ and given its description."""

def wait_for_pending_works(backend: Any) -> None:
    """Wait until a backend has no collective under way that it watches."""

def groups_held(group_type: type[ProcessGroup]) -> list[ProcessGroup]:
    """Return all groups of a type that this process holds in Python."""

class Shell:
    """A backend that refuses every collective, and keeps what was set on the one that it stands for."""

    timing: bool
    @property
    def options(self) -> Any:
        """The options that it answers with."""
    def pass_on(self, to: Any) -> None:
        """Set on another backend what was set on the one that the shell stands for, or on the shell."""
    def register_abort_hook(self, hook_id: int, hook: Callable[[], None]) -> None:
        """Torch's, from 2.14."""

def make_shell(live: Any, refusal: str, options: Any | None) -> Shell:
    """Return a shell for a backend."""

class Meeting(PrefixStore):
    """The store on which a group's backend is built again."""

    def __init__(self, prefix: str, groups_own: Store, client: Store) -> None: ...
    def settle(self) -> None:
        """Have the group's own store serve the backend from now on."""
    def call_off(self) -> None:
        """Have whoever waits here stop."""
    def keys(self) -> set[str]:
        """Return the keys that this process has written here."""

def guarded(body: Callable[..., Any], rescue: Callable[..., None], awaited: bool) -> Any:
    """Return a method that does what ``body`` does, and has ``rescue`` told of what it raises."""

def suspend(backend: Any) -> None:
    """Call the backend's ``suspend()`` without the GIL. Not there before torch 2.12."""

def resume(backend: Any) -> None:
    """Call the backend's ``resume()`` without the GIL. Not there before torch 2.12."""
