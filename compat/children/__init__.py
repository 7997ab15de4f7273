"""The redirect in processes that a redirected process starts.

An import hook lives in one process. A child that starts a fresh interpreter would import the real FairScale, and
nothing would say so. Two ways lead into children:

* ``multiprocessing`` (spawn, and the server of forkserver, which imports the script before it forks its first child)
  starts them with ``python -c``; the hook is put in front of that code, and so is there before anything is unpickled.
* Any other Python below (Lightning re-runs the script with ``subprocess``, torchrun started from the script, loky) gets
  it from the environment: ``PYTHONPATH`` begins with this folder, whose ``sitecustomize`` Python runs when it starts.

A forked child has its parent's hook. A child that is started with ``-E`` or ``-I``, or with an environment of its own,
by other means than multiprocessing, has none of this.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from .sitecustomize import MARK, arm_multiprocessing, disarm_multiprocessing, inherited

__all__ = ["MARK", "arm", "disarm", "inherited"]

FOLDER = str(Path(__file__).parent.absolute())


def arm(served: str) -> None:
    """Let all later children, and theirs, serve FairScale's names from the package ``served``."""
    os.environ[MARK] = f"{served}@{sys.prefix}"
    paths = _python_path()
    if FOLDER not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([FOLDER, *paths])
    arm_multiprocessing(served)


def disarm() -> None:
    """Undo :func:`arm` for later children. A fork server that runs already keeps the redirect."""
    os.environ.pop(MARK, None)
    paths = [path for path in _python_path() if path != FOLDER]
    if paths:
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    else:
        os.environ.pop("PYTHONPATH", None)
    disarm_multiprocessing()


def _python_path() -> list[str]:
    text = os.environ.get("PYTHONPATH", "")
    return text.split(os.pathsep) if text else []  # an empty entry would be the working directory
