"""Samples and losses of the recipes that come with fsshard; nothing is downloaded."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Batch = dict[str, Tensor]
Model = Callable[..., Any]

SAMPLES = 4
"""Samples per batch."""


def random_numbers(rank: int, number: int) -> torch.Generator:
    """A generator that depends on the rank and the number of its batch only."""
    seed = 1_000_003 * (rank + 1) + number
    return torch.Generator().manual_seed(seed)


def sines(
    rank: int,
    world_size: int,
    number: int,
) -> Batch:
    """``x`` (samples, 6) and the sums of their sines ``y`` (samples, 2)."""
    generator = random_numbers(rank, number)
    x = torch.randn(SAMPLES, 6, generator=generator)
    of_sines = x.sin().sum(1)
    of_cosines = x.cos().sum(1)
    sums = torch.stack([of_sines, of_cosines], dim=1)
    return {"x": x, "y": sums / 2}


def images(
    rank: int,
    world_size: int,
    number: int,
) -> Batch:
    """Noise ``x`` (samples, 1, 8, 8) with one bright quarter, whose number is ``y`` (samples,)."""
    generator = random_numbers(rank, number)
    x = torch.randn(SAMPLES, 1, 8, 8, generator=generator)
    y = torch.randint(0, 4, (SAMPLES,), generator=generator)
    for image, quarter in zip(x, y.tolist(), strict=True):
        top = 4 * (quarter // 2)
        left = 4 * (quarter % 2)
        image[0, top : top + 4, left : left + 4] += 2
    return {"x": x, "y": y}


def words(
    rank: int,
    world_size: int,
    number: int,
) -> Batch:
    """Words of five letters, ``input_ids`` (samples, 5), and the same backwards, ``labels``."""
    generator = random_numbers(rank, number)
    letters = torch.randint(1, 20, (SAMPLES, 5), generator=generator)
    return {"input_ids": letters, "labels": letters.flip(1)}


def heat(
    height: int,
    width: int,
    rank: int,
    world_size: int,
    number: int,
) -> Batch:
    """Random fields ``x`` (samples, 1, height, width), periodic, and the same after a time of diffusion, ``y``."""
    # In Fourier space diffusion multiplies wave number k by exp(-t |k|^2): solved exactly.
    generator = random_numbers(rank, number)
    x = torch.randn(SAMPLES, 1, height, width, generator=generator)
    rows = torch.fft.fftfreq(height, 1 / height)
    columns = torch.fft.rfftfreq(width, 1 / width)
    squares = rows[:, None] ** 2 + columns**2
    decay = torch.exp(-0.1 * squares)
    spectrum = decay * torch.fft.rfft2(x)
    y = torch.fft.irfft2(spectrum, s=(height, width))
    return {"x": x, "y": 2 * y}


def waves(
    rank: int,
    world_size: int,
    number: int,
) -> Batch:
    """Sums of three plane waves (samples, points, 1): ``x`` at the points where they are known, ``y`` where asked."""
    generator = random_numbers(rank, number)
    amplitude = torch.randn(SAMPLES, 1, 3, generator=generator)
    turns = torch.rand(SAMPLES, 1, 3, generator=generator)
    phase = 2 * math.pi * turns
    direction = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]])

    def field(places: Tensor) -> Tensor:
        angles = 2 * places @ direction + phase
        plane_waves = amplitude * torch.sin(angles)
        return plane_waves.sum(-1, keepdim=True)

    known, asked, _ = points()
    return {"x": field(known), "y": field(asked)}


@functools.cache
def points() -> tuple[Tensor, Tensor, Tensor]:
    """Return points of the unit square: 20 where a field is known, 10 where it is asked, and a grid (4, 4, 2)."""
    generator = torch.Generator().manual_seed(7)
    known = torch.rand(20, 2, generator=generator)
    asked = torch.rand(10, 2, generator=generator)
    line = torch.linspace(0, 1, 4)
    coordinates = torch.meshgrid(line, line, indexing="ij")
    grid = torch.stack(coordinates, dim=-1)
    return known, asked, grid


def squared_error(model: Model, batch: Batch) -> Tensor:
    """Mean of the squared error."""
    output = model(batch["x"])
    return nn.functional.mse_loss(output, batch["y"])


def image_error(model: Model, batch: Batch) -> Tensor:
    """Mean cross entropy of the kinds of images; the model returns scores, or an object with ``logits``."""
    output = model(batch["x"])
    if hasattr(output, "logits"):
        output = output.logits
    return nn.functional.cross_entropy(output, batch["y"])


def word_error(model: Model, batch: Batch) -> Tensor:
    """Mean cross entropy over all letters; words are equally long, so this is a mean over the samples too."""
    loss: Tensor = model(**batch).loss
    return loss


def wave_error(model: Model, batch: Batch) -> Tensor:
    """Mean squared error at the points where the field is asked."""
    x = batch["x"]
    known, asked, grid = points()
    output = model(
        input_geom=known[None].to(x.device),
        latent_queries=grid[None].to(x.device),
        output_queries=asked[None].to(x.device),
        x=x,
    )
    return nn.functional.mse_loss(output, batch["y"])
