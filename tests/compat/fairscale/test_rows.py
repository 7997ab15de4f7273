"""The table of FairScale's faults: every row is shown by a test, and docs/data/fairscale-faults.md has it."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.compat.fairscale.rows import PAGE, PART, ROWS, table
from tests.parity.page import part_of

ROOT = Path(__file__).resolve().parents[3]


def marks_in(path: Path) -> list[int]:
    """The rows that a test file's marks name; parametrised or not, each once."""
    calls = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    marks = [call for call in calls if ast.unparse(call.func).endswith("mark.fairscale_row")]
    return [ast.literal_eval(argument) for mark in marks for argument in mark.args]


def test_the_rows_are_all_there() -> None:
    assert list(ROWS) == list(range(1, 44))
    for row in ROWS.values():
        assert "|" not in row.fault + row.here and len(row.fault) < 100


def test_every_row_is_shown_by_a_test() -> None:
    shown = {number for path in (ROOT / "tests").rglob("test_*.py") for number in marks_in(path)}
    assert sorted(shown) == sorted(ROWS)


def test_the_page_has_the_table() -> None:
    assert part_of(PAGE.read_text(encoding="utf-8"), PART) == table(), "make rows"
