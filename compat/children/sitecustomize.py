"""Code that a child process runs before anything else; imports the standard library only.

fsshard imports torch, which costs seconds, and a child need not use FairScale at all. So this only waits for the first
import of it. Python imports this file as ``sitecustomize`` where the folder is on ``PYTHONPATH``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from types import ModuleType
from typing import Any

MARK = "FSSHARD_REDIRECT"  # in the environment: package@sys.prefix
REDIRECT = "fsshard.compat.redirect"  # by name: in the parent that one imports this, in a child nothing has yet
# It means the real FairScale; the redirect sees to that, so it must be there before this module is loaded.
PATCHED = "fsshard.backends.fairscale_patched"


def inherited() -> str | None:
    """Return the package that the parent's redirect serves, where this is the parent's Python environment."""
    served, _, prefix = os.environ.get(MARK, "").partition("@")
    return served if served and prefix == sys.prefix else None


class Waiting(MetaPathFinder):
    """Puts the redirect in its own place at the first import of FairScale."""

    def __init__(self, served: str) -> None:
        self.served = served

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != PATCHED and name.partition(".")[0] != "fairscale":
            return None
        redirect: Any = import_module(REDIRECT)
        redirect.install_serving(self.served)  # takes this object off sys.meta_path
        found: ModuleSpec | None = redirect.find_spec(name)
        return found

    def find_distributions(self, context: Any = None) -> Iterator[Any]:
        return distributions(context)


def distributions(context: Any = None) -> Iterator[Any]:
    """Yield FairScale's distribution, installed or not: libraries ask :mod:`importlib.metadata` for the release."""
    name = getattr(context, "name", None)
    if name is not None and name.lower() != "fairscale":
        return
    from importlib.metadata import Distribution
    from pathlib import Path

    class Served(Distribution):
        def read_text(self, filename: str) -> str | None:
            texts = {
                "METADATA": "Metadata-Version: 2.1\nName: fairscale\nVersion: 0.4.13\n",
                "top_level.txt": "fairscale\n",
            }
            return texts.get(filename)

        def locate_file(self, path: str | os.PathLike[str]) -> Path:
            return Path(__file__).absolute().parent.parent / path

    yield Served()


def _run_the_next_sitecustomize() -> None:
    """Run the environment's own, if it has one: Python runs one only, and this file stands before it."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != here]
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None:
        return
    sys.modules["sitecustomize"] = module = module_from_spec(spec)
    spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    if (_served := inherited()) is not None:
        sys.meta_path.insert(0, Waiting(_served))
    _run_the_next_sitecustomize()
