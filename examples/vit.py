"""A vision transformer that forecasts fields one step ahead; whole on one rank, or cut by ``mesh_layers.py``.

    model = ViT(channels=3, shape=(32, 64), patch=4, width=64, depth=4, heads=4)
    y = model(x)                      # (N, 3, 32, 64) each

A field is cut into square patches, each of which is one token; every block lets all tokens look at each other; the last
layer turns tokens into what is added to the field. It begins with zeros, so an untrained model forecasts persistence.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["Attention", "Block", "Sequence", "ViT", "WholeSequence"]


class Sequence(Protocol):
    """Where tokens are. Tensors are ``(N, tokens, ...)``, keys and values ``(..., tokens, size)``."""

    def part(self, tokens: Tensor) -> Tensor:
        """Return those of all tokens that are computed here."""

    def everyone(self, keys: Tensor) -> Tensor:
        """Keys or values of all tokens, from those that are computed here."""

    def joined(self, tokens: Tensor) -> Tensor:
        """All tokens, from those that are computed here."""


class WholeSequence:
    """All tokens are computed here."""

    def part(self, tokens: Tensor) -> Tensor:
        return tokens

    everyone = joined = part


class Attention(nn.Module):
    """Multi-head self-attention.

    The rows of ``qkv`` lie head by head: the query, key and value of head 0, those of head 1, and so on. So a part of
    its rows is a part of the heads, and the forward does not need to know how many of them are here.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_size = width // heads
        self.qkv: nn.Module = nn.Linear(width, 3 * width)
        self.proj: nn.Module = nn.Linear(width, width)
        self.sequence: Sequence = WholeSequence()

    def forward(self, tokens: Tensor) -> Tensor:
        """``(N, tokens, width)`` to the same."""
        split = self.qkv(tokens).unflatten(-1, (-1, 3, self.head_size))
        heads = split.permute(3, 0, 2, 1, 4)  # query, key or value; N; head; token; size
        key, value = self.sequence.everyone(heads[1:])
        mixed = functional.scaled_dot_product_attention(heads[0], key, value)
        out: Tensor = self.proj(mixed.transpose(1, 2).flatten(2))
        return out


class MLP(nn.Module):
    """Two layers, four times as wide in between."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1: nn.Module = nn.Linear(width, 4 * width)
        self.fc2: nn.Module = nn.Linear(4 * width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """``(N, tokens, width)`` to the same."""
        out: Tensor = self.fc2(functional.gelu(self.fc1(tokens)))
        return out


class Block(nn.Module):
    """Attention and MLP, each behind a norm and beside a bypass."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.mlp = Attention(width, heads), MLP(width)

    def forward(self, tokens: Tensor) -> Tensor:
        """``(N, tokens, width)`` to the same."""
        tokens = tokens + self.attention(self.norm1(tokens))
        out: Tensor = tokens + self.mlp(self.norm2(tokens))
        return out


class ViT(nn.Module):
    """Fields now to fields one step later.

    Args:
        channels: fields, such as depth and wind.
        shape: rows and columns of the grid, both multiples of ``patch``.
        patch: rows and columns of a token.
        width: numbers per token, a multiple of ``heads``.
        depth: blocks.
        heads: of each attention.
    """

    def __init__(self, channels: int, shape: tuple[int, int], patch: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.patch, self.grid = patch, (shape[0] // patch, shape[1] // patch)
        self.embed = nn.Linear(channels * patch**2, width)
        self.position = nn.Parameter(torch.zeros(1, self.grid[0] * self.grid[1], width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, channels * patch**2)
        self.sequence: Sequence = WholeSequence()
        nn.init.trunc_normal_(self.position, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)
        nn.init.zeros_(self.head.weight)

    def forward(self, fields: Tensor) -> Tensor:
        """``(N, channels, rows, columns)`` to the same."""
        patches = self.to_patches(fields)
        tokens = self.embed(self.sequence.part(patches)) + self.sequence.part(self.position)
        for block in self.blocks:
            tokens = block(tokens)
        change = self.sequence.joined(self.head(self.norm(tokens)))
        return fields + self.to_fields(change)

    def to_patches(self, fields: Tensor) -> Tensor:
        """``(N, channels, rows, columns)`` to ``(N, tokens, channels * patch^2)``, row by row of patches."""
        p = self.patch
        return fields.unflatten(3, (-1, p)).unflatten(2, (-1, p)).permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)

    def to_fields(self, patches: Tensor) -> Tensor:
        """The inverse of :meth:`to_patches`."""
        p = self.patch
        cut = patches.unflatten(2, (-1, p, p)).unflatten(1, self.grid)
        return cut.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)
