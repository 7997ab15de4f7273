"""Docstrings as the site shows them: an extension of griffe.

Docstrings are written for ``help()``: their references are those of Sphinx (``:func:`fsshard.wrap```), and pages are
named by their file (``docs/meshes.md``). Both become links, and so do torch's names. What is public has a docstring.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|func|meth|mod|attr|exc|data):`(~?)([\w.]+)`")
PAGE = re.compile(r"(?<![`\w/])docs/([\w/-]+)\.md")
TORCH = re.compile(r"``(torch(?:\.\w+)+)``")

REFERENCE = Path(__file__).resolve().parent.parent / "docs" / "reference"

log = griffe.get_logger("fsshard")


class Docstrings(griffe.Extension):
    """Rewrites each docstring when the whole package has been read, so that names can be looked up."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Of each object of the package."""
        _rewrite(pkg, set())
        for path in shown():
            for name in undocumented(pkg, path):
                log.warning("%s is public and has no docstring", name)


def shown() -> list[str]:
    """The names that the pages of the reference show."""
    pages = sorted(REFERENCE.glob("*.md"))
    return [name for page in pages for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)]


def undocumented(package: griffe.Module, path: str) -> list[str]:
    """Of a name and, if it is a class or a module, of its public functions and classes: those without a docstring."""
    found = package[path.removeprefix(f"{package.path}.")]
    here = found.final_target if found.is_alias else found
    own = [one for one in here.members.values() if not one.is_alias and (one.is_function or one.is_class)]
    public = [one for one in own if not one.name.startswith("_") and not here.is_function]
    return [one.path for one in (here, *public) if not one.has_docstring]


def _rewrite(owner: griffe.Object, seen: set[int]) -> None:
    if id(owner) in seen:
        return
    seen.add(id(owner))
    if owner.docstring is not None:
        owner.docstring.value = in_markdown(owner.docstring.value, owner)
    for member in owner.members.values():
        if not member.is_alias:
            _rewrite(member, seen)


def in_markdown(text: str, owner: griffe.Object) -> str:
    """A docstring of ``owner`` with links in place of references."""
    text = ROLE.sub(lambda role: _link(role[2], role[2].rpartition(".")[2] if role[1] else role[2], owner), text)
    text = TORCH.sub(lambda name: _link(name[1], name[1], owner), text)
    return PAGE.sub(r"[docs/\1.md](../\1.md)", text)


def _link(name: str, shown: str, owner: griffe.Object) -> str:
    """``optional``: a reference may lead to something that is on no page; it is shown as code then."""
    try:
        target = owner.resolve(name)
    except griffe.NameResolutionError:
        target = name
    return f'<autoref optional identifier="{target}"><code>{shown}</code></autoref>'
