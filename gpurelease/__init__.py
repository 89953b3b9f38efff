"""Give the device memory of idle communicators back while a colocated inference engine generates.

    with released_world():        # NCCL is torn down, Gloo stands in
        samples = engine.generate(prompts)
    # every group, wherever it is held, works again

The package, from the outside in: ``api`` and ``decorator`` (what users write), ``scopes`` (which of the nested ones
act), ``world``, ``release``, ``restore`` and ``state`` (the way of all ranks from one state to the other),
``agreement`` and ``rollcall`` (how they decide), ``strategy``, ``rebuild`` and ``suspend`` (how memory is given back),
``groups``, ``rebuilders`` and ``standin`` (what is released, how it is built again, and what stands in meanwhile),
``torch_internals/`` (all that torch keeps private) and ``csrc/`` (the one thing that Python cannot do).
"""

from gpurelease.api import (
    current_report,
    is_released,
    release_depth,
    release_world,
    released_world,
    restore_world,
    restored_world,
)
from gpurelease.decorator import releases_world
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
from gpurelease.rebuilders import Blueprint, register_rebuilder
from gpurelease.report import GroupReport, Report, Transition

__all__ = [
    "Blueprint",
    "ContextFailed",
    "GpuReleaseError",
    "GroupReport",
    "InvalidOption",
    "NotBuilt",
    "ReleaseFailed",
    "Report",
    "RestoreFailed",
    "ScopeMisuse",
    "Transition",
    "TransitionFailed",
    "current_report",
    "is_released",
    "register_rebuilder",
    "release_depth",
    "release_world",
    "released_world",
    "releases_world",
    "restore_world",
    "restored_world",
]
