"""The table of FairScale's faults in docs/fairscale.md, made by the tests that show them.

    python -m pytest -m fairscale_row --fairscale-rows=docs/fairscale.md        # make rows

runs the tests and writes the table between two comments of the file. A run of all tests that are marked with
``fairscale_row``, alone or with others, fails where the page's table is not the one that it makes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.compat.fairscale.rows import ROWS

MARK = "fairscale_row"
PAGE = "docs/fairscale.md"
BEGIN, END = "<!-- fairscale rows: made by `make rows` -->", "<!-- end of fairscale rows -->"
HEAD = "| row | severity | in FairScale 0.4.13 on torch 2.13 | here | tests passed |\n|--:|---|---|---|--:|"


def table(passed: Mapping[int, int]) -> str:
    """The table.

    Args:
        passed: row -> how many of its tests have passed; a row that is not in here has 0.
    """
    lines = [
        f"| {number} | {row.severity} | {row.fault} | {row.here} | {passed.get(number, 0)} |"
        for number, row in ROWS.items()
    ]
    return "\n".join([HEAD, *lines])


def table_in(text: str) -> str | None:
    """The table that a file has between the comments; None where it has not these comments once each, in order."""
    before, begin, rest = text.partition(BEGIN)
    inner, end, after = rest.partition(END)
    return inner.strip("\n") if begin and end and BEGIN not in rest and END not in before + after else None


def with_table(text: str, made: str) -> str:
    """The text of a file with another table.

    Raises:
        ValueError: it has not the two comments, once each and in order.
    """
    if table_in(text) is None:
        raise ValueError(f"expected {BEGIN!r} and {END!r}, once each and in this order")
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{made}\n\n{END}{rest.partition(END)[2]}"


def marked_rows(item: pytest.Item) -> set[int]:
    """The rows that a test shows."""
    return {number for mark in item.iter_markers(MARK) for number in mark.args}


def pytest_addoption(parser: pytest.Parser) -> None:
    # To be given with "=": before this file is loaded, pytest takes a FILE that stands alone for a folder of tests.
    text = "write the table of FairScale's faults into FILE, between its two comments; relative to the root folder"
    parser.addoption(f"--{MARK.replace('_', '-')}s", metavar="FILE", default=None, help=text)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Collected(config), "fairscale rows of this session")


class _Collected:
    """What became of the marked tests of a session."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.file: str | None = config.getoption("fairscale_rows")
        self.rows: dict[str, set[int]] = {}
        self.files: set[Path] = set()
        self.left_out = any("::" in argument for argument in config.args)
        self.outcomes: dict[str, str] = {}
        self.said: str | None = None

    def pytest_deselected(self, items: Iterable[pytest.Item]) -> None:
        self.left_out = self.left_out or any(marked_rows(item) for item in items)
        self.files.update(item.path for item in items)  # was collected, all the same

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            rows = marked_rows(item)
            self.files.add(item.path)
            if rows:
                self.rows[item.nodeid] = rows
        unknown = {number for rows in self.rows.values() for number in rows} - set(ROWS)
        if unknown:
            raise pytest.UsageError(f"{MARK}: there is no row {', '.join(map(str, sorted(unknown)))}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        asked = report.nodeid in self.rows and (report.when == "call" or report.outcome != "passed")
        if asked and self.outcomes.get(report.nodeid, "passed") == "passed":
            self.outcomes[report.nodeid] = report.outcome

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.file is None and not self._is_whole():
            return
        page = self.config.rootpath / (self.file or PAGE)
        text, made = page.read_text(encoding="utf-8") if page.is_file() else "", table(self._passed())
        if self.file is None:
            if table_in(text) != made:
                self._fail(session, f"{page.name}: the table of FairScale's rows is not what this run makes; make rows")
        elif not self._is_whole():
            self._fail(session, f"{page.name} is left as it is: {self._what_lacks()}")
        else:
            try:
                page.write_text(with_table(text, made), encoding="utf-8")
                self.said = f"wrote {len(ROWS)} rows, {len(self.rows)} tests, into {page.name}"
            except ValueError as error:
                self._fail(session, f"{page}: {error}")

    def _fail(self, session: pytest.Session, why: str) -> None:
        self.said = why
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED

    def _is_whole(self) -> bool:
        return bool(self.rows) and not self._what_lacks()

    def _what_lacks(self) -> str:
        """Why this run says nothing of all rows; empty where it does."""
        if self.left_out or not set(files_with_marks(self.config)) <= self.files:
            return "not all of the marked tests were asked for"
        other = sorted(name for name in self.rows if self.outcomes.get(name) != "passed")
        return f"not all of the marked tests have passed: {', '.join(other)}" if other else ""

    def _passed(self) -> dict[int, int]:
        passed = [rows for name, rows in self.rows.items() if self.outcomes.get(name) == "passed"]
        return {number: sum(number in rows for rows in passed) for number in ROWS}

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.said is not None:
            terminalreporter.write_line(self.said)


def files_with_marks(config: pytest.Config) -> Iterator[Path]:
    """Test files that have the mark, or speak of it; found without importing them."""
    for folder in config.getini("testpaths"):
        for path in sorted((config.rootpath / folder).rglob("test_*.py")):
            if f"mark.{MARK}(" in path.read_text(encoding="utf-8"):
                yield path
