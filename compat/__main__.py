"""``python -m fsshard.compat train.py``: runs a FairScale script, unmodified, on maintained engines."""

from __future__ import annotations

import os
import runpy
import sys
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Any

from fsshard.launching.children.sitecustomize import redirected

from . import redirect, report
from .not_served import FRONT

USAGE = "usage: python -m fsshard.compat [--report] (SCRIPT | -m MODULE) [ARGUMENT ...]"
HELP = f"""{USAGE}
       torchrun [...] -m fsshard.compat [--report] (SCRIPT | -m MODULE) [ARGUMENT ...]

Run a script as python does, where every `import fairscale`, in the script, in the libraries that it imports and in the
processes that it starts, gives fsshard's implementation of it.

  SCRIPT     a Python file
  -m MODULE  a module or package, as of python -m
  --report   at exit, print what was used of FairScale, what served it, and what to write instead (to stderr)
  -h, --help print this"""


def main(arguments: list[str]) -> None:
    """Run what ``arguments`` say, in this process, as ``__main__``."""
    reports = False
    left = list(arguments)
    while left and left[0] == "--report":
        reports = bool(left.pop(0))
    if left and left[0] in ("-h", "--help"):
        print(HELP)
        return
    # Options end at the script or module: what follows is the script's own.
    is_module = left[:1] == ["-m"]
    target, *rest = left[is_module:] or [""]
    if not target:
        _fail(f"{'-m needs the name of a module' if is_module else 'no script'}\n{USAGE}")
    if not is_module and target.startswith("-"):
        _fail(f"unknown option {target!r}\n{USAGE}")
    if not is_module and not os.path.isfile(target):
        _fail(f"can't open file {os.path.abspath(target)!r}: no such file or directory")
    if reports:
        report.begin()
    redirect.install_serving(redirected() or FRONT)
    (_run_module if is_module else _run_script)(target, rest)


def _fail(message: str) -> None:
    print(f"fsshard.compat: {message}", file=sys.stderr)
    sys.exit(2)


def _fresh_main() -> ModuleType:
    """Make a new ``__main__``."""
    # runpy.run_path would put the old one back at the end, under threads and exit handlers.
    module = ModuleType("__main__")
    vars(module).update(__builtins__=sys.modules["builtins"], __annotations__={})
    sys.modules["__main__"] = module
    return module


def _run_script(path: str, arguments: list[str]) -> None:
    sys.argv[:] = [path, *arguments]
    # From Python 3.11 on python -P and PYTHONSAFEPATH leave that folder out.
    if not getattr(sys.flags, "safe_path", False):
        # python -m has put the working directory there.
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    where = os.path.abspath(path)
    loader: Any = SourceFileLoader("__main__", where)
    module = _fresh_main()
    vars(module).update(__file__=where, __loader__=loader, __cached__=None)
    # A script leaves no .pyc.
    exec(compile(loader.get_data(where), where, "exec", dont_inherit=True), vars(module))


def _run_module(name: str, arguments: list[str]) -> None:
    # What python -m itself runs. The public runpy.run_module takes the new __main__ away at the end.
    sys.argv[:] = ["-m", *arguments]
    _fresh_main()
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]


if __name__ == "__main__":
    main(sys.argv[1:])
