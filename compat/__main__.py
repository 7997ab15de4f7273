"""``python -m fsshard.compat train.py``: runs a FairScale script, unmodified, on maintained engines."""

from __future__ import annotations

import os
import runpy
import sys
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Any

from . import redirect, report
from .children.sitecustomize import inherited
from .not_served import FRONT

USAGE = "usage: python -m fsshard.compat [--report] (SCRIPT | -m MODULE) [ARGUMENT ...]"
HELP = f"""{USAGE}
       torchrun [...] -m fsshard.compat [--report] (SCRIPT | -m MODULE) [ARGUMENT ...]

Run a script as python does, where every `import fairscale`, in the script, in the libraries that it imports and in the
processes that it starts, gives fsshard's implementation of it.

  SCRIPT     a Python file, or a folder or zip file with a __main__.py
  -m MODULE  a module or package, as of python -m
  --report   at exit, print what was used of FairScale, what served it, and what to write instead (to stderr)
  -h, --help print this"""


def main(arguments: list[str]) -> None:
    """Run what ``arguments`` say, in this process, as ``__main__``."""
    options, is_module, target, rest = _parse(arguments)
    if not is_module and not os.path.exists(target):
        _fail(f"can't open file {os.path.abspath(target)!r}: no such file or directory")
    if "--report" in options:
        report.begin()
    redirect.install_serving(inherited() or FRONT)
    run = _run_module if is_module else _run_script if os.path.isfile(target) and _is_python(target) else _run_folder
    run(target, rest)


def _parse(arguments: list[str]) -> tuple[set[str], bool, str, list[str]]:
    """Options end at the script or module: what follows is the script's own."""
    options: set[str] = set()
    left = list(arguments)
    while left and left[0].startswith("-"):
        option = left.pop(0)
        if option in ("-h", "--help"):
            print(HELP)
            sys.exit(0)
        elif option == "--report":
            options.add(option)
        elif option == "-m":
            if not left:
                _fail(f"-m needs the name of a module\n{USAGE}")
            return options, True, left[0], left[1:]
        else:
            _fail(f"unknown option {option!r}\n{USAGE}")
    if not left:
        _fail(f"no script\n{USAGE}")
    return options, False, left[0], left[1:]


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


def _is_python(path: str) -> bool:
    with open(path, "rb") as file:
        return not file.read(2).startswith(b"PK")  # a zip file, whatever its name


def _run_script(path: str, arguments: list[str]) -> None:
    sys.argv[:] = [path, *arguments]
    _set_first_path(os.path.dirname(os.path.realpath(path)))
    where = os.path.abspath(path)
    loader: Any = SourceFileLoader("__main__", where)
    module = _fresh_main()
    vars(module).update(__file__=where, __loader__=loader, __cached__=None)
    exec(compile(loader.get_data(where), where, "exec", dont_inherit=True), vars(module))  # a script leaves no .pyc


def _run_module(name: str, arguments: list[str]) -> None:
    # What python -m itself runs. The public runpy.run_module takes the new __main__ away at the end.
    sys.argv[:] = ["-m", *arguments]
    _fresh_main()
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]


def _run_folder(path: str, arguments: list[str]) -> None:
    sys.argv[:] = [path, *arguments]
    _set_first_path(os.path.abspath(path), always=True)
    _fresh_main()
    runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]


def _set_first_path(folder: str, always: bool = False) -> None:
    """Put the script's folder where ``python -m`` has put the working directory."""
    if not getattr(sys.flags, "safe_path", False):  # Python 3.11: python -P, PYTHONSAFEPATH
        sys.path[0] = folder
    elif always:
        sys.path.insert(0, folder)


if __name__ == "__main__":
    main(sys.argv[1:])
