"""Fixtures that build the double, and run ranks under it."""

from __future__ import annotations

import pytest

from tests.nccl.build import CannotBuild, build, double_ranks, preloaded


@pytest.fixture(scope="session")
def double(tmp_path_factory):
    """The built double, preloaded into every process that is started while a test uses it."""
    out = tmp_path_factory.mktemp("simgpu")
    try:
        build(out)
    except CannotBuild as why:
        pytest.skip(str(why))
    with preloaded(out):
        yield out


@pytest.fixture
def nccl_ranks(double, tmp_path):
    """``run_ranks`` under the double: see :func:`tests.nccl.build.double_ranks`."""
    with double_ranks(tmp_path.name, tmp_path) as run:
        yield run
