"""A page of recorded results in parts: each command writes its own between two comments, and leaves the others."""

from __future__ import annotations

from pathlib import Path


def part_of(text: str, name: str) -> str | None:
    """The part of a page's text; None where it has no such part."""
    begin, end = _comments(name)
    return text.partition(begin)[2].partition(end)[0].strip("\n") if begin in text else None


def with_part(text: str, name: str, made: str) -> str:
    """A page's text with another content of one part; a part that it has not is added at its end."""
    begin, end = _comments(name)
    block = f"{begin}\n\n{made.strip()}\n\n{end}"
    if part_of(text, name) is None:
        return f"{text.rstrip()}\n\n{block}\n".lstrip()
    return text.partition(begin)[0] + block + text.partition(end)[2]


def write_part(page: Path, name: str, made: str) -> None:
    """:func:`with_part` of a file, which need not exist."""
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    page.write_text(with_part(text, name, made), encoding="utf-8")


def _comments(name: str) -> tuple[str, str]:
    return f"<!-- recorded: {name} -->", f"<!-- end of recorded: {name} -->"
