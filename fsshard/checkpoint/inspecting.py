"""Shows what a checkpoint holds and whether it is complete, and lists the checkpoints of a directory."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsshard.checkpoint.format.directory import leftovers, newest_whole
from fsshard.checkpoint.format.division import RANK_FILE, pieces_of
from fsshard.checkpoint.format.index import FORMAT_VERSION, INDEX_FILE, Index, Tree, check_files, read_index
from fsshard.checkpoint.format.object_store import refuse_url
from fsshard.checkpoint.format.tensors_file import StrPath
from fsshard.checkpoint.format.tree import decode
from fsshard.checkpoint.interop.foreign import foreign
from fsshard.checkpoint.reader import Reader
from fsshard.errors import CheckpointError, CorruptCheckpoint
from fsshard.planning.text import aligned, printable, size


@dataclass(frozen=True)
class Inspection:
    """A checkpoint, and what is wrong with it.

    Attributes:
        problems: what is wrong with it; each names a file and what it holds.
        verified: whether checksums were compared.
        contents: its index as plain values, empty where that cannot be read: ``id``, ``ordinal``, ``saved_at``,
            ``origin``, ``format_version``, ``files`` (name -> bytes),
            ``tensors`` (name, dtype, shape, number of pieces, bytes of each), ``tied`` (name -> the first name of the
            same parameter), ``optimizers`` (name -> class, and for each group its settings and number of parameters),
            ``models`` (of several: name -> its optimizers), ``objects`` (name -> ``"all"`` or ``"per_rank"``), ``rng``
            (of how many ranks the generators' states are there), ``dropped`` (keys of the state dict that could not be
            saved -> why).
    """

    path: Path
    problems: list[str]
    verified: bool
    contents: Tree

    @property
    def ok(self) -> bool:
        """Tell whether nothing is wrong with it."""
        return not self.problems

    def to_json(self) -> str:
        """Return all of it."""
        verdict = {"ok": self.ok, "path": str(self.path), "problems": self.problems, "verified": self.verified}
        return json.dumps(verdict | self.contents, indent=1, default=repr)

    def render(self) -> Iterator[str]:
        """Yield lines for a terminal; whatever it would obey in names and texts is spelled out."""
        verdict = "whole (sizes and headers; --verify compares checksums)"
        if self.verified:
            verdict = "whole, checksums agree"
        if self.problems:
            verdict = "\n  ".join(["INVALID", *map(printable, self.problems)])
        yield f"{printable(str(self.path))}: {verdict}"
        if self.contents:
            yield from map(printable, _lines(self.contents))


def _lines(contents: Tree) -> Iterator[str]:
    """Yield a table of the tensors, and a line of JSON for each other entry that has something in it."""
    rows = [("tensor", "dtype", "shape", "pieces", "bytes")]
    nbytes = 0
    for tensor in contents["tensors"]:
        shape = " x ".join(map(str, tensor["shape"])) or "scalar"
        rows.append((tensor["name"], tensor["dtype"], shape, str(tensor["pieces"]), size(tensor["bytes"])))
        nbytes += tensor["bytes"]
    yield from aligned(rows, "<<<>>")
    yield f"{len(contents['tensors'])} tensors, {size(nbytes)}"
    for name, value in contents.items():
        if name != "tensors" and value:
            yield f"{name}: {json.dumps(value, default=repr)}"


@dataclass(frozen=True)
class Listing:
    """The checkpoints of a directory."""

    path: Path
    checkpoints: list[Tree]  # the newest last; "problems": what is wrong with one, "latest": which one counts
    leftovers: list[str]  # hidden directories of saves that run, or that were killed

    @property
    def ok(self) -> bool:
        """Tell whether all of them are whole."""
        return all(not row["problems"] for row in self.checkpoints)

    def to_json(self) -> str:
        """Return all of it."""
        return json.dumps({"ok": self.ok, **asdict(self), "path": str(self.path)}, indent=1)

    def render(self) -> Iterator[str]:
        """Yield a table, and what is wrong, as lines for a terminal."""
        rows = [("checkpoint", "save", "saved at", "bytes", "")]
        problems = []
        for row in self.checkpoints:
            name = row["name"]
            verdict = "latest" if row["latest"] else ""
            for problem in row["problems"]:
                verdict = "INVALID"
                problems.append(printable(f"{name}: {problem}"))
            number = "" if row["ordinal"] is None else str(row["ordinal"])
            rows.append((printable(name), number, printable(row["saved_at"]), size(row["bytes"]), verdict))
        yield from aligned(rows, "<><>")
        yield from problems
        if self.leftovers:
            names = ", ".join(map(printable, self.leftovers))
            yield f"left by interrupted saves, or still being written: {names}; remove those that no save is writing"


def inspect(
    path: StrPath,
    *,
    verify: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Inspection | Listing:
    """Look at a checkpoint, or at a directory of checkpoints; raise if there is neither.

    With ``verify`` the checksums of one checkpoint are compared as well, and ``progress`` is told the bytes that are
    read so far, and all there are.
    """
    refuse_url(os.fspath(path))
    path = Path(os.path.expanduser(path)).absolute()
    kind = foreign(path)
    if kind is not None:
        raise CheckpointError(
            f"{path} is a checkpoint of another kind ({kind}); load it with fsshard.load, or convert it with `fsshard "
            "import`"
        )
    if not path.is_dir():
        what = "a file" if path.exists() else "nothing there"
        raise CheckpointError(f"{path}: expected a checkpoint, which is a directory, got {what}")
    if _looks_like_one(path):
        return _inspect_one(path, verify, progress)
    listing = _list(path)
    if not listing.checkpoints and not listing.leftovers:
        raise CheckpointError(f"{path} is not a checkpoint and contains none")
    return listing


def _looks_like_one(path: Path) -> bool:
    return any(entry.name == INDEX_FILE or RANK_FILE.fullmatch(entry.name) for entry in os.scandir(path))


def _list(path: Path) -> Listing:
    """List the checkpoints of a directory, in the order of their saves."""
    newest = newest_whole(path, warn=False)  # the list says what is wrong
    rows = []
    for child in sorted(path.iterdir()):
        if child.name.startswith(".") or not child.is_dir() or not _looks_like_one(child):
            continue
        row: Tree = {"name": child.name, "ordinal": None, "saved_at": "", "bytes": 0, "problems": []}
        try:
            index = read_index(child, files=False)
            row["ordinal"] = index.ordinal
            row["saved_at"] = index.saved_at
            row["bytes"] = sum(file.bytes for file in index.files.values())
            check_files(child, index, index.files)
        except CheckpointError as error:
            row["problems"] = str(error).splitlines()
        row["latest"] = child == newest
        rows.append(row)
    # Those without a count, whose index cannot be read, come first.
    rows.sort(key=lambda row: (row["ordinal"] is not None, row["ordinal"] or 0))
    return Listing(path, rows, [stray.name for stray in leftovers(path)])


def _inspect_one(path: Path, verify: bool, progress: Callable[[int, int], None] | None) -> Inspection:
    contents = {}
    problems = []
    done = 0
    total = 0

    def count(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(done, total)

    try:
        index = read_index(path, files=False)
        contents = _contents(index)
        total = sum(file.bytes for file in index.files.values())
        with Reader(path) as reader:
            reader.check_headers()
            if verify:
                reader.verify(progress=count)
    except CorruptCheckpoint as error:
        problems = str(error).splitlines()
    return Inspection(path, problems, verify and not problems, contents)


def _contents(index: Index) -> Tree:
    tensors = []
    for name, info in index.tensors.items():
        tensors.append(
            {
                "name": name,
                "dtype": info.dtype,
                "shape": list(info.shape),
                "pieces": sum(1 for _ in pieces_of(info.pieces)),
                "bytes": info.nbytes,
            }
        )
    optimizers = {}
    for name, optimizer in index.optimizers.items():
        groups = list(map(_group, optimizer.groups))
        optimizers[name] = {"class": optimizer.kind, "groups": groups}
    return {
        "id": index.id,
        "ordinal": index.ordinal,
        "saved_at": index.saved_at,
        "origin": index.origin.described(),
        "files": {name: file.bytes for name, file in index.files.items()},
        "tensors": tensors,
        "tied": index.tied,
        "optimizers": optimizers,
        "models": index.models,
        "objects": {name: next(iter(entry)) for name, entry in index.objects.items()},
        "rng": 0 if index.rng is None else len(index.rng["per_rank"]),
        "dropped": index.model.dropped,
        "format_version": FORMAT_VERSION,
    }


def _group(node: Any) -> Tree:
    """Return a group's settings, and how many parameters it has."""
    values: Tree = decode(node, lambda name: torch.empty(0))
    for key, value in values.items():
        if isinstance(value, Tensor):
            values[key] = "a tensor"
    values["params"] = len(values["params"])
    return values
