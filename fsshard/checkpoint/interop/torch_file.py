"""Writes files that ``torch.load(weights_only=True)`` reads, as a stream.

``torch.save`` needs every tensor in memory. Its format is a zip archive: a pickle that says which tensor lies in which
record, and one record per storage. Here the records are written a chunk at a time, with true checksums
(``torch.serialization.skip_data`` leaves room for the bytes too, but checksums of zeros).
"""

from __future__ import annotations

import collections
import io
import os
import pickle
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsshard.checkpoint.format.dtypes import dtype_name
from fsshard.checkpoint.format.index import TensorInfo

__all__ = ["Placeholder", "write_torch"]

ALIGNMENT = 64
"""Where records begin, in bytes, so that a file can be mapped (torch 2.13's own)."""

FOLDER = "archive"
DATE = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True)
class Placeholder:
    """Stands for a tensor. Those with the same ``name`` share memory.

    Attributes:
        name: of the tensor.
        info: its dtype and shape.
    """

    name: str
    info: TensorInfo


def write_torch(path: Path, value: Any, read: Callable[[str], Iterable[Tensor]]) -> None:
    """Write what ``torch.save(value, path)`` would, through to the disk.

    Args:
        path: of a new file.
        value: dicts, lists, tuples, numbers and text, with :class:`Placeholder` in place of tensors; small tensors may
            stand there themselves.
        read: name of a tensor -> its elements, flat and in order, in any number of pieces.
    """
    structure, storages, held = _structure(value)
    with zipfile.ZipFile(path, "x", zipfile.ZIP_STORED, allowZip64=True) as archive:
        _record(archive, "data.pkl", len(structure), [structure])
        _record(archive, "byteorder", len(sys.byteorder), [sys.byteorder.encode()])
        for number, (name, info) in enumerate(storages.items()):
            _record(archive, f"data/{number}", info.nbytes, _memory(held.get(name) or read(name)))
        _record(archive, "version", 2, [b"3\n"])
    with path.open("rb+") as stream:
        os.fsync(stream.fileno())


def _memory(pieces: Iterable[Tensor]) -> Iterator[Any]:
    for piece in pieces:
        yield memoryview(piece.contiguous().view(torch.uint8).numpy())  # type: ignore[arg-type]


def _record(archive: zipfile.ZipFile, name: str, nbytes: int, pieces: Iterable[Any]) -> None:
    info = zipfile.ZipInfo(f"{FOLDER}/{name}", DATE)
    info.file_size = nbytes  # decides whether sizes take 64 bits
    wide = nbytes * 1.05 > zipfile.ZIP64_LIMIT  # as zipfile decides
    begin = archive.fp.tell() + 30 + len(info.filename) + (20 if wide else 0) + 4  # type: ignore[union-attr]
    padding = -begin % ALIGNMENT
    info.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
    with archive.open(info, "w") as record:
        for piece in pieces:
            record.write(piece)


# ------------------------------------------------------------------------------------------------ the pickle

STORAGE_CLASSES = {
    torch.float64: "DoubleStorage",
    torch.float32: "FloatStorage",
    torch.float16: "HalfStorage",
    torch.bfloat16: "BFloat16Storage",
    torch.complex128: "ComplexDoubleStorage",
    torch.complex64: "ComplexFloatStorage",
    torch.int64: "LongStorage",
    torch.int32: "IntStorage",
    torch.int16: "ShortStorage",
    torch.int8: "CharStorage",
    torch.uint8: "ByteStorage",
    torch.bool: "BoolStorage",
}
"""The class that a file names for the storage of a dtype; other dtypes have none."""


class _Storage(NamedTuple):
    number: int
    info: TensorInfo


class _Rebuilt:
    """Pickled as a call of torch's function that makes a tensor of a storage."""

    def __init__(self, storage: _Storage) -> None:
        self._storage = storage

    def __reduce__(self) -> Any:
        dtype, shape = self._storage.info.kind, self._storage.info.shape
        stride = tuple(torch.empty(shape, device="meta").stride())
        hooks: collections.OrderedDict[Any, Any] = collections.OrderedDict()
        arguments = (self._storage, 0, shape, stride, False, hooks)
        # torch itself says by which of its functions a file rebuilds tensors of this dtype.
        rebuild: Any = torch.empty(0, dtype=dtype).__reduce_ex__(2)[0]
        return rebuild, arguments if dtype in STORAGE_CLASSES else (*arguments, dtype)


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, _Storage):
            return None
        legacy = STORAGE_CLASSES.get(obj.info.kind)
        if legacy is None:
            return "storage", torch.UntypedStorage, str(obj.number), "cpu", obj.info.nbytes
        return "storage", getattr(torch, legacy), str(obj.number), "cpu", obj.info.numel


def _structure(value: Any) -> tuple[bytes, dict[str, TensorInfo], dict[str, list[Tensor]]]:
    """Return the pickle, the storages by number, and the values of those that were there themselves."""
    storages: dict[str, TensorInfo] = {}
    numbers: dict[str, int] = {}
    held: dict[str, list[Tensor]] = {}

    def filled(node: Any) -> Any:
        if isinstance(node, Tensor):
            name = f"\0{len(held)}"  # no tensor's name
            held[name] = [node.detach().cpu().reshape(-1)]
            return filled(Placeholder(name, TensorInfo(dtype_name(node.dtype), tuple(node.shape), ())))
        if isinstance(node, Placeholder):
            storages.setdefault(node.name, node.info)
            return _Rebuilt(_Storage(numbers.setdefault(node.name, len(numbers)), node.info))
        if type(node) in (dict, collections.OrderedDict):
            return type(node)((key, filled(item)) for key, item in node.items())
        if type(node) in (list, tuple):
            return type(node)(filled(item) for item in node)
        return node

    buffer = io.BytesIO()
    _Pickler(buffer, protocol=2).dump(filled(value))
    return buffer.getvalue(), storages, held
