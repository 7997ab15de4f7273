"""neuraloperator's other layers that need more than a slab: coordinates, padding, and norms over the field."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from neuralop.layers.embeddings import GridEmbedding2D, GridEmbeddingND
from neuralop.layers.normalization_layers import AdaIN, InstanceNorm
from neuralop.layers.padding import DomainPadding
from torch import Tensor, nn

from fsshard.errors import ConfigurationError
from fsshard.parallel.domain.exchange import summed
from fsshard.parallel.domain.slabs import FIRST, Layout, Slabs


class _GlobalGrid:
    """Coordinates of the whole domain, of which this rank keeps its own."""

    domain: Slabs
    domain_name: str
    grid_boundaries: Any
    _grid: Any
    _res: Any

    def grid(self, spatial_dims: Any, device: Any, dtype: Any) -> Any:
        """This rank's coordinates, one tensor (1, 1, d1, ..., dN) per dimension; as neuraloperator computes them."""
        layout = self.domain.layout(self.domain_name, spatial_dims)
        wanted = (layout, tuple(spatial_dims), str(device), dtype)
        if self._grid is None or self._res != wanted:
            self._grid, self._res = self._coordinates(layout, spatial_dims, device, dtype), wanted
        return self._grid

    def _coordinates(self, layout: Layout, spatial_dims: Sequence[int], device: Any, dtype: Any) -> list[Tensor]:
        lines = []
        whole = self.domain.whole(layout, spatial_dims)
        for size, (first, end) in zip(whole, self.grid_boundaries, strict=True):
            lines.append(torch.linspace(first, end, size + 1)[:-1])
        for axis, sizes in zip(self.domain.axes, layout, strict=True):
            lines[axis.dim] = lines[axis.dim].narrow(0, sum(sizes[: axis.rank]), sizes[axis.rank])
        grids = torch.meshgrid(*lines, indexing="ij")
        return [grid.contiguous().to(device).to(dtype)[None, None] for grid in grids]


class DomainGridEmbeddingND(_GlobalGrid, GridEmbeddingND):
    """Appends this rank's coordinates."""


class DomainGridEmbedding2D(_GlobalGrid, GridEmbedding2D):
    """Appends this rank's coordinates."""


class DomainPaddingOfSlabs(DomainPadding):
    """Pads the whole domain: along a split dimension its first and last ranks do."""

    domain: Slabs
    domain_name: str

    def pad(self, x: Tensor, verbose: bool = False) -> Tensor:
        """This rank's slab of the padded field.

        Raises:
            ConfigurationError: the field's resolution is scaled as well.
        """
        layout = self.domain.layout(f"{self.domain_name}.pad", x.shape)
        sizes = self.domain.whole(layout, x.shape)
        parts = self.domain_padding
        parts = [float(parts)] * len(sizes) if isinstance(parts, (int, float)) else parts
        widths = [round(part * size) for part, size in zip(parts, sizes, strict=True)]
        ends = [(width, width) for width in widths]
        padded = list(layout)
        for at, axis in enumerate(self.domain.axes):
            width, rows = widths[axis.dim], list(layout[at])
            ends[axis.dim] = (width * (axis.rank == 0), width * (axis.rank == axis.size - 1))
            rows[0] += width
            rows[-1] += width
            padded[at] = tuple(rows)
        out = F.pad(x, [width for pair in reversed(ends) for width in pair])
        note = (self.domain_name, tuple(padded), tuple(out.shape[FIRST:]))
        self.domain.notes[note] = layout, ends
        self.domain.becomes(tuple(padded))
        return out

    def unpad(self, x: Tensor) -> Tensor:
        """This rank's slab without the padding."""
        padded = self.domain.layout(f"{self.domain_name}.unpad", x.shape)
        found = self.domain.notes.get((self.domain_name, padded, tuple(x.shape[FIRST:])))
        if found is None:
            raise ConfigurationError(
                f"{self.domain_name}: the padded field has changed its size (output_shape), so that the padding cannot "
                "be taken away"
            )
        layout, ends = found
        self.domain.becomes(layout)
        for dim, (before, after) in enumerate(ends, start=FIRST):
            x = x.narrow(dim, before, x.shape[dim] - before - after)
        return x


class DomainInstanceNorm(InstanceNorm):
    """Over the whole field of each sample and channel."""

    domain: Slabs
    domain_name: str

    def forward(self, x: Tensor) -> Tensor:
        """x normalized, (batch, channels, d1, ..., dN). Collective."""
        told = self.kwargs
        return _normalized(self, x, x.shape[1], told.get("eps", 1e-5), told.get("weight"), told.get("bias"))


class DomainGroupNorm(nn.GroupNorm):
    """Over the whole field of each sample and group of channels."""

    domain: Slabs
    domain_name: str

    def forward(self, x: Tensor) -> Tensor:
        """x normalized, (batch, channels, d1, ..., dN). Collective."""
        return _normalized(self, x, self.num_groups, self.eps, self.weight, self.bias)


class DomainAdaIN(AdaIN):
    """Over the whole field of each sample and channel, scaled and shifted by an embedding."""

    domain: Slabs
    domain_name: str

    def forward(self, x: Tensor) -> Tensor:
        """x normalized, (batch, channels, d1, ..., dN). Collective."""
        if self.embedding is None:
            raise ConfigurationError(f"{self.domain_name}: call set_embedding before the forward")
        weight, bias = self.mlp(self.embedding).split(self.in_channels)
        return _normalized(self, x, self.in_channels, self.eps, weight, bias)


def _normalized(module: Any, x: Tensor, groups: int, eps: float, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias, in each sample and group of channels; two sums over the ranks.

    Scales are multiplied with each other before they meet the field, so that one copy of it is kept for the backward.
    """
    domain: Slabs = module.domain
    sizes = domain.whole(domain.layout(module.domain_name, x.shape), x.shape)
    members, channels = x.shape[1] // groups, (1, -1, *[1] * domain.order)
    count = members * math.prod(sizes)
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x  # as torch's own norms, inside
    flat = wide.reshape(x.shape[0], groups, -1)
    centred = flat - summed(flat.sum(2, keepdim=True), domain.axes) / count
    variance = summed(centred.square().sum(2, keepdim=True), domain.axes) / count
    scale = torch.rsqrt(variance + eps).expand(-1, -1, members).reshape(x.shape[0], *channels[1:])
    if weight is not None:
        scale = scale * weight.view(channels)
    out = centred.reshape(x.shape) * scale
    return (out if bias is None else out + bias.view(channels)).to(x.dtype)
