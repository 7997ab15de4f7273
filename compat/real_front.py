"""The modules of :mod:`fsshard.compat.fairscale` with the real library's values: the same tree, the same names.

Each module that the front has is made anew, empty, and gets from the real module of that name what the front's lists
in ``__all__``. OSS and ShardedDataParallel are :mod:`fsshard.compat.real_classes`. The names keep their place: the
redirect, pickles and children find ``fsshard.compat.fairscale.optim.oss`` as ever.

What is wrong with the real library stays wrong, apart from those two classes; docs/fairscale.md numbers the faults:

====================================  ================================================================================
mended                                1, 2, 3, 4, 5, 8, 9, 19, 27; evaluation mode
wrong still: OSS                      6, 7, 15, 17, 20, 21, 23, 24, 25, 26, 28, 34
wrong still: ShardedDataParallel      10, 26, 33; ``reduce_fp16`` is refused
wrong still: checkpoint_wrapper       11, 12, 22, 26, 31
wrong still: gradient scalers         16, 18, 32
wrong still: AdaScale                 13, 14, 30
wrong still: FlattenParamsWrapper     29
does not run on the CPU               FullyShardedDataParallel (KeyError 'all_gather')
====================================  ================================================================================
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from .not_served import FRONT, _names, missing_from, place_of
from .real import load_real

__all__ = ["install"]

_NOTHING = object()


def install() -> None:
    """Serve every module of the front that is imported from here on by the real library."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not name.startswith(FRONT + ".") or name.rpartition(".")[2].startswith("_"):
            return None
        ours = PathFinder.find_spec(name, path)
        names = None if ours is None else _names(ours, name)
        if ours is None or names is None:
            return None
        folders = ours.submodule_search_locations
        spec = ModuleSpec(name, _FromReal(names), origin=ours.origin, is_package=folders is not None)
        if folders is not None:
            spec.submodule_search_locations = list(folders)
        return spec


class _FromReal(Loader):
    """Fills a module with the real one's values."""

    def __init__(self, names: list[str]) -> None:
        self.names = names

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        place = place_of(module.__name__)
        library = load_real(place)
        parts = [library, *_parts(module)]  # before the names: fairscale.nn.wrap is a function in the end
        values = {name: _value(name, parts) for name in self.names}
        found = {name: value for name, value in values.items() if value is not _NOTHING}
        vars(module).update(found)
        vars(module).update(
            __doc__=f"``{place}`` of the real FairScale.",
            __all__=sorted(found),
            __getattr__=missing_from(module.__name__),
        )


def _parts(module: ModuleType) -> list[ModuleType]:
    """The modules right below a package, all imported."""
    parts = []
    for found in pkgutil.iter_modules(getattr(module, "__path__", [])):
        if not found.name.startswith("_"):
            try:
                parts.append(importlib.import_module(f"{module.__name__}.{found.name}"))
            except ModuleNotFoundError as error:  # the front may have more than the real library, or hold a place
                if not (error.name or "").endswith(f"{place_of(module.__name__)}.{found.name}"):
                    raise
    return parts


def _value(name: str, parts: list[ModuleType]) -> Any:
    """From the module of that name; or from below it, where the front has the name in two places."""
    for part in parts:
        if name in vars(part):
            return _mended(name, vars(part)[name])
    return _NOTHING


def _mended(name: str, value: Any) -> Any:
    if name in ("OSS", "ShardedDataParallel"):
        from . import real_classes

        return getattr(real_classes, name)
    return value
