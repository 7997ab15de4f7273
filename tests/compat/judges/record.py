"""Shared by the plugins that put ours into another library's tests: what becomes of each, as lines of JSON."""

from __future__ import annotations

import ast
import functools
import importlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

import tests

ENGINE = os.environ.get("FSSHARD_JUDGED", "theirs")


class Record:
    """Writes to the file that ``FSSHARD_JUDGED_RECORD`` names. What processes do that a test forks is the test's."""

    def __init__(self) -> None:
        self._failed: str | None = None

    @property
    def _used(self) -> Path:
        """Is there where the test that runs has made what is judged."""
        return Path(os.environ["FSSHARD_JUDGED_RECORD"] + ".used")

    def watch(self, owner: Any, name: str) -> None:
        """Note from now on that a test has called this, and that it returned."""
        own = getattr(owner, name)

        @functools.wraps(own)
        def noted(*args: Any, **given: Any) -> Any:
            found = own(*args, **given)
            self._used.touch()
            return found

        setattr(owner, name, noted)

    def note(self, name: str, report: Any, call: Any) -> None:
        """Note a phase of a test; after its last one, the line is written."""
        if report.when == "setup":
            self._failed = None
            self._used.unlink(missing_ok=True)
        if report.failed and self._failed is None:
            self._failed = f"{call.excinfo.typename}: {call.excinfo.value}"
        if report.when == "call" or (report.when == "setup" and not report.passed):
            self._outcome = "skipped" if report.skipped else "passed"
        if report.when != "teardown":
            return
        line = {
            "test": name,
            "outcome": "failed" if self._failed is not None else self._outcome,
            "used": self._used.exists(),
            "why": (self._failed or "")[-2000:],
        }
        with Path(os.environ["FSSHARD_JUDGED_RECORD"]).open("a") as file:
            file.write(json.dumps(line) + "\n")


RECORD = Record()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Any:
    """One line per test."""
    outcome = yield
    RECORD.note(item.nodeid, outcome.get_result(), call)


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
