"""Numbers and tables as text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import Any


def printable(text: str, keep: str = "") -> str:
    """Spell what a terminal must not obey in somebody else's text: control characters, changes of direction.

    They are spelled as Python does (``\\x1b``), but for those in ``keep``.
    """
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() or each in keep else each.encode("unicode_escape").decode() for each in text
    )


SCALES = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def unit_of(nbytes: float) -> tuple[str, int]:
    """Return the unit in which a size is shown, and its bytes."""
    return next((pair for pair in SCALES if nbytes >= pair[1]), ("B", 1))


def size(nbytes: float) -> str:
    """Return a size as text, such as ``1.50 MiB``."""
    unit, scale = unit_of(nbytes)
    return f"{nbytes:.0f} B" if scale == 1 else f"{nbytes / scale:.2f} {unit}"


def duration(seconds: float) -> str:
    """Return a time as text, such as ``1.50 ms``."""
    unit, scale = next((pair for pair in (("s", 1.0), ("ms", 1e-3)) if seconds >= pair[1]), ("us", 1e-6))
    return f"{seconds / scale:.3g} {unit}"


def ratio(value: float, bound: float) -> str:
    """Return ``1.25``, or a dash where there is nothing to divide by."""
    return f"{value / bound:.2f}" if bound else "-"


def aligned(rows: Sequence[Sequence[str]], columns: str = "") -> list[str]:
    """Return the rows, equally long ones, with their columns below each other.

    ``columns`` has ``<`` or ``>`` for each, left or right; ``<`` is meant for those that it does not reach.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = columns.ljust(len(widths), "<")
    shown = [[f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)] for row in rows]
    return ["  ".join(cells).rstrip() for cells in shown]


def wrapped(lines: Iterable[str]) -> list[str]:
    """Break the lines at 120 columns, names left whole."""
    options: dict[str, Any] = {"subsequent_indent": "  ", "break_long_words": False, "break_on_hyphens": False}
    return [part for line in lines for part in textwrap.wrap(line, 120, **options)]
