"""List the Fourier modes that neuraloperator 2.0's spectral convolution reads, multiplies and writes, by dimension.

From ``neuralop/layers/spectral_convolution.py``, ``SpectralConv.forward``: it transforms, shifts all dimensions (of
real data all but the last) by ``fftshift``, keeps the bins around the middle (of the last dimension the first ones),
and shifts all but the last back by ``fftshift`` again, not by its inverse: of an odd number of bins every frequency
comes back one bin lower. ``irfftn(s=...)`` then cuts or fills each dimension at its end.

With ``weights="modes"`` each rank of a domain has its own modes of the weights only: DTensors, sharded along the last
dimension's modes. For dense operators in three dimensions at batch 1, weights are most of what is sent. A rank
multiplies its share of the last dimension's modes; so it needs no more of the weight, and ranks of other samples with
the same share shard it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fsshard.errors import ConfigurationError, ModelError


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
        """Return the bins of the forward transform, in the weight's order."""
        if not self.last:
            shift = self.kept // 2
        elif self.complex_data:
            shift = self.bins // 2
        else:
            shift = 0
        return [(index - shift) % self.bins for index in range(self.kept)]

    def written(self) -> list[int]:
        """Return the bins of the backward transform, in the weight's order."""
        if self.last:
            return list(range(self.kept))
        half = self.bins // 2
        # The shift back is by fftshift again and not by its inverse, hence two halves.
        first = half - self.kept // 2 + half
        return [(first + index) % self.bins for index in range(self.kept)]


def modes_of(conv: Any, sizes: Sequence[int]) -> list[Modes]:
    """Return what a ``SpectralConv`` does with a field of these spatial sizes, dimension by dimension.

    Raises:
        ConfigurationError: more modes are asked for than the weight has.
    """
    bins = list(sizes)
    if not conv.complex_data:
        bins[-1] = bins[-1] // 2 + 1
    modes = []
    last = len(bins) - 1
    asked = list(conv.n_modes)
    most = list(conv.max_n_modes)
    for index, size in enumerate(bins):
        kept = min(size, asked[index])
        if kept > most[index]:
            raise ConfigurationError(f"n_modes={asked}: the weight has {most} modes")
        is_last = index == last
        start = (most[index] - kept) // 2
        # Of real data the last dimension has no negative frequencies, and its modes begin at zero.
        if is_last and not conv.complex_data:
            start = 0
        modes.append(Modes(size, kept, start, is_last, conv.complex_data))
    return modes


def keep(spectrum: Tensor, dim: int, modes: Modes) -> Tensor:
    """Return the kept bins of a dimension, in the weight's order."""
    if modes.last and not modes.complex_data:
        return spectrum.narrow(dim, 0, modes.kept)
    return spectrum.index_select(dim, _index(modes.read(), spectrum.device))


def place(
    spectrum: Tensor,
    dim: int,
    modes: Modes,
    size: int,
) -> Tensor:
    """Return a dimension of ``size`` bins: the kept ones where they belong, zeros elsewhere, none beyond ``size``."""
    device = spectrum.device
    bins = modes.written()
    fitting = [index for index, number in enumerate(bins) if number < size]
    if len(fitting) < len(bins):
        spectrum = spectrum.index_select(dim, _index(fitting, device))
    shape = list(spectrum.shape)
    shape[dim] = size
    places = [bins[index] for index in fitting]
    return spectrum.new_zeros(shape).index_copy(dim, _index(places, device), spectrum)


_indices: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}


def _index(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Return these numbers on a device. They are kept, and not sent there for every forward."""
    key = (tuple(numbers), device)
    if key not in _indices:
        # A tensor of inference mode could not be used in trainings later.
        with torch.inference_mode(False):
            _indices[key] = torch.tensor(numbers, device=device)
    return _indices[key]


def slice_sizes(modes: int, parts: int) -> tuple[int, ...]:
    """Return how many of the last dimension's modes each rank has: those of ``Shard``, which are ``torch.chunk``'s."""
    most = -(-modes // parts)
    sizes = []
    left = modes
    for _ in range(parts):
        size = min(most, left)
        sizes.append(size)
        left -= size
    return tuple(sizes)


def check_sliceable(model: nn.Module, mesh: Any) -> None:
    """Raise unless all spectral weights are dense, and one dimension is split. Local.

    Raises:
        ModelError: a weight is factorized.
        ConfigurationError: the mesh has two dimensions.
    """
    if mesh.ndim != 1:
        raise ConfigurationError("shard_domain(weights='modes') splits one dimension; pass mesh['domain'], of one")
    for name, conv in _convolutions(model):
        if not _is_dense(conv.weight):
            raise ModelError(
                f"shard_domain(weights='modes'): {name}.weight, {type(conv.weight).__name__}, cannot be cut by modes, "
                "which share its factors; leave weights='whole', or take a dense weight"
            )


def slice_weights(model: nn.Module, mesh: Any) -> None:
    """Replace every spectral weight by a DTensor of which this rank has its modes. Local."""
    from torch.distributed.tensor import DTensor, Shard

    rank = mesh.get_local_rank()
    for _, conv in _convolutions(model):
        whole = conv.weight.tensor
        sizes = slice_sizes(whole.shape[-1], mesh.size())
        own = whole.detach().narrow(-1, sum(sizes[:rank]), sizes[rank])
        sharded = DTensor.from_local(
            own.clone(memory_format=torch.contiguous_format),
            mesh,
            [Shard(whole.ndim - 1)],
            run_check=False,
            shape=whole.shape,
            stride=torch.empty(whole.shape, device="meta").stride(),
        )
        conv.weight.tensor = nn.Parameter(sharded, requires_grad=whole.requires_grad)


def has_slice(conv: Any) -> bool:
    """Return whether this rank has some modes of the weight only."""
    return _is_dense(conv.weight) and hasattr(conv.weight.tensor, "to_local")


def _is_dense(weight: Any) -> bool:
    """Return whether a weight is dense. Also after ``wrap``, which gives it a class of its own."""
    from tltorch.factorized_tensors.complex_factorized_tensors import ComplexHandler
    from tltorch.factorized_tensors.factorized_tensors import DenseTensor

    return isinstance(weight, DenseTensor) and not isinstance(weight, ComplexHandler)


def own_slice(conv: Any, ranks: int) -> Tensor:
    """Return this rank's modes; their gradient is the mean over the ranks of the domain.

    All of them backpropagate through a rank's modes, and no one else averages what only this rank has.
    """
    # Autograd functions are untyped in torch 2.13 alone.
    function: Any = _MeanOfRanks
    mean: Tensor = function.apply(conv.weight.tensor.to_local(), ranks)
    return mean


class _MeanOfRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return part.view_as(part)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] / ctx.ranks, None


def shared_parameters(model: nn.Module, mesh: Any) -> Mapping[str, tuple[Any, str]]:
    """Return the other parameters as ``wrap`` takes them: the domain's ranks share them, and average gradients."""
    from torch.distributed.tensor import DTensor

    shared = {}
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            shared[f"^{re.escape(name)}$"] = (mesh, "mean")
    return shared


def _convolutions(model: nn.Module) -> list[tuple[str, Any]]:
    from neuralop.layers.spectral_convolution import SpectralConv

    convolutions = []
    for name, module in model.named_modules():
        if isinstance(module, SpectralConv):
            convolutions.append((name, module))
    return convolutions
