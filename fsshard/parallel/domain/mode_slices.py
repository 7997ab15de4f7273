"""Weights of which each rank of a domain has its own modes only: DTensors, sharded along the last dimension's modes.

For dense operators in three dimensions at batch 1, weights are most of what is sent. A rank multiplies its share of the
last dimension's modes; so it needs no more of the weight, and ranks of other samples with the same share shard it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fsshard.errors import ConfigurationError, ModelError

__all__ = ["check_sliceable", "has_slice", "own_slice", "shared_parameters", "slice_sizes", "slice_weights"]


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
