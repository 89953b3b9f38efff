"""Fixtures that all tests share."""

from __future__ import annotations

import pytest

from gpurelease.scopes import Scopes


@pytest.fixture
def scopes(mocker):
    """This process's scopes, fresh and empty."""
    fresh = Scopes()
    mocker.patch("gpurelease.api.shared", return_value=fresh)
    return fresh
