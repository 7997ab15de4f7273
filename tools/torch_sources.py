"""Reads a file of torch's part by part, whatever its comments and its formatting.

A part is a function, a method, a module's variable, or what a class has beside its methods. Files are read and not
imported: what is replaced while a program runs, by us or by others, is still torch's here.

A digest is of the syntax tree without what changes nothing: comments, blank lines, docstrings, brackets, quotes,
trailing commas, types of arguments, results and variables, and overloads. Only fields of the tree that hold something
count, so it is the same under each Python: their trees differ in fields that torch leaves empty.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_UNCOUNTED = frozenset({"annotation", "ctx", "kind", "returns", "type_comment"})
_BLOCKS = ("body", "orelse", "handlers", "finalbody")


def digest_of(text: str) -> str:
    """Ten hexadecimal digits of a text's SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:10]


@dataclass(frozen=True)
class Part:
    """The text under one name of a file.

    Attributes:
        name: qualified within the file: ``"function"``, ``"Class.method"``, ``"Class"``.
        digest: ten hexadecimal digits that change with what is said.
        lines: where to read it: ``"12-20, 31"``.
        mentioned: all names and strings in it, its own name included.
    """

    name: str
    digest: str
    lines: str
    mentioned: frozenset[str]


def parts_of(path: Path) -> dict[str, Part]:
    """Everything that a file of Python says; nothing where there is no such file."""
    return _parts(path.read_text(encoding="utf-8")) if path.is_file() else {}


@functools.lru_cache(maxsize=256)
def _parts(text: str) -> dict[str, Part]:
    found: dict[str, list[ast.stmt]] = {}
    _collect(ast.parse(text).body, "", found)
    return {name: _part(name, found[name]) for name in sorted(found)}


def _part(name: str, nodes: list[ast.stmt]) -> Part:
    """One part of all places that define its name: a property can have a setter, an ``if`` another branch."""
    mentioned = frozenset(one for node in nodes for inner in ast.walk(node) for one in _names(inner))
    return Part(name, digest_of("\n".join(map(_form, nodes))), _lines(nodes), mentioned)


def _lines(nodes: list[ast.stmt]) -> str:
    merged: list[list[int]] = []
    for first, last in sorted(span for node in nodes for span in _spans(node)):
        if merged and first <= merged[-1][1] + 1:
            merged[-1][1] = max(last, merged[-1][1])
        else:
            merged.append([first, last])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in merged)


def _collect(body: list[ast.stmt], prefix: str, found: dict[str, list[ast.stmt]]) -> list[ast.stmt]:
    """Note what is defined, inside of ``if`` and ``try`` too.

    Returns:
        the other statements.
    """
    rest: list[ast.stmt] = []
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if not _is_overload(node):
                found.setdefault(prefix + node.name, []).append(node)
        elif isinstance(node, ast.ClassDef):
            found.setdefault(prefix + node.name, []).append(_without_methods(node, prefix, found))
        elif inner := list(_inside(node)):
            rest += _collect(inner, prefix, found)
        else:
            for name in _variables(node) if not prefix else ():
                found.setdefault(name, []).append(node)
            rest.append(node)
    return rest


def _is_overload(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether it is for type checkers alone."""
    return any(isinstance(one, ast.Name) and one.id == "overload" for one in node.decorator_list)


def _without_methods(node: ast.ClassDef, prefix: str, found: dict[str, list[ast.stmt]]) -> ast.ClassDef:
    """A class with what is left of it once its methods are noted as parts of their own."""
    rest = _collect(node.body, f"{prefix}{node.name}.", found)
    left = ast.ClassDef(
        name=node.name, bases=node.bases, keywords=node.keywords, body=rest, decorator_list=node.decorator_list
    )
    return ast.copy_location(left, node)


def _inside(node: ast.AST) -> Iterator[ast.stmt]:
    if isinstance(node, (ast.If, ast.Try, ast.With, ast.ExceptHandler)):
        for block in _BLOCKS:
            for inner in getattr(node, block, ()):
                yield from _inside(inner) if isinstance(inner, ast.ExceptHandler) else (inner,)


def _variables(node: ast.stmt) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _spans(node: ast.stmt) -> Iterator[tuple[int, int]]:
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(one.lineno for one in decorators)])
    if isinstance(node, ast.ClassDef):
        yield first, node.lineno
        for inner in node.body:
            yield from () if _is_text(inner) else _spans(inner)
    else:
        yield first, node.end_lineno or node.lineno


def _names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name


# ------------------------------------------------------------------------------------------------ the form of a tree


def _form(node: object) -> str:
    """A tree as text, without what does not count."""
    if isinstance(node, ast.AST):
        return f"{type(node).__name__}({','.join(_fields(node))})"
    if isinstance(node, list):
        return f"[{','.join(_form(one) for one in node if not _is_text(one))}]"
    return repr(node)


def _fields(node: ast.AST) -> Iterator[str]:
    for name, value in ast.iter_fields(node):
        empty = value == [] or (value is None and not isinstance(node, ast.Constant))
        if isinstance(node, ast.JoinedStr):  # Python 3.12.1 puts empty strings between the values of an f-string
            value = [one for one in node.values if not (isinstance(one, ast.Constant) and one.value == "")]
        if not (name in _UNCOUNTED or empty):
            yield f"{name}={_form(value)}"


def _is_text(node: object) -> bool:
    """Return whether a statement is a string and nothing else: a docstring, or a comment as one."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
