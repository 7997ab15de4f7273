"""Collects what a page of the documentation has a reader copy. Needs Python alone, no package."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def blocks(page: Path, language: str) -> list[str]:
    """A page's blocks of code in one language; "" for those that name none."""
    found = re.findall(r"```(\w*)\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    return [code for named, code in found if named == language]


def training() -> str:
    """README's training."""
    (code,) = (block for block in blocks(ROOT / "README.md", "python") if "def train" in block)
    return code


def commands() -> list[str]:
    """README's commands of ``fsshard`` that need no file of the user's."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    given = [*re.findall(r"^(fsshard .*)$", text, re.MULTILINE), *re.findall(r"`(fsshard [^`\n]+)`", text)]
    code = (ROOT / "fsshard" / "recipes" / "__init__.py").read_text(encoding="utf-8")
    own = [*re.findall(r"^def ([a-z]\w*)", code, re.MULTILINE), "demo", "doctor"]
    return [command for command in given if not {*command.split()}.isdisjoint(own)]
