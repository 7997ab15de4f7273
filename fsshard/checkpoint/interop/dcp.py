"""Directories of torch.distributed.checkpoint, written as a stream and read by slices.

DCP's own writer and reader do the work; here are planners that name bounded pieces of tensors in place of whole ones.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

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

from fsshard.checkpoint.format.pieces import Range
from fsshard.checkpoint.interop.torch_file import Placeholder
from fsshard.checkpoint.reader import TensorReader
from fsshard.errors import CheckpointError, CorruptCheckpoint
from fsshard.torch_private.patching import replaced

__all__ = ["DcpDirectory", "write_dcp"]

PIECE_BYTES = 1 << 20
"""Of a tensor in one record; each record costs DCP about a kilobyte."""


# ------------------------------------------------------------------------------------------------ writing


def write_dcp(path: Path, value: dict[str, Any], reader: TensorReader) -> None:
    """Write what ``torch.distributed.checkpoint.save(value)`` would.

    Args:
        path: of a directory that does not exist.
        value: nested dicts, with :class:`Placeholder` in place of tensors.
        reader: gives the tensors.

    Raises:
        CheckpointError: DCP could not write it.
    """
    try:
        with warnings.catch_warnings(), replaced(TensorProperties, "__getstate__", _read_by_all):
            warnings.simplefilter("ignore")  # that one process saves alone
            dcp.save(value, storage_writer=dcp.FileSystemWriter(path), planner=_Pieces(reader), no_dist=True)
    except dcp.CheckpointException as error:  # of torch 2.13, derived from BaseException
        failures = {rank: str(failure[0]) for rank, failure in error.failures.items()}
        raise CheckpointError(f"cannot write {path}: {'; '.join(failures.values())}") from error


_GETSTATE: Any = TensorProperties.__getstate__


def _read_by_all(properties: TensorProperties) -> tuple[Any, ...]:
    """Return what is pickled, without the strides that torch 2.15 adds and does without, too.

    torch 2.13 cannot read them: "too many values to unpack (expected 5)".
    """
    state: tuple[Any, ...] = _GETSTATE(properties)
    return state[:5]


class _Pieces(DefaultSavePlanner):
    """Plans pieces of tensors, and reads each when its turn has come."""

    def __init__(self, reader: TensorReader) -> None:
        super().__init__()
        self._reader = reader

    def create_local_plan(self) -> SavePlan:
        """Plan every tensor in boxes of consecutive elements; everything else as bytes."""
        items: list[WriteItem] = []
        for name, value in self.state_dict.items():
            if isinstance(value, Placeholder):
                items += _write_items(name, value.info.kind, value.info.shape)
            elif isinstance(value, Tensor):
                items += _write_items(name, value.dtype, tuple(value.shape))
            else:
                items.append(WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO))
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


def _write_items(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Iterator[WriteItem]:
    properties = TensorProperties(dtype=dtype)
    for offsets, sizes in _boxes(shape, dtype.itemsize):
        box = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        data = TensorWriteData(box, properties, torch.Size(shape))
        yield WriteItem(MetadataIndex(name, box.offsets), WriteItemType.SHARD, tensor_data=data)


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
        left, before = outer, list[int]()
        for length in reversed(shape[:dim]):
            left, place = divmod(left, length)
            before.insert(0, place)
        for start in range(0, shape[dim], step):
            count = min(step, shape[dim] - start)
            yield (*before, start, *(0,) * (len(shape) - dim - 1)), (*(1,) * dim, count, *shape[dim + 1 :])


# ------------------------------------------------------------------------------------------------ reading


class DcpDirectory:
    """A DCP checkpoint that is trusted: its ``.metadata`` is unpickled.

    Args:
        path: of the directory.

    Raises:
        CorruptCheckpoint: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reader = dcp.FileSystemReader(path)
        with self._faults():
            self._metadata: Metadata = self._reader.read_metadata()
            self._check_places()
            self._reader.set_up_storage_reader(self._metadata, True)

    @contextlib.contextmanager
    def _faults(self) -> Iterator[None]:
        try:
            yield
        except CorruptCheckpoint:
            raise
        except Exception as error:  # whatever unpickling, torch.load and DCP's own asserts raise
            raise CorruptCheckpoint(f"{self._path}: {type(error).__name__}: {error}") from error

    def _check_places(self) -> None:
        for info in (self._metadata.storage_data or {}).values():
            name = getattr(info, "relative_path", "")
            if name != os.path.basename(name):
                raise CorruptCheckpoint(f"{self._path}: {name!r:.100} is no file of it")

    def tree(
        self, stand: Callable[[torch.dtype, tuple[int, ...], Callable[[Range], Tensor]], Tensor]
    ) -> dict[str, Any]:
        """Return what was saved, nested as it was.

        Args:
            stand: makes what stands for a tensor that is no single number: of its dtype, its shape, and how to read it.

        Raises:
            CorruptCheckpoint: a single number, or a value that is no tensor, cannot be read.
        """
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
                    node[path[-1]] = stand(info.properties.dtype, tuple(info.size), partial(self.read, name))
                else:
                    node[path[-1]] = self.read(name, (0, 1)).reshape(())
        found: dict[str, Any] = _listed(tree)
        return found

    def _read_bytes(self, name: str) -> Any:
        item = ReadItem(
            LoadItemType.BYTE_IO,
            MetadataIndex(name),
            torch.Size((0,)),
            MetadataIndex(name),
            torch.Size((0,)),
            torch.Size((0,)),
        )
        planner = _Target(None)
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
    made = {key: _listed(value) for key, value in node.items()}
    numbers = list(made)
    if numbers and all(type(key) is int for key in numbers) and sorted(numbers) == list(range(len(numbers))):
        return [made[index] for index in range(len(numbers))]
    return made
