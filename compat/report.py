"""``python -m fsshard.compat --report``: notes what a run uses of FairScale, and prints it at the end.

The modules that serve FairScale's names call :func:`called`. Ranks are often children that end without a goodbye, so
every process of a reported run appends what is new to a file of its own; the one that was started with ``--report``
reads them all.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import sys
import tempfile
import textwrap
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from .not_served import steps

FOLDER = "FSSHARD_REPORT"  # in the environment of a reported run


class Note(NamedTuple):
    """``kind`` is ``"module"`` (``detail``: from where) or ``"call"`` (by which engine)."""

    kind: str
    name: str
    detail: str


_noted: set[Note] = set()


def called(call: str, engine: str) -> None:
    """Note that a script called something of FairScale. Only a look into the environment where no report is asked for.

    Args:
        call: the name in FairScale's tree, such as ``"fairscale.optim.oss.OSS"``.
        engine: what did the work, such as ``"DistributedDataParallel"``.
    """
    if FOLDER in os.environ:
        _note(Note("call", call, engine))


def imported(module: str, server: str) -> None:
    """Note that a module was imported, and from which library it came."""
    _note(Note("module", module, server))


def notes() -> list[Note]:
    """Return what this process has noted, and in a reported run all of its processes."""
    folder = os.environ.get(FOLDER)
    notes_of_run = set(_noted)
    if folder is not None:
        for path in Path(folder).glob("*.jsonl"):
            notes_of_run |= {Note(*json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()}
    return sorted(notes_of_run)


def _note(note: Note) -> None:
    if note in _noted:
        return
    _noted.add(note)
    folder = os.environ.get(FOLDER)
    # It is gone where the run that asked has ended, and this child has not.
    if folder is not None and os.path.isdir(folder):
        with open(os.path.join(folder, f"{os.getpid()}.jsonl"), "a", encoding="utf-8") as file:
            file.write(json.dumps(note) + "\n")


def begin() -> None:
    """Print a report at this process's exit, unless a process above it or another rank does."""
    rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0"
    if FOLDER in os.environ or rank != "0":
        return
    os.environ[FOLDER] = folder = tempfile.mkdtemp(prefix="fsshard-report-")
    atexit.register(_end, folder, os.getpid())


def _end(folder: str, process: int) -> None:
    if os.getpid() != process:  # a fork has its parent's exit handlers
        return
    lines = text(notes())
    os.environ.pop(FOLDER, None)
    shutil.rmtree(folder, ignore_errors=True)
    print(lines, file=sys.stderr, flush=True)


def text(notes_of_run: Iterable[Note]) -> str:
    """Write the report."""
    notes_of_run = sorted(notes_of_run)
    if not notes_of_run:
        return "fsshard.compat: this run used nothing of FairScale"
    lines = ["fsshard.compat: what this run used of FairScale"]
    for kind, title, verb in (("call", "called", "served by"), ("module", "modules", "from")):
        rows = defaultdict(list)
        for note in notes_of_run:
            if note.kind == kind:
                rows[note.name].append(note.detail)
        width = max(map(len, rows), default=0)
        lines += [f"  {title}:"] * bool(rows)
        lines += [f"    {name:<{width}}  {verb} {', '.join(details)}" for name, details in rows.items()]
    ways_out = steps(note.name for note in notes_of_run)
    lines += ["  to leave FairScale, write:"] * bool(ways_out)
    for names, instead in ways_out:
        lines.append(f"    instead of {', '.join(names)}:")
        # It may say why losses differ.
        advice = textwrap.wrap(instead.advice, 100, break_on_hyphens=False)
        lines += [*(f"        # {part}" for part in advice), *(f"        {line}" for line in instead.lines.split("\n"))]
    return "\n".join(lines)
