"""The redirect in processes that a redirected process starts.

An import hook lives in one process. A child that starts a fresh interpreter (``multiprocessing`` by spawn or by a fork
server, ``subprocess``, torchrun started from the script, loky) would import the real FairScale, and nothing would say
so. Such a child gets the redirect from the environment: ``PYTHONPATH`` begins with this folder, whose ``sitecustomize``
Python runs when it starts. A forked child has its parent's hook.

A child that is started with ``-E`` or ``-I``, or with an environment of its own, has none of this, and nothing warns.
Among those of ``multiprocessing`` these are two: it hands ``-E`` and ``-I`` on where the script itself has them, and a
fork server that ran before the redirect has the environment of that time.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from .sitecustomize import MARK, inherited

__all__ = ["MARK", "arm", "disarm", "inherited"]

FOLDER = str(Path(__file__).parent.absolute())


def arm(served: str) -> None:
    """Let all later children, and theirs, serve FairScale's names from the package ``served``."""
    os.environ[MARK] = f"{served}@{sys.prefix}"
    paths = _python_path()
    if FOLDER not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([FOLDER, *paths])


def disarm() -> None:
    """Undo :func:`arm` for later children. A fork server that runs already keeps the redirect."""
    os.environ.pop(MARK, None)
    paths = [path for path in _python_path() if path != FOLDER]
    if paths:
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    else:
        os.environ.pop("PYTHONPATH", None)


def _python_path() -> list[str]:
    text = os.environ.get("PYTHONPATH", "")
    return text.split(os.pathsep) if text else []  # an empty entry would be the working directory
