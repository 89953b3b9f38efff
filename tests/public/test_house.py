"""The public surface, and the house: who may use what, and how long a file is."""

from __future__ import annotations

import ast
import importlib.metadata
from pathlib import Path

import gpurelease
from gpurelease import ReleaseFailed, TransitionFailed
from gpurelease.errors import GpuReleaseError

PACKAGE = Path(gpurelease.__file__).parent


def test_the_error_tree_is_the_one_drawn():
    import gpurelease.errors as module

    drawn = [line.split("(")[0].strip(" │├└─") for line in module.__doc__.split("::")[1].splitlines() if "──" in line]
    classes = {name: value for name, value in vars(module).items() if isinstance(value, type)}
    ours = [
        name for name, value in classes.items() if issubclass(value, GpuReleaseError) and value is not GpuReleaseError
    ]
    assert sorted(name.split()[0] for name in drawn) == sorted(ours)
    assert issubclass(ReleaseFailed, TransitionFailed)


def test_all_is_the_public_surface():
    public = {name for name, value in vars(gpurelease).items() if not name.startswith("_") and not _is_module(value)}
    assert sorted(gpurelease.__all__) == gpurelease.__all__
    assert public == set(gpurelease.__all__)
    for name in gpurelease.__all__:
        assert getattr(gpurelease, name).__doc__, f"{name} has no docs"


def test_dir_has_the_public_names_only():
    assert [name for name in dir(gpurelease) if not name.startswith("__")] == gpurelease.__all__
    assert {"__doc__", "__all__"} <= set(dir(gpurelease))
    assert gpurelease.__version__ == importlib.metadata.version("gpurelease")


def _is_module(value):
    import types

    return isinstance(value, types.ModuleType)


def test_private_names_of_torch_are_used_in_one_folder_only():
    """``_world``, ``_plugins``, ``_timeout``, ... of torch objects belong in torch_internals/."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.parent.name in ("torch_internals", "demo"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls", "other")
                assert own, f"{path.name}:{node.lineno}: .{node.attr}"


# Each room, above what it uses. What is outside them is the public face.
ROOMS = ["torch_internals", "agreement", "groups", "strategies", "transition", "scopes"]


USED_BY_ALL = ["errors", "options", "report"]


def test_no_room_uses_one_above_it():
    for path in sorted(PACKAGE.rglob("*.py")):
        room = path.parent.name
        allowed = USED_BY_ALL + (ROOMS[: ROOMS.index(room) + 1] if room in ROOMS else ROOMS)
        if room == "demo" or path.stem in ("__init__", "api", "sleep"):
            continue
        allowed = ["errors"] if path.stem in USED_BY_ALL else allowed
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gpurelease."):
                assert node.module.split(".")[1] in allowed, f"{path}:{node.lineno}: {node.module}"


def test_files_are_read_in_one_go():
    for path in sorted(PACKAGE.rglob("*.py")):
        lines = len(path.read_text().splitlines())
        assert lines <= 300, f"{path}: {lines} lines"
