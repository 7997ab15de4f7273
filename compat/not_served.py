"""What happens to a name of FairScale that is not served: one text, by whichever way it was asked for.

A module of the front ends with ``__getattr__ = missing_from(__name__)``, so that an import of a name that it does not
have fails with the list of those that there are and not with a bare "cannot import name". The redirect gives every
module that it serves the same. Nothing here needs torch.
"""

from __future__ import annotations

import ast
import dis
import functools
import importlib.util
import os
import pkgutil
import sys
import tokenize
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType
from typing import Any, NoReturn

from .equivalents import equivalents
from .errors import NotServed

__all__ = [
    "EXPORTS",
    "FALL_THROUGH",
    "FRONT",
    "Refusing",
    "explain",
    "falls_through",
    "is_probe",
    "missing_from",
    "place_of",
    "refuse",
]

FRONT = "fsshard.compat.fairscale"
FALL_THROUGH = ("fairscale.nn.model_parallel", "fairscale.nn.moe", "fairscale.nn.pipe")
# Where fairscale.nn has a name from a package that falls through.
EXPORTS = {
    "fairscale.nn.MOELayer": "fairscale.nn.moe",
    "fairscale.nn.Pipe": "fairscale.nn.pipe",
    "fairscale.nn.PipeRPCWrapper": "fairscale.nn.pipe",
    "fairscale.nn.Top2Gate": "fairscale.nn.moe",
}
_IMPORT_FROM = dis.opmap["IMPORT_FROM"]


def falls_through(name: str) -> bool:
    """Whether the redirect leaves a module, or a name that FairScale exports from one, to the real FairScale."""
    name = EXPORTS.get(name, name)
    return any(name == each or name.startswith(each + ".") for each in FALL_THROUGH)


def explain(name: str, front: str = FRONT) -> str:
    """Why a name cannot be had, what to use instead, and what can be had.

    Args:
        name: the full name in FairScale: ``"fairscale.nn.Pipe"``.
        front: the package that serves FairScale's names.
    """
    from . import real, redirect  # not at the top: they import this module, and one puts a finder on sys.meta_path

    lines = [f"{name} is not served: fairscale is {front} here (fsshard.compat)"]
    way_back = "  the real FairScale's, where it is installed: fsshard.compat.load_real(...)"
    if falls_through(name):
        lines = [f"{name} is left to the real FairScale, which is not installed; run: pip install fairscale==0.4.13"]
        way_back = ""
        if real.is_installed():  # nobody redirects: the front was imported by its own name
            lines = [f"{name} is left to the real FairScale; import it from there"]
            if redirect.active() is not None:
                lines = [f"{name} is left to the real FairScale, which is installed and does not have it"]
    found = equivalents(name)
    own = name.rpartition(".")[2] in found
    lines += [f"  instead{'' if own else f' of {each}'}: {instead.advice}" for each, instead in found.items()]
    lines += ["  served:", *_served(front)]
    return "\n".join([*lines, way_back] if way_back else lines)


def missing_from(module: str) -> Callable[[str], NoReturn]:
    """Give the ``__getattr__`` of a module of the front."""
    place = place_of(module)

    def __getattr__(name: str) -> NoReturn:
        refuse(f"{place}.{name}", FRONT, sys._getframe(1))

    return __getattr__


def place_of(module: str, front: str = FRONT) -> str:
    """The name in FairScale of a module of the front."""
    return "fairscale" + module.removeprefix(front)


def refuse(name: str, front: str, asking: FrameType) -> NoReturn:
    """Raise for an attribute that a module does not have: :class:`NotServed` to who imports, else an AttributeError.

    ``hasattr``, ``getattr`` with a default and ``pickle.whichmodule`` must see an AttributeError. The statement
    ``from module import name`` would swallow it and its text, and say "cannot import name" in its place.
    """
    if name.rpartition(".")[2].startswith("__"):  # what Python and its tools look for; no name of FairScale's
        raise AttributeError(f"module {name.rpartition('.')[0]!r} has no attribute {name.rpartition('.')[2]!r}")
    if asking.f_lasti >= 0 and asking.f_code.co_code[asking.f_lasti] == _IMPORT_FROM:
        raise NotServed(explain(name, front), name)
    raise AttributeError(explain(name, front))


class Refusing(MetaPathFinder):
    """Comes after the finders that look at files: a module of the front that none of them has found is not served.

    With this, ``import fsshard.compat.fairscale.experimental`` says what ``from fsshard.compat.fairscale import
    experimental`` says, and so do ``importlib.import_module`` and ``__import__`` with a list of names.
    """

    @classmethod
    def install(cls) -> None:
        """Once is enough."""
        if not any(isinstance(finder, cls) for finder in sys.meta_path):
            sys.meta_path.append(cls())

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.startswith(FRONT + ".") and not is_probe():
            # By the name that was looked for: ``__import__(package, fromlist=["x"])`` passes over that one, and gives
            # the package, which is what it is called for.
            raise NotServed(explain(place_of(name)), name)
        return None


def is_probe() -> bool:
    """Whether importlib.util.find_spec asks. The import statement asks finders in the same way, from another caller."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        frame = frame.f_back
    while frame is not None and frame.f_code.co_filename == "<frozen importlib._bootstrap>":
        if frame.f_code.co_name == "_find_and_load":
            return False
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") == "importlib.util"


# ------------------------------------------------------------------------------------------------ what is served


@functools.cache  # pickle.whichmodule asks all modules for a name
def _served(front: str) -> tuple[str, ...]:
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
