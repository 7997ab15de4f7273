"""Samples and losses of the recipes that come with fsshard; nothing is downloaded."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Batch = dict[str, Tensor]

SAMPLES = 4
"""Samples per batch."""


def random_numbers(rank: int, number: int) -> torch.Generator:
    """A generator that depends on the rank and the number of its batch only."""
    return torch.Generator().manual_seed(1_000_003 * (rank + 1) + number)


def sines(rank: int, world_size: int, number: int) -> Batch:
    """``x`` (samples, 6) and the sums of their sines ``y`` (samples, 2)."""
    x = torch.randn(SAMPLES, 6, generator=random_numbers(rank, number))
    return {"x": x, "y": torch.stack([x.sin().sum(1), x.cos().sum(1)], dim=1) / 2}


def images(rank: int, world_size: int, number: int) -> Batch:
    """Noise ``x`` (samples, 1, 8, 8) with one bright quarter, whose number is ``y`` (samples,)."""
    generator = random_numbers(rank, number)
    x = torch.randn(SAMPLES, 1, 8, 8, generator=generator)
    y = torch.randint(0, 4, (SAMPLES,), generator=generator)
    for image, quarter in zip(x, y.tolist(), strict=True):
        top, left = 4 * (quarter // 2), 4 * (quarter % 2)
        image[0, top : top + 4, left : left + 4] += 2
    return {"x": x, "y": y}


def words(rank: int, world_size: int, number: int) -> Batch:
    """Words of five letters, ``input_ids`` (samples, 5), and the same backwards, ``labels``."""
    letters = torch.randint(1, 20, (SAMPLES, 5), generator=random_numbers(rank, number))
    return {"input_ids": letters, "labels": letters.flip(1)}


def heat(height: int, width: int, rank: int, world_size: int, number: int) -> Batch:
    """Random fields ``x`` (samples, 1, height, width), periodic, and the same after a time of diffusion, ``y``."""
    # In Fourier space diffusion multiplies wave number k by exp(-t |k|^2): solved exactly.
    x = torch.randn(SAMPLES, 1, height, width, generator=random_numbers(rank, number))
    rows, columns = torch.fft.fftfreq(height, 1 / height), torch.fft.rfftfreq(width, 1 / width)
    damping = torch.exp(-0.1 * (rows[:, None] ** 2 + columns[None, :] ** 2))
    return {"x": x, "y": 2 * torch.fft.irfft2(damping * torch.fft.rfft2(x), s=(height, width))}


def waves(rank: int, world_size: int, number: int) -> Batch:
    """Sums of three plane waves (samples, points, 1): ``x`` at the points where they are known, ``y`` where asked."""
    generator = random_numbers(rank, number)
    amplitude = torch.randn(SAMPLES, 1, 3, generator=generator)
    phase = 2 * math.pi * torch.rand(SAMPLES, 1, 3, generator=generator)
    direction = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]])
    known, asked = ((amplitude * torch.sin(2 * x @ direction + phase)).sum(-1, keepdim=True) for x in points()[:2])
    return {"x": known, "y": asked}


@functools.cache
def points() -> tuple[Tensor, Tensor, Tensor]:
    """Return points of the unit square: 20 where a field is known, 10 where it is asked, and a grid (4, 4, 2)."""
    generator, line = torch.Generator().manual_seed(7), torch.linspace(0, 1, 4)
    grid = torch.stack(torch.meshgrid(line, line, indexing="ij"), dim=-1)
    return torch.rand(20, 2, generator=generator), torch.rand(10, 2, generator=generator), grid


def squared_error(model: Callable[..., Tensor], batch: Batch) -> Tensor:
    """Mean of the squared error."""
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])


def image_error(model: Callable[..., Any], batch: Batch) -> Tensor:
    """Mean cross entropy of the kinds of images; the model returns scores, or an object with ``logits``."""
    output = model(batch["x"])
    return nn.functional.cross_entropy(getattr(output, "logits", output), batch["y"])


def word_error(model: Callable[..., Any], batch: Batch) -> Tensor:
    """Mean cross entropy over all letters; words are equally long, so this is a mean over the samples too."""
    loss: Tensor = model(**batch).loss
    return loss


def wave_error(model: Callable[..., Tensor], batch: Batch) -> Tensor:
    """Mean squared error at the points where the field is asked."""
    known, asked, grid = (p[None].to(batch["x"].device) for p in points())
    output = model(input_geom=known, latent_queries=grid, output_queries=asked, x=batch["x"])
    return nn.functional.mse_loss(output, batch["y"])
