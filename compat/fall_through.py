"""The parts that the redirect leaves to the real FairScale, under names of their own so that the two never mix.

That is model_parallel, moe and pipe, which the front does not have, and what backend="fairscale" imports. Below this
module lies the real library, where it is installed: ``fsshard.compat.fall_through.fairscale.optim.oss`` is its
``fairscale.optim.oss``. Its modules import ``fairscale...`` from each other, also while they run; inside of them such
an import means the real library too. So nothing is moved in and out of ``sys.modules``, which other threads see.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

FALL_THROUGH = ("fairscale.nn.model_parallel", "fairscale.nn.moe", "fairscale.nn.pipe")
# Where fairscale.nn has a name from a package that falls through.
EXPORTS = {
    "fairscale.nn.MOELayer": "fairscale.nn.moe",
    "fairscale.nn.Pipe": "fairscale.nn.pipe",
    "fairscale.nn.PipeRPCWrapper": "fairscale.nn.pipe",
    "fairscale.nn.Top2Gate": "fairscale.nn.moe",
}

# It is a package for the import system: its one submodule comes from the finder below.
__path__: list[str] = []
# Before the name of a real module: where it lies next to the redirect.
HERE = __name__ + "."


def falls_through(name: str) -> bool:
    """Return whether a module, or a name that FairScale exports from one, is left to the real FairScale."""
    name = EXPORTS.get(name, name)
    return any(name == each or name.startswith(each + ".") for each in FALL_THROUGH)


def is_installed() -> bool:
    """Return whether the real FairScale could be imported."""
    return HERE + "fairscale" in sys.modules or _find_root() is not None


def _find_root() -> ModuleSpec | None:
    """Find FairScale's own spec. importlib.util.find_spec would answer from sys.modules and from the redirect."""
    for finder in sys.meta_path:
        if getattr(finder, "served", None) is None and hasattr(finder, "find_spec"):
            spec = finder.find_spec("fairscale", None)
            if spec is not None and spec.origin is not None:
                return spec
    return None


def _import(
    name: str,
    globals: Mapping[str, object] | None = None,
    locals: Mapping[str, object] | None = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> ModuleType:
    """Import as ``__import__`` does, in the real library's modules."""
    if level or name.partition(".")[0] != "fairscale":
        return builtins.__import__(name, globals, locals, fromlist or (), level)
    if fromlist:
        return builtins.__import__(HERE + name, globals, locals, fromlist, 0)
    importlib.import_module(HERE + name)
    return sys.modules[HERE + "fairscale"]


_BUILTINS: dict[str, Any] = {**vars(builtins), "__import__": _import}


class _RealLoader(SourceFileLoader):
    """Runs a module whose ``import fairscale`` means the real library."""

    def exec_module(self, module: ModuleType) -> None:
        # The interpreter takes __import__ from here.
        vars(module)["__builtins__"] = _BUILTINS
        public = self.name.removeprefix(HERE)
        code = self.get_code(self.name)
        assert code is not None
        if public == self.name or not falls_through(public):
            exec(code, vars(module))
            return
        # Scripts know this module by its public name alone: classes pickle by that, as they do without the redirect.
        module.__name__ = public
        sys.modules[public] = module
        try:
            exec(code, vars(module))
        except BaseException:
            sys.modules.pop(public, None)
            raise


def spec_with_real_imports(spec: ModuleSpec | None) -> ModuleSpec | None:
    """Let ``import fairscale`` mean the real library in the module that a spec is of."""
    if spec is not None and isinstance(spec.loader, SourceFileLoader):
        spec.loader = _RealLoader(spec.loader.name, str(spec.loader.path))
    return spec


class _RealFinder(MetaPathFinder):
    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if not name.startswith(HERE):
            return None
        if name != HERE + "fairscale":
            return spec_with_real_imports(PathFinder.find_spec(name, path))
        root = _find_root()
        if root is None:
            raise ModuleNotFoundError(
                "the real FairScale is needed here, and is not installed; run: pip install fairscale==0.4.13",
                name="fairscale",  # fsshard.backends.fairscale looks at this
            )
        folders = root.submodule_search_locations
        return spec_with_real_imports(
            importlib.util.spec_from_file_location(name, root.origin, submodule_search_locations=folders)
        )


# A child that unpickles a class of the real library imports this module first.
if not any(type(finder).__qualname__ == _RealFinder.__qualname__ for finder in sys.meta_path):
    sys.meta_path.insert(0, _RealFinder())
