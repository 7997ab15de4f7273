"""Numbers and tables as text, and what is a number."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import TypeGuard


def printable(text: str, keep: str = "") -> str:
    """Spell what a terminal must not obey in somebody else's text: control characters, changes of direction.

    They are spelled as Python does (``\\x1b``), but for those in ``keep``.
    """
    if text.isprintable():
        return text
    spelled = []
    for character in text:
        if character.isprintable() or character in keep:
            spelled.append(character)
        else:
            spelled.append(character.encode("unicode_escape").decode())
    return "".join(spelled)


def is_count(value: object, least: int = 1) -> TypeGuard[int]:
    """Return whether an argument is a whole number from ``least`` on; True is none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


# Units of sizes and their bytes, the largest first.
SCALES = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}


def unit_of(nbytes: float) -> tuple[str, int]:
    """Return the unit in which a size is shown, and its bytes."""
    for unit, scale in SCALES.items():
        if nbytes >= scale:
            return unit, scale
    return "B", 1


def size(nbytes: float) -> str:
    """Return a size as text, such as ``1.50 MiB``."""
    unit, scale = unit_of(nbytes)
    if scale == 1:
        return f"{nbytes:.0f} B"
    return f"{nbytes / scale:.2f} {unit}"


def duration(seconds: float) -> str:
    """Return a time as text, such as ``1.50 ms``."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    if seconds >= 1e-3:
        return f"{seconds / 1e-3:.3g} ms"
    return f"{seconds / 1e-6:.3g} us"


def counted(number: int, word: str) -> str:
    """Return ``1 rank``, or ``2 ranks``."""
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def ratio(value: float, bound: float) -> str:
    """Return ``1.25``, or a dash where there is nothing to divide by."""
    return f"{value / bound:.2f}" if bound else "-"


def aligned(rows: Sequence[Sequence[str]], columns: str = "") -> list[str]:
    """Return the rows, equally long ones, with their columns below each other.

    ``columns`` has ``<`` or ``>`` for each, left or right; ``<`` is meant for those that it does not reach.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = columns.ljust(len(widths), "<")
    lines = []
    for row in rows:
        cells = []
        for cell, side, width in zip(row, sides, widths, strict=True):
            cells.append(f"{cell:{side}{width}}")
        lines.append("  ".join(cells).rstrip())
    return lines


def wrapped(lines: Iterable[str]) -> list[str]:
    """Break the lines at 120 columns, names left whole."""
    wrapper = textwrap.TextWrapper(
        120,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    broken = []
    for line in lines:
        broken += wrapper.wrap(line)
    return broken
