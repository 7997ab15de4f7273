"""Files of torch.save and directories of torch.distributed.checkpoint, written as a stream; the latter read by slices.

``torch.save`` and DCP need every tensor in memory. Here values have placeholders in place of tensors, whose numbers are
read a piece at a time when their turn has come.
"""

from __future__ import annotations

import collections
import contextlib
import io
import math
import os
import pickle
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from fsshard.checkpoint.format.index import Range, TensorInfo
from fsshard.checkpoint.format.tensors_file import dtype_name
from fsshard.checkpoint.reader import TensorReader
from fsshard.errors import CheckpointError, CorruptCheckpoint
from fsshard.torch_private.patching import replaced

__all__ = ["DcpDirectory", "Placeholder", "write_dcp", "write_torch"]

ALIGNMENT = 64  # bytes, where records of a file begin, so that it can be mapped (torch 2.13's own)
PIECE_BYTES = 1 << 20  # of a tensor in one record of DCP, each of which costs DCP about a kilobyte
FOLDER = "archive"
DATE = (1980, 1, 1, 0, 0, 0)


# ------------------------------------------------------------------------------------------------ files of torch.save


@dataclass(frozen=True)
class Placeholder:
    """Stands for a tensor. Those with the same ``name`` share memory."""

    name: str
    info: TensorInfo


def write_torch(path: Path, value: Any, read: Callable[[str], Iterable[Tensor]]) -> None:
    """Write what ``torch.save(value, path)`` would, through to the disk.

    ``value`` has :class:`Placeholder` in place of tensors; small tensors may stand there themselves. ``read`` gives the
    elements of a tensor by its name, flat and in order, in any number of pieces.
    """
    # The format is a zip archive: a pickle that says which tensor lies in which record, and one record per storage.
    # Checksums are true; torch.serialization.skip_data leaves room for the bytes too, but checksums of zeros.
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
    """Return the pickle, the storages in the order of their numbers, and the values of tensors that were there."""
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


# ------------------------------------------------------------------------------------------------ writing DCP


def write_dcp(path: Path, value: dict[str, Any], reader: TensorReader) -> None:
    """Write what ``torch.distributed.checkpoint.save(value)`` would; placeholders stand for the reader's tensors."""
    try:
        with warnings.catch_warnings(), replaced(TensorProperties, "__getstate__", _read_by_all):
            warnings.simplefilter("ignore")  # that one process saves alone
            dcp.save(value, storage_writer=dcp.FileSystemWriter(path), planner=_Pieces(reader), no_dist=True)
    except dcp.CheckpointException as error:  # of torch 2.13, derived from BaseException
        failures = {rank: str(failure[0]) for rank, failure in error.failures.items()}
        raise CheckpointError(f"cannot write {path}: {'; '.join(failures.values())}") from error


_GETSTATE: Any = TensorProperties.__getstate__


def _read_by_all(properties: TensorProperties) -> tuple[Any, ...]:
    """Return what is pickled, without the strides that torch 2.15 adds and does without, too."""
    state: tuple[Any, ...] = _GETSTATE(properties)
    return state[:5]  # torch 2.13 cannot read more: "too many values to unpack (expected 5)"


class _Pieces(DefaultSavePlanner):
    """Plans pieces of tensors, and reads each when its turn has come."""

    def __init__(self, reader: TensorReader) -> None:
        super().__init__()
        self._reader = reader

    def create_local_plan(self) -> SavePlan:
        """Plan every tensor in boxes of consecutive elements; everything else as bytes."""
        items: list[WriteItem] = []
        for name, value in self.state_dict.items():
            if not isinstance(value, (Placeholder, Tensor)):
                items.append(WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO))
                continue
            dtype = value.dtype if isinstance(value, Tensor) else value.info.kind
            shape = torch.Size(value.shape if isinstance(value, Tensor) else value.info.shape)
            for offsets, sizes in _boxes(shape, dtype.itemsize):
                box = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
                data = TensorWriteData(box, TensorProperties(dtype=dtype), shape)
                items.append(WriteItem(MetadataIndex(name, box.offsets), WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items, planner_data=self.mappings)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """Read the numbers of one piece."""
        value = self.state_dict[write_item.index.fqn]
        if write_item.type == WriteItemType.BYTE_IO:
            buffer = io.BytesIO()
            torch.save(value, buffer)
            return buffer
        if isinstance(value, Tensor):
            return value.detach().cpu()
        assert write_item.tensor_data is not None
        box = write_item.tensor_data.chunk
        strides = _strides(value.info.shape)
        start = sum(offset * stride for offset, stride in zip(box.offsets, strides, strict=True))
        return self._reader.read(value.name, (start, start + math.prod(box.sizes))).reshape(box.sizes)


def _strides(shape: tuple[int, ...]) -> list[int]:
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


def _boxes(shape: tuple[int, ...], itemsize: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield offsets and sizes of boxes that lie one after the other in the flattened tensor."""
    most = max(1, PIECE_BYTES // itemsize)
    if math.prod(shape) <= most:
        yield (0,) * len(shape), shape
        return
    strides = _strides(shape)
    dim = next(dim for dim, stride in enumerate(strides) if stride <= most)  # divided; those before it are singled out
    step = most // strides[dim]
    for outer in range(math.prod(shape[:dim])):
        before = [outer // math.prod(shape[at + 1 : dim]) % shape[at] for at in range(dim)]
        for start in range(0, shape[dim], step):
            count = min(step, shape[dim] - start)
            yield (*before, start, *(0,) * (len(shape) - dim - 1)), (*(1,) * dim, count, *shape[dim + 1 :])


# ------------------------------------------------------------------------------------------------ reading DCP


class DcpDirectory:
    """A DCP checkpoint that is trusted: its ``.metadata`` is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reader = dcp.FileSystemReader(path)
        with self._faults():
            self._metadata: Metadata = self._reader.read_metadata()
            self._reader.set_up_storage_reader(self._metadata, True)

    @contextlib.contextmanager
    def _faults(self) -> Iterator[None]:
        try:
            yield
        except CorruptCheckpoint:
            raise
        except Exception as error:  # whatever unpickling, torch.load and DCP's own asserts raise
            raise CorruptCheckpoint(f"{self._path}: {type(error).__name__}: {error}") from error

    def tree(self, awaited: Callable[[torch.dtype, tuple[int, ...], Callable[[Range], Tensor]], Any]) -> dict[str, Any]:
        """Return what was saved, nested as it was, with ``awaited`` for tensors that are no single numbers."""
        tree: dict[Any, Any] = {}
        places = self._metadata.planner_data or {}
        with self._faults():
            for name, info in self._metadata.state_dict_metadata.items():
                node, path = tree, places.get(name) or (name,)
                for step in path[:-1]:
                    node = node.setdefault(step, {})
                if not isinstance(info, TensorStorageMetadata):
                    node[path[-1]] = self._read_bytes(name)
                elif info.size:
                    node[path[-1]] = awaited(info.properties.dtype, tuple(info.size), partial(self.read, name))
                else:
                    node[path[-1]] = self.read(name, (0, 1)).reshape(())
        return dict(_listed(tree))

    def _read_bytes(self, name: str) -> Any:
        index, none = MetadataIndex(name), torch.Size((0,))
        item, planner = ReadItem(LoadItemType.BYTE_IO, index, none, index, none, none), _Target(None)
        self._reader.read_data(LoadPlan([item]), planner).wait()
        return planner.value

    def read(self, name: str, wanted: Range) -> Tensor:
        """Return elements [start, stop) of a flattened tensor; the rows that they lie in are read."""
        info = self._metadata.state_dict_metadata[name]
        assert isinstance(info, TensorStorageMetadata)
        shape, dtype = tuple(info.size), info.properties.dtype
        start, stop = wanted
        if stop <= start:
            return torch.empty(0, dtype=dtype)
        row = math.prod(shape[1:])
        first, last = (start // row, -(-stop // row)) if shape else (0, 1)
        sizes = (last - first, *shape[1:]) if shape else ()
        offsets = (first, *(0,) * (len(shape) - 1)) if shape else ()
        target = torch.empty(sizes, dtype=dtype)
        box = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        with self._faults():
            items = create_read_items_for_chunk_list(name, info, [box])
            if sum(math.prod(item.lengths) for item in items) != target.numel():
                raise CorruptCheckpoint(f"{self._path}: pieces of {name} are missing, or overlap")
            self._reader.read_data(LoadPlan(items), _Target(target)).wait()
        return target.reshape(-1)[start - first * row : stop - first * row]


class _Target(DefaultLoadPlanner):
    """Puts what is read into one tensor, or keeps one value."""

    def __init__(self, target: Tensor | None) -> None:
        super().__init__()
        self._target = target
        self.value: Any = None

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Unpickle: the directory is trusted."""
        self.value = torch.load(value, map_location="cpu", weights_only=False)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Return the place of a piece."""
        assert self._target is not None
        place = self._target
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            place = place.narrow(dim, offset, length)
        return place

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Do nothing: the tensor is in its place already."""


def _listed(node: Any) -> Any:
    """Turn dicts whose keys are 0, 1, ... into lists, which DCP takes apart like dicts."""
    if not isinstance(node, dict):
        return node
    values = {key: _listed(value) for key, value in node.items()}
    if values and all(type(key) is int for key in values) and sorted(values) == list(range(len(values))):
        return [values[index] for index in range(len(values))]
    return values
