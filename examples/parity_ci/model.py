"""A small Fourier neural operator that learns the heat equation, and the recipe of its training."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fsshard.parity import Recipe

POINTS = 32
MODES = 8
TIME = 0.01
SAMPLES = 4


class SpectralConv(nn.Module):
    """Multiplies the lowest Fourier modes by complex weights; these are what sharding engines refuse."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(channels, channels, MODES, dtype=torch.complex64) / channels)

    def forward(self, x: Tensor) -> Tensor:
        low = torch.fft.rfft(x)[..., :MODES]
        return torch.fft.irfft(torch.einsum("bim,iom->bom", low, self.weight), n=x.shape[-1])


class Block(nn.Module):
    """One layer of the operator."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.spectral = SpectralConv(channels)
        self.skip = nn.Conv1d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.gelu(self.spectral(x) + self.skip(x))


def build() -> nn.Module:
    """The model. It is built with the recipe's seed, under every engine alike."""
    return nn.Sequential(nn.Conv1d(1, 8, 1), Block(8), Block(8), nn.Conv1d(8, 1, 1))


def batches(rank: int, world_size: int, number: int) -> tuple[Tensor, Tensor]:
    """Random periodic temperatures, and what they are a moment later: mode k has decayed by exp(-(2 pi k)^2 t)."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    spectrum = torch.zeros(SAMPLES, 1, POINTS // 2 + 1, dtype=torch.complex64)
    spectrum[..., :MODES] = torch.randn(SAMPLES, 1, MODES, dtype=torch.complex64, generator=generator)
    decay = torch.exp(-TIME * (2 * torch.pi * torch.arange(POINTS // 2 + 1)) ** 2)
    before, after = (torch.fft.irfft(modes, n=POINTS, norm="forward") for modes in (spectrum, spectrum * decay))
    return before, after


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean over the samples of the squared error."""
    before, after = batch
    return (model(before) - after).square().mean()


def recipe() -> Recipe:
    """The training as it is in production: optimizer, accumulation, clipping."""
    return Recipe(
        build=build,
        batches=batches,
        loss=loss,
        optimizer=torch.optim.AdamW,
        hyper={"lr": 1e-3, "weight_decay": 1e-2},
        accumulate=2,
        clip=1.0,
    )
