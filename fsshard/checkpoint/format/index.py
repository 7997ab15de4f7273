"""The index of a checkpoint: what it holds, where each piece lies, and checksums of the files.

Its text ends with the SHA-256 of all that stands before, so that no statement in it can change unnoticed: a key of an
optimizer, a hyper-parameter, the count of saves.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from fsshard.checkpoint.format.division import (
    Division,
    Layout,
    Piece,
    Pieces,
    Range,
    Spread,
    pieces_in,
    rank_file,
)
from fsshard.checkpoint.format.tensors_file import (
    BY_NAME,
    FileEntry,
    Shape,
    StrPath,
    new_file,
    open_regular,
    parse_json,
)
from fsshard.errors import CheckpointError, CorruptCheckpoint
from fsshard.planning.text import printable

# Names and values, and the same within: what is JSON, or becomes it.
Tree = dict[str, Any]
Values = Mapping[str, Any]
# Name -> name, or a reason.
Names = dict[str, str]

FORMAT = "fsshard-checkpoint"
FORMAT_VERSION = 3
READ_VERSIONS = (2, 3)  # in version 2 each tensor lists its pieces
MAX_BYTES = 1_000_000_000  # of an index

INDEX_FILE = "index.json"
# Of more files than these each rank looks at its share, and keeps no more of them open.
MANY_FILES = 64
# A tensor is read in steps of so many bytes: the write that follows finds them in the cache.
STEP_BYTES = 1 << 19
_FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,254}")
# Every index that fsshard has written begins so.
_HEAD = re.compile(rb'\s*\{\s*"format"\s*:\s*"' + FORMAT.encode() + rb'"')
_ORDINAL = re.compile(rb'"ordinal"\s*:\s*(\d{1,15})\b')
_SEAL = re.compile(rb',"sha256":"([0-9a-f]{64})"\}')
_SEAL_BYTES = len(',"sha256":""}') + 64


def steps(numel: int, itemsize: int) -> Iterator[Range]:
    """Yield successive ranges of a flattened tensor, each of at most :data:`STEP_BYTES`."""
    step = max(1, STEP_BYTES // itemsize)
    for start in range(0, numel, step):
        yield start, min(start + step, numel)


class TensorInfo(NamedTuple):
    """A tensor; its pieces cover it in order, and none are needed for no elements."""

    dtype: str
    shape: Shape
    pieces: Pieces

    @property
    def kind(self) -> torch.dtype:
        """Return the dtype itself."""
        return BY_NAME[self.dtype]

    @property
    def is_whole(self) -> bool:
        """Return whether the pieces cover all elements, in order."""
        if isinstance(self.pieces, Division):
            return self.pieces.is_sound()
        end = 0
        for piece in self.pieces:
            if piece.start != end or piece.stop < end:
                return False
            end = piece.stop
        return end == self.numel

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all elements."""
        return self.numel * self.kind.itemsize

    def described(self) -> Tree:
        """Return plain values, as the index has them."""
        value = {"dtype": self.dtype, "shape": self.shape}
        if isinstance(self.pieces, Division):
            value["division"] = [self.pieces.ranks, *self.pieces.layout, *self.pieces.spread]
        else:
            value["pieces"] = self.pieces
        return value

    @classmethod
    def of(cls, name: str, value: Values) -> TensorInfo:
        """Return what :meth:`described` gave, after JSON has had it."""
        info = cls(value["dtype"], tuple(value["shape"]), ())
        if "division" not in value:
            return info._replace(pieces=tuple(Piece(*node) for node in value["pieces"]))
        ranks, shards, inner, stride, offset, before, total = map(int, value["division"])
        layout = Layout(shards, inner, stride, offset)
        spread = Spread(before, total)
        return info._replace(pieces=Division(name, info.numel, info.kind.itemsize, ranks, layout, spread))


class Origin(NamedTuple):
    """The writer of a checkpoint: versions, the backend's name, the number of ranks, along which mesh dimensions."""

    fsshard: str
    torch: str
    backend: str
    world_size: int
    mesh: Mapping[str, int] = MappingProxyType({})  # empty where data is the only dimension, and left out of the text

    def described(self) -> Tree:
        """Return plain values, without the mesh where there is none."""
        values = self._asdict()
        del values["mesh"]
        if self.mesh:
            values["mesh"] = dict(self.mesh)
        return values


class ModelInfo(NamedTuple):
    """The model's state dict."""

    keys: dict[str, str | None]  # key -> name of a tensor or None, in the order of the state dict
    extra: Tree  # key -> tree, for what is no tensor
    dropped: Names  # key -> why it is not kept


class OptimizerInfo(NamedTuple):
    """An optimizer: its class's name, a tree per group with the parameters' names, parameter -> key -> tree."""

    kind: str
    groups: list[Any]
    state: dict[str, Tree]


@dataclass(frozen=True)
class Index:
    """All that is known of a checkpoint without reading a tensor. Trees: :mod:`fsshard.checkpoint.format.tree`."""

    id: str  # hexadecimal, another one for each save
    ordinal: int  # grows with each save of a run
    saved_at: str  # ISO 8601 in UTC
    origin: Origin
    files: dict[str, FileEntry]  # by name
    tensors: dict[str, TensorInfo]  # by name
    model: ModelInfo
    tied: Names = field(default_factory=dict)  # name -> the first name of the same tensor
    optimizers: dict[str, OptimizerInfo] = field(default_factory=dict)  # by name
    objects: dict[str, Tree] = field(default_factory=dict)  # name -> {"all": tree} or {"per_rank": [...]}
    rng: Tree | None = None  # {"per_rank": [tree, ...]}
    # name -> its optimizers, of several models: keys and names of parameters begin with "<name>."; empty for one
    models: dict[str, list[str]] = field(default_factory=dict)

    def to_json(self) -> bytes:
        """Return the text of the index."""
        optimizers = {}
        for name, (kind, groups, state) in self.optimizers.items():
            optimizers[name] = {"class": kind, "groups": groups, "state": state}
        value = {"format": FORMAT, **vars(self)}
        # As before, of one model.
        if not self.models:
            del value["models"]
        value.update(
            format_version=FORMAT_VERSION,
            origin=self.origin.described(),
            files={name: file._asdict() for name, file in self.files.items()},
            tensors={name: tensor.described() for name, tensor in self.tensors.items()},
            model=self.model._asdict(),
            optimizers=optimizers,
        )
        return sealed(value)

    @classmethod
    def from_json(cls, data: bytes | bytearray, where: str) -> Index:
        """Read a text that has the digest it was written with; all else is a CorruptCheckpoint."""
        body = data[:-_SEAL_BYTES]
        seal = _SEAL.fullmatch(data[-_SEAL_BYTES:])
        if seal is not None and hashlib.sha256(body).hexdigest().encode() != seal[1]:
            raise CorruptCheckpoint(f"{where}: its checksum differs from what was written: it has been altered")
        value = parse_json(data, where)
        try:
            return _index(value, whole=seal is not None)
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise CorruptCheckpoint(f"{where}: no sound index: {type(error).__name__}: {error}") from error

    def of_model(self, name: str) -> Index:
        """Return the index of one of several models, with its own keys, names and optimizers; all of the rest."""
        prefix = f"{name}."

        def own(table: Values) -> Tree:
            return {key.removeprefix(prefix): value for key, value in table.items() if key.startswith(prefix)}

        tied = {}
        for key, first in own(self.tied).items():
            tied[key] = first.removeprefix(prefix)
        optimizers = {}
        for optimizer in self.models[name]:
            optimizers[optimizer] = self.optimizers[optimizer]
        return replace(
            self,
            model=ModelInfo(*map(own, self.model)),
            tied=tied,
            optimizers=optimizers,
            models={},
        )

    def optimizer_tensors(self, optimizer: str) -> dict[str, Names]:
        """Map parameters to keys to the names of the tensors of one optimizer's state."""
        names: dict[str, Names] = {}
        prefix = f"optimizer/{optimizer}/"
        for name in self.tensors:
            if name.startswith(prefix):
                parameter, _, key = name.removeprefix(prefix).rpartition("/")
                names.setdefault(parameter, {})[key] = name
        return names

    def tensors_in(self, file: str) -> list[str]:
        """List the tensors that have a piece in a file."""
        return [name for name, info in self.tensors.items() if pieces_in(info.pieces, file)]


def read_index(
    directory: StrPath,
    *,
    files: bool = True,
    rank: int = 0,
    ranks: int = 1,
) -> Index:
    """Read the index of a checkpoint; with ``files``, check as well that those are there and have their sizes.

    Of many files every ``ranks``-th alone is looked at, from the ``rank``-th on (:func:`share_of`).
    """
    directory = Path(directory)
    if not os.path.lexists(directory):
        raise CheckpointError(
            f"there is no checkpoint at {directory}; fsshard.latest(folder) returns the newest of a folder, or None"
        )
    if not os.path.isdir(directory):
        raise CheckpointError(f"{directory}: expected a checkpoint, which is a directory, got a file")
    path = directory / INDEX_FILE
    try:
        with os.fdopen(open_regular(path), "rb") as stream:
            data = stream.read(MAX_BYTES)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    index = Index.from_json(data, str(path))
    if files:
        check_files(directory, index, share_of(index, rank, ranks))
    return index


def share_of(index: Index, rank: int, ranks: int) -> list[str]:
    """Return the files that a rank looks at: all, or of more than :data:`MANY_FILES` every ``ranks``-th.

    A thousand ranks that open a thousand files each are a burden for a parallel file system.
    """
    files = sorted(index.files)
    return files if len(files) <= MANY_FILES else files[rank::ranks]


def sealed(value: Values) -> bytes:
    """Return a JSON object as text, with the digest of that text as its last key."""
    body = json.dumps(value, separators=(",", ":"), allow_nan=False).encode()[:-1]
    digest = hashlib.sha256(body).hexdigest()
    return body + f',"sha256":"{digest}"}}'.encode()


def says_ours(directory: StrPath) -> bool:
    """Tell whether the index in a directory says at its beginning that it is fsshard's, of any version."""
    return _HEAD.match(_beginning(directory)) is not None


def ordinal_in(directory: StrPath) -> int:
    """Return the count of saves that the index in a directory begins with; 0 where there is none."""
    return ordinal_of(_beginning(directory))


def ordinal_of(beginning: bytes) -> int:
    """Return the count of saves in the first bytes of an index; 0 where there is none."""
    match = _ORDINAL.search(beginning)
    return int(match[1]) if match else 0


def _beginning(directory: StrPath) -> bytes:
    try:
        with os.fdopen(open_regular(Path(directory) / INDEX_FILE), "rb") as stream:
            return stream.read(4096)
    except CorruptCheckpoint:
        # There is none, or a link, a pipe or a folder of that name.
        return b""


def write_index(directory: StrPath, index: Index) -> None:
    """Write the index into a directory that has none, through to the disk.

    Raises:
        CheckpointError: it is longer than :func:`read_index` takes: the checkpoint could never be loaded.
    """
    data = index.to_json()
    check_length(directory, data)
    with new_file(Path(directory) / INDEX_FILE) as stream:
        stream.write(memoryview(data))


def check_length(where: object, data: bytes) -> None:
    """Raise CheckpointError for an index that would not be read."""
    if len(data) >= MAX_BYTES:
        raise CheckpointError(
            f"{where}: the index of this checkpoint has {len(data):,} bytes, and at most {MAX_BYTES:,} are read; "
            "save fewer tensors together (several models in several checkpoints), or from fewer ranks"
        )


def check_files(directory: StrPath, index: Index, names: Iterable[str]) -> None:
    """Raise a CorruptCheckpoint that names files that are missing or of another size, with the tensors in them."""
    faults = []
    for name in names:
        expected = index.files[name]
        path = Path(directory) / name
        try:
            with os.fdopen(open_regular(path), "rb") as stream:
                size = os.fstat(stream.fileno()).st_size
            if size != expected.bytes:
                raise CorruptCheckpoint(f"{path}: {size} bytes where {expected.bytes} were written")
        except CorruptCheckpoint as error:
            faults.append(f"{error}; it holds {some(index.tensors_in(name))}")
    if faults:
        raise CorruptCheckpoint("\n".join(faults))


def some(names: list[str]) -> str:
    """List a few names for a message."""
    shown = list(map(printable, names[:8]))
    if len(names) > 8:
        shown.append("...")
    return ", ".join(shown) or "no tensor"


def _index(value: Any, whole: bool) -> Index:
    """Make the index of a JSON value; ``whole``: the digest at its end is right."""
    if value.get("format") != FORMAT:
        raise ValueError("not the index of an fsshard checkpoint")
    version = value["format_version"]
    if version not in READ_VERSIONS:
        known = " and ".join(map(str, READ_VERSIONS))
        raise ValueError(
            f"format version {version!r:.40}; this fsshard reads {known}. It was written by "
            f"{value.get('origin')!r:.80}: use that fsshard or a newer one"
        )
    if not whole:
        raise ValueError("the checksum at its end is missing: it is cut short, or has been altered")
    # The digest says that all is as it was written. What is checked besides it keeps an index that is made by hand from
    # naming files elsewhere, and tensors whose elements are not all there.
    files = {name: FileEntry(**entry) for name, entry in value["files"].items()}
    for name in files:
        if not _FILE_NAME.fullmatch(name) or name == INDEX_FILE:
            raise ValueError(f"files: {name!r:.100} is not the name of a file next to the index")
    nbytes = sum(file.bytes for file in files.values())
    optimizers = {}
    for name, info in value["optimizers"].items():
        optimizers[name] = OptimizerInfo(info["class"], info["groups"], info["state"])
    return Index(
        id=value["id"],
        ordinal=int(value["ordinal"]),
        saved_at=str(value["saved_at"]),
        origin=Origin(**value["origin"]),
        files=files,
        tensors={name: _tensor(name, entry, files, nbytes) for name, entry in value["tensors"].items()},
        model=ModelInfo(**value["model"]),
        tied=dict(value["tied"]),
        optimizers=optimizers,
        objects=dict(value["objects"]),
        rng=value["rng"],
        models=dict(value.get("models", {})),
    )


def _tensor(
    name: str,
    value: Values,
    files: Mapping[str, FileEntry],
    nbytes: int,
) -> TensorInfo:
    """Make the facts of a tensor of a JSON value; ``nbytes`` are those of all files."""
    info = TensorInfo.of(name, value)
    if not info.is_whole or min(info.shape, default=0) < 0:
        raise ValueError(f"tensors, {name!r:.100}: pieces overlap, leave a gap or do not end at {info.numel} elements")
    # Before anybody makes room.
    if isinstance(info.pieces, Division):
        last = rank_file(info.pieces.ranks - 1, info.pieces.ranks)
        if last not in files or info.nbytes > nbytes:
            raise ValueError(f"tensors, {name!r:.100}: more elements than the files can have")
        return info
    for piece in info.pieces:
        if (piece.stop - piece.start) * info.kind.itemsize > files[piece.file].bytes:
            raise ValueError(f"tensors, {name!r:.100}: more elements than {piece.file} can have")
    return info
