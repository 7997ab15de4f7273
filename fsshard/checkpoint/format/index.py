"""The index of a checkpoint: what it holds, where each piece lies, and checksums of the files.

Its text ends with the SHA-256 of all that stands before (format version 2), so that no statement in it can change
unnoticed: an optimizer's key, a hyper-parameter, the count of saves. Version 1 had no such digest and is still read.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsshard.checkpoint.format import tree
from fsshard.checkpoint.format.dtypes import BY_NAME
from fsshard.checkpoint.format.pieces import INDEX_FILE, Piece, piece_key
from fsshard.checkpoint.format.tensors_file import FileEntry, new_file, open_regular, parse_json
from fsshard.errors import CheckpointError, CorruptCheckpoint
from fsshard.planning.text import printable
from fsshard.sharded.state_dict import NEURALOP_ARGUMENTS

__all__ = [
    "FORMAT",
    "FORMAT_VERSION",
    "FileEntry",
    "Index",
    "ModelInfo",
    "OptimizerInfo",
    "Origin",
    "Piece",
    "TensorInfo",
    "check_files",
    "read_index",
    "says_ours",
    "sealed",
    "some",
    "write_index",
]

FORMAT = "fsshard-checkpoint"
FORMAT_VERSION = 2
READ_VERSIONS = (1, 2)
WROTE_IN_MEMORY_ORDER = "fsdp"
"""Name of the backend that wrote format version 1 as :attr:`Index.may_be_permuted` says: a fact about old files, which
no class of today can tell."""
MAX_BYTES = 1_000_000_000
"""Bytes that an index can have."""

_FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,254}")
_HEAD = re.compile(rb'\s*\{\s*"format"\s*:\s*"' + FORMAT.encode() + rb'"')  # of every index that fsshard has written
_SEAL = re.compile(rb',"sha256":"([0-9a-f]{64})"\}')
_SEAL_BYTES = len(',"sha256":""}') + 64


class TensorInfo(NamedTuple):
    """A tensor: its dtype's name, its shape, and pieces that cover it in order; none are needed for no elements."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def kind(self) -> torch.dtype:
        """The dtype itself."""
        return BY_NAME[self.dtype]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.numel * self.kind.itemsize


class Origin(NamedTuple):
    """The writer of a checkpoint: versions, the backend's name, the number of ranks, along which mesh dimensions.

    The mesh is empty where data is the only one, and left out of the text.
    """

    fsshard: str
    torch: str
    backend: str
    world_size: int
    mesh: Mapping[str, int] = MappingProxyType({})

    def described(self) -> dict[str, Any]:
        """Return plain values, without the mesh where there is none."""
        plain = {**self._asdict(), "mesh": dict(self.mesh)}
        return plain if self.mesh else {key: value for key, value in plain.items() if key != "mesh"}


class ModelInfo(NamedTuple):
    """The model's state dict.

    Attributes:
        keys: key -> name of a tensor or None, in the order of the state dict.
        extra: key -> tree, for what is no tensor.
        dropped: key -> why it is not kept, in checkpoints of earlier releases.
    """

    keys: dict[str, str | None]
    extra: dict[str, Any]
    dropped: dict[str, str]


class OptimizerInfo(NamedTuple):
    """An optimizer: its class's name, a tree per group with the parameters' names, parameter -> key -> tree."""

    kind: str
    groups: list[Any]
    state: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Index:
    """All that is known of a checkpoint without reading a tensor. Trees: :mod:`fsshard.checkpoint.format.tree`.

    Attributes:
        id: hexadecimal, another one for each save.
        ordinal: grows with each save of a run.
        saved_at: ISO 8601 in UTC.
        origin: what wrote it.
        files: name -> size and checksum.
        tensors: name -> dtype, shape and where its pieces are.
        model: its state dict.
        tied: name -> the first name of the same tensor.
        optimizers: name -> optimizer.
        objects: name -> ``{"all": tree}``, or ``{"per_rank": [tree, ...]}`` where ranks differ.
        rng: a tree per rank, or None.
        format_version: of the text that it was read from; what is written has the present one.
    """

    id: str
    ordinal: int
    saved_at: str
    origin: Origin
    files: dict[str, FileEntry]
    tensors: dict[str, TensorInfo]
    model: ModelInfo
    tied: dict[str, str] = field(default_factory=dict)
    optimizers: dict[str, OptimizerInfo] = field(default_factory=dict)
    objects: dict[str, dict[str, Any]] = field(default_factory=dict)
    rng: dict[str, Any] | None = None
    format_version: int = FORMAT_VERSION

    def to_json(self) -> bytes:
        """Return the text of the index.

        Raises:
            CheckpointError: it is larger than an index can be, or holds what JSON does not.
        """
        value = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "id": self.id,
            "ordinal": self.ordinal,
            "saved_at": self.saved_at,
            "origin": self.origin.described(),
            "files": {name: file._asdict() for name, file in self.files.items()},
            "tensors": {name: tensor._asdict() for name, tensor in self.tensors.items()},
            "model": self.model._asdict(),
            "tied": self.tied,
            "optimizers": {
                name: {"class": kind, "groups": groups, "state": state}
                for name, (kind, groups, state) in self.optimizers.items()
            },
            "objects": self.objects,
            "rng": self.rng,
        }
        try:
            text = sealed(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(f"the index cannot be written as JSON: {error}") from error
        if len(text) > MAX_BYTES:
            raise CheckpointError(f"the index takes {len(text)} bytes; at most {MAX_BYTES}")
        return text

    @classmethod
    def from_json(cls, data: bytes | bytearray, where: str) -> Index:
        """Read a text that has the digest it was written with, and whose pieces and trees fit together.

        Args:
            data: the text.
            where: its file, for messages.

        Raises:
            CorruptCheckpoint: it is no sound index; no other exception comes out.
        """
        whole = _check_seal(data, where)
        value = parse_json(data, where)
        try:
            return _index(value, whole)
        except ValueError as error:
            raise CorruptCheckpoint(f"{where}: {error}") from None
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError) as error:  # of another kind
            raise CorruptCheckpoint(f"{where}: no sound index: {type(error).__name__}: {error}") from error

    @property
    def may_be_permuted(self) -> bool:
        """Tell whether what wrote it put parameters that were not contiguous into another order.

        ``tools/mend_layout.py`` writes such a checkpoint anew.
        """
        return self.format_version == 1 and self.origin.backend == WROTE_IN_MEMORY_ORDER and self.origin.world_size > 1

    def optimizer_tensors(self, optimizer: str) -> dict[str, dict[str, str]]:
        """Map parameters to keys to the names of the tensors of one optimizer's state."""
        found: dict[str, dict[str, str]] = {}
        prefix = f"optimizer/{optimizer}/"
        for name in self.tensors:
            if name.startswith(prefix):
                parameter, _, key = name.removeprefix(prefix).rpartition("/")
                found.setdefault(parameter, {})[key] = name
        return found

    def tensors_in(self, file: str) -> list[str]:
        """List the tensors that have a piece in a file."""
        return [name for name, info in self.tensors.items() if any(piece.file == file for piece in info.pieces)]


def read_index(directory: str | os.PathLike[str], *, files: bool = True) -> Index:
    """Read the index of a checkpoint.

    Args:
        directory: of the checkpoint.
        files: check as well that its files are there and have their sizes.

    Raises:
        CorruptCheckpoint: the index, or a file, is missing, no regular file, or not sound.
        CheckpointError: ``directory`` does not exist, is a file, or cannot be read.
    """
    directory = Path(directory)
    if not os.path.lexists(directory):
        raise CheckpointError(f"there is no checkpoint at {directory}")
    if not os.path.isdir(directory):
        raise CheckpointError(f"{directory} is a file; a checkpoint is a directory")
    path = directory / INDEX_FILE
    descriptor = open_regular(path)
    with os.fdopen(descriptor, "rb") as stream:
        size = os.fstat(descriptor).st_size
        if size > MAX_BYTES:
            raise CorruptCheckpoint(f"{path}: {size} bytes; an index has at most {MAX_BYTES}")
        try:
            data = stream.read(size)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    index = Index.from_json(data, str(path))
    if files:
        check_files(directory, index)
    return index


def sealed(value: Mapping[str, Any]) -> bytes:
    """Return a JSON object as text, with the digest of that text as its last key.

    Raises:
        TypeError, ValueError, RecursionError: JSON has no such thing.
    """
    body = json.dumps(value, separators=(",", ":"), allow_nan=False).encode()[:-1]
    return body + b',"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'"}'


def _check_seal(data: bytes | bytearray, where: str) -> bool:
    """Tell whether the text ends with a digest.

    Raises:
        CorruptCheckpoint: that is the digest of another text.
    """
    seal = _SEAL.fullmatch(data[-_SEAL_BYTES:])
    if seal is None:
        return False
    if hashlib.sha256(memoryview(data)[:-_SEAL_BYTES]).hexdigest().encode() != seal[1]:
        raise CorruptCheckpoint(f"{where}: its checksum differs from what was written: it has been altered")
    return True


def says_ours(directory: str | os.PathLike[str]) -> bool:
    """Tell whether the index in a directory says at its beginning that it is fsshard's, of any version.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        with os.fdopen(open_regular(Path(directory) / INDEX_FILE), "rb") as stream:
            return _HEAD.match(stream.read(4096)) is not None
    except CorruptCheckpoint:  # there is none, or a link, a pipe or a folder of that name
        return False


def write_index(directory: str | os.PathLike[str], index: Index) -> None:
    """Write the index into a directory that has none, through to the disk.

    Raises:
        CheckpointError: there is one, or it cannot be written.
    """
    with new_file(Path(directory) / INDEX_FILE) as stream:
        stream.write(memoryview(index.to_json()))


def check_files(directory: str | os.PathLike[str], index: Index) -> None:
    """Compare the sizes of a checkpoint's files with its index.

    Raises:
        CorruptCheckpoint: files are missing, no regular files, or of another size; with the tensors in them.
        CheckpointError: one cannot be read.
    """
    faults = []
    for name, expected in index.files.items():
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
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return (", ".join(map(printable, names[:8])) + more) or "no tensor"


def _index(value: Any, whole: bool) -> Index:
    """Make the index of a JSON value; ``whole``: the digest at its end is right.

    That digest says that all is as it was written. What is checked beside it keeps an index that is made by hand, or
    of format 1, which has no digest, from giving another tensor's numbers, or files from elsewhere.

    Raises:
        CorruptCheckpoint, ValueError, or what Python raises for a value of another kind: it is not sound.
    """
    version = _check_format(value)
    if version > 1 and not whole:
        raise ValueError("the checksum at its end is missing: it is cut short, or has been altered")
    files = {name: FileEntry(**entry) for name, entry in value["files"].items()}
    for name in files:
        if not _FILE_NAME.fullmatch(name) or name == INDEX_FILE:
            raise ValueError(f"files: {name!r:.100} is no name of a file beside the index")
    found = Index(
        id=value["id"],
        ordinal=int(value["ordinal"]),
        saved_at=str(value["saved_at"]),
        origin=Origin(**value["origin"]),
        files=files,
        tensors={name: _tensor(name, entry, files) for name, entry in value["tensors"].items()},
        model=ModelInfo(**value["model"]),
        tied=dict(value["tied"]),
        optimizers={
            name: OptimizerInfo(info["class"], info["groups"], info["state"])
            for name, info in value["optimizers"].items()
        },
        objects=dict(value["objects"]),
        rng=value["rng"],
        format_version=version,
    )
    _check_references(found)
    for values in found.model:  # no value of the model; earlier releases saved it
        values.pop(NEURALOP_ARGUMENTS, None)
    return found


def _check_format(value: Any) -> int:
    """Return the version."""
    if value.get("format") != FORMAT:
        raise ValueError("not the index of an fsshard checkpoint")
    version: int = value["format_version"]
    if version not in READ_VERSIONS:
        origin = value.get("origin")
        writer = origin.get("fsshard") if isinstance(origin, dict) else None
        raise ValueError(
            f"format version {version!r:.40}; this fsshard reads {' and '.join(map(str, READ_VERSIONS))}. "
            f"It was written by fsshard {writer!r:.40}: use that one or a newer one"
        )
    return version


def _tensor(name: str, value: Mapping[str, Any], files: Mapping[str, FileEntry]) -> TensorInfo:
    dtype, shape = value["dtype"], tuple(value["shape"])
    elements, itemsize, position, pieces = math.prod(shape), BY_NAME[dtype].itemsize, 0, []
    for node in value["pieces"]:
        piece = Piece(*node)
        if piece.start != position or not (piece.start < piece.stop <= elements or piece.stop == elements == 0):
            raise ValueError(
                f"tensors, {name!r:.100}: elements {piece.start} to {piece.stop} of {elements} follow {position}: "
                "pieces overlap, leave a gap, are out of order or reach beyond the shape"
            )
        if piece.key != piece_key(name, elements, (piece.start, piece.stop)):
            raise ValueError(f"tensors, {name!r:.100}: a piece is named {piece.key!r:.100}, as another tensor")
        if (piece.stop - piece.start) * itemsize > files[piece.file].bytes:  # before anybody makes room for them
            raise ValueError(f"tensors, {name!r:.100}: more elements than {piece.file} can have")
        position = piece.stop
        pieces.append(piece)
    if position != elements or min(shape, default=0) < 0:
        raise ValueError(f"tensors, {name!r:.100}: pieces cover {position} of {elements} elements")
    return TensorInfo(dtype, shape, tuple(pieces))


def _check_references(index: Index) -> None:
    """Raise unless all trees decode, and name every tensor and no other; in format 1 no digest says so."""
    used: set[str] = set()

    def stand_in(name: str) -> Tensor:
        used.add(name)
        return torch.empty(0, dtype=index.tensors[name].kind)

    def decoded(node: Any) -> Any:
        return tree.decode(node, stand_in)

    keys, extra, dropped = index.model
    for name in keys.values():
        if name is not None:
            stand_in(name)
    for node in extra.values():
        decoded(node)
    if odd := {key for key, name in keys.items() if name is None} ^ (extra.keys() | dropped.keys()):
        raise ValueError(f"model: the index lists other non-tensor values than it has: {some(sorted(odd))}")
    for name, info in index.optimizers.items():
        members = {parameter for node in info.groups for parameter in decoded(node)["params"]}
        if unknown := info.state.keys() - members:
            raise ValueError(f"optimizers, {name!r:.100}: state of {some(sorted(unknown))}, in none of the groups")
        for values in info.state.values():
            for node in values.values():
                decoded(node)
        for parameter, tensors in index.optimizer_tensors(name).items():
            used.update(tensors.values() if parameter in members else ())
    for name, value in [*index.objects.items(), *([("rng", index.rng)] if index.rng is not None else [])]:
        nodes = [value["all"]] if value.keys() == {"all"} else value["per_rank"]
        if "all" not in value and len(nodes) != index.origin.world_size:
            raise ValueError(f"{name!r:.100}: {len(nodes)} trees of {index.origin.world_size} ranks")
        for node in nodes:
            decoded(node)
    if unused := index.tensors.keys() - used:  # what they belong to has been lost: nobody would ever read them
        raise ValueError(f"tensors: nothing in the index refers to {some(sorted(unused))}")
