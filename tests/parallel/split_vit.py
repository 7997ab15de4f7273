"""A small vision transformer that is split by hand over "tp" and "cp", and the same on one process.

Column- and row-parallel linear layers over tp (Megatron-LM, arXiv:1909.08053), tokens divided over cp with keys and
values gathered, one complex weight. Written with torch alone: nothing of the library is in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

TOKENS, WIDTH, HEADS, HIDDEN, CHANNELS = 8, 16, 4, 32, 6

SPLIT: dict[str, int] = {r"\.(q|k|v|fc1)\.(weight|bias)$": 0, r"\.(proj|fc2)\.weight$": 1}
"""Pattern of the parameters that are parts over tp -> the dimension along which they lie."""


class _Copy(torch.autograd.Function):
    """The same input for every rank: gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        whole = gradient.contiguous().clone()
        dist.all_reduce(whole, group=ctx.group)
        return whole, None


class _Sum(torch.autograd.Function):
    """The sum of every rank's output: each gets its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        whole = x.contiguous().clone()
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


class _Gather(torch.autograd.Function):
    """All tokens from every rank's: the gradient of a rank's is the sum of what all have of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        whole = gradient.contiguous().clone()
        dist.all_reduce(whole, group=ctx.group)
        return whole.chunk(ctx.group.size(), dim=1)[ctx.group.rank()], None


def _with(function: Any, x: Tensor, group: Any) -> Tensor:
    return x if group is None else function.apply(x, group)


class Block(nn.Module):
    """Attention and a multilayer perceptron, each with a norm before it."""

    def __init__(self, tp: Any, cp: Any) -> None:
        super().__init__()
        parts = 1 if tp is None else tp.size()
        self.tp, self.cp, self.heads = tp, cp, HEADS // parts
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        for name in ("q", "k", "v"):
            setattr(self, name, nn.Linear(WIDTH, WIDTH // parts))
        self.proj = nn.Linear(WIDTH // parts, WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, HIDDEN // parts), nn.Linear(HIDDEN // parts, WIDTH)

    def _row(self, layer: nn.Linear, x: Tensor) -> Tensor:
        return _with(_Sum, nn.functional.linear(x, layer.weight), self.tp) + layer.bias

    def forward(self, x: Tensor) -> Tensor:
        normed = _with(_Copy, self.norm1(x), self.tp)
        q = self.q(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = (
            _with(_Gather, layer(normed), self.cp).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.k, self.v)
        )
        scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)
        x = x + self._row(self.proj, (scores @ v).transpose(1, 2).flatten(2))
        hidden = torch.tanh(self.fc1(_with(_Copy, self.norm2(x), self.tp)))
        return x + self._row(self.fc2, hidden)


class ViT(nn.Module):
    """The whole model; a rank of cp sees its part of the tokens."""

    def __init__(self, tp: Any = None, cp: Any = None) -> None:
        super().__init__()
        self.cp = cp
        self.embed = nn.Linear(CHANNELS, WIDTH)
        self.pos_embed = nn.Parameter(torch.randn(1, TOKENS, WIDTH) * 0.1)
        self.blocks = nn.ModuleList([Block(tp, cp), Block(tp, cp)])
        self.norm = nn.LayerNorm(WIDTH)
        self.phase = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))
        self.head = nn.Linear(WIDTH, CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(my_tokens(x, self.cp)) + my_tokens(self.pos_embed, self.cp)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.head(x + (x * self.phase).real)


def my_tokens(x: Tensor, cp: Any) -> Tensor:
    """This rank's part of the tokens, dim 1."""
    return x if cp is None else x.chunk(cp.size(), dim=1)[cp.rank()]


def serial() -> ViT:
    """The model on one process."""
    torch.manual_seed(7)
    return ViT()


def split_of(whole: Mapping[str, Tensor], tp: Any) -> dict[str, Tensor]:
    """This rank's part of a state dict."""
    import re

    def part(name: str, value: Tensor) -> Tensor:
        dims = [dim for pattern, dim in SPLIT.items() if re.search(pattern, name)]
        return value.chunk(tp.size(), dims[0])[tp.rank()].clone() if dims else value

    return dict(whole) if tp is None else {name: part(name, value) for name, value in whole.items()}


def mesh_of(data: int, cp: int, tp: int) -> DeviceMesh:
    """Make the mesh over the whole world."""
    return init_device_mesh("cpu", (data, cp, tp), mesh_dim_names=("data", "cp", "tp"))


def group_of(mesh: DeviceMesh, name: str) -> Any:
    """The group along a dimension, None for one rank."""
    found = mesh[name]
    return found.get_group() if found.size() > 1 else None


def split(mesh: DeviceMesh) -> ViT:
    """This rank's part of :func:`serial`."""
    tp, cp = group_of(mesh, "tp"), group_of(mesh, "cp")
    model = ViT(tp, cp)
    model.load_state_dict(split_of(serial().state_dict(), tp))
    return model


def said_of(mesh: DeviceMesh) -> dict[str, Any]:
    """Return what ``wrap`` has to be told: all of it is shared over cp, what SPLIT names is in parts over tp."""
    return {"replicated": {".": mesh["cp"]}, "sharded": {pattern: (mesh["tp"], dim) for pattern, dim in SPLIT.items()}}


def batch(data_ranks: int, step: int) -> Tensor:
    """The inputs of all ranks of data, one after the other."""
    return torch.randn(2 * data_ranks, TOKENS, CHANNELS, generator=torch.Generator().manual_seed(100 + step))


def loss_of(model: Any, x: Tensor, cp: Any) -> Tensor:
    """The mean over all tokens; of a rank of cp its part of that, so that these add up to it."""
    target = my_tokens(x.flip(1), cp)
    return (model(x) - target).square().sum() / (x.shape[0] * TOKENS * CHANNELS)
