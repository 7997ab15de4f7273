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
from fsshard.parallel.domain.exchange import Parts, summed
from fsshard.parallel.domain.slabs import FIRST, Layout, Slabs


class _GlobalGrid:
    """Coordinates of the whole domain, of which this rank keeps its own."""

    domain: Slabs
    domain_name: str
    grid_boundaries: Any
    _grid: Any
    _res: Any

    def grid(self, spatial_dims: Any, device: Any, dtype: Any) -> Any:
        """Return this rank's coordinates, one tensor (1, 1, d1, ..., dN) per dimension; as neuraloperator has them."""
        layout = self.domain.layout(self.domain_name, spatial_dims)
        key = (layout, tuple(spatial_dims), str(device), dtype)
        if self._grid is None or self._res != key:
            self._grid = self._coordinates(layout, spatial_dims, device, dtype)
            self._res = key
        return self._grid

    def _coordinates(
        self,
        layout: Layout,
        spatial_dims: Sequence[int],
        device: Any,
        dtype: Any,
    ) -> list[Tensor]:
        sizes = self.domain.whole(layout, spatial_dims)
        lines = []
        for size, (first, end) in zip(sizes, self.grid_boundaries, strict=True):
            points = torch.linspace(first, end, size + 1)
            lines.append(points[:-1])
        for axis, rows in zip(self.domain.axes, layout, strict=True):
            dim = axis.dim
            lines[dim] = axis.own_part(lines[dim], Parts(0, rows))
        coordinates = []
        for grid in torch.meshgrid(*lines, indexing="ij"):
            own = grid.contiguous().to(device).to(dtype)
            coordinates.append(own[None, None])
        return coordinates


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
        domain = self.domain
        layout = domain.layout(f"{self.domain_name}.pad", x.shape)
        sizes = domain.whole(layout, x.shape)
        parts = self.domain_padding
        if isinstance(parts, (int, float)):
            parts = [float(parts)] * len(sizes)
        widths = [round(part * size) for part, size in zip(parts, sizes, strict=True)]
        ends = [(width, width) for width in widths]
        padded_layout = []
        for axis, rows in zip(domain.axes, layout, strict=True):
            width = widths[axis.dim]
            before = 0
            after = 0
            padded_rows = list(rows)
            padded_rows[0] += width
            padded_rows[-1] += width
            padded_layout.append(tuple(padded_rows))
            if axis.rank == 0:
                before = width
            if axis.rank == axis.size - 1:
                after = width
            ends[axis.dim] = (before, after)
        padding = []
        # F.pad takes the last dimension first.
        for before, after in reversed(ends):
            padding += [before, after]
        out = F.pad(x, padding)
        padded = tuple(padded_layout)
        domain.notes[self._note(padded, out)] = layout, ends
        domain.becomes(padded)
        return out

    def unpad(self, x: Tensor) -> Tensor:
        """Return this rank's slab without the padding."""
        domain = self.domain
        padded = domain.layout(f"{self.domain_name}.unpad", x.shape)
        note = domain.notes.get(self._note(padded, x))
        if note is None:
            raise ConfigurationError(
                f"{self.domain_name}: the padded field has changed its size (output_shape), so that the padding cannot "
                "be taken away"
            )
        layout, ends = note
        domain.becomes(layout)
        for dim, (before, after) in enumerate(ends, start=FIRST):
            x = x.narrow(dim, before, x.shape[dim] - before - after)
        return x

    def _note(self, padded: Layout, slab: Tensor) -> tuple[Any, ...]:
        """Return the key by which :meth:`unpad` finds what :meth:`pad` has noted."""
        return self.domain_name, padded, tuple(slab.shape[FIRST:])


class DomainInstanceNorm(InstanceNorm):
    """Over the whole field of each sample and channel."""

    domain: Slabs
    domain_name: str

    def forward(self, x: Tensor) -> Tensor:
        """Return x normalized, (batch, channels, d1, ..., dN). Collective."""
        settings = self.kwargs
        eps = settings.get("eps", 1e-5)
        return _normalized(self, x, x.shape[1], eps, settings.get("weight"), settings.get("bias"))


class DomainGroupNorm(nn.GroupNorm):
    """Over the whole field of each sample and group of channels."""

    domain: Slabs
    domain_name: str

    def forward(self, x: Tensor) -> Tensor:
        """Return x normalized, (batch, channels, d1, ..., dN). Collective."""
        return _normalized(self, x, self.num_groups, self.eps, self.weight, self.bias)


class DomainAdaIN(AdaIN):
    """Over the whole field of each sample and channel, scaled and shifted by an embedding."""

    domain: Slabs
    domain_name: str

    def forward(self, x: Tensor) -> Tensor:
        """Return x normalized, (batch, channels, d1, ..., dN). Collective."""
        if self.embedding is None:
            raise ConfigurationError(f"{self.domain_name}: call set_embedding before the forward")
        weight, bias = self.mlp(self.embedding).split(self.in_channels)
        return _normalized(self, x, self.in_channels, self.eps, weight, bias)


def _normalized(
    module: Any,
    x: Tensor,
    groups: int,
    eps: float,
    weight: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """Return (x - mean) / sqrt(variance + eps) * weight + bias, in each sample and group; two sums over the ranks."""
    domain: Slabs = module.domain
    axes = domain.axes
    layout = domain.layout(module.domain_name, x.shape)
    sizes = domain.whole(layout, x.shape)
    batch, channels = x.shape[:2]
    members = channels // groups
    count = members * math.prod(sizes)
    # As torch's own norms do inside.
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    flat = wide.reshape(batch, groups, -1)
    centred = flat - summed(flat.sum(2, keepdim=True), axes) / count
    variance = summed(centred.square().sum(2, keepdim=True), axes) / count
    # Scales are multiplied with each other before they meet the field: one copy of it is kept for the backward.
    ones = [1] * len(sizes)
    scale = torch.rsqrt(variance + eps).expand(-1, -1, members)
    scale = scale.reshape(batch, -1, *ones)
    if weight is not None:
        scale = scale * weight.view(1, -1, *ones)
    out = centred.reshape(x.shape) * scale
    if bias is not None:
        out = out + bias.view(1, -1, *ones)
    return out.to(x.dtype)
