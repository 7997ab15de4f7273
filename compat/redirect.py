"""``import fairscale`` means fsshard's own package: :func:`install`, in this process and in those that it starts.

A module has two names then and is one object: ``fairscale.optim.oss`` is ``fsshard.compat.fairscale.optim.oss``. What
the package does not have fails when it is imported, and says what there is. The real FairScale never answers in its
stead: a script that is half on each of them would be silently wrong. Its model_parallel, moe and pipe are the
exception, which have no counterpart here and work on plain tensors.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from fsshard.launching.children import FOLDER, python_path
from fsshard.launching.children.sitecustomize import PATCHED, REDIRECT, TRACE, distributions

from . import fall_through, report
from .errors import NotServed, RedirectError
from .not_served import FRONT, explain


def install() -> None:
    """Let every later ``import fairscale`` give :mod:`fsshard.compat.fairscale`; see also ``python -m fsshard.compat``.

    In this process and in all Python processes below it (:mod:`fsshard.launching.children`). Once is enough; again does
    nothing.

    Raises:
        RedirectError: FairScale is imported already.
    """
    install_serving(FRONT)


def install_serving(served: str) -> None:
    """Do as :func:`install`, for another package than fsshard's own: what a child process inherits."""
    if active() is not None:
        return
    _check_that_it_is_early()
    sys.meta_path[:] = [finder for finder in sys.meta_path if getattr(finder, "served", None) is None]
    sys.meta_path.insert(0, Redirect(served))
    os.environ[REDIRECT] = f"{served}@{sys.prefix}"
    _set_python_path(FOLDER, *python_path())


def uninstall() -> None:
    """Undo :func:`install`: the next ``import fairscale`` gives the real library. What exists stays what it is."""
    redirect = active()
    if redirect is None:
        return
    sys.meta_path.remove(redirect)
    # A fork server that runs already keeps the redirect.
    os.environ.pop(REDIRECT, None)
    if TRACE not in os.environ:
        _set_python_path(*python_path())
    for name in _fairscale_modules():
        del sys.modules[name]


def active() -> Redirect | None:
    """Return the redirect of this process, if there is one."""
    return next((finder for finder in sys.meta_path if isinstance(finder, Redirect)), None)


def find_spec(name: str) -> ModuleSpec | None:
    """Return what the redirect of this process finds for a name."""
    redirect = active()
    if redirect is None:
        return None
    return redirect.find_spec(name)


class Redirect(MetaPathFinder):
    """Finds FairScale's names in the package ``served``."""

    redirects = True  # by which others on sys.meta_path can tell it

    def __init__(self, served: str) -> None:
        self.served = served

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if name == PATCHED:
            import fsshard.backends

            return fall_through.spec_with_real_imports(PathFinder.find_spec(name, fsshard.backends.__path__))
        if name != "fairscale" and not name.startswith("fairscale."):
            return None
        if fall_through.falls_through(name):
            return self._real(name)
        ours = self.served + name.removeprefix("fairscale")
        spec = importlib.util.find_spec(ours)
        if spec is None:
            raise NotServed(explain(name), name)
        if name == "fairscale":
            report.imported(name, self.served)
        package = spec.submodule_search_locations is not None
        return ModuleSpec(name, _AliasLoader(self, ours), origin=spec.origin, is_package=package)

    def _real(self, name: str) -> ModuleSpec | None:
        if not fall_through.is_installed():
            raise NotServed(explain(name), name)
        if name in fall_through.FALL_THROUGH:
            report.imported(name, "the real FairScale")
        # Packages themselves are not looked for: that would import what lies above them.
        elif importlib.util.find_spec(fall_through.HERE + name) is None:
            return None
        return ModuleSpec(name, _AliasLoader(self, fall_through.HERE + name))

    def find_distributions(self, context: Any = None) -> Iterator[Any]:
        return distributions(context)

    def adopt(self) -> None:
        """Give every module of ours that is loaded FairScale's name as well."""
        # Not only the one that was asked for: importing a module sets it as an attribute of its parent, which would put
        # the package fairscale.nn.wrap where the function of that name is. What sys.modules has is not set again.
        for ours, module in list(sys.modules.items()):
            if ours == self.served or ours.startswith(self.served + "."):
                sys.modules.setdefault("fairscale" + ours.removeprefix(self.served), module)


class _AliasLoader(Loader):
    """A module under a second name."""

    def __init__(self, redirect: Redirect, ours: str) -> None:
        self.redirect = redirect
        self.ours = ours
        self.spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self.ours)
        self.spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # importlib has put that of the second name there.
        module.__spec__ = self.spec
        self.redirect.adopt()


def _set_python_path(*paths: str) -> None:
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    if not paths:
        del os.environ["PYTHONPATH"]


def _fairscale_modules() -> list[str]:
    return sorted(name for name in sys.modules if name == "fairscale" or name.startswith("fairscale."))


def _check_that_it_is_early() -> None:
    loaded = _fairscale_modules()
    if loaded:
        where = getattr(sys.modules[loaded[0]], "__file__", None) or "a place unknown"
        raise RedirectError(
            f"install() comes too late: {loaded[0]} is already imported, from {where}, and stays the real one; call "
            "install() before the first import of fairscale, or run: python -m fsshard.compat script.py"
        )
