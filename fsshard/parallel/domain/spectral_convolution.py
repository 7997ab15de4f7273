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
        layout = self.domain.layout(f"{self.domain_name}.transform", x.shape)
        whole = self.domain.join(x, layout)
        resampled: Tensor = super().transform(whole, output_shape)
        return self.domain.cut(resampled, self.domain.resized(layout, resampled.shape[FIRST:])).contiguous()

    def forward(self, x: Tensor, output_shape: Any = None) -> Tensor:
        """This rank's slab of the convolution; of a field that lies on the ranks as the domain says. Collective.

        Args:
            x: (batch, in_channels, d1, ..., dN).
            output_shape: sizes of the whole output, if not those of the input.
        """
        layout = self.domain.layout(self.domain_name, x.shape)
        sizes = self.domain.whole(layout, x.shape)
        target = self._target(sizes, output_shape)
        after = self.domain.resized(layout, target)
        modes = modes_of(self, sizes)
        dealings = self._dealings(modes)
        spectrum = self._analysed(x, modes, layout, dealings)
        weight = self._weight_of(modes, dealings)
        contract = get_contract_fun(weight, implementation=self.implementation, separable=self.separable)
        spectrum = contract(spectrum, weight, separable=self.separable)
        out = self._synthesised(spectrum, modes, target, after, dealings)
        self.domain.becomes(after)
        return out if self.bias is None else out + self.bias

    def _target(self, sizes: Sequence[int], output_shape: Any) -> list[int]:
        if output_shape is not None:
            return list(output_shape)
        factors = self.resolution_scaling_factor
        return list(sizes) if factors is None else [round(s * f) for s, f in zip(sizes, factors, strict=True)]

    def _dealings(self, modes: Sequence[Modes]) -> list[tuple[Axis, Parts]]:
        """Return each split dimension's ranks, and the tensor dimension whose modes they share meanwhile."""
        axes = self.domain.axes
        partners = [axis.dim + 1 for axis in axes[:-1]] + [self.order - 1]
        if has_slice(self):  # each rank multiplies what it has, as far as it is kept
            sizes = slice_sizes(self.max_n_modes[-1], axes[0].size)
            ends = [(sum(sizes[:rank]), sum(sizes[: rank + 1])) for rank in range(len(sizes))]
            low, high = modes[-1].start, modes[-1].start + modes[-1].kept
            kept = tuple(max(0, min(end, high) - max(first, low)) for first, end in ends)
            return [(axes[0], Parts(FIRST + partners[0], kept))]
        return [
            (axis, Parts(FIRST + dim, even_parts(modes[dim].kept, axis.size)))
            for axis, dim in zip(axes, partners, strict=True)
        ]

    def _local_dims(self) -> range:
        """Spatial dimensions that no one splits, but for the last."""
        return range(len(self.domain.axes), self.order - 1)

    def _analysed(
        self, x: Tensor, modes: Sequence[Modes], layout: Layout, dealings: Sequence[tuple[Axis, Parts]]
    ) -> Tensor:
        """This rank's share of the kept modes."""
        last = FIRST + self.order - 1
        transform = torch.fft.fft if self.complex_data else torch.fft.rfft
        x = keep(transform(x, dim=last, norm=self.fft_norm), last, modes[-1])
        for dim in reversed(self._local_dims()):
            x = keep(torch.fft.fft(x, dim=FIRST + dim, norm=self.fft_norm), FIRST + dim, modes[dim])
        for (axis, dealt), sizes in zip(reversed(dealings), reversed(layout), strict=True):
            dim = FIRST + axis.dim
            x = redealt(x, axis, dealt, Parts(dim, sizes))
            x = keep(_transformed(torch.fft.fft, x, dim, self.fft_norm), dim, modes[axis.dim])
        return x

    def _weight_of(self, modes: Sequence[Modes], dealings: Sequence[tuple[Axis, Parts]]) -> Any:
        """The part of the weight that belongs to this rank's modes."""
        window = [slice(one.start, one.start + one.kept) for one in modes]
        for axis, (dim, sizes) in dealings:
            first = window[dim - FIRST].start + sum(sizes[: axis.rank])
            window[dim - FIRST] = slice(first, first + sizes[axis.rank])
        channels = [slice(None)] * (1 if self.separable else 2)
        if has_slice(self):
            (axis, dealt) = dealings[0]
            before = sum(slice_sizes(self.max_n_modes[-1], axis.size)[: axis.rank])
            first = max(modes[-1].start - before, 0)
            window[-1] = slice(first, first + dealt.sizes[axis.rank])
            return own_slice(self, axis.size)[tuple(channels + window)]
        return self.weight[tuple(channels + window)]

    def _synthesised(
        self,
        x: Tensor,
        modes: Sequence[Modes],
        target: Sequence[int],
        layout: Layout,
        dealings: Sequence[tuple[Axis, Parts]],
    ) -> Tensor:
        """This rank's slab, from its share of the modes."""
        last = FIRST + self.order - 1
        for (axis, dealt), sizes in zip(dealings, layout, strict=True):
            dim = FIRST + axis.dim
            x = place(x, dim, modes[axis.dim], target[axis.dim])
            x = _transformed(torch.fft.ifft, x, dim, self.fft_norm)
            x = redealt(x, axis, Parts(dim, sizes), dealt)
        for at in self._local_dims():
            x = torch.fft.ifft(place(x, FIRST + at, modes[at], target[at]), dim=FIRST + at, norm=self.fft_norm)
        if self.complex_data:
            x = torch.fft.ifft(place(x, last, modes[-1], target[-1]), dim=last, norm=self.fft_norm)
        else:
            x = torch.fft.irfft(x, n=target[-1], dim=last, norm=self.fft_norm)
        return x


def _transformed(transform: Callable[..., Tensor], x: Tensor, dim: int, norm: str) -> Tensor:
    """MKL refuses an empty batch ("MKL FFT error", torch 2.13): a rank without modes."""
    return transform(x, dim=dim, norm=norm) if x.numel() else x
