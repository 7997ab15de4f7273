"""The golden recipes: plain torch, weights and batches by a rule."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable

import torch
from torch import Tensor, nn

from fsshard.parity.sketch import shifted, signed, splitmix64
from fsshard.recipes.recipe import Recipe

__all__ = ["convnet", "fill", "spectral", "transformer", "uniform"]


def uniform(name: str, *shape: int) -> Tensor:
    """Numbers in [-1, 1) from a name: the same bits on every machine, by integer arithmetic alone.

    Counter mode of the SplitMix64 finaliser (Steele, Lea and Flood, OOPSLA 2014), of which 24 bits are kept, as many
    as a float32 holds exactly.
    """
    state = torch.arange(1, math.prod(shape) + 1, dtype=torch.int64) * signed(0x9E3779B97F4A7C15)
    state += signed((zlib.crc32(name.encode()) << 32) | zlib.adler32(name.encode()))
    return (shifted(splitmix64(state), 40).to(torch.float32) * 2.0**-23 - 1.0).reshape(shape)


def fill(model: nn.Module) -> nn.Module:
    """Weights by the rule, of size 1 / sqrt(fan in) rounded to a power of two; vectors named weight are ones."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2:
                parameter.fill_(1.0 if name.endswith("weight") else 0.0)
                continue
            scale = 2.0 ** round(math.log2(parameter[0].numel() ** -0.5))
            if parameter.is_complex():
                pairs = uniform(name, *parameter.shape, 2) * scale
                parameter.copy_(torch.view_as_complex(pairs))
            else:
                parameter.copy_(uniform(name, *parameter.shape) * scale)
    return model


def _batches(*shape: int) -> Callable[[int, int, int], tuple[Tensor, Tensor]]:
    def batches(rank: int, world_size: int, number: int) -> tuple[Tensor, Tensor]:
        return uniform(f"x{rank}.{number}", *shape), uniform(f"y{rank}.{number}", *shape)

    return batches


def _mean_square(model: Callable[[Tensor], Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


class _SpectralLayer(nn.Module):
    """Multiplies the lowest Fourier modes by complex weights, beside a pointwise path (Li et al., ICLR 2021)."""

    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.zeros(width, width, modes, modes, dtype=torch.complex64))
        self.pointwise = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft2(x)
        low = torch.einsum("bixy,ioxy->boxy", spectrum[..., : self.modes, : self.modes], self.weight)
        padded = nn.functional.pad(low, (0, spectrum.shape[-1] - self.modes, 0, spectrum.shape[-2] - self.modes))
        return torch.relu(torch.fft.irfft2(padded, s=x.shape[-2:]) + self.pointwise(x))


def _spectral() -> nn.Module:
    return fill(nn.Sequential(nn.Conv2d(1, 8, 1), _SpectralLayer(8, 4), _SpectralLayer(8, 4), nn.Conv2d(8, 1, 1)))


def spectral() -> Recipe:
    """A small Fourier neural operator with complex64 weights, AdamW and clipping."""
    return Recipe(
        build=_spectral,
        batches=_batches(4, 1, 12, 12),
        loss=_mean_square,
        optimizer=torch.optim.AdamW,
        hyper={"lr": 2.0**-8},
        clip=0.5,
        name="spectral",
    )


class _Transformer(nn.Module):
    """Two encoder layers between an embedding and the same embedding transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x)
        return out


def _transformer() -> nn.Module:
    return fill(_Transformer())


def _tokens(rank: int, world_size: int, number: int) -> Tensor:
    return ((uniform(f"tokens{rank}.{number}", 4, 9) + 1.0) * 10.0).long()


def _next_token(model: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def transformer() -> Recipe:
    """Two transformer layers with a tied embedding, Adam, three batches per step."""
    return Recipe(
        build=_transformer, batches=_tokens, loss=_next_token, hyper={"lr": 2.0**-8}, accumulate=3, name="transformer"
    )


def _convnet() -> nn.Module:
    return fill(
        nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1, bias=False)
        )
    )


def convnet() -> Recipe:
    """Convolutions and BatchNorm, SGD with momentum."""
    return Recipe(
        build=_convnet,
        batches=_batches(4, 1, 10, 10),
        loss=_mean_square,
        optimizer=torch.optim.SGD,
        hyper={"lr": 2.0**-5, "momentum": 0.875},
        name="convnet",
    )
