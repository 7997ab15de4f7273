"""Some of the planted changes and equal pairs, each time; all of them by ``make planted``.

Tests fsshard/parity/scripts/gradient_norms.py, fsshard/parity/scripts/facts.py and
fsshard/parity/scripts/copies.py too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.parity.scripts.planted import CHANGES, EQUAL, Change, compared, row


@pytest.mark.parametrize("change", CHANGES[::12], ids=lambda one: one[0])
def test_a_change_is_found_and_named(tmp_path: Path, change: Change) -> None:
    what, cause, old, new = change
    found = compared(tmp_path, old, new)
    assert not found.ok and row(what, cause, found)[1], str(found)


@pytest.mark.parametrize("pair", EQUAL[4::5], ids=lambda one: one[0])
def test_an_equal_pair_is_called_the_same(tmp_path: Path, pair: Any) -> None:
    found = compared(tmp_path, *pair[1:])
    assert found.ok and not found.causes, str(found)
