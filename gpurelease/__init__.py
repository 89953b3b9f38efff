"""Give the device memory of idle communicators back while a colocated inference engine generates.

    with released_world():        # NCCL is torn down, Gloo stands in
        samples = engine.generate(prompts)
    # every group, wherever it is held, works again

The package, from the outside in, each room above what it uses:

* the public face: ``api`` and ``sleep`` (what users write), ``errors``, ``options``, ``report`` and ``views``,
  ``history``;
* ``scopes/``: what one of several open scopes does, and when;
* ``transition/``: the way of all ranks from one state to the other, as each of them goes it;
* ``strategies/``: how communicators give their memory back and take it again; ``groups/``: what is released, what
  stands in for it, and how it is built again;
* ``agreement/``: how the ranks decide;
* ``torch_internals/``: all that torch keeps private; and ``csrc/``: what Python cannot do.
"""

import importlib.metadata as _metadata
import sys as _sys

from gpurelease.api import (
    current_report,
    is_released,
    release_depth,
    released_world,
    releases_world,
    restored_world,
)
from gpurelease.errors import (
    ContextFailed,
    GpuReleaseError,
    InvalidOption,
    NotBuilt,
    ReleaseFailed,
    RestoreFailed,
    ScopeMisuse,
    TransitionFailed,
)
from gpurelease.groups.blueprint import Blueprint, register_rebuilder
from gpurelease.history import Totals, last_report, on_transition, totals
from gpurelease.report import GroupReport, Memory, Report, Transition
from gpurelease.scopes.scope import Scope
from gpurelease.sleep import sleep_world, wake_world

__all__ = [
    "Blueprint",
    "ContextFailed",
    "GpuReleaseError",
    "GroupReport",
    "InvalidOption",
    "Memory",
    "NotBuilt",
    "ReleaseFailed",
    "Report",
    "RestoreFailed",
    "Scope",
    "ScopeMisuse",
    "Totals",
    "Transition",
    "TransitionFailed",
    "current_report",
    "is_released",
    "last_report",
    "on_transition",
    "register_rebuilder",
    "release_depth",
    "released_world",
    "releases_world",
    "restored_world",
    "sleep_world",
    "totals",
    "wake_world",
]


__version__ = next((each.version for each in _metadata.distributions(name="gpurelease")), "not installed")


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]


# Where the package is imported from two places, there is one of everything all the same: one book of scopes, one set of
# error classes (miles 545: what was installed twice grew with each cycle).
_first = _sys.modules.setdefault("_gpurelease", _sys.modules[__name__])
if _first is not _sys.modules[__name__]:
    globals().update({name: getattr(_first, name) for name in __all__})
