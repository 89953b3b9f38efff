"""``pip install .`` in all ways, against the torch that is there and never a second one. It takes minutes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="the tests run outside a source tree")


SCOPE = """
import gpurelease as g, torch.distributed as dist
print("imported")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
try:
    with g.released_world(backends=("gloo",), timeout=20) as scope:
        pass
    print(scope.report)
finally:
    print(g.release_depth(), "open")
dist.destroy_process_group()
"""


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
    """A copy of the source as a clone would have it, with what is not committed yet, and without what was built."""
    copy = tmp_path / "source"
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in filter(lambda name: (ROOT / name).exists(), names):
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


def test_an_unbuilt_source_tree_says_the_command_that_mends_it(tmp_path, source):
    environment = Environment(tmp_path / "venv", with_torch=True)
    unbuilt = environment.run("-c", SCOPE, PYTHONPATH=str(source))
    assert "it is missing, or was built for another torch or Python (cannot import name '_extension'" in unbuilt.stderr
    disabled = environment.run("-c", SCOPE, PYTHONPATH=str(source), GPURELEASE_DISABLE="1")
    assert disabled.returncode == 0, disabled.stderr
    assert disabled.stdout.splitlines() == ["imported", "nothing done: GPURELEASE_DISABLE is set", "0 open"]
    done = run_command_of(unbuilt)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_released(environment.run("-c", SCOPE, PYTHONPATH=str(source)))


def test_an_installed_extension_that_does_not_load_says_the_command_that_mends_it(tmp_path, source):
    environment = Environment(tmp_path / "venv", with_torch=True)
    installed = environment.pip_install(str(source))
    assert installed.returncode == 0, installed.stderr
    assert_released(environment.run("-c", SCOPE))
    # One that was compiled against another torch asks for functions that this one does not have.
    code = "int of_another_torch(void); int PyInit__extension(void) { return of_another_torch(); }"
    [built] = (tmp_path / "venv").glob("lib/python*/site-packages/gpurelease/_extension.*.so")
    compiler = sysconfig.get_config_var("CC").split()[0]
    built.unlink()
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", str(built)], input=code, text=True, check=True, timeout=60
    )
    broken = environment.run("-c", SCOPE)
    assert "undefined symbol: of_another_torch" in broken.stderr
    done = run_command_of(broken)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_released(environment.run("-c", SCOPE))


def test_another_torch_than_it_was_built_for_is_one_clear_error():
    code = (
        "import sys, types; built = types.ModuleType('gpurelease._extension'); built.built_for = '2.9.1+cu128'\n"
        "sys.modules['gpurelease._extension'] = built\n"
    )
    done = subprocess.run([sys.executable, "-c", code + SCOPE], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert f"gpurelease was built for torch 2.9.1+cu128, and this is torch {torch.__version__}. " in done.stderr
    assert f" -m pip install --no-deps --no-build-isolation --editable {ROOT}" in command_of(done)


def assert_released(done: subprocess.CompletedProcess[str]) -> None:
    """Check that :data:`SCOPE` released the world."""
    assert done.returncode == 0, done.stderr
    first, report, last = done.stdout.splitlines()
    assert (first, last) == ("imported", "0 open")
    assert report.startswith("released 1 process group in "), report


def command_of(done: subprocess.CompletedProcess[str]) -> str:
    """Check that :data:`SCOPE` was refused in one sentence, with nothing left open, and return the command in it."""
    assert done.returncode != 0
    assert done.stdout.splitlines() == ["imported", "0 open"]
    last = done.stderr.splitlines()[-1].removeprefix("[rank0]: ")
    assert last.startswith("gpurelease.errors.NotBuilt: gpurelease"), done.stderr
    return re.search(r"Build it (?:again|for this one): (.*)$", last).group(1)


def run_command_of(done: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    """Run the command that the error tells, as it stands."""
    return subprocess.run(command_of(done), shell=True, cwd="/", capture_output=True, text=True, timeout=400)
