"""Parity in pytest: the same training under four engines, compared bit for bit, on two ranks.

    pytest test_parity.py
    python test_parity.py                # the report as a table

A training is described once, without an engine: build the model, give a rank its batches, take the loss. The test
fails with the first step, parameter and rank that differ. Replace the three functions by yours.
"""

import pytest
import torch
from torch import nn

from fsshard.parity import Recipe, compare

BACKENDS = ["fairscale", "fsdp", "fsdp2", "ddp"]


class SpectralConv(nn.Module):
    """Multiplies the lowest Fourier modes by complex weights, which sharding engines refuse by themselves."""

    def __init__(self, channels, modes=8):
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.randn(channels, channels, modes, dtype=torch.complex64) / channels)

    def forward(self, x):
        low = torch.fft.rfft(x)[..., : self.modes]
        return torch.fft.irfft(torch.einsum("bim,iom->bom", low, self.weight), n=x.shape[-1])


def build():
    """The model; it is called with the same seed under every engine."""
    return nn.Sequential(nn.Conv1d(1, 8, 1), SpectralConv(8), nn.GELU(), SpectralConv(8), nn.Conv1d(8, 1, 1))


def batches(rank, world_size, number):
    """The ``number``-th batch of a rank: a function of these three, and of nothing else."""
    x = torch.randn(4, 1, 32, generator=torch.Generator().manual_seed(1000 * number + rank))
    return x, x.roll(1, dims=-1)


def loss(model, batch):
    """A mean over the samples of the batch."""
    x, y = batch
    return nn.functional.mse_loss(model(x), y)


def recipe():
    """The rest as it is in production: optimizer, accumulation, clipping, precision."""
    return Recipe(
        build=build,
        batches=batches,
        loss=loss,
        optimizer=torch.optim.AdamW,
        hyper={"lr": 1e-3, "weight_decay": 1e-2},
        accumulate=2,
        clip=1.0,
    )


test_engines_agree = pytest.mark.fsshard_parity(backends=BACKENDS, world_size=2, steps=5)(recipe)


if __name__ == "__main__":
    print(compare(recipe, backends=BACKENDS, world_sizes=[2], steps=5))
