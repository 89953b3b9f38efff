"""Builds the extensions. Everything that can be said in words is in setup.cfg.

They are compiled against the torch that is already installed, and no second torch is ever fetched: pip's
build isolation hides the environment's packages from this file, so a fresh interpreter, which does not see the
isolation (``-I`` ignores PYTHONPATH), is asked for torch's headers.
"""

import json
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.egg_info import egg_info

ASK_TORCH = """
import json, torch
from torch.utils import cpp_extension
print(json.dumps({
    "nccl": torch.distributed.is_nccl_available(),
    "version": torch.__version__,
    "include_dirs": cpp_extension.include_paths(),
    "library_dirs": cpp_extension.library_paths(),
    "cxx11_abi": int(torch._C._GLIBCXX_USE_CXX11_ABI),
}))
"""


class AskTorchFirst(egg_info):
    """Look for torch before pip reads the requirements: it would else fetch one, and build against another."""

    def run(self):
        """Write the metadata."""
        installed_torch()
        super().run()


class BuildAgainstTorch(build_ext):
    """Build the extensions against the installed torch."""

    def finalize_options(self):
        """Always compile: what lies in build/ may be for another torch, and setuptools compares times only."""
        super().finalize_options()
        self.force = self.parallel = True

    def build_extensions(self):
        """Build, or say in one sentence what is missing."""
        torch = installed_torch()
        self.extensions = [each for each in self.extensions if not each.optional or find_headers(torch, each)]
        for extension in self.extensions:
            extension.include_dirs += torch["include_dirs"]
            extension.library_dirs += torch["library_dirs"]
            extension.define_macros += [
                ("GPURELEASE_TORCH_VERSION", f'"{torch["version"]}"'),
                ("TORCH_EXTENSION_NAME", extension.name.rpartition(".")[2]),
                ("_GLIBCXX_USE_CXX11_ABI", str(torch["cxx11_abi"])),
            ]
        try:
            super().build_extensions()
        except Exception as error:
            sys.exit(
                "gpurelease: its C++ extension could not be compiled; a compiler that knows C++20 (g++ 11 or later, "
                f"clang 14 or later) and the headers of this Python are needed: install them and try again. ({error})"
            )


def installed_torch() -> dict:
    """Return where the installed torch keeps its headers and libraries, and its version."""
    asked = subprocess.run([sys.executable, "-I", "-c", ASK_TORCH], capture_output=True, text=True)
    if asked.returncode:
        reason = asked.stderr.strip().rpartition("\n")[2]
        sys.exit(
            "gpurelease: it is compiled against the torch that is already installed, and "
            f"{sys.executable} cannot import torch: install torch 2.11 or later there and try again. ({reason})"
        )
    torch = json.loads(asked.stdout)
    if tuple(map(int, torch["version"].split(".")[:2])) < (2, 11):
        sys.exit(f"gpurelease: it needs torch 2.11 or later, and torch {torch['version']} is installed: upgrade torch.")
    return torch


def find_headers(torch: dict, extension: Extension) -> bool:
    """Tell an extension where the headers of NCCL and CUDA are, and return whether they are anywhere.

    torch's wheels for CUDA bring them in packages of their own, but for those of the compiler, which triton brings.
    """
    packages = Path(torch["include_dirs"][0]).parents[1]
    folders = [*sorted((packages / "nvidia").glob("*/include")), packages / "triton/backends/nvidia/include"]
    extension.include_dirs += [str(folder) for folder in folders] + ["gpurelease/csrc"]
    return torch["nccl"] and any((folder / "nccl.h").exists() for folder in folders)


COMPILE = ["-std=c++20", "-O1", "-g0", "-fvisibility=hidden"]
TORCH = ["c10", "torch", "torch_cpu", "torch_python"]

setup(
    ext_modules=[
        Extension(
            "gpurelease._extension",
            ["gpurelease/csrc/extension.cpp"],
            libraries=TORCH,
            extra_compile_args=COMPILE,
            language="c++",
        ),
        Extension(
            "gpurelease._nccl_settings",
            ["gpurelease/csrc/nccl_settings.cpp"],
            libraries=[*TORCH, "torch_cuda"],
            extra_compile_args=[*COMPILE, "-Wno-interference-size"],
            language="c++",
            optional=True,
        ),
    ],
    cmdclass={"build_ext": BuildAgainstTorch, "egg_info": AskTorchFirst},
)
