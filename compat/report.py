"""``python -m fsshard.compat --report``: notes what a run uses of FairScale, and prints it at the end.

The modules that serve FairScale's names call :func:`called`. Ranks are often children that end without a goodbye, so
every process of a reported run appends what is new to a file of its own; the one that was started with ``--report``
reads them all.
"""

from __future__ import annotations

import atexit
import builtins
import json
import os
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from .equivalents import steps

__all__ = ["Note", "called", "notes", "text"]

FOLDER = "FSSHARD_REPORT"  # in the environment of a reported run


@dataclass(frozen=True, order=True)
class Note:
    """``kind`` is ``"import"`` (``detail``: by whom), ``"module"`` (from where) or ``"call"`` (by which engine)."""

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
    found = set(_noted)
    if folder is not None:
        for path in Path(folder).glob("*.jsonl"):
            found |= {Note(*json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()}
    return sorted(found)


def _note(note: Note) -> None:
    if note in _noted:
        return
    _noted.add(note)
    folder = os.environ.get(FOLDER)
    if folder is not None and os.path.isdir(folder):  # gone: the run that asked has ended, this child has not
        with open(os.path.join(folder, f"{os.getpid()}.jsonl"), "a", encoding="utf-8") as file:
            file.write(json.dumps(astuple(note)) + "\n")


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


def text(found: Iterable[Note]) -> str:
    """Write the report."""
    found = sorted(found)
    by: dict[str, dict[str, list[str]]] = {"import": {}, "module": {}, "call": {}}
    for note in found:
        by[note.kind].setdefault(note.name, []).append(note.detail)
    if not found:
        return "fsshard.compat: this run used nothing of FairScale"
    lines = ["fsshard.compat: what this run used of FairScale"]
    lines += _section("imported", {name: f"by {', '.join(who)}" for name, who in by["import"].items()})
    lines += _section("called", {name: f"served by {', '.join(engine)}" for name, engine in by["call"].items()})
    lines += _section("modules", {name: f"from {', '.join(origin)}" for name, origin in by["module"].items()})
    return "\n".join([*lines, *_way_out([*by["import"], *by["call"]])])


def _section(title: str, rows: Mapping[str, str]) -> list[str]:
    width = max(map(len, rows), default=0)
    return [f"  {title}:", *(f"    {name:<{width}}  {rest}" for name, rest in rows.items())] if rows else []


def _way_out(names: Iterable[str]) -> list[str]:
    lines: list[str] = []
    for instead_of, found in steps(names):
        lines.append(f"    instead of {', '.join(instead_of)}:")
        note = textwrap.wrap(found.note, 100, break_on_hyphens=False)  # what differs may be what makes losses differ
        lines += [*(f"        # {part}" for part in note), *(f"        {line}" for line in found.lines)]
    return ["  to leave FairScale, write:", *lines] if lines else []


class _ImportWatch:
    """``builtins.__import__`` that notes which names are imported from FairScale, and by whom."""

    def __init__(self, original: Any) -> None:
        self.original = original

    def __call__(
        self,
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        module: ModuleType = self.original(name, globals, locals, fromlist, level)
        if level == 0 and name.partition(".")[0] == "fairscale":
            who = str((globals or {}).get("__name__", "?"))
            for each in [f"{name}.{part}" for part in fromlist] if fromlist else [name]:
                _note(Note("import", each, "__main__" if who == "__mp_main__" else who))
        return module


def watch_imports() -> None:
    """Note every ``import`` of FairScale from here on, in a reported run."""
    if FOLDER in os.environ and not isinstance(builtins.__import__, _ImportWatch):
        builtins.__import__ = _ImportWatch(builtins.__import__)


def stop_watching() -> None:
    """Undo :func:`watch_imports`."""
    if isinstance(builtins.__import__, _ImportWatch):
        builtins.__import__ = builtins.__import__.original
