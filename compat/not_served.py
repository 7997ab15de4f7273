"""The error for a FairScale name that is not served: the same text however it was imported.

A module of the front ends with ``__getattr__ = missing_from(__name__)``, so that an import of a name that it does not
have fails with the list of those that there are and not with a bare "cannot import name". The redirect gives every
module that it serves the same. Nothing here needs torch.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType
from typing import NoReturn

from .equivalents import equivalents
from .errors import NotServed
from .front import FRONT, falls_through, served_lines

__all__ = [
    "Refusing",
    "explain",
    "is_probe",
    "missing_from",
    "place_of",
    "refuse",
]

_IMPORT_FROM = dis.opmap["IMPORT_FROM"]


def explain(name: str, front: str = FRONT) -> str:
    """Why a name cannot be had, what to use instead, and what can be had.

    Args:
        name: the full name in FairScale: ``"fairscale.nn.Pipe"``.
        front: the package that serves FairScale's names.
    """
    from . import fall_through  # not at the top: it puts a finder in place

    lines = [f"{name} is not served: fairscale is {front} here (fsshard.compat)"]
    way_back = "  to use the real FairScale: run the script without fsshard.compat"
    if falls_through(name):
        lines = [f"{name} is left to the real FairScale, which is not installed; run: pip install fairscale==0.4.13"]
        way_back = ""
        if fall_through.is_installed():  # nobody redirects: the front was imported by its own name
            lines = [f"{name} is left to the real FairScale; import it from there"]
            if any(getattr(finder, "redirects", False) for finder in sys.meta_path):
                lines = [f"{name} is left to the real FairScale, which is installed and does not have it"]
    found = equivalents(name)
    own = name.rpartition(".")[2] in found
    lines += [f"  instead{'' if own else f' of {each}'}: {instead.advice}" for each, instead in found.items()]
    lines += ["  served:", *served_lines(front)]
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


def refuse(name: str, front: str, caller: FrameType) -> NoReturn:
    """Raise for an attribute that a module does not have: :class:`NotServed` to who imports, else an AttributeError.

    ``hasattr``, ``getattr`` with a default and ``pickle.whichmodule`` must see an AttributeError. The statement
    ``from module import name`` would swallow it and its text, and say "cannot import name" in its place.
    """
    if name.rpartition(".")[2].startswith("__"):  # what Python and its tools look for; no name of FairScale's
        raise AttributeError(f"module {name.rpartition('.')[0]!r} has no attribute {name.rpartition('.')[2]!r}")
    if caller.f_lasti >= 0 and caller.f_code.co_code[caller.f_lasti] == _IMPORT_FROM:
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
