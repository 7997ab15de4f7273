"""Divide a parameter over mesh dimensions other than those of data, and put the whole one together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Groups = list[dist.ProcessGroup]


class Layout:
    """The parts of a parameter that ranks along other mesh dimensions hold, in the user's shape and dtype."""

    @property
    def divides(self) -> Groups:
        """The groups whose ranks hold different elements of it."""
        return []

    @property
    def shares(self) -> Groups:
        """The groups whose ranks hold the same values of it."""
        return []

    def whole_shape(self, part: torch.Size) -> torch.Size:
        """Return the shape of the whole one, of which a rank's part has the shape ``part``."""
        return part

    def whole(self, part: Tensor) -> Tensor:
        """Return the whole one, a new tensor on every rank. Collective over :attr:`divides`."""
        return part

    def part(self, whole: Tensor) -> Tensor:
        """Return this rank's part of it. No communication."""
        return whole


@dataclass(frozen=True)
class DTensorLayout(Layout):
    """The layout of a DTensor parameter: torch's mesh, placements, and the shape and strides of the whole.

    Meshes of the same ranks are equal, also where one is of a world that is gone; layouts are not, for which ``groups``
    has the names of the groups along the mesh's dimensions: classes of modules are remembered by them.
    """

    mesh: Any
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]
    groups: tuple[str, ...] = ()

    @property
    def divides(self) -> Groups:
        return [self.mesh.get_group(dim) for dim, placed in enumerate(self.placements) if placed.is_shard()]

    @property
    def shares(self) -> Groups:
        return [self.mesh.get_group(dim) for dim, placed in enumerate(self.placements) if not placed.is_shard()]

    def as_dtensor(self, part: Tensor) -> Tensor:
        """Return ``part`` as the DTensor that the model computes with; differentiable."""
        from torch.distributed.tensor import DTensor

        form: dict[str, Any] = {}
        if self.shape:
            # A 0-dim one has none.
            form = {"shape": self.shape, "stride": self.stride}
        dtensor: Tensor = DTensor.from_local(part, self.mesh, self.placements, run_check=False, **form)
        return dtensor

    def whole_shape(self, part: torch.Size) -> torch.Size:
        return self.shape

    def whole(self, part: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor

        # As reals: not every communication library knows complex numbers.
        real = torch.view_as_real(part) if part.is_complex() else part
        # Halves of complex numbers come last.
        shape = torch.Size([*self.shape, *real.shape[len(self.shape) :]])
        if not shape:
            return part.clone()
        stride = torch.empty(shape, device="meta").stride()
        held = DTensor.from_local(
            real.contiguous(), self.mesh, self.placements, run_check=False, shape=shape, stride=stride
        )
        whole = held.full_tensor()
        if whole.data_ptr() == real.data_ptr():
            whole = whole.clone()
        if part.is_complex():
            return torch.view_as_complex(whole.contiguous())
        return whole

    def part(self, whole: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor, Replicate

        everywhere = [Replicate()] * len(self.placements)
        local = DTensor.from_local(whole, self.mesh, everywhere, run_check=False)
        found = local.redistribute(placements=self.placements).to_local()
        return found


@dataclass(frozen=True)
class HandSplit(Layout):
    """The layout of a plain parameter that is one of ``group``'s parts of a whole, in the order of their ranks.

    The parts lie one after the other along ``dim``; where the user has not said (None), side by side along a new one.
    """

    group: dist.ProcessGroup
    dim: int | None

    @property
    def divides(self) -> Groups:
        return [self.group]

    def whole_shape(self, part: torch.Size) -> torch.Size:
        parts = self.group.size()
        if self.dim is None:
            return torch.Size([parts, *part])
        shape = list(part)
        shape[self.dim] *= parts
        return torch.Size(shape)

    def whole(self, part: Tensor) -> Tensor:
        real = torch.view_as_real(part) if part.is_complex() else part
        real = real.contiguous()
        parts = [torch.empty_like(real) for _ in range(self.group.size())]
        dist.all_gather(parts, real, group=self.group)
        whole = torch.stack(parts) if self.dim is None else torch.cat(parts, self.dim)
        if part.is_complex():
            return torch.view_as_complex(whole)
        return whole

    def part(self, whole: Tensor) -> Tensor:
        rank = dist.get_rank(self.group)
        if self.dim is None:
            return whole[rank]
        return whole.chunk(self.group.size(), self.dim)[rank]


@dataclass(frozen=True)
class Shared(Layout):
    """The layout of a plain parameter whose values ``group`` shares, while each rank has a part of its gradient.

    The gradient is the sum of theirs, or with ``mean`` their mean.
    """

    group: dist.ProcessGroup
    mean: bool = False

    @property
    def shares(self) -> Groups:
        return [self.group]
