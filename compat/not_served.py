"""The error for a FairScale name that is not served: the same text however it was imported.

A module of the front ends with ``__getattr__ = missing_from(__name__)``, so that an import of a name that it does not
have fails with the list of those that there are and not with a bare "cannot import name". Nothing here needs torch.
"""

from __future__ import annotations

import dis
import importlib
import sys
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from .equivalents import equivalents
from .errors import NotServed
from .front import EXPORTS, FRONT, SERVED, falls_through

__all__ = ["explain", "missing_from"]

_IMPORT_FROM = dis.opmap["IMPORT_FROM"]


def explain(name: str) -> str:
    """Return why a name cannot be had, what to use instead, and what can be had.

    Args:
        name: the full name in FairScale: ``"fairscale.nn.Pipe"``.
    """
    from . import fall_through  # not at the top: it puts a finder in place

    way_back = []
    if not falls_through(name):
        lines = [f"{name} is not served: fairscale is {FRONT} here (fsshard.compat)"]
        way_back = ["  to use the real FairScale: run the script without fsshard.compat"]
    elif fall_through.is_installed():  # nobody redirects: the front was imported by its own name
        lines = [f"{name} is left to the real FairScale; import it from there"]
    else:
        lines = [f"{name} is left to the real FairScale, which is not installed; run: pip install fairscale==0.4.13"]
    found = equivalents(name)
    own = name.rpartition(".")[2] in found
    lines += [f"  instead{'' if own else f' of {each}'}: {instead.advice}" for each, instead in found.items()]
    served = [f"    {module}: {names}" for module, names in SERVED.items()]
    return "\n".join([*lines, "  served:", *served, *way_back])


def missing_from(module: str, front: str = FRONT) -> Callable[[str], object]:
    """Return the ``__getattr__`` of a module of the front, which gives what is left to the real FairScale or raises."""
    place = "fairscale" + module.removeprefix(front)

    def __getattr__(name: str) -> object:
        from . import fall_through

        whole = f"{place}.{name}"
        if falls_through(whole) and _is_redirected() and fall_through.is_installed():
            package = importlib.import_module(EXPORTS.get(whole, whole))
            return getattr(package, name) if whole in EXPORTS else package
        _refuse(whole, sys._getframe(1))

    return __getattr__


def _is_redirected() -> bool:
    return any(getattr(finder, "redirects", False) for finder in sys.meta_path)


def _refuse(name: str, caller: FrameType) -> NoReturn:
    """Raise for an attribute that a module does not have: :class:`NotServed` to who imports, else an AttributeError."""
    if name.rpartition(".")[2].startswith("__"):  # what Python and its tools look for; no name of FairScale's
        raise AttributeError(f"module {name.rpartition('.')[0]!r} has no attribute {name.rpartition('.')[2]!r}")
    # hasattr, getattr with a default and pickle.whichmodule must see an AttributeError. The statement `from module
    # import name` would swallow it and its text, and say "cannot import name" in its place.
    if caller.f_lasti >= 0 and caller.f_code.co_code[caller.f_lasti] == _IMPORT_FROM:
        raise NotServed(explain(name), name)
    raise AttributeError(explain(name))
