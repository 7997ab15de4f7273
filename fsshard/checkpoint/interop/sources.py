"""What an export reads from: a checkpoint on disk, or a wrapped model in the memory of all ranks.

Both give their tensors a range at a time, so that whoever writes them needs memory for one range only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fsshard.checkpoint.collect import Collected, Part, collect, first_of
from fsshard.checkpoint.format.dtypes import BY_NAME, dtype_name
from fsshard.checkpoint.format.index import optimizer_tensors
from fsshard.checkpoint.format.pieces import Range, cover, steps
from fsshard.checkpoint.format.tree import decode
from fsshard.checkpoint.ranges import divides_otherwise, put_in_ranges
from fsshard.checkpoint.reader import Reader
from fsshard.comm.rendezvous import Rendezvous
from fsshard.errors import CheckpointError
from fsshard.sharded.buffers import buffers_of
from fsshard.sharded.module import ShardedModule
from fsshard.sharded.optimizer import ShardedOptimizer

__all__ = ["Contents", "OfCheckpoint", "OfModel", "OptimizerContents", "Source", "TensorKind", "chunks"]


class TensorKind(NamedTuple):
    """Dtype and shape of a whole tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class OptimizerContents:
    """One optimizer's state, by name of parameter.

    Attributes:
        groups: hyper-parameters; ``"params"`` are names.
        small: parameter -> key -> value that is no tensor to stream.
        tensors: parameter -> key -> name of a tensor.
    """

    groups: list[dict[str, Any]]
    small: dict[str, dict[str, Any]]
    tensors: dict[str, dict[str, str]]


@dataclass(frozen=True)
class Contents:
    """What there is to write.

    Attributes:
        keys: the state dict's keys in order -> name of the tensor; tied keys have the same one. None: in ``extra``.
        extra: the state dict's values that are no tensors.
        tensors: name -> kind.
        optimizers: name -> its state.
    """

    keys: dict[str, str | None] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, TensorKind] = field(default_factory=dict)
    optimizers: dict[str, OptimizerContents] = field(default_factory=dict)


class Source(Protocol):
    """Something with contents that can be read in ranges."""

    @property
    def contents(self) -> Contents:
        """What there is."""

    def read(self, name: str, wanted: Range) -> Tensor:
        """Elements [start, stop) of a flattened tensor, on the CPU."""


def chunks(source: Source, name: str) -> Iterator[Tensor]:
    """The flattened tensor in order, a bounded number of bytes at a time."""
    kind = source.contents.tensors[name]
    return (source.read(name, part) for part in steps(kind.numel, kind.dtype.itemsize))


# ------------------------------------------------------------------------------------------------ a checkpoint


class OfCheckpoint:
    """A checkpoint on the disk.

    Args:
        reader: open for as long as this is used.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self.contents = self._describe()

    def _describe(self) -> Contents:
        index, tree = self._reader.index, self._reader.tree
        tensors = {name: TensorKind(BY_NAME[info.dtype], tuple(info.shape)) for name, info in index.tensors.items()}
        return Contents(
            dict(index.model.keys),
            {key: tree(node) for key, node in index.model.extra.items()},
            tensors,
            {
                name: OptimizerContents(
                    [tree(group) for group in saved.groups],
                    {p: {k: tree(node) for k, node in state.items()} for p, state in saved.state.items()},
                    index.optimizer_tensors(name),
                )
                for name, saved in index.optimizers.items()
            },
        )

    def read(self, name: str, wanted: Range) -> Tensor:
        """Elements [start, stop) of a flattened tensor."""
        return self._reader.read(name, wanted)


# ------------------------------------------------------------------------------------------------ a model


class OfModel:
    """A wrapped model, and optimizers over it, on all ranks. Collective to make.

    Rank 0 reads; every other rank calls :meth:`serve`, which hands out what rank 0 asks for until it closes.

    Args:
        model: what :func:`fsshard.wrap` returned.
        optimizers: by name.
        rendezvous: of the model's ranks.

    Raises:
        CheckpointError: something in it that no checkpoint holds; on every rank.
    """

    def __init__(
        self, model: ShardedModule, optimizers: Mapping[str, ShardedOptimizer], rendezvous: Rendezvous
    ) -> None:
        settings = model.backend.settings
        self._group, self._rank, self._device = settings.everyone, settings.overall_rank, settings.device
        buffers_of(model).sync()  # rank 0's count, as in a state dict
        self._mine = Collected()

        def collected() -> None:
            model.backend.reshard()
            self._mine = collect(model, optimizers, {}, settings.overall_rank)

        rendezvous.run_on_all_ranks(collected)
        if divides_otherwise(model.backend):
            put_in_ranges(self._mine, model.backend, rendezvous)
        tables = rendezvous.gather(
            {
                "parts": {n: [dtype_name(p.dtype), list(p.shape), *p.range] for n, p in self._mine.parts.items()},
                "state": self._mine.state,
            }
        )
        self._names = sorted({name for table in tables for name in table["parts"]})
        self._holders = {name: _holders(name, tables) for name in self._names}
        ranks = {rank for held in self._holders.values() for _, rank in held}
        self._asked = sorted(ranks - {0})  # those that rank 0 needs at all: with whole parameters, none
        self.contents = self._describe(tables)

    def _describe(self, tables: Sequence[Mapping[str, Any]]) -> Contents:
        kinds: dict[str, TensorKind] = {}
        for table in tables:
            for name, (dtype, shape, *_) in table["parts"].items():
                kinds.setdefault(name, TensorKind(BY_NAME[dtype], tuple(shape)))
        mine = self._mine
        if self._rank:
            return Contents(tensors=kinds)
        small = {
            name: {
                parameter: {key: self._decoded(node) for key, node in state.items()}
                for parameter, state in first_of([table["state"][name] for table in tables]).items()
            }
            for name in mine.groups
        }
        return Contents(
            dict(mine.model["keys"]),
            {key: self._decoded(node) for key, node in mine.model["extra"].items()},
            kinds,
            {
                name: OptimizerContents(self._decoded(groups), small[name], optimizer_tensors(kinds, name))
                for name, (_, groups) in mine.groups.items()
            },
        )

    def _decoded(self, node: Any) -> Any:
        def get(name: str) -> Tensor:
            part = self._mine.parts[name]
            return part.values.detach().cpu().reshape(part.shape)

        return decode(node, get)

    # -- rank 0

    def read(self, name: str, wanted: Range) -> Tensor:
        """Elements [start, stop) of a flattened tensor, on the CPU. On rank 0, while the others serve."""
        out = torch.empty(wanted[1] - wanted[0], dtype=self.contents.tensors[name].dtype)
        held = self._holders[name]
        for at, (low, high) in cover([part for part, _ in held], wanted):
            rank = held[at][1]
            place = out[low - wanted[0] : high - wanted[0]]
            if rank == 0:
                place.copy_(_slice(self._mine.parts[name], low, high))
            else:
                self._fetch(rank, name, low, high, place)
        return out

    def _fetch(self, rank: int, name: str, low: int, high: int, place: Tensor) -> None:
        self._send([self._names.index(name), low, high], rank)
        direct = self._device.type == "cpu"
        buffer = place if direct else torch.empty(place.shape, dtype=place.dtype, device=self._device)
        dist.recv(_bytes(buffer), group=self._group, group_src=rank)
        if not direct:
            place.copy_(buffer)

    def close(self) -> None:
        """On rank 0: let the others go on."""
        for rank in self._asked:
            self._send([-1, 0, 0], rank)
        self._asked = []

    def _send(self, request: list[int], rank: int) -> None:
        dist.send(torch.tensor(request, device=self._device), group=self._group, group_dst=rank)

    # -- the others

    def serve(self) -> None:
        """On the other ranks: hand out parts until rank 0 closes."""
        request = torch.empty(3, dtype=torch.int64, device=self._device)
        while self._rank in self._asked:
            dist.recv(request, group=self._group, group_src=0)
            at, low, high = request.tolist()
            if at < 0:
                return
            part = _slice(self._mine.parts[self._names[at]], low, high).to(self._device)  # a step's count is on the CPU
            dist.send(_bytes(part), group=self._group, group_dst=0)


def _holders(name: str, tables: Sequence[Mapping[str, Any]]) -> list[tuple[Range, int]]:
    """The ranges of a tensor and for each the first rank that holds it."""
    found: dict[Range, int] = {}
    for rank, table in enumerate(tables):
        if name in table["parts"]:
            dtype, shape, start, stop = table["parts"][name]
            if [dtype, shape] != next(t["parts"][name][:2] for t in tables if name in t["parts"]):
                raise CheckpointError(f"the ranks disagree on {name}: rank {rank} has {dtype} {tuple(shape)}")
            if stop > start:
                found.setdefault((start, stop), rank)
    return sorted(found.items())


def _slice(part: Part, low: int, high: int) -> Tensor:
    return part.values[low - part.range[0] : high - part.range[0]]


def _bytes(values: Tensor) -> Tensor:
    """As bytes, which every collective library carries; complex numbers and bool not all of them do."""
    return values.contiguous().view(torch.uint8)
