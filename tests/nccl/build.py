"""Builds the double, and runs ranks under it: for the tests' fixtures, and for ``python -m tests.soak``."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.forkserver import _forkserver
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.nccl.double import on_double
from tests.ranks import run_ranks

SOURCE = Path(__file__).parents[1] / "simgpu"


class CannotBuild(Exception):
    """Something that the double needs is not on this machine; the text says what."""


def build(out: Path) -> None:
    """Build the double into a folder.

    Raises:
        CannotBuild: Something that it needs is not on this machine.
    """
    if not dist.is_nccl_available():
        raise CannotBuild("this torch was built without NCCL")
    if shutil.which("g++") is None:
        raise CannotBuild("there is no g++ to build the double with")
    packages = Path(torch.__file__).parents[1]
    # nvidia-cuda-runtime leaves nvcc's own headers out; triton brings them.
    headers = [SOURCE / "headers", *sorted((packages / "nvidia").glob("*/include"))]
    headers.append(packages / "triton/backends/nvidia/include")
    if not any((folder / "nccl.h").exists() for folder in headers):
        raise CannotBuild(
            f"there are no headers of NCCL below {packages / 'nvidia'}: torch was not installed from a wheel"
        )
    subprocess.run(
        ["g++", "-O1", "-Wall", "-fPIC", "-shared", "-std=c++17", "-o", str(out / "libsimgpu.so"), "-lpthread"]
        + [str(source) for source in sorted(SOURCE.glob("*.cpp"))]
        + [f"-isystem{folder}" for folder in headers],
        check=True,
    )
    (out / "libcuda.so.1").symlink_to("libsimgpu.so")


@contextmanager
def preloaded(out: Path) -> Iterator[None]:
    """Preload the double in ``out`` into every process that is started inside."""
    before = dict(os.environ)
    os.environ["LD_PRELOAD"] = str(out / "libsimgpu.so")
    os.environ["LD_LIBRARY_PATH"] = f"{out}:{os.environ.get('LD_LIBRARY_PATH', '')}"
    _forkserver._stop()  # ranks are forked from it, and it may have been started without the double
    try:
        yield
    finally:
        _forkserver._stop()
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def double_ranks(name: str, otherwise: Path) -> Iterator[Callable[..., Any]]:
    """Give ``run_ranks`` under the double, with a fresh folder for the ranks to meet in.

    It fails also if a rank used a communicator that was gone, or aborted one with collectives still in flight.

    Args:
        name: Tells the folder from others of this process.
        otherwise: Where the folder is, if there is no shared memory.
    """
    folder = (Path("/dev/shm") if Path("/dev/shm").is_dir() else otherwise) / f"simgpu-{os.getpid()}-{name}"

    def run(function: Callable[..., Any], size: int = 4, *, env: Mapping[str, str] | None = None, **kwargs: Any) -> Any:
        settings = {"SIMGPU_DIR": str(folder), "SIMGPU_TIMEOUT": "30"} | dict(env or {})
        return run_ranks(on_double, size, env=settings, body=function, **kwargs)

    try:
        yield run
    finally:
        shutil.rmtree(folder, ignore_errors=True)
