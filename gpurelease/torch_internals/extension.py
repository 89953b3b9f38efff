"""Loads the C++ extension, or says how to build it."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

from gpurelease.errors import NotBuilt

_SOURCE = Path(__file__).resolve().parents[2]
_MEND = (
    f"python -m pip install --no-deps --no-build-isolation -e {_SOURCE}"
    if (_SOURCE / "setup.py").exists()
    else "python -m pip install --no-deps --no-cache-dir --force-reinstall gpurelease"
)


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
            f"for another torch or Python ({error}). Build it for this one: {_MEND}"
        ) from error
    if _extension.built_for.partition("+")[0] != torch.__version__.partition("+")[0]:
        raise NotBuilt(
            f"gpurelease was built for torch {_extension.built_for}, and this is torch {torch.__version__}. "
            f"Build it again: {_MEND}"
        )
    return _extension
