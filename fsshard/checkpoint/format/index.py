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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsshard.checkpoint.format import strict_json, tree
from fsshard.checkpoint.format.dtypes import BY_NAME
from fsshard.checkpoint.format.pieces import piece_key
from fsshard.checkpoint.format.tensors_file import checksum, open_regular
from fsshard.errors import CheckpointError, CorruptCheckpoint
from fsshard.planning.text import printable

__all__ = [
    "FORMAT",
    "FORMAT_VERSION",
    "INDEX_NAME",
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
    "write_index",
]

FORMAT = "fsshard-checkpoint"
FORMAT_VERSION = 2
READ_VERSIONS = (1, 2)
WROTE_IN_MEMORY_ORDER = "fsdp"
"""Name of the backend that wrote format version 1 as :attr:`Index.may_be_permuted` says: a fact about old files, which
no class of today can tell."""
INDEX_NAME = "index.json"
MAX_BYTES = 1_000_000_000
"""Bytes that an index can have."""

_MAX_JSON_DEPTH = tree.MAX_JSON_DEPTH + 8  # of the index around a tree
_FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,254}")
_ID = re.compile(r"[0-9a-f]{1,64}")
_MAX_DIMENSIONS = 64
_CHUNK = 1 << 20
_HEAD = re.compile(rb'\s*\{\s*"format"\s*:\s*"' + FORMAT.encode() + rb'"')  # of every index that fsshard has written
_SEAL = re.compile(rb',"sha256":"([0-9a-f]{64})"\}')
_SEAL_BYTES = len(',"sha256":""}') + 64


class FileEntry(NamedTuple):
    """Size and CRC-32 of a file."""

    bytes: int
    crc32: int


class Piece(NamedTuple):
    """Elements ``[start, stop)`` of a flattened tensor; they are the whole of the tensor ``key`` in ``file``."""

    file: str
    key: str
    start: int
    stop: int


class TensorInfo(NamedTuple):
    """A tensor: its dtype's name, its shape, and pieces that cover it in order; none are needed for no elements."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


class Origin(NamedTuple):
    """What wrote the checkpoint: versions, the backend's name, the number of ranks, and along which mesh dimensions.

    The mesh is empty where data is the only one, and left out of the text.
    """

    fsshard: str
    torch: str
    backend: str
    world_size: int
    mesh: Mapping[str, int] = MappingProxyType({})

    def described(self) -> dict[str, Any]:
        """It as plain values; without the mesh where there is none."""
        plain = {**self._asdict(), "mesh": dict(self.mesh)}
        return plain if self.mesh else {key: value for key, value in plain.items() if key != "mesh"}


class ModelInfo(NamedTuple):
    """The model's state dict.

    Attributes:
        keys: key -> name of a tensor or None, in the order of the state dict.
        extra: key -> tree, for what is no tensor.
        dropped: key -> why it is not kept.
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
        """The text of the index.

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
        """The index of a text, with every statement in it checked.

        Args:
            data: the text.
            where: its file, for messages.

        Raises:
            CorruptCheckpoint: it is no sound index; no other exception comes out.
        """
        if len(data) > MAX_BYTES:
            raise CorruptCheckpoint(f"{where}: {len(data)} bytes; an index has at most {MAX_BYTES}")
        whole = _check_seal(data, where)
        value = strict_json.parse(data, where, max_depth=_MAX_JSON_DEPTH)
        try:
            return _index(value, where, whole)
        except RecursionError:  # the caller's stack was almost full
            raise CorruptCheckpoint(f"{where}: nested too deep") from None

    @property
    def may_be_permuted(self) -> bool:
        """Whether what wrote it put parameters that were not contiguous into another order.

        See :mod:`fsshard.checkpoint.mending`.
        """
        return self.format_version == 1 and self.origin.backend == WROTE_IN_MEMORY_ORDER and self.origin.world_size > 1

    def tensors_in(self, file: str) -> list[str]:
        """Names of the tensors that have a piece in a file."""
        return [name for name, info in self.tensors.items() if any(piece.file == file for piece in info.pieces)]


def read_index(directory: str | os.PathLike[str], *, files: bool = True) -> Index:
    """The index of a checkpoint.

    Args:
        directory: of the checkpoint.
        files: check as well that its files are there and have their sizes.

    Raises:
        CorruptCheckpoint: the index, or a file, is missing, no regular file, or not sound.
        CheckpointError: ``directory`` is a file, or cannot be read.
    """
    directory = Path(directory)
    if os.path.lexists(directory) and not directory.is_dir():
        raise CheckpointError(f"{directory} is a file; a checkpoint is a directory")
    path = directory / INDEX_NAME
    descriptor = open_regular(path)
    with os.fdopen(descriptor, "rb") as stream:
        size = os.fstat(descriptor).st_size
        if size > MAX_BYTES:
            raise CorruptCheckpoint(f"{path}: {size} bytes; an index has at most {MAX_BYTES}")
        data = bytearray()
        try:
            while chunk := stream.read(min(_CHUNK, size - len(data))):
                if 0 in chunk:  # a file with holes can claim any size without having it
                    raise CorruptCheckpoint(f"{path}: holds zeros at byte {len(data) + chunk.index(0)}; it is not text")
                data += chunk
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    index = Index.from_json(data, str(path))
    if files:
        check_files(directory, index)
    return index


def sealed(value: Mapping[str, Any]) -> bytes:
    """A JSON object as text, with the digest of that text as its last key.

    Raises:
        TypeError, ValueError, RecursionError: JSON has no such thing.
    """
    body = json.dumps(value, separators=(",", ":"), allow_nan=False).encode()[:-1]
    return body + b',"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'"}'


def _check_seal(data: bytes | bytearray, where: str) -> bool:
    """Whether the text ends with a digest.

    Raises:
        CorruptCheckpoint: that is the digest of another text.
    """
    seal = _SEAL.fullmatch(data[-_SEAL_BYTES:])
    if seal is None:
        return False
    if hashlib.sha256(memoryview(data)[:-_SEAL_BYTES]).hexdigest().encode() != seal[1]:
        raise CorruptCheckpoint(f"{where}: its checksum differs from what was written: it has been altered")
    return True


def says_ours(directory: str | os.PathLike[str]) -> bool | None:
    """Whether the index in a directory says at its beginning that it is fsshard's, of any version.

    Returns:
        None where there is no index, or one that is damaged: no JSON at all.

    Raises:
        CheckpointError: it cannot be read.
    """
    path = Path(directory) / INDEX_NAME
    if not os.path.lexists(path):
        return None
    try:
        with os.fdopen(open_regular(path), "rb") as stream:
            head = stream.read(4096)
    except CorruptCheckpoint:  # a link, a pipe or a folder of that name is nothing that a save has put there
        return False
    if _HEAD.match(head):
        return True
    return False if re.match(rb"\s*[\[{]\s*[\"\[{\]}]", head) else None


def write_index(directory: str | os.PathLike[str], index: Index) -> None:
    """Write the index into a directory that has none, through to the disk.

    Raises:
        CheckpointError: there is one, or it cannot be written.
    """
    path = Path(directory) / INDEX_NAME
    text = memoryview(index.to_json())
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            while len(text):
                text = text[os.write(descriptor, text) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror}") from error


def check_files(
    directory: str | os.PathLike[str],
    index: Index,
    *,
    verify: bool = False,
    only: Iterable[str] | None = None,
    progress: Callable[[int], None] | None = None,
    opened: Callable[[Path], int] = open_regular,
) -> None:
    """Compare the files of a checkpoint with its index.

    Args:
        directory: of the checkpoint.
        index: of it.
        verify: read them all and compare their checksums, not only sizes.
        only: these files; else all.
        progress: told the bytes of each chunk that was read.
        opened: gives a descriptor of a file, which is closed here.

    Raises:
        CorruptCheckpoint: files are missing, no regular files, of another size or content; with the tensors in them.
        CheckpointError: one cannot be read.
    """
    faults = []
    for name in index.files if only is None else only:
        path, expected = Path(directory) / name, index.files[name]
        try:
            descriptor = opened(path)
            with os.fdopen(descriptor, "rb"):
                size = os.fstat(descriptor).st_size
                if size != expected.bytes:
                    raise CorruptCheckpoint(f"{path}: {size} bytes where {expected.bytes} were written")
                if verify and checksum(path, descriptor, progress) != expected:
                    raise CorruptCheckpoint(f"{path}: its checksum differs from what was written")
        except CorruptCheckpoint as error:
            faults.append(f"{error}; it holds {_some(index.tensors_in(name))}")
    if faults:
        raise CorruptCheckpoint("\n".join(faults))


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return (", ".join(map(printable, names[:8])) + more) or "no tensor"


_TENSOR_KEYS = frozenset(TensorInfo._fields)
_PIECE_TYPES = [str, str, int, int]  # True is none of them


class _Where(str):
    """A place in the index, for messages."""

    def at(self, key: object) -> _Where:
        return _Where(f"{self}: {key!r:.100}" if ": " not in self else f"{self}, {key!r:.100}")

    def fault(self, what: str) -> CorruptCheckpoint:
        return CorruptCheckpoint(f"{self}: {what}")

    def object(self, value: Any, *keys: str) -> dict[str, Any]:
        """``value`` if it is a JSON object; with exactly these keys if any are given."""
        if type(value) is not dict:
            raise self.fault("expected an object")
        if keys and value.keys() != set(keys):
            raise self.fault(f"expected {', '.join(keys)}; got {', '.join(map(repr, value)):.200}")
        return value

    def list(self, value: Any) -> list[Any]:
        if type(value) is not list:
            raise self.fault("expected a list")
        return value

    def text(self, value: Any, pattern: re.Pattern[str] | None = None) -> str:
        if type(value) is not str or (pattern is not None and not pattern.fullmatch(value)):
            raise self.fault(f"expected a text{f' like {pattern.pattern}' if pattern else ''}, got {value!r:.100}")
        return value

    def size(self, value: Any, bound: int = 1 << 63) -> int:
        if type(value) is not int or not 0 <= value < bound:
            raise self.fault(f"expected an integer from 0 on and below {bound}, got {value!r:.100}")
        return value


def _index(value: Any, text: str, whole: bool) -> Index:
    """The index of a JSON value; ``whole``: the digest at its end is right."""
    where = _Where(text)
    version = _check_format(value, where)
    if version > 1 and not whole:
        raise where.fault("the checksum at its end is missing: it is cut short, or has been altered")
    names = ("format", "format_version", "id", "ordinal", "saved_at", "origin", "files", "tensors", "model", "tied")
    where.object(value, *names, "optimizers", "objects", "rng", *(["sha256"] if version > 1 else []))
    origin = _origin(value["origin"], where.at("origin"))
    files = {
        where.at("files").text(name, _FILE_NAME): _file(entry, where.at(name))
        for name, entry in where.at("files").object(value["files"]).items()
    }
    if INDEX_NAME in files:
        raise where.fault("the index lists itself as a file")
    tensors = {
        name: _tensor(name, entry, where, files) for name, entry in where.at("tensors").object(value["tensors"]).items()
    }
    trees = _Trees(tensors)
    found = Index(
        id=where.at("id").text(value["id"], _ID),
        ordinal=where.at("ordinal").size(value["ordinal"]),
        saved_at=_time(value["saved_at"], where.at("saved_at")),
        origin=origin,
        files=files,
        tensors=tensors,
        model=_model(value["model"], where.at("model"), trees),
        tied=_tied(value["tied"], where.at("tied")),
        optimizers={
            name: _optimizer(name, entry, where.at("optimizers").at(name), trees)
            for name, entry in where.at("optimizers").object(value["optimizers"]).items()
        },
        objects={
            name: _by_rank(entry, where.at("objects").at(name), trees, origin.world_size)
            for name, entry in where.at("objects").object(value["objects"]).items()
        },
        rng=None if value["rng"] is None else _rng(value["rng"], where.at("rng"), trees, origin.world_size),
        format_version=version,
    )
    trees.check_all_used(where.at("tensors"))
    return found


def _check_format(value: Any, where: _Where) -> int:
    """The version."""
    if where.object(value).get("format") != FORMAT:
        raise where.fault("not the index of an fsshard checkpoint")
    version = where.at("format_version").size(value.get("format_version"))
    if version not in READ_VERSIONS:
        origin = value.get("origin")
        writer = origin.get("fsshard") if isinstance(origin, dict) else None
        raise where.fault(
            f"format version {version}; this fsshard reads {' and '.join(map(str, READ_VERSIONS))}. "
            f"It was written by fsshard {writer!r:.40}: use that one or a newer one"
        )
    return version


def _origin(value: Any, where: _Where) -> Origin:
    has_mesh = "mesh" in where.object(value)
    where.object(value, *(key for key in Origin._fields if key != "mesh" or has_mesh))
    world_size = where.at("world_size").size(value["world_size"], 1 << 31)
    if world_size == 0:
        raise where.fault("no ranks")
    fsshard, of_torch, backend = (where.at(key).text(value[key]) for key in ("fsshard", "torch", "backend"))
    if not has_mesh:
        return Origin(fsshard, of_torch, backend, world_size)
    mesh = where.at("mesh").object(value["mesh"])
    sizes = {where.at("mesh").text(name): where.at("mesh").size(size, 1 << 31) for name, size in mesh.items()}
    return Origin(fsshard, of_torch, backend, world_size, sizes)


def _time(value: Any, where: _Where) -> str:
    try:
        moment = datetime.fromisoformat(where.text(value))
    except ValueError:
        raise where.fault(f"no time: {value!r:.40}") from None
    offset = moment.utcoffset()
    if offset is None or offset:
        raise where.fault(f"expected a time in UTC, got {value!r:.40}")
    return str(value)


def _file(value: Any, where: _Where) -> FileEntry:
    where.object(value, *FileEntry._fields)
    return FileEntry(where.at("bytes").size(value["bytes"]), where.at("crc32").size(value["crc32"], 1 << 32))


def _tensor(name: str, value: Any, within: _Where, files: Mapping[str, FileEntry]) -> TensorInfo:
    def fault(what: str) -> CorruptCheckpoint:  # places are put into words only for faults: there are many tensors
        return within.at(name).fault(what)

    if type(value) is not dict or value.keys() != _TENSOR_KEYS:
        within.at(name).object(value, *TensorInfo._fields)
    dtype, sizes, nodes = value["dtype"], value["shape"], value["pieces"]
    if type(dtype) is not str or dtype not in BY_NAME:
        raise fault(f"the unknown dtype {dtype!r:.40}")
    if type(sizes) is not list or not all(type(size) is int and 0 <= size < 1 << 63 for size in sizes):
        raise fault(f"expected sizes as the shape, got {sizes!r:.100}")
    elements = math.prod(sizes)
    if len(sizes) > _MAX_DIMENSIONS or (elements or math.prod(size for size in sizes if size)) >= 1 << 63:
        raise fault("no possible shape")
    if type(nodes) is not list:
        raise fault("expected a list of pieces")
    position, pieces, itemsize = 0, [], BY_NAME[dtype].itemsize
    for node in nodes:
        piece = _piece(node, fault, files)
        if piece.start != position or piece.stop > elements or (piece.stop <= piece.start and elements):
            raise fault(
                f"elements {piece.start} to {piece.stop} of {elements} follow {position}: "
                "pieces overlap, leave a gap, are out of order or reach beyond the shape"
            )
        if piece.key != piece_key(name, elements, (piece.start, piece.stop)):
            raise fault(f"elements {piece.start} to {piece.stop} are named {piece.key!r:.100}, as another tensor")
        if (piece.stop - piece.start) * itemsize > files[piece.file].bytes:
            raise fault(f"{piece.stop - piece.start} elements are more than {piece.file} can have")
        position = piece.stop
        pieces.append(piece)
    if position != elements:
        raise fault(f"pieces cover {position} of {elements} elements")
    return TensorInfo(dtype, tuple(sizes), tuple(pieces))


def _piece(node: Any, fault: Callable[[str], CorruptCheckpoint], files: Mapping[str, FileEntry]) -> Piece:
    if type(node) is not list or [type(item) for item in node] != _PIECE_TYPES:
        raise fault(f"a piece is file, key, start and stop; got {node!r:.100}")
    piece = Piece(*node)
    if piece.file not in files:
        raise fault(f"a piece in {piece.file!r:.100}, which is not a file of the checkpoint")
    if not (0 <= piece.start < 1 << 63 and 0 <= piece.stop < 1 << 63):
        raise fault(f"a piece of elements {piece.start!r:.40} to {piece.stop!r:.40}")
    return piece


class _Trees:
    """Checks trees by decoding them, with stand-ins for the tensors."""

    def __init__(self, tensors: Mapping[str, TensorInfo]) -> None:
        self.tensors = tensors
        self.used: set[str] = set()
        self.members: dict[str, set[str]] = {}  # optimizer -> names of the parameters in its groups

    def decode(self, node: Any, where: _Where) -> Any:
        return tree.decode(node, self._stand_in, where)

    def check(self, node: Any, where: _Where) -> Any:
        """``node``, when it is a tree whose tensors are in the index."""
        self.decode(node, where)
        return node

    def _stand_in(self, name: str) -> Tensor:
        self.used.add(name)
        return torch.empty(0, dtype=BY_NAME[self.tensors[name].dtype])

    def check_all_used(self, where: _Where) -> None:
        """Raise for tensors that nobody would ever read: something that they belong to has been lost or renamed."""
        unknown = [name for name in self.tensors if name not in self.used and not self._is_state(name)]
        if unknown:
            raise where.fault(f"nothing in the index refers to {_some(unknown)}")

    def _is_state(self, name: str) -> bool:
        """Whether it is state of a parameter that is in a group of the optimizer."""
        kind, _, rest = name.partition("/")
        optimizer, _, rest = rest.partition("/")
        return kind == "optimizer" and rest.rpartition("/")[0] in self.members.get(optimizer, ())


def _model(value: Any, where: _Where, trees: _Trees) -> ModelInfo:
    where.object(value, *ModelInfo._fields)
    keys = where.at("keys").object(value["keys"])
    for key, name in keys.items():
        if name is not None and where.at(key).text(name) not in trees.tensors:
            raise where.at(key).fault(f"there is no tensor {name!r:.100}")
        trees.used.update(() if name is None else (name,))
    extra = where.at("extra").object(value["extra"])
    for key, node in extra.items():
        trees.check(node, where.at(key))
    dropped = where.at("dropped").object(value["dropped"])
    for key, why in dropped.items():
        where.at(key).text(why)
    values = {key for key, name in keys.items() if name is None}
    if values != extra.keys() | dropped.keys():
        odd = sorted(values ^ (extra.keys() | dropped.keys()))
        raise where.fault(f"the index lists other non-tensor values than it has: {_some(odd)}")
    return ModelInfo(keys, extra, dropped)


def _tied(value: Any, where: _Where) -> dict[str, str]:
    for name, first in where.object(value).items():
        if where.at(name).text(first) in value:
            raise where.at(name).fault(f"{first!r:.100} is tied to another name itself")
    return dict(value)


def _optimizer(name: str, value: Any, where: _Where, trees: _Trees) -> OptimizerInfo:
    where.object(value, "class", "groups", "state")
    members = trees.members[name] = set()
    groups = where.at("groups").list(value["groups"])
    for number, node in enumerate(groups):
        group = trees.decode(node, where.at("groups").at(number))
        names = group.get("params") if isinstance(group, dict) else None
        if type(names) is not list or not all(type(name) is str for name in names):
            raise where.at("groups").at(number).fault("expected an object with the names of its params")
        members.update(names)
    state = where.at("state").object(value["state"])
    for parameter, values in state.items():
        if parameter not in members:
            raise where.at("state").fault(f"state of {parameter!r:.100}, which is in none of the groups")
        for key, node in where.at(parameter).object(values).items():
            trees.check(node, where.at(parameter).at(key))
    return OptimizerInfo(where.at("class").text(value["class"]), groups, state)


def _by_rank(value: Any, where: _Where, trees: _Trees, world_size: int) -> dict[str, Any]:
    if where.object(value).keys() == {"all"}:
        trees.check(value["all"], where)
        return dict(value)
    return _rng(value, where, trees, world_size)


def _rng(value: Any, where: _Where, trees: _Trees, world_size: int) -> dict[str, Any]:
    nodes = where.list(where.object(value, "per_rank")["per_rank"])
    if len(nodes) != world_size:
        raise where.fault(f"{len(nodes)} trees of {world_size} ranks")
    for rank, node in enumerate(nodes):
        trees.check(node, where.at(rank))
    return dict(value)
