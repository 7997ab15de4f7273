"""Code that a child process runs before anything else; imports the standard library only.

fsshard imports torch, which costs seconds, and a child need not train, or use FairScale, at all: launchers and loaders
of data pay for nothing. So this only waits for the first import of torch or of FairScale, as the environment asks.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any

TRACE = "FSSHARD_TRACE"  # in the environment: what to record, as JSON
REDIRECT = "FSSHARD_REDIRECT"  # in the environment: package@sys.prefix
# It means the real FairScale; the redirect sees to that, so it must be there before this module is loaded.
PATCHED = "fsshard.backends.fairscale_patched"


def redirected() -> str | None:
    """Return the package that the parent's redirect serves, where this is the parent's Python environment."""
    served, _, prefix = os.environ.get(REDIRECT, "").partition("@")
    return served if served and prefix == sys.prefix else None


class WaitingForFairScale(MetaPathFinder):
    """Puts the redirect in its own place at the first import of FairScale."""

    def __init__(self, served: str) -> None:
        self.served = served

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != PATCHED and name.partition(".")[0] != "fairscale":
            return None
        # By name: the redirect imports this file, and a child has imported neither yet.
        redirect: Any = import_module("fsshard.compat.redirect")
        # This takes the object off sys.meta_path.
        redirect.install_serving(self.served)
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
            spec: Any = find_spec("fsshard.compat")
            return Path(spec.origin).parent / path

    yield Served()


class WaitingForTorch(MetaPathFinder):
    """Waits for torch to be imported, and then for a training."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        try:
            spec: Any = find_spec(name)
        finally:
            # Whoever asks may only want to know whether there is a torch.
            sys.meta_path.insert(0, self)
        if spec is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                sys.meta_path.remove(self)
                _wait_for_training(self.settings)

            spec.loader.exec_module = exec_module
        return spec  # type: ignore[no-any-return]


def _wait_for_training(settings: dict[str, Any]) -> None:
    """Start the recorder with the first forward of a module that may be differentiated."""
    import torch
    from torch.nn.modules.module import register_module_forward_pre_hook

    def begin(module: Any, arguments: Any) -> None:
        if torch.compiler.is_compiling() or torch.jit.is_tracing() or not torch.is_grad_enabled():
            return
        handle.remove()
        recording = import_module("fsshard.parity.scripts.recorder")
        recorder = recording.Recorder(settings.pop("folder"), recording.Settings(**settings))
        recorder.start()
        # The recorder's own hooks come too late for this forward.
        recorder.forward_begins(module, arguments)

    handle = register_module_forward_pre_hook(begin)


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
    _settings = json.loads(os.environ.get(TRACE, "{}"))
    # Another Python has no fsshard, or another one.
    if _settings.pop("prefix", None) == sys.prefix:
        sys.meta_path.insert(0, WaitingForTorch(_settings))
    if (_served := redirected()) is not None:
        sys.meta_path.insert(0, WaitingForFairScale(_served))
    _run_the_next_sitecustomize()
