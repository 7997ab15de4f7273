"""Tensor and context parallelism by hand: the few layers that a transformer needs, over torch's public collectives.

    split_tensors(model, mesh["tp"])       # every rank has some of the heads and some of the MLP's hidden numbers
    split_sequence(model, mesh["cp"])      # every rank has some of the tokens
    model = fsshard.wrap(
        model,
        device_mesh=mesh["data"],
        sharded=sharded_parameters(mesh["tp"]),
        replicated={".": mesh["cp"]},
    )

Tensor parallelism cuts weights. A matrix that is cut by its outputs (:class:`ColumnParallelLinear`) is followed by one
that is cut by its inputs (:class:`RowParallelLinear`), and one sum over the ranks makes the result whole: one
all-reduce in the forward, one in the backward, for each attention and each MLP (Shoeybi et al., *Megatron-LM*, 2019).

Context parallelism cuts the sequence of tokens. All layers but attention look at one token at a time and need not know;
attention gathers the keys and values of all ranks' tokens. Weights are whole on every rank, and each rank's gradient is
that of its tokens' part in the loss: the gradients have to be added up, which is what ``replicated`` tells fsshard.

Each operation below is a pair: what it does in the forward, and what it does to gradients in the backward.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from examples.vit import Attention, ViT
from fsshard import ConfigurationError

__all__ = [
    "ColumnParallelLinear",
    "RowParallelLinear",
    "SplitSequence",
    "sharded_parameters",
    "split_sequence",
    "split_tensors",
]

# Operations -------------------------------------------------------------------------------------------------------


def _sum(tensor: Tensor, group: ProcessGroup) -> Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _all(tensor: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return torch.cat(parts, dim)


def _mine(tensor: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    return tensor.chunk(group.size(), dim)[group.rank()]


class _Copy(torch.autograd.Function):
    """Every rank uses the same tensor in another way: nothing now, a sum of the gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _sum(gradients[0], ctx.group), None


class _Reduce(torch.autograd.Function):
    """Every rank has a summand, and uses the sum in the same way: a sum now, nothing to the gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        return _sum(tensor, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _Gather(torch.autograd.Function):
    """Every rank has a part, and uses the whole: in the same way, then its gradient is its part of the whole's; or each
    in its own, then the gradients are added up first."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, group: ProcessGroup, used_alike: bool) -> Tensor:
        ctx.dim, ctx.group, ctx.used_alike = dim, group, used_alike
        return _all(tensor, dim, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        whole = gradients[0] if ctx.used_alike else _sum(gradients[0], ctx.group)
        return _mine(whole, ctx.dim, ctx.group), None, None, None


# Tensor parallelism -----------------------------------------------------------------------------------------------


class ColumnParallelLinear(nn.Module):
    """Some of the outputs of a linear layer. Every rank gives it the same input.

    Args:
        whole: the layer, the same on every rank.
        group: the ranks that share it, in the order of its outputs.
    """

    def __init__(self, whole: nn.Linear, group: ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.weight = nn.Parameter(_mine(whole.weight.detach(), 0, group).clone())
        self.bias = nn.Parameter(_mine(whole.bias.detach(), 0, group).clone())

    def forward(self, x: Tensor) -> Tensor:
        """``(..., inputs)`` to ``(..., outputs / ranks)``."""
        return functional.linear(_Copy.apply(x, self.group), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """A linear layer of which every rank has some of the inputs. Every rank gets the whole output.

    The bias is whole, and is added after the sum: once, not once for every rank.

    Args:
        whole: the layer, the same on every rank.
        group: the ranks that share it, in the order of its inputs.
    """

    def __init__(self, whole: nn.Linear, group: ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.weight = nn.Parameter(_mine(whole.weight.detach(), 1, group).clone())
        self.bias = nn.Parameter(whole.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        """``(..., inputs / ranks)`` to ``(..., outputs)``."""
        out: Tensor = _Reduce.apply(functional.linear(x, self.weight), self.group) + self.bias
        return out


def split_tensors(model: ViT, mesh: DeviceMesh) -> None:
    """Cut the weights of every block, in place. The model has to be the same on all ranks of ``mesh``.

    Raises:
        ConfigurationError: the heads cannot be shared out evenly.
    """
    group = mesh.get_group()
    for block in model.modules():
        if isinstance(block, Attention):
            heads = cast(nn.Linear, block.proj).in_features // block.head_size
            if heads % group.size():
                raise ConfigurationError(f"{heads} heads cannot be shared out among {group.size()} ranks evenly")
    for block in model.blocks:
        for owner, column, row in ((block.attention, "qkv", "proj"), (block.mlp, "fc1", "fc2")):
            setattr(owner, column, ColumnParallelLinear(getattr(owner, column), group))
            setattr(owner, row, RowParallelLinear(getattr(owner, row), group))


def sharded_parameters(mesh: DeviceMesh) -> dict[str, tuple[DeviceMesh, int]]:
    """Which parameters :func:`split_tensors` has cut, for ``fsshard.wrap(sharded=...)``: pattern, ranks, dimension."""
    return {r"\.(qkv|fc1)\.(weight|bias)$": (mesh, 0), r"\.(proj|fc2)\.weight$": (mesh, 1)}


# Context parallelism ----------------------------------------------------------------------------------------------


class SplitSequence:
    """Some of the tokens are computed here: a band of the grid."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group

    def part(self, tokens: Tensor) -> Tensor:
        """Return this rank's part of ``(N, tokens, ...)``, of which all ranks have the whole."""
        return _mine(tokens, 1, self.group)

    def everyone(self, keys: Tensor) -> Tensor:
        """Gather the whole of ``(..., tokens / ranks, size)``. Every rank's queries ask for other things."""
        whole: Tensor = _Gather.apply(keys, -2, self.group, False)
        return whole

    def joined(self, tokens: Tensor) -> Tensor:
        """Join ``(N, tokens / ranks, ...)`` to the whole, for a loss that all ranks compute alike."""
        whole: Tensor = _Gather.apply(tokens, 1, self.group, True)
        return whole


def split_sequence(model: ViT, mesh: DeviceMesh) -> None:
    """Cut the sequence of tokens, in place. All ranks of ``mesh`` are given the same batch.

    Raises:
        ConfigurationError: the tokens cannot be shared out evenly.
    """
    group = mesh.get_group()
    tokens = model.grid[0] * model.grid[1]
    if tokens % group.size():
        raise ConfigurationError(f"{tokens} tokens cannot be shared out among {group.size()} ranks evenly")
    sequence = SplitSequence(group)
    for module in model.modules():
        if isinstance(module, (ViT, Attention)):
            module.sequence = sequence
