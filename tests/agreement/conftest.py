"""Stores of all kinds."""

from __future__ import annotations

import pytest
import torch.distributed as dist


def a_store(kind, folder):
    if kind == "hash":
        return dist.HashStore()
    if kind == "file":
        return dist.FileStore(str(folder / "store"), 1)
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture(params=["hash", "tcp"])
def store(request, tmp_path):
    return a_store(request.param, tmp_path)


@pytest.fixture(params=["hash", "tcp", "file"])
def any_store(request, tmp_path):
    """Also a FileStore, that looks at its time-outs once a second."""
    return a_store(request.param, tmp_path)
