"""Which Fourier modes neuraloperator 2.0's spectral convolution reads, multiplies and writes, dimension by dimension.

From ``neuralop/layers/spectral_convolution.py``, ``SpectralConv.forward``: it transforms, shifts all dimensions (of
real data all but the last) by ``fftshift``, keeps the bins around the middle (of the last dimension the first ones),
and shifts all but the last back by ``fftshift`` again, not by its inverse: of an odd number of bins every frequency
comes back one bin lower. ``irfftn(s=...)`` then cuts or fills each dimension at its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsshard.errors import ConfigurationError

__all__ = ["Modes", "keep", "modes_of", "place"]


@dataclass(frozen=True)
class Modes:
    """The modes of one dimension.

    Attributes:
        bins: how many the transform has.
        kept: how many of them are multiplied.
        start: where they begin in the weight.
        last: whether it is the last dimension.
        complex_data: whether the field is complex.
    """

    bins: int
    kept: int
    start: int
    last: bool
    complex_data: bool

    def read(self) -> list[int]:
        """Bins of the forward transform, in the weight's order."""
        if self.last:
            shift = self.bins // 2 if self.complex_data else 0
            return [(at - shift) % self.bins for at in range(self.kept)]
        return [(at - self.kept // 2) % self.bins for at in range(self.kept)]

    def written(self) -> list[int]:
        """Bins of the backward transform, in the weight's order."""
        if self.last:
            return list(range(self.kept))
        first = self.bins // 2 - self.kept // 2
        return [(first + at + self.bins // 2) % self.bins for at in range(self.kept)]


def modes_of(conv: Any, sizes: Sequence[int]) -> list[Modes]:
    """Return what a ``SpectralConv`` does with a field of these spatial sizes, dimension by dimension.

    Raises:
        ConfigurationError: more modes are asked for than the weight has.
    """
    bins = list(sizes)
    if not conv.complex_data:
        bins[-1] = bins[-1] // 2 + 1
    found = []
    for at, (size, asked, most) in enumerate(zip(bins, conv.n_modes, conv.max_n_modes, strict=True)):
        kept, last = min(size, asked), at == len(bins) - 1
        if kept > most:
            raise ConfigurationError(f"n_modes={list(conv.n_modes)}: the weight has {list(conv.max_n_modes)} modes")
        start = 0 if last and not conv.complex_data else (most - kept) // 2
        found.append(Modes(size, kept, start, last, conv.complex_data))
    return found


def keep(spectrum: Tensor, dim: int, modes: Modes) -> Tensor:
    """The kept bins of a dimension, in the weight's order."""
    if modes.last and not modes.complex_data:
        return spectrum.narrow(dim, 0, modes.kept)
    return spectrum.index_select(dim, _index(tuple(modes.read()), spectrum.device))


def place(spectrum: Tensor, dim: int, modes: Modes, size: int) -> Tensor:
    """A dimension of ``size`` bins with the kept ones where they belong, and zeros; those beyond it are dropped."""
    slots = modes.written()
    fitting = [at for at, slot in enumerate(slots) if slot < size]
    if len(fitting) < len(slots):
        spectrum = spectrum.index_select(dim, _index(tuple(fitting), spectrum.device))
    out = spectrum.new_zeros([*spectrum.shape[:dim], size, *spectrum.shape[dim + 1 :]])
    return out.index_copy(dim, _index(tuple(slots[at] for at in fitting), spectrum.device), spectrum)


_indices: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}


def _index(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """These numbers on a device, which need not be sent there for every forward."""
    if (numbers, device) not in _indices:
        with torch.inference_mode(False):  # it is kept for trainings
            _indices[numbers, device] = torch.tensor(numbers, device=device)
    return _indices[numbers, device]
