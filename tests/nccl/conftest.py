"""Builds the double, and runs ranks under it."""

from __future__ import annotations

import os
import shutil
import subprocess
from multiprocessing.forkserver import _forkserver
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.nccl.double import on_double
from tests.ranks import run_ranks

SOURCE = Path(__file__).parents[1] / "simgpu"


@pytest.fixture(scope="session")
def double(tmp_path_factory):
    """The built double, preloaded into every process that is started while a test uses it."""
    if not dist.is_nccl_available():
        pytest.skip("this torch was built without NCCL")
    if shutil.which("g++") is None:
        pytest.skip("there is no g++ to build the double with")
    packages = Path(torch.__file__).parents[1]
    # nvidia-cuda-runtime leaves nvcc's own headers out; triton brings them.
    headers = [SOURCE / "headers", *sorted((packages / "nvidia").glob("*/include"))]
    headers.append(packages / "triton/backends/nvidia/include")
    if not any((folder / "nccl.h").exists() for folder in headers):
        pytest.skip(f"there are no headers of NCCL below {packages / 'nvidia'}: torch was not installed from a wheel")
    out = tmp_path_factory.mktemp("simgpu")
    subprocess.run(
        ["g++", "-O1", "-Wall", "-fPIC", "-shared", "-std=c++17", "-o", str(out / "libsimgpu.so"), "-lpthread"]
        + [str(source) for source in sorted(SOURCE.glob("*.cpp"))]
        + [f"-isystem{folder}" for folder in headers],
        check=True,
    )
    (out / "libcuda.so.1").symlink_to("libsimgpu.so")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LD_PRELOAD", str(out / "libsimgpu.so"))
        patch.setenv("LD_LIBRARY_PATH", f"{out}:{os.environ.get('LD_LIBRARY_PATH', '')}")
        _forkserver._stop()  # ranks are forked from it, and it may have been started without the double
        yield out
        _forkserver._stop()


@pytest.fixture
def nccl_ranks(double, tmp_path):
    """``run_ranks`` under the double, with a fresh folder for the ranks to meet in.

    Fails also if a rank used a communicator that was gone, or aborted one with collectives still in flight.
    """
    shared_memory = Path("/dev/shm") if Path("/dev/shm").is_dir() else tmp_path
    folder = shared_memory / f"simgpu-{os.getpid()}-{tmp_path.name}"

    def run(function, size=4, *, env=None, **kwargs):
        settings = {"SIMGPU_DIR": str(folder), "SIMGPU_TIMEOUT": "30"} | (env or {})
        return run_ranks(on_double, size, env=settings, body=function, **kwargs)

    yield run
    shutil.rmtree(folder, ignore_errors=True)
