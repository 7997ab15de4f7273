"""Trainers of other libraries, as they are: recorded without a line of ours, they train what a loop by hand does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fsshard.parity.scripts.command import run
from fsshard.parity.scripts.comparing import compare_scripts
from tests.parity.scripts import fronts


@pytest.fixture(scope="module")
def by_hand(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("fronts"), "by-hand")


def record(folder: Path, name: str) -> Path:
    assert run([sys.executable, str(fronts.__file__), name], folder / name) == 0
    return folder / name


@pytest.mark.long
@pytest.mark.parametrize("name", ["lightning", "transformers", "accelerate", "ours"])
def test_trainers_of_other_libraries(by_hand: Path, tmp_path: Path, name: str) -> None:
    found = compare_scripts(by_hand, record(tmp_path, name))
    assert (found.verdict, found.renamed, found.steps) == ("exact", {}, [0, 1, 2, 3]), str(found)
