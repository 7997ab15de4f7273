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


def slice_sizes(modes: int, parts: int) -> tuple[int, ...]:
    """Return how many of the last dimension's modes each rank has: those of ``Shard``, which are ``torch.chunk``'s."""
    most = -(-modes // parts)
    return tuple(max(0, min(most, modes - part * most)) for part in range(parts))


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

    for _, conv in _convolutions(model):
        whole = conv.weight.tensor
        sizes, rank = slice_sizes(whole.shape[-1], mesh.size()), mesh.get_local_rank()
        part = whole.detach().narrow(-1, sum(sizes[:rank]), sizes[rank]).clone(memory_format=torch.contiguous_format)
        stride = torch.empty(whole.shape, device="meta").stride()
        held = DTensor.from_local(
            part, mesh, [Shard(whole.ndim - 1)], run_check=False, shape=whole.shape, stride=stride
        )
        conv.weight.tensor = nn.Parameter(held, requires_grad=whole.requires_grad)


def has_slice(conv: Any) -> bool:
    """Return whether this rank has some modes of the weight only."""
    return _is_dense(conv.weight) and hasattr(conv.weight.tensor, "to_local")


def _is_dense(weight: Any) -> bool:
    """Also after ``wrap``, which gives it a class of its own."""
    from tltorch.factorized_tensors.complex_factorized_tensors import ComplexHandler
    from tltorch.factorized_tensors.factorized_tensors import DenseTensor

    return isinstance(weight, DenseTensor) and not isinstance(weight, ComplexHandler)


def own_slice(conv: Any, ranks: int) -> Tensor:
    """This rank's modes; their gradient is the mean over the ranks of the domain.

    All of them backpropagate through a rank's modes, and no one else averages what only this rank has.
    """
    part: Tensor = conv.weight.tensor.to_local()
    function: Any = _MeanOfRanks  # untyped in torch 2.13 alone
    mean: Tensor = function.apply(part, ranks)
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

    plain = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    return {f"^{re.escape(name)}$": (mesh, "mean") for name in plain}


def _convolutions(model: nn.Module) -> list[tuple[str, Any]]:
    from neuralop.layers.spectral_convolution import SpectralConv

    return [(name, module) for name, module in model.named_modules() if isinstance(module, SpectralConv)]
