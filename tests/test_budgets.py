"""The library does not grow unnoticed: upper bounds that are only ever lowered.

Whoever makes something smaller lowers its number here. Whoever must raise one says in the commit what it is for.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from fsshard.backends.base import Backend
from fsshard.torch_private.registry import everything

ROOT = Path(__file__).parents[1]
ADVICE = "make it smaller, or raise the bound and say in the commit why"

LINES = {
    "fsshard + compat": 50_573,
    "fsshard/backends": 4_350,
    "fsshard/checkpoint": 5_170,
    "fsshard/parity": 5_188,
    "fsshard/sharded": 4_915,
    "fsshard/comm + fsshard/launching": 3_148,
    "fsshard/simulation": 3_695,
    "fsshard/model": 2_587,
    "fsshard/oss": 1_927,
    "fsshard/torch_private": 1_632,
    "fsshard/complex_params": 1_620,
    "compat": 7_874,
    "tests": 54_135,
}
"""Folders -> lines of their Python files, docstrings and comments included."""
PRIVATE_NAMES = 127
CONTRACT = 26
FLOORS = 10
"""Lines of the layers of imports in pyproject.toml."""
"""Public members of Backend."""


def lines_below(*folders: str) -> int:
    """Count the lines of all Python files below folders of the project."""
    files = [
        file
        for folder in folders
        for file in (ROOT / folder).rglob("*.py")
        if ROOT / "fsshard/compat" not in file.parents
    ]
    return sum(len(file.read_text("utf-8").splitlines()) for file in files)


@pytest.mark.parametrize("folders", LINES)
def test_lines(folders: str) -> None:
    count = lines_below(*folders.split(" + "))
    assert count <= LINES[folders], f"{folders} has {count} lines, at most {LINES[folders]} are allowed: {ADVICE}"


def test_private_names_of_torch() -> None:
    count = len(everything())
    assert count <= PRIVATE_NAMES, f"{count} private names of torch, at most {PRIVATE_NAMES} are allowed: {ADVICE}"


def test_members_of_the_contract_of_backends() -> None:
    members = [name for name, _ in inspect.getmembers(Backend) if not name.startswith("_")]
    told = f"Backend has {len(members)} members, at most {CONTRACT} are allowed: {ADVICE}\n{members}"
    assert len(members) <= CONTRACT, told


def test_floors_of_imports() -> None:
    (layers,) = re.findall(
        r"^layers = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text("utf-8"), re.DOTALL | re.MULTILINE
    )
    floors = layers.strip().splitlines()
    assert len(floors) <= FLOORS, f"{len(floors)} floors of imports, at most {FLOORS} are allowed: {ADVICE}"
