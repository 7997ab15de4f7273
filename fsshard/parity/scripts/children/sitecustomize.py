"""Code that a traced process runs before anything else; imports the standard library only.

Launchers and loaders of data pay for nothing: the recorder is imported by the first forward that may be differentiated.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any

MARK = "FSSHARD_TRACE"  # in the environment of the command: what to record, as JSON


class Waiting(MetaPathFinder):
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
            sys.meta_path.insert(0, self)  # whoever asks may only want to know whether there is a torch
        if spec is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                sys.meta_path.remove(self)
                wait_for_training(self.settings)

            spec.loader.exec_module = exec_module
        return spec  # type: ignore[no-any-return]


def wait_for_training(settings: dict[str, Any]) -> None:
    """Start the recorder with the first forward of a module that may be differentiated."""
    import torch
    from torch.nn.modules.module import register_module_forward_pre_hook

    def begin(module: Any, arguments: Any) -> None:
        if torch.compiler.is_compiling() or torch.jit.is_tracing() or not torch.is_grad_enabled():
            return
        handle.remove()
        from fsshard.parity.scripts.recorder import Recorder, Settings

        recorder = Recorder(settings.pop("folder"), Settings(**settings))
        recorder.start()
        recorder.forward_begins(module, arguments)  # its own hooks come too late for this one

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
    _settings = json.loads(os.environ.get(MARK, "{}"))
    if _settings.pop("prefix", None) == sys.prefix:  # another Python has no fsshard, or another one
        sys.meta_path.insert(0, Waiting(_settings))
    _run_the_next_sitecustomize()
