"""How a parameter is divided over mesh dimensions other than those of data, and how the whole one is put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["DTensorLayout", "HandSplit", "Layout", "Shared", "rank_in"]


class Layout(Protocol):
    """What ranks along other mesh dimensions hold of a parameter, in the user's shape and dtype."""

    @property
    def divides(self) -> Sequence[dist.ProcessGroup]:
        """The groups whose ranks hold different elements of it."""

    @property
    def shares(self) -> Sequence[dist.ProcessGroup]:
        """The groups whose ranks hold the same values of it."""

    def whole_shape(self, part: torch.Size) -> torch.Size:
        """The shape of the whole one, of which a rank's part has the shape ``part``."""

    def whole(self, part: Tensor) -> Tensor:
        """The whole one, a new tensor on every rank. Collective over :attr:`divides`."""

    def part(self, whole: Tensor) -> Tensor:
        """This rank's part of it. No communication."""


def rank_in(group: dist.ProcessGroup) -> int:
    """This process's rank in the group."""
    return dist.get_rank(group)


@dataclass(frozen=True)
class DTensorLayout:
    """Of a parameter that came as a DTensor: torch's mesh, placements, and the shape and strides of the whole.

    Attributes:
        mesh: its DeviceMesh, of other dimensions than data.
        placements: a ``Shard`` or ``Replicate`` per dimension of it.
        shape: of the whole parameter, the user's.
        stride: likewise.
        groups: the names of the groups along its dimensions. Meshes of the same ranks are equal, also where one is of a
            world that is gone; layouts are not, of which classes of modules are remembered.
    """

    mesh: Any
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]
    groups: tuple[str, ...] = ()

    @property
    def divides(self) -> list[dist.ProcessGroup]:
        return [self.mesh.get_group(dim) for dim, placed in enumerate(self.placements) if placed.is_shard()]

    @property
    def shares(self) -> list[dist.ProcessGroup]:
        return [self.mesh.get_group(dim) for dim, placed in enumerate(self.placements) if not placed.is_shard()]

    def as_dtensor(self, part: Tensor) -> Tensor:
        """``part`` as the DTensor that the model computes with; differentiable."""
        from torch.distributed.tensor import DTensor

        shape: Any = self.shape or None  # of a 0-dim one torch wants neither
        stride: Any = self.stride or None
        found: Tensor = DTensor.from_local(
            part, self.mesh, self.placements, run_check=False, shape=shape, stride=stride
        )
        return found

    def whole_shape(self, part: torch.Size) -> torch.Size:
        return self.shape

    def whole(self, part: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor

        # As reals: not every communication library knows complex numbers.
        real = torch.view_as_real(part) if part.is_complex() else part
        shape = torch.Size([*self.shape, *real.shape[len(self.shape) :]])  # halves of complex numbers come last
        if not shape:
            return part.clone()
        stride = torch.empty(shape, device="meta").stride()
        held = DTensor.from_local(
            real.contiguous(), self.mesh, self.placements, run_check=False, shape=shape, stride=stride
        )
        whole = held.full_tensor()
        whole = whole.clone() if whole.data_ptr() == real.data_ptr() else whole
        return torch.view_as_complex(whole.contiguous()) if part.is_complex() else whole

    def part(self, whole: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor, Replicate

        everywhere = [Replicate()] * len(self.placements)
        local = DTensor.from_local(whole, self.mesh, everywhere, run_check=False)
        found: Tensor = local.redistribute(placements=self.placements).to_local()
        return found


@dataclass(frozen=True)
class HandSplit:
    """Of a plain parameter that is one of ``group``'s parts of a whole.

    Attributes:
        group: the ranks that hold the parts, in their order.
        dim: along which the parts lie one after the other; None where the user has not said, so that the whole is the
            parts side by side, along a new first dimension.
    """

    group: dist.ProcessGroup
    dim: int | None

    @property
    def divides(self) -> list[dist.ProcessGroup]:
        return [self.group]

    @property
    def shares(self) -> list[dist.ProcessGroup]:
        return []

    def whole_shape(self, part: torch.Size) -> torch.Size:
        parts = self.group.size()
        if self.dim is None:
            return torch.Size([parts, *part])
        return torch.Size([size * parts if dim == self.dim else size for dim, size in enumerate(part)])

    def whole(self, part: Tensor) -> Tensor:
        real = (torch.view_as_real(part) if part.is_complex() else part).contiguous()
        parts = [torch.empty_like(real) for _ in range(self.group.size())]
        dist.all_gather(parts, real, group=self.group)
        whole = torch.stack(parts) if self.dim is None else torch.cat(parts, self.dim)
        return torch.view_as_complex(whole) if part.is_complex() else whole

    def part(self, whole: Tensor) -> Tensor:
        rank = rank_in(self.group)
        return whole[rank] if self.dim is None else whole.chunk(self.group.size(), self.dim)[rank]


@dataclass(frozen=True)
class Shared:
    """Of a plain parameter whose values the ranks of ``group`` share, while each has a part of its gradient.

    Attributes:
        group: the ranks.
        mean: whether the gradient is the mean of theirs, and not their sum.
    """

    group: dist.ProcessGroup
    mean: bool = False

    @property
    def divides(self) -> list[dist.ProcessGroup]:
        return []

    @property
    def shares(self) -> list[dist.ProcessGroup]:
        return [self.group]

    def whole_shape(self, part: torch.Size) -> torch.Size:
        return part

    def whole(self, part: Tensor) -> Tensor:
        return part

    def part(self, whole: Tensor) -> Tensor:
        return whole
