"""Arrows that import-linter cannot see: fsshard.compat lies in a folder of its own."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LONGEST = 80


def imported(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


@pytest.mark.parametrize("path", sorted((ROOT / "fsshard").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_the_library_does_not_know_its_front_doors(path: Path) -> None:
    assert not {name for name in imported(path) if name.startswith(("fsshard.compat", "compat", "examples", "tests"))}


@pytest.mark.parametrize("path", sorted((ROOT / "fsshard").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_functions_are_short(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            lines = (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0
            assert lines <= LONGEST, f"{node.name}: {lines} lines"


def test_backend_names_are_asked_for_nowhere_else() -> None:
    """All differences between engines are behind the backend's methods."""
    for path in (ROOT / "fsshard").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare):
                texts = [ast.unparse(side) for side in (node.left, *node.comparators)]
                assert not any(text.endswith("backend.name") for text in texts), f"{path.name}: {ast.unparse(node)}"
