"""Numbers and tables as text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

__all__ = ["aligned", "printable", "ratio", "size", "wrapped"]

WIDTH = 120


def printable(text: str, keep: str = "") -> str:
    """Spell what a terminal must not obey in somebody else's text: control characters, changes of direction.

    Args:
        text: a name out of a file, say.
        keep: control characters that are wanted, such as ``"\\n"``; the others are spelled as Python does (``\\x1b``).
    """
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() or each in keep else each.encode("unicode_escape").decode() for each in text
    )


def size(nbytes: float) -> str:
    """Return a size as text, such as ``1.50 MiB``."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.2f} {unit}"
    return f"{nbytes:.0f} B"


def ratio(value: float, bound: float) -> str:
    """Return ``1.25``, or a dash where there is nothing to divide by."""
    return f"{value / bound:.2f}" if bound else "-"


def aligned(rows: Sequence[Sequence[str]], columns: str = "") -> list[str]:
    """Return the rows with their columns below each other.

    Args:
        rows: equally long ones.
        columns: ``<`` or ``>`` for each column, left or right; ``<`` for those that it does not reach.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = columns.ljust(len(widths), "<")
    shown = [[f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)] for row in rows]
    return ["  ".join(cells).rstrip() for cells in shown]


def wrapped(lines: Iterable[str]) -> list[str]:
    """Break the lines at :data:`WIDTH` columns, names left whole."""
    found: list[str] = []
    for line in lines:
        found += textwrap.wrap(line, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return found
