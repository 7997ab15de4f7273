"""neuraloperator's spectral convolution, of a field in slabs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from neuralop.layers.spectral_convolution import SpectralConv, get_contract_fun
from torch import Tensor

from fsshard.parallel.domain.exchange import Axis, Parts, redealt
from fsshard.parallel.domain.modes import Modes, has_slice, keep, modes_of, own_slice, place, slice_sizes
from fsshard.parallel.domain.slabs import FIRST, Layout, Slabs, even_parts

Dealing = tuple[Axis, Parts]
"""A split dimension's ranks, and the tensor dimension whose modes they share meanwhile."""


class DomainSpectralConv(SpectralConv):
    """Transforms the dimensions that a rank has whole, and keeps their modes; then, split dimension by split dimension,
    ranks exchange slabs for a share of another dimension's modes, and transform what has come together.

    The split dimension before the last modes are dealt is always the last of the split ones: with one split dimension
    the last dimension's modes are dealt out, with two those of the last and of the second. Weights are used where this
    rank has modes; their gradients are zero elsewhere.
    """

    domain: Slabs
    domain_name: str

    def transform(self, x: Tensor, output_shape: Any = None) -> Tensor:
        """Interpolate what passes by the convolution, as neuraloperator does. It reads everything: x is gathered."""
        if self.resolution_scaling_factor is None and output_shape is None:
            return x
        domain = self.domain
        name = f"{self.domain_name}.transform"
        layout = domain.layout(name, x.shape)
        whole = domain.join(x, layout)
        resampled = super().transform(whole, output_shape)
        after = domain.resized(layout, resampled.shape[FIRST:])
        return domain.cut(resampled, after).contiguous()

    def forward(self, x: Tensor, output_shape: Any = None) -> Tensor:
        """This rank's slab of the convolution; of a field that lies on the ranks as the domain says. Collective.

        Args:
            x: (batch, in_channels, d1, ..., dN).
            output_shape: sizes of the whole output, if not those of the input.
        """
        domain = self.domain
        layout = domain.layout(self.domain_name, x.shape)
        sizes = domain.whole(layout, x.shape)
        target = self._target(sizes, output_shape)
        after = domain.resized(layout, target)
        modes = modes_of(self, sizes)
        dealings = self._dealings(modes)
        spectrum = self._analysed(x, modes, layout, dealings)
        weight = self._weight_of(modes, dealings)
        contract = get_contract_fun(weight, implementation=self.implementation, separable=self.separable)
        spectrum = contract(spectrum, weight, separable=self.separable)
        out = self._synthesised(spectrum, modes, target, after, dealings)
        domain.becomes(after)
        if self.bias is not None:
            out = out + self.bias
        return out

    def _target(self, sizes: Sequence[int], output_shape: Any) -> list[int]:
        if output_shape is not None:
            return list(output_shape)
        factors = self.resolution_scaling_factor
        if factors is None:
            return list(sizes)
        target = []
        for size, factor in zip(sizes, factors, strict=True):
            target.append(round(size * factor))
        return target

    def _dealings(self, modes: Sequence[Modes]) -> list[Dealing]:
        """Return each split dimension's ranks, and the tensor dimension whose modes they share meanwhile."""
        axes = self.domain.axes
        last = self.order - 1
        if has_slice(self):
            # One dimension is split then. Each rank multiplies the kept modes among those that it has.
            (axis,) = axes
            slices = slice_sizes(self.max_n_modes[-1], axis.size)
            overlaps = _overlaps(modes[-1], slices)
            return [(axis, Parts(FIRST + last, overlaps))]
        dealings = []
        for axis in axes:
            dim = last
            if axis is not axes[-1]:
                dim = axis.dim + 1
            sizes = even_parts(modes[dim].kept, axis.size)
            parts = Parts(FIRST + dim, sizes)
            dealings.append((axis, parts))
        return dealings

    def _local_dims(self) -> range:
        """Spatial dimensions that no one splits, but for the last."""
        return range(len(self.domain.axes), self.order - 1)

    def _analysed(
        self,
        x: Tensor,
        modes: Sequence[Modes],
        layout: Layout,
        dealings: Sequence[Dealing],
    ) -> Tensor:
        """Return this rank's share of the kept modes."""
        norm = self.fft_norm
        last = FIRST + self.order - 1
        transform = torch.fft.fft if self.complex_data else torch.fft.rfft
        x = transform(x, dim=last, norm=norm)
        x = keep(x, last, modes[-1])
        for spatial in reversed(self._local_dims()):
            dim = FIRST + spatial
            x = torch.fft.fft(x, dim=dim, norm=norm)
            x = keep(x, dim, modes[spatial])
        for index in reversed(range(len(layout))):
            axis, dealt = dealings[index]
            spatial = axis.dim
            dim = FIRST + spatial
            joined = Parts(dim, layout[index])
            x = redealt(x, axis, dealt, joined)
            x = _transformed(torch.fft.fft, x, dim, norm)
            x = keep(x, dim, modes[spatial])
        return x

    def _weight_of(
        self,
        modes: Sequence[Modes],
        dealings: Sequence[Dealing],
    ) -> Any:
        """Return the part of the weight that belongs to this rank's modes."""
        firsts = [each.start for each in modes]
        lengths = [each.kept for each in modes]
        if has_slice(self):
            axis, dealt = dealings[0]
            weight = own_slice(self, axis.size)
            slices = slice_sizes(self.max_n_modes[-1], axis.size)
            before = sum(slices[: axis.rank])
            first = firsts[-1] - before
            firsts[-1] = max(first, 0)
            lengths[-1] = dealt.sizes[axis.rank]
        else:
            weight = self.weight
            for axis, (dim, sizes) in dealings:
                spatial = dim - FIRST
                rank = axis.rank
                firsts[spatial] += sum(sizes[:rank])
                lengths[spatial] = sizes[rank]
        channels = 1 if self.separable else 2
        window = [slice(None)] * channels
        for first, length in zip(firsts, lengths, strict=True):
            window.append(slice(first, first + length))
        return weight[tuple(window)]

    def _synthesised(
        self,
        x: Tensor,
        modes: Sequence[Modes],
        target: Sequence[int],
        layout: Layout,
        dealings: Sequence[Dealing],
    ) -> Tensor:
        """Return this rank's slab, from its share of the modes."""
        norm = self.fft_norm
        last = FIRST + self.order - 1
        for (axis, dealt), sizes in zip(dealings, layout, strict=True):
            spatial = axis.dim
            dim = FIRST + spatial
            joined = Parts(dim, sizes)
            x = place(x, dim, modes[spatial], target[spatial])
            x = _transformed(torch.fft.ifft, x, dim, norm)
            x = redealt(x, axis, joined, dealt)
        for spatial in self._local_dims():
            dim = FIRST + spatial
            x = place(x, dim, modes[spatial], target[spatial])
            x = torch.fft.ifft(x, dim=dim, norm=norm)
        size = target[-1]
        if self.complex_data:
            x = place(x, last, modes[-1], size)
            x = torch.fft.ifft(x, dim=last, norm=norm)
        else:
            x = torch.fft.irfft(x, n=size, dim=last, norm=norm)
        return x


def _transformed(
    transform: Callable[..., Tensor],
    x: Tensor,
    dim: int,
    norm: str,
) -> Tensor:
    """Return the transform of what may be empty, on a rank without modes."""
    # MKL refuses an empty batch ("MKL FFT error", torch 2.13).
    if x.numel() == 0:
        return x
    return transform(x, dim=dim, norm=norm)


def _overlaps(modes: Modes, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return how many of the kept modes lie in each slice of a weight, whose slices have these sizes."""
    overlaps = []
    first = 0
    kept_end = modes.start + modes.kept
    for size in sizes:
        end = first + size
        low = max(first, modes.start)
        high = min(end, kept_end)
        overlaps.append(max(0, high - low))
        first = end
    return tuple(overlaps)
