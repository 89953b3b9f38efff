"""Loads the C++ extension, or says how to build it."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

from gpurelease.errors import NotBuilt

_SOURCE = Path(__file__).resolve().parents[2]


@functools.cache
def extension() -> Any:
    """Return the extension.

    Raises:
        NotBuilt: It is missing, or was built for another torch.
    """
    try:
        from gpurelease import _extension
    except ImportError as error:
        raise NotBuilt(
            f"gpurelease's C++ extension cannot be loaded into torch {torch.__version__}: it is missing, or was built "
            f"for another torch or Python ({error}). Build it for this one: {_mend()}"
        ) from error
    if _extension.built_for.partition("+")[0] != torch.__version__.partition("+")[0]:
        raise NotBuilt(
            f"gpurelease was built for torch {_extension.built_for}, and this is torch {torch.__version__}. "
            f"Build it again: {_mend()}"
        )
    return _extension


def _mend() -> str:
    """Return the command that builds it, from where it was installed from."""
    if (_SOURCE / "setup.py").exists():
        what = ["--no-build-isolation", "--editable", str(_SOURCE)]
    else:
        what = ["--no-cache-dir", "--force-reinstall", _installed_from()]
    return shlex.join([sys.executable, "-m", "pip", "install", "--no-deps", *what])


def _installed_from() -> str:
    """Return what pip was told to install, as it has written it down; the package's name, if it came from an index."""
    installed = next(iter(importlib.metadata.distributions(name="gpurelease")), None)
    text = None if installed is None else installed.read_text("direct_url.json")
    origin: dict[str, Any] = json.loads(text) if text else {"url": "gpurelease"}
    code = origin.get("vcs_info")
    return f"{code['vcs']}+{origin['url']}@{code['commit_id']}" if code else origin["url"]
