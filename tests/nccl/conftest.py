"""Builds the double, and runs ranks under it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.ranks import run_ranks

SOURCE = Path(__file__).parents[1] / "simgpu"


@pytest.fixture(scope="session")
def double(tmp_path_factory):
    """The built double, preloaded into every process that is started from now on."""
    if not dist.is_nccl_available():
        pytest.skip("this torch was built without NCCL")
    if shutil.which("g++") is None:
        pytest.skip("there is no g++ to build the double with")
    out = tmp_path_factory.mktemp("simgpu")
    packages = Path(sysconfig.get_paths()["purelib"])
    headers = [
        SOURCE / "headers",
        *sorted((packages / "nvidia").glob("*/include")),
        packages / "triton/backends/nvidia/include",
    ]
    subprocess.run(
        ["g++", "-O1", "-fPIC", "-shared", "-std=c++17", "-o", str(out / "libsimgpu.so")]
        + [str(SOURCE / "device.cpp"), str(SOURCE / "nccl.cpp")]
        + [f"-I{folder}" for folder in headers]
        + ["-lpthread"],
        check=True,
    )
    (out / "libcuda.so.1").symlink_to("libsimgpu.so")
    os.environ["TORCH_DIST_USE_NCCL2"] = "0"  # what "nccl" means from torch 2.15 on
    os.environ["LD_PRELOAD"] = str(out / "libsimgpu.so")
    os.environ["LD_LIBRARY_PATH"] = f"{out}:{os.environ.get('LD_LIBRARY_PATH', '')}"
    return out


@pytest.fixture
def nccl_ranks(double, tmp_path):
    """``run_ranks`` under the double, with a fresh folder for the ranks to meet in."""
    shared_memory = Path("/dev/shm") if Path("/dev/shm").is_dir() else tmp_path
    folder = shared_memory / f"simgpu-{os.getpid()}-{tmp_path.name}"

    def run(function, size=4, *, env=None, **kwargs):
        return run_ranks(
            function, size, env={"SIMGPU_DIR": str(folder), "SIMGPU_TIMEOUT": "30"} | (env or {}), **kwargs
        )

    yield run
    shutil.rmtree(folder, ignore_errors=True)
