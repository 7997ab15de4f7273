"""Files of torch.save and directories of torch.distributed.checkpoint, written as a stream; the latter read by slices.

``torch.save`` needs every tensor in memory. Here placeholders stand for tensors that are read piece by piece; in a
directory of DCP, which torch writes, one after the other.
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
from torch.distributed.checkpoint import metadata as meta
from torch.distributed.checkpoint import planner as plans
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from fsshard.checkpoint.format.division import Range
from fsshard.checkpoint.format.index import TensorInfo, Tree
from fsshard.checkpoint.format.tensors_file import dtype_name, open_regular
from fsshard.checkpoint.interop.pickles import needs_trust, stand_in
from fsshard.checkpoint.reader import TensorReader
from fsshard.errors import CheckpointError, CorruptCheckpoint
from fsshard.torch_private.tensors import layout_by_name

# Bytes to which records of a file are aligned, so that it can be mapped (torch 2.13's own).
ALIGNMENT = 64
FOLDER = "archive"
DATE = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True)
class Placeholder:
    """Stands for a tensor. Those with the same ``name`` share memory."""

    name: str
    info: TensorInfo


def write_torch(
    path: Path,
    value: Any,
    read: Callable[[str], Iterable[Tensor]],
) -> None:
    """Write what ``torch.save(value, path)`` would, through to the disk.

    :class:`Placeholder` stands for tensors, whose elements ``read`` gives by name, flat and in order, in any pieces.
    """
    # The format is a zip archive: a pickle that says which tensor lies in which record, and one record per storage.
    # Checksums are true; torch.serialization.skip_data leaves room for the bytes too, but checksums of zeros.
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(value)
    with zipfile.ZipFile(path, "x", zipfile.ZIP_STORED, allowZip64=True) as archive:
        _record(archive, "data.pkl", len(buffer.getvalue()), [buffer.getvalue()])
        _record(archive, "byteorder", len(sys.byteorder), [sys.byteorder.encode()])
        for number, (name, info) in pickler.storages.items():
            tensors = pickler.held.get(name) or read(name)
            pieces = (tensor.contiguous().view(torch.uint8).numpy() for tensor in tensors)
            _record(archive, f"data/{number}", info.nbytes, pieces)
        _record(archive, "version", 2, [b"3\n"])
    with path.open("rb+") as stream:
        os.fsync(stream.fileno())


def _record(
    archive: zipfile.ZipFile,
    name: str,
    nbytes: int,
    pieces: Iterable[Any],
) -> None:
    info = zipfile.ZipInfo(f"{FOLDER}/{name}", DATE)
    info.file_size = nbytes  # decides whether sizes take 64 bits
    # The record's header: its fixed part, its name, the sizes of 64 bits, and the beginning of this padding.
    header = 30 + len(info.filename) + 4
    if nbytes * 1.05 > zipfile.ZIP64_LIMIT:  # as zipfile decides
        header += 20
    begin = archive.fp.tell() + header  # type: ignore[union-attr]
    padding = -begin % ALIGNMENT
    info.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
    with archive.open(info, "w") as record:
        for piece in pieces:
            record.write(piece)


# The class that a file names for the storage of a dtype; other dtypes have none.
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


class _Storage(NamedTuple):
    number: int
    info: TensorInfo


class _Pickler(pickle.Pickler):
    """Writes, in place of placeholders and tensors, calls of torch's functions that make a tensor of a storage."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        # By their numbers, in order.
        self.storages: dict[int, tuple[str, TensorInfo]] = {}
        # The numbers of tensors that stood in the value.
        self.held: dict[str, list[Tensor]] = {}
        self._numbers: dict[str, int] = {}

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Tensor):
            name = f"\0{len(self.held)}"  # no tensor's name
            info = TensorInfo(dtype_name(obj.dtype), tuple(obj.shape), ())
            self.held[name] = [obj.detach().cpu().reshape(-1)]
            obj = Placeholder(name, info)
        if not isinstance(obj, Placeholder):
            return NotImplemented
        number = self._numbers.setdefault(obj.name, len(self._numbers))
        self.storages.setdefault(number, (obj.name, obj.info))
        dtype = obj.info.kind
        shape = obj.info.shape
        stride = torch.empty(shape, device="meta").stride()
        hooks: collections.OrderedDict[Any, Any] = collections.OrderedDict()
        arguments: tuple[Any, ...] = (_Storage(number, obj.info), 0, shape, stride, False, hooks)
        if dtype not in STORAGE_CLASSES:
            arguments = (*arguments, dtype)
        # torch itself says by which of its functions a file rebuilds tensors of this dtype.
        rebuild: Any = torch.empty(0, dtype=dtype).__reduce_ex__(2)[0]
        return rebuild, arguments

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, _Storage):
            return None
        legacy = STORAGE_CLASSES.get(obj.info.kind)
        if legacy is None:
            return "storage", torch.UntypedStorage, str(obj.number), "cpu", obj.info.nbytes
        return "storage", getattr(torch, legacy), str(obj.number), "cpu", obj.info.numel


def write_dcp(
    path: Path,
    value: Tree,
    reader: TensorReader,
) -> None:
    """Write what ``torch.distributed.checkpoint.save(value)`` would; placeholders stand for the reader's tensors."""
    planner = _ReadingPlanner(reader)
    writer = dcp.FileSystemWriter(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that one process saves alone
            dcp.save(planner.without_numbers(value), storage_writer=writer, planner=planner, no_dist=True)
    except dcp.CheckpointException as error:
        # In torch 2.13 it derives from BaseException.
        failures = [str(failure[0]) for failure in error.failures.values()]
        raise CheckpointError(f"cannot write {path}: {'; '.join(failures)}") from error


class _ReadingPlanner(DefaultSavePlanner):
    """Reads each tensor when its turn to be written has come, so that one is whole at a time."""

    def __init__(self, reader: TensorReader) -> None:
        super().__init__()
        self._reader = reader
        # By the ids of the tensors without numbers, which the state dict keeps alive.
        self._names: dict[int, str] = {}

    def without_numbers(self, value: Any) -> Any:
        """Return the value with tensors on the meta device in the place of placeholders."""
        if isinstance(value, dict):
            blank = {}
            for key, item in value.items():
                blank[key] = self.without_numbers(item)
            return blank
        if not isinstance(value, Placeholder):
            return value
        tensor = torch.empty(value.info.shape, dtype=value.info.kind, device="meta")
        self._names[id(tensor)] = value.name
        return tensor

    def lookup_object(self, index: meta.MetadataIndex) -> Any:
        """Return the value at a place of the state dict."""
        value = super().lookup_object(index)
        name = self._names.get(id(value))
        if name is None:
            return value
        return self._reader.read(name, (0, value.numel())).reshape(value.shape)


PLAIN: Tree = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
PLAIN["collections.OrderedDict"] = collections.OrderedDict
PLAIN["torch.Size"] = torch.Size
PLAIN["torch.serialization._get_layout"] = layout_by_name
OF_DCP = {"BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "_StorageInfo"}
OF_DCP |= {"TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"}
"""What DCP writes into ``.metadata``, none of which runs code of the file."""


class _MetadataUnpickler(pickle.Unpickler):
    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._own: Tree = {}

    def find_class(self, module: str, name: str) -> Any:
        full_name = f"{module}.{name}"
        plain = PLAIN.get(full_name) or stand_in(full_name)
        if plain is not None:
            return plain
        if not module.startswith("torch.distributed.checkpoint.") or name not in OF_DCP:
            raise pickle.UnpicklingError(f"{module}.{name}")
        known = super().find_class(module, name)
        # It is an enum, of which there is no other class.
        if name.startswith("_MEM"):
            return known
        # A pickle can set attributes of classes, too: those of a class that is dropped with it.
        return self._own.setdefault(name, type(name, (known,), {}))


Awaited = Callable[[torch.dtype, tuple[int, ...], Callable[[Range], Tensor]], Any]


class DcpDirectory:
    """A DCP checkpoint; if it is not ``trusted``, only plain values in it are unpickled."""

    def __init__(self, path: Path, trusted: bool) -> None:
        self._path = path
        self._trusted = trusted
        self._reader = dcp.FileSystemReader(path)
        with self._faults(), os.fdopen(open_regular(path / ".metadata", follow=True), "rb") as stream:
            unpickler = pickle.Unpickler(stream) if trusted else _MetadataUnpickler(stream)
            self._metadata: meta.Metadata = unpickler.load()
            places = {}
            for index, place in self._metadata.storage_data.items():
                places[meta.MetadataIndex(index.fqn, index.offset, index.index)] = place
                if os.path.basename(place.relative_path) != place.relative_path:
                    raise CorruptCheckpoint(f"{path}: has pieces in {place.relative_path!r}, which is not in it")
            self._metadata.storage_data = places
            self._reader.set_up_storage_reader(self._metadata, True)

    @contextlib.contextmanager
    def _faults(self) -> Iterator[None]:
        try:
            yield
        except CheckpointError:
            raise
        except pickle.UnpicklingError as error:
            raise needs_trust(self._path, error) from None
        except Exception as error:
            # Unpickling, torch.load and DCP's own asserts raise whatever they like.
            raise CorruptCheckpoint(f"{self._path}: {type(error).__name__}: {error}") from error

    def tree(
        self,
        awaited: Awaited,
    ) -> Tree:
        """Return what was saved, nested as it was, with ``awaited`` for tensors that are no single numbers."""
        tree: dict[Any, Any] = {}
        places = self._metadata.planner_data or {}
        with self._faults():
            for name, info in self._metadata.state_dict_metadata.items():
                node = tree
                path = places.get(name) or (name,)
                for step in path[:-1]:
                    node = node.setdefault(step, {})
                last = path[-1]
                if not isinstance(info, meta.TensorStorageMetadata):
                    node[last] = self._read_bytes(name)
                elif info.size:
                    node[last] = awaited(info.properties.dtype, tuple(info.size), partial(self.read, name))
                else:
                    node[last] = self.read(name, (0, 1)).reshape(())
        return dict(_listed(tree))

    def _read_bytes(self, name: str) -> Any:
        index = meta.MetadataIndex(name)
        none = torch.Size((0,))
        item = plans.ReadItem(plans.LoadItemType.BYTE_IO, index, none, index, none, none)
        planner = _Target(None)
        planner.trusted = self._trusted
        self._reader.read_data(plans.LoadPlan([item]), planner).wait()
        return planner.value

    def read(self, name: str, wanted: Range) -> Tensor:
        """Return elements [start, stop) of a flattened tensor; the rows that they lie in are read."""
        info = self._metadata.state_dict_metadata[name]
        assert isinstance(info, meta.TensorStorageMetadata)
        dtype = info.properties.dtype
        start, stop = wanted
        if stop <= start:
            return torch.empty(0, dtype=dtype)
        offsets = []
        lengths = []
        before = 0  # elements of the rows before
        if info.size:
            _, *row = info.size
            size = math.prod(row)
            first = start // size
            last = -(-stop // size)
            before = first * size
            offsets = [first, *(0 for _ in row)]
            lengths = [last - first, *row]
        target = torch.empty(lengths, dtype=dtype)
        box = meta.ChunkStorageMetadata(torch.Size(offsets), target.shape)
        with self._faults():
            items = create_read_items_for_chunk_list(name, info, [box])
            if sum(math.prod(item.lengths) for item in items) != target.numel():
                raise CorruptCheckpoint(f"{self._path}: pieces of {name} are missing, or overlap")
            self._reader.read_data(plans.LoadPlan(items), _Target(target)).wait()
        return target.reshape(-1)[start - before : stop - before]


class _Target(DefaultLoadPlanner):
    """Puts what is read into one tensor, or keeps one value."""

    def __init__(self, target: Tensor | None) -> None:
        super().__init__()
        self._target = target
        self.trusted = False
        self.value: Any = None

    def load_bytes(self, read_item: plans.ReadItem, value: io.BytesIO) -> None:
        """Unpickle a value that is no tensor."""
        self.value = torch.load(value, map_location="cpu", weights_only=not self.trusted)

    def resolve_tensor(self, read_item: plans.ReadItem) -> Tensor:
        """Return the place of a piece."""
        assert self._target is not None
        place = self._target
        offsets = read_item.dest_offsets
        for dim, length in enumerate(read_item.lengths):
            place = place.narrow(dim, offsets[dim], length)
        return place

    def commit_tensor(self, read_item: plans.ReadItem, tensor: Tensor) -> None:
        """Do nothing: the tensor is in its place already."""


def _listed(node: Any) -> Any:
    """Turn dicts whose keys are 0, 1, ... into lists, which DCP takes apart like dicts.

    Not an optimizer's state, in which numbers stand for parameters, and which DCP writes as text.
    """
    if not isinstance(node, dict):
        return node
    values = {}
    for key, value in node.items():
        values[key] = _listed(value)
    if "param_groups" in values and isinstance(values.get("state"), dict):
        state = {}
        for key, item in values["state"].items():
            number = int(key) if str(key).isdecimal() else key
            state[number] = item
        values["state"] = state
    if not values or not all(type(key) is int for key in values):
        return values
    numbers = range(len(values))
    if sorted(values) == list(numbers):
        return [values[number] for number in numbers]
    return values
