"""Tests of the libraries that we stand in front of, from a checkout of theirs, with ours put in."""

from __future__ import annotations

import ast
import importlib
import os
from pathlib import Path

import tests


def find_theirs() -> None:
    """Let the package ``tests`` of a checkout, whose modules import each other by that name, be found within ours."""
    tests.__path__.insert(0, str(Path(os.environ["FSSHARD_JUDGED_CHECKOUT"], "tests")))


def stand_in(library: str, folder: str) -> None:
    """Give modules the names that tests of another version import, and that are gone, as None: so only tests fail
    that use them.

    Args:
        library: the tests of which.
        folder: of the checkout, where they are.
    """
    for path in Path(os.environ["FSSHARD_JUDGED_CHECKOUT"], folder).glob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == library:
                _complete(str(node.module), [each.name for each in node.names])


def _complete(module: str, names: list[str]) -> None:
    try:
        found = importlib.import_module(module)
    except ImportError:
        return
    for name in names:
        if not hasattr(found, name):
            setattr(found, name, None)
