"""Loads the C++ extension, or says how to build it."""

from __future__ import annotations

from pathlib import Path

import torch

from gpurelease.errors import NotBuilt

_SOURCE = Path(__file__).resolve().parents[2]
_MEND = (
    f"python -m pip install --no-deps --no-build-isolation -e {_SOURCE}"
    if (_SOURCE / "setup.py").exists()
    else "python -m pip install --no-deps --no-cache-dir --force-reinstall gpurelease"
)

try:
    from gpurelease import _backend_table as backend_table
except ImportError as error:
    raise NotBuilt(
        f"gpurelease's C++ extension cannot be loaded into torch {torch.__version__}: it is missing, or was built for "
        f"another torch or Python ({error}). Build it for this one: {_MEND}"
    ) from error

if backend_table.built_for.partition("+")[0] != torch.__version__.partition("+")[0]:
    raise NotBuilt(
        f"gpurelease was built for torch {backend_table.built_for}, and this is torch {torch.__version__}. "
        f"Build it again: {_MEND}"
    )

__all__ = ["backend_table"]
