"""Fixtures that all tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """The pool of ranks; its processes start with the first test that runs something on them."""
    pool = RankPool()
    yield pool
    pool.close()
