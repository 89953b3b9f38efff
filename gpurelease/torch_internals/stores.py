"""Stores: where ranks meet."""

from __future__ import annotations

from typing import Any

from torch.distributed import FileStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from gpurelease.torch_internals.extension import extension


def base_of(store: Store) -> Store:
    """Return the store below all prefixes. Of one store it is always the same object, as long as somebody holds it."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store  # 2.11 to 2.15
    return store


def are_one(store: Store, other: Store) -> bool:
    """Return whether two stores lead to the same keys: clients of one server, as ``split_group`` makes them, do."""
    store, other = base_of(store), base_of(other)
    if store is other:
        return True
    if isinstance(store, TCPStore) and isinstance(other, TCPStore):
        return (store.host, store.port) == (other.host, other.port)
    return isinstance(store, FileStore) and isinstance(other, FileStore) and store.path == other.path  # type: ignore[attr-defined]


def client_of(store: Store) -> Store:
    """Return a client of ``store``'s server for us alone: who waits on one client holds up all others on it.

    Stores of a process's own, such as a HashStore, are their own clients.
    """
    try:
        return store.clone()  # type: ignore[attr-defined]  # 2.11 to 2.15
    except (NotImplementedError, RuntimeError):  # a store of somebody's own
        return store


def meeting(prefix: str, groups_own: Store, client: Store) -> Any:
    """Return the store on which a group's backend is built again.

    Args:
        prefix: What its keys begin with. ``groups_own`` and ``client`` must lead to the same keys.
        groups_own: The group's store, that serves the backend once it is there.
        client: A client of ours, that serves it until then.
    """
    return extension().Meeting(prefix, groups_own, client)


def delete_keys(met_on: Any, client: Store) -> None:
    """Delete the keys that this process has written to a meeting, whose backend is gone.

    Args:
        met_on: What :func:`meeting` has returned.
        client: A client of ours of the same store.
    """
    base = base_of(client)
    for key in met_on.keys():  # noqa: SIM118 - no dict
        base.delete_key(key)
