"""Which of FairScale's names the front serves, and which are left to the real FairScale. Imports nothing of it."""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
import pkgutil
import tokenize
from collections.abc import Iterator
from typing import Any

__all__ = ["EXPORTS", "FALL_THROUGH", "FRONT", "falls_through", "served_lines"]

FRONT = "fsshard.compat.fairscale"
FALL_THROUGH = ("fairscale.nn.model_parallel", "fairscale.nn.moe", "fairscale.nn.pipe")
# Where fairscale.nn has a name from a package that falls through.
EXPORTS = {
    "fairscale.nn.MOELayer": "fairscale.nn.moe",
    "fairscale.nn.Pipe": "fairscale.nn.pipe",
    "fairscale.nn.PipeRPCWrapper": "fairscale.nn.pipe",
    "fairscale.nn.Top2Gate": "fairscale.nn.moe",
}


def falls_through(name: str) -> bool:
    """Whether the redirect leaves a module, or a name that FairScale exports from one, to the real FairScale."""
    name = EXPORTS.get(name, name)
    return any(name == each or name.startswith(each + ".") for each in FALL_THROUGH)


@functools.cache  # pickle.whichmodule asks all modules for a name
def served_lines(front: str) -> tuple[str, ...]:
    """A line for each module of a front. They are read and not imported: that would bring whatever they import."""
    spec = importlib.util.find_spec(front)
    if spec is None:
        return ()
    root = _names(spec, front)
    lines = [] if root is None else [("fairscale", root)]
    lines += _below(list(spec.submodule_search_locations or []), "fairscale.")
    return tuple(f"    {module}: {', '.join(names)}" if names else f"    {module}" for module, names in sorted(lines))


def _below(folders: list[str], prefix: str) -> Iterator[tuple[str, list[str]]]:
    for found in pkgutil.iter_modules(folders):
        if found.name.startswith("_"):
            continue
        finder: Any = found.module_finder
        names = _names(finder.find_spec(found.name), found.name)
        if names is None:
            continue
        yield prefix + found.name, names
        if found.ispkg:
            yield from _below([os.path.join(folder, found.name) for folder in folders], f"{prefix}{found.name}.")


def _names(spec: Any, module: str) -> list[str] | None:
    """The public names of a module; None for one that only holds a place, and raises when it is imported."""
    body = ast.parse(_source(spec, module)).body
    if any(isinstance(node, ast.Raise) for node in body):
        return None
    found: list[str] = []
    for node in body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return sorted(ast.literal_eval(node.value))
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            found.append(node.name)
        elif isinstance(node, ast.ImportFrom) and node.module != "__future__":
            found += [alias.asname or alias.name for alias in node.names]
    return sorted(name for name in found if not name.startswith("_"))


def _source(spec: Any, module: str) -> str:
    if hasattr(spec.loader, "get_source"):
        return spec.loader.get_source(module) or ""
    with tokenize.open(spec.origin) as file:  # pytest's loader, which rewrites asserts, has no get_source
        return file.read()
