"""A cache that the examples share: what takes them seconds to make is made once in a session."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for XDG_CACHE_HOME; the user's own is neither read nor written."""
    return tmp_path_factory.mktemp("cache")
