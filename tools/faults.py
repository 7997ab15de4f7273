"""Writes docs/data/faults.md from tools/faults.toml, which also names the tests that show each fault.

python -m tools.faults
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tomllib

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "data" / "faults.md"

HEAD = """# Faults of the raw engines

`python -m tools.faults` writes this page from `tools/faults.toml`, which names the tests that show each fault in the
raw library, where that is safe, and its absence here. Seen on the CPU over gloo with torch 2.13, unless another version
is named. *Silently* means a wrong result without an error or warning. FairScale has
[its own page](fairscale-faults.md).
"""


def faults() -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each engine: fault, what happens here, tests."""
    text = (ROOT / "tools" / "faults.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def page() -> str:
    """Return the page's text."""
    parts = [HEAD]
    for engine, rows in faults().items():
        lines = [f"## {engine.replace('-', ' ')}", "", "| | fault | here |", "|---|---|---|"]
        for number, row in enumerate(rows, 1):
            lines.append(f"| {number} | {row['fault']} | {row['here']} |")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
