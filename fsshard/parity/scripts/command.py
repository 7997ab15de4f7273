"""Runs a command whose Python processes are recorded."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from fsshard.errors import ConfigurationError
from fsshard.launching.children import FOLDER, python_path
from fsshard.launching.children.sitecustomize import TRACE
from fsshard.parity.scripts.recorder import Settings, check_new


def run(
    command: Sequence[str],
    folder: str | Path,
    settings: Settings | None = None,
    *,
    repeat: int = 0,
) -> int:
    """Run ``command`` once, and ``repeat`` times more with other rounding; return the first exit code that is not 0.

    Whatever it starts is recorded: ranks of torchrun, of ``multiprocessing`` and of SLURM, if they are processes of
    this Python that inherit the environment.

    Args:
        command: a program and its arguments.
        folder: a new folder for the record.
        settings: what is recorded; None for everything.
        repeat: further runs, whose distance from the first one bounds what rounding may do.

    Raises:
        ConfigurationError: no such program, the folder holds a record, or a setting has no meaning.
    """
    folder, settings = Path(folder).absolute(), settings or Settings()
    if folder.is_file():
        raise ConfigurationError(f"expected a folder for the record, got the file {folder}; name another place")
    check_new(folder)
    if not command or shutil.which(command[0]) is None:
        raise ConfigurationError(
            f"expected a program and its arguments, got {' '.join(command)!r}; write, for example: fsshard trace "
            f"{folder.name} -- torchrun --nproc-per-node 2 train.py"
        )
    folder.mkdir(parents=True, exist_ok=True)
    draws = (replace(settings, tensors=0, draw=draw) for draw in range(1, repeat + 1))
    for place, kept in [(folder, settings), *((folder / f"repeat{draw.draw}", draw) for draw in draws)]:
        if code := _run(command, {**asdict(kept), "folder": str(place)}):
            return code
    return 0


def _run(command: Sequence[str], settings: dict[str, object]) -> int:
    path = os.pathsep.join([FOLDER, *python_path()])
    variables = {TRACE: json.dumps({**settings, "prefix": sys.prefix}), "PYTHONPATH": path}
    with subprocess.Popen(command, env={**os.environ, **variables}) as child:
        try:
            return child.wait()
        except BaseException:
            # It was interrupted or terminated: ranks end as they would have without us.
            child.terminate()
            raise
