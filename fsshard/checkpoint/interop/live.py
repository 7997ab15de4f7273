"""Reads a wrapped model in the memory of all ranks as if it were a checkpoint, a range at a time."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from fsshard.checkpoint.format.pieces import Range, cover, first_holders, rank_of
from fsshard.checkpoint.parts import Collected, collect, collect_together, holders, make_index, origin_of, tensor_infos
from fsshard.checkpoint.reader import TensorReader
from fsshard.comm.channel import Channel
from fsshard.sharded.buffers import buffers_of
from fsshard.sharded.module import ShardedModule
from fsshard.sharded.optimizer import ShardedOptimizer

__all__ = ["LiveReader"]


class LiveReader(TensorReader):
    """A wrapped model, and optimizers over it, on all ranks. Collective to make.

    Rank 0 reads; every other rank calls :meth:`serve`, which hands out what rank 0 asks for until it closes.

    Args:
        model: what :func:`fsshard.wrap` returned.
        optimizers: by name.
        channel: of the model's ranks.
        call: for messages.

    Raises:
        CheckpointError: something in it that no checkpoint holds; on every rank.
    """

    def __init__(
        self, model: ShardedModule, optimizers: Mapping[str, ShardedOptimizer], channel: Channel, call: str
    ) -> None:
        settings = model.backend.settings
        self._group, self._rank, self._device = settings.everyone, settings.overall_rank, settings.device
        buffers_of(model).sync()  # rank 0's count, as in a state dict

        def collected() -> Collected:
            model.backend.reshard()
            return collect(model, optimizers, {}, settings.overall_rank)

        mine = collect_together(collected, model.backend, channel)
        self._parts = mine.parts
        told = channel.gather([mine.table(), mine.trees(())])
        infos, held = holders([table for table, _ in told], call)
        tensors = tensor_infos(infos, first_holders(held, channel.size))
        self.index = make_index(origin_of(model), mine, tensors, [trees for _, trees in told])
        self._names = sorted(tensors)
        ranks = {rank_of(piece.file) for info in tensors.values() for piece in info.pieces}
        self._asked = sorted(ranks - {0})  # those that rank 0 needs at all: with whole parameters, none

    # -- rank 0

    def read(self, name: str, wanted: Range) -> Tensor:
        """Return elements [start, stop) of a flattened tensor, on the CPU. On rank 0, while the others serve."""
        info = self.index.tensors[name]
        out = torch.empty(wanted[1] - wanted[0], dtype=info.kind)
        for piece, low, high in cover(info.pieces, wanted):
            place = out[low - wanted[0] : high - wanted[0]]
            if rank_of(piece.file) == 0:
                place.copy_(self._slice(name, low, high))
            else:
                self._fetch(rank_of(piece.file), name, low, high, place)
        return out

    def _slice(self, name: str, low: int, high: int) -> Tensor:
        part = self._parts[name]
        return part.values[low - part.range[0] : high - part.range[0]]

    def _fetch(self, rank: int, name: str, low: int, high: int, place: Tensor) -> None:
        self._send([self._names.index(name), low, high], rank)
        direct = self._device.type == "cpu"
        buffer = place if direct else torch.empty(place.shape, dtype=place.dtype, device=self._device)
        dist.recv(_bytes(buffer), group=self._group, group_src=rank)
        if not direct:
            place.copy_(buffer)

    def close(self) -> None:
        """Let the others go on; on rank 0."""
        for rank in self._asked:
            self._send([-1, 0, 0], rank)
        self._asked = []

    def _send(self, request: list[int], rank: int) -> None:
        dist.send(torch.tensor(request, device=self._device), group=self._group, group_dst=rank)

    # -- the others

    def serve(self) -> None:
        """Hand out parts until rank 0 closes; on the other ranks."""
        request = torch.empty(3, dtype=torch.int64, device=self._device)
        while self._rank in self._asked:
            dist.recv(request, group=self._group, group_src=0)
            at, low, high = request.tolist()
            if at < 0:
                return
            part = self._slice(self._names[at], low, high).to(self._device)  # a step's count is on the CPU
            dist.send(_bytes(part), group=self._group, group_dst=0)


def _bytes(values: Tensor) -> Tensor:
    """View values as bytes, which every collective library carries; complex numbers and bool not all of them do."""
    return values.contiguous().view(torch.uint8)
