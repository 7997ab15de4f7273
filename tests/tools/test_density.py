"""Counts of code: what is a line of code, and how many nodes it has."""

from __future__ import annotations

from pathlib import Path

from tools.density import HEAD, density_of

CODE = '''"""A file.

Of two lines.
"""

# Why it is so.
x = [y for y in (1, 2)]  # a comment behind code


def f(a):
    """Do it."""
    return 1 if a else 2
'''


def test_counts(tmp_path: Path) -> None:
    file = tmp_path / "f.py"
    file.write_text(CODE)
    found = density_of([file, file])
    assert (found.lines, found.code, found.comments) == (24, 6, 2)
    assert (found.comprehensions, found.conditionals) == (2, 2)
    assert found.per_hundred(found.comments) == 100 / 3
    assert found.nodes_per_line == found.nodes / 6 > 5


def test_a_row_has_a_cell_for_each_head(tmp_path: Path) -> None:
    file = tmp_path / "f.py"
    file.write_text("x = 1\n")
    row = density_of([file]).row("some code")
    assert row.count("|") == HEAD.count("|") and row.startswith("| some code | 1 | 1 |")
