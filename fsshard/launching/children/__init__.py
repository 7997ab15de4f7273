"""How is each Python process that a command starts reached? By this folder on PYTHONPATH.

Python runs the ``sitecustomize`` of that folder in each fresh interpreter: ``multiprocessing`` by spawn or by a fork
server, ``subprocess``, torchrun started from a script, loky. So ``fsshard trace`` records ranks that somebody else
starts, and a child of a process under fsshard.compat's redirect does not import the real FairScale unnoticed. A forked
child has what its parent has.

A child that is started with ``-E`` or ``-I``, or with an environment of its own, has none of this, and nothing warns.
Among those of ``multiprocessing`` these are two: it hands ``-E`` and ``-I`` on where the script itself has them, and a
fork server that ran before the redirect has the environment of that time.
"""

import os
from pathlib import Path

FOLDER = str(Path(__file__).absolute().parent)


def python_path() -> list[str]:
    """Return the entries of PYTHONPATH without this folder."""
    text = os.environ.get("PYTHONPATH", "")
    # An empty text has no entries: an empty one would be the working directory.
    if not text:
        return []
    paths = text.split(os.pathsep)
    return [path for path in paths if path != FOLDER]
