"""Who imports whom among modules of fsshard and compat: everywhere in a file, functions and type checking included."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path


@functools.cache
def parsed(text: str) -> ast.Module:
    """Parse a source; many tests ask for the same."""
    return ast.parse(text)


@dataclass(frozen=True)
class Import:
    """One name that one module takes from another; ``name`` is "" for the module itself."""

    module: str
    line: int
    target: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}:{self.line} -> {self.target}{f':{self.name}' if self.name else ''}"


def sources(root: Path) -> dict[str, str]:
    """Dotted name -> text of each module; a package ends with ".__init__", as its file."""
    found = {}
    for room in ("fsshard", "compat"):
        for path in sorted((root / room).rglob("*.py")):
            dotted = ".".join(path.relative_to(root).with_suffix("").parts)
            found[dotted if room == "fsshard" else f"fsshard.{dotted}"] = path.read_text()
    return found


def imports(texts: Mapping[str, str]) -> list[Import]:
    """All imports among the modules of ``texts``."""
    known = {name.removesuffix(".__init__"): name for name in texts}
    found = []
    for module, text in texts.items():
        for line, base, name in _all_named(module, text):
            whole = f"{base}.{name}" if name else base
            if whole in known:
                found.append(Import(module, line, known[whole], ""))
            elif base in known:
                found.append(Import(module, line, known[base], name))
    return [one for one in found if one.module != one.target]


@functools.cache
def _all_named(module: str, text: str) -> list[tuple[int, str, str]]:
    """Return the names in a module's import statements, each with its line; several tests ask."""
    statements = (node for node in ast.walk(parsed(text)) if isinstance(node, (ast.Import, ast.ImportFrom)))
    return [(node.lineno, base, name) for node in statements for base, name in _named(node, module)]


def _named(node: ast.AST, module: str) -> Iterator[tuple[str, str]]:
    """The modules that an import statement names, each with the name that it takes from there."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield alias.name, ""
    elif isinstance(node, ast.ImportFrom):
        above = module.split(".")[: -node.level] if node.level else []
        base = ".".join([*above, *([node.module] if node.module else [])])
        for alias in node.names:
            yield base, alias.name


def room_of(module: str) -> str:
    """The room of ``fsshard.room.more``; "" for the package itself, whose names are those of all rooms."""
    parts = module.split(".")
    return "" if parts == ["fsshard", "__init__"] else "cli" if parts[1] == "__main__" else parts[1]


def package_of(module: str) -> str:
    """The package that a module lies in; a package's ``__init__`` lies in the package."""
    return module.rpartition(".")[0]


def circles(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other, by Tarjan's algorithm for strongly connected components."""
    number = {}
    lowest = {}
    open_ = []
    found = []

    def visit(node: str) -> None:
        number[node] = lowest[node] = len(number)
        open_.append(node)
        for other in sorted(edges.get(node, ())):
            if other not in number:
                visit(other)
                lowest[node] = min(lowest[node], lowest[other])
            elif other in open_:
                lowest[node] = min(lowest[node], number[other])
        if lowest[node] == number[node]:
            index = open_.index(node)
            if len(open_) > index + 1:
                found.append(sorted(open_[index:]))
            del open_[index:]

    for node in sorted(edges):
        if node not in number:
            visit(node)
    return found


def private_attributes(texts: Mapping[str, str], allowed: set[str]) -> list[str]:
    """Uses of attributes with an underscore that only classes of other packages have."""
    trees = {module: parsed(text) for module, text in texts.items()}
    owners = {}
    for module, tree in trees.items():
        for name in _own_attributes(tree) - allowed:
            owners.setdefault(name, set()).add(package_of(module))
    return [
        f"{module}:{node.lineno} {ast.unparse(node)}: of {', '.join(sorted(owners[node.attr]))}"
        for module, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and package_of(module) not in owners.get(node.attr, {package_of(module)})
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    ]


def _own_attributes(tree: ast.Module) -> set[str]:
    """Attributes with one leading underscore that classes in a module define or set on ``self``."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for part in node.body:
                if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    found.add(part.name)
                elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                    found.add(part.target.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr} if isinstance(node.value, ast.Name) and node.value.id == "self" else set()
    return {name for name in found if name.startswith("_") and not name.startswith("__")}


def unused_overrides(texts: Mapping[str, str], allowed: set[str]) -> list[str]:
    """Methods with one leading underscore, of subclasses of classes in ``texts``, whose name is looked up nowhere."""
    nodes = {module: list(ast.walk(parsed(text))) for module, text in texts.items()}
    everything = [node for found in nodes.values() for node in found]
    used = allowed | {node.attr for node in everything if isinstance(node, ast.Attribute)}
    used |= {node.value for node in everything if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    ours = {node.name for node in everything if isinstance(node, ast.ClassDef)}
    return [
        f"{module}:{part.lineno} {node.name}.{part.name}"
        for module, found in nodes.items()
        for node in found
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base).rpartition(".")[2] in ours for base in node.bases)
        for part in node.body
        if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef))
        and (part.name.startswith("_") and not part.name.startswith("__") and part.name not in used)
    ]
