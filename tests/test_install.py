"""``pip install .`` in all ways, against the torch that is there and never a second one. It takes minutes."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="the tests run outside a source tree")


class Environment:
    """A virtual environment that sees this one's torch, or none."""

    def __init__(self, folder: Path, *, with_torch: bool) -> None:
        venv.create(folder, with_pip=True)
        self.python = str(folder / "bin" / "python")
        if with_torch:
            site = next(folder.glob("lib/python*/site-packages"))
            (site / "this-torch.pth").write_text(sysconfig.get_paths()["purelib"])

    def run(self, *arguments, **more_environment):
        hidden = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}
        environment = {key: value for key, value in os.environ.items() if key not in hidden} | more_environment
        return subprocess.run(
            [self.python, *arguments], cwd="/", env=environment, capture_output=True, text=True, timeout=400
        )

    def pip_install(self, *arguments, **more_environment):
        return self.run("-m", "pip", "install", *arguments, **more_environment)


@pytest.fixture
def source(tmp_path):
    """A copy of the source as a clone has it, without what was built in it."""
    copy = tmp_path / "source"
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in names:
        target = copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    return copy


@pytest.mark.parametrize("flags", [[], ["--no-build-isolation"]], ids=["isolated", "no isolation"])
def test_install_uses_the_torch_that_is_there(tmp_path, source, flags):
    environment = Environment(tmp_path / "venv", with_torch=True)
    if flags:
        assert environment.pip_install("setuptools>=70.1").returncode == 0
    done = environment.pip_install(*flags, str(source))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Collecting torch" not in done.stdout
    assert not list((tmp_path / "venv").glob("lib/python*/site-packages/torch"))
    asked = environment.run(
        "-c", "import gpurelease as g, torch; print(g.__file__, g.is_released(), torch.__version__)"
    )
    assert asked.returncode == 0, asked.stderr
    file, released, version = asked.stdout.split()
    assert file.startswith(str(tmp_path / "venv"))
    assert released == "False"
    import torch

    assert version == torch.__version__


def test_without_torch_one_sentence_says_what_to_do(tmp_path, source):
    environment = Environment(tmp_path / "venv", with_torch=False)
    done = environment.pip_install(str(source))
    assert done.returncode != 0
    assert "cannot import torch: install torch 2.11 or later there and try again" in done.stdout + done.stderr
    assert "Downloading torch" not in done.stdout


def test_without_a_compiler_one_sentence_says_what_to_do(tmp_path, source):
    environment = Environment(tmp_path / "venv", with_torch=True)
    done = environment.pip_install(str(source), CC="/nowhere/cc", CXX="/nowhere/c++")
    assert done.returncode != 0
    assert (
        "gpurelease: its C++ extension could not be compiled; a compiler that knows C++20" in done.stderr + done.stdout
    )


def test_an_unbuilt_source_tree_says_the_command_that_mends_it(source):
    # This environment's editable install would lend its built extension to the tree here.
    code = "import sys; sys.meta_path = [f for f in sys.meta_path if 'editable' not in repr(f)]; import gpurelease"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "gpurelease.errors.NotBuilt: gpurelease's C++ extension cannot be loaded into torch" in done.stderr
    assert f"Build it for this one: python -m pip install --no-deps --no-build-isolation -e {source}" in done.stderr


def test_another_torch_than_it_was_built_for_is_one_clear_error():
    code = (
        "import sys, types; built = types.ModuleType('gpurelease._backend_table'); built.built_for = '2.9.1+cu128'\n"
        "sys.modules['gpurelease._backend_table'] = built\n"
        "import gpurelease"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "gpurelease.errors.NotBuilt: gpurelease was built for torch 2.9.1+cu128, and this is torch" in done.stderr
    assert "Build it again: python -m pip install" in done.stderr
