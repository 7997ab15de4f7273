"""Twelve trainings for ``fsshard parity``, each told without an engine.

    fsshard parity examples.recipes:tfno --backends fairscale,fsdp,fsdp2,ddp --world-size 2

Every function here returns a recipe: a model, its batches and its loss. The models are real ones, made small (a step
takes milliseconds) and with random weights, so nothing is downloaded. A batch is a pure function of the rank and its
number: no file, no state, other samples for every rank. Each loss is a mean over the samples of its batch, so the mean
over the ranks' losses is the loss of all their samples together.

Write your own in the same way; a recipe of your model is three functions.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fsshard import MissingExtra
from fsshard.parity.recipe import Recipe

__all__ = [
    "convnet",
    "dropout",
    "fno",
    "gino",
    "mlp",
    "sfno",
    "t5",
    "tfno",
    "tfno_cp",
    "tfno_tt",
    "uno",
    "vit",
]

Batch = dict[str, Tensor]

SAMPLES = 4
"""Samples per batch."""


def mlp() -> Recipe:
    """Plain torch: a perceptron with a complex layer in the middle fits a sum of sines."""
    return Recipe(build=ComplexMLP, batches=sines, loss=squared_error, hyper={"lr": 1e-2})


def dropout() -> Recipe:
    """A perceptron with dropout: random numbers are drawn in every forward, others on every rank."""
    return Recipe(build=_dropout, batches=sines, loss=squared_error, hyper={"lr": 1e-2})


def convnet() -> Recipe:
    """Convolution and BatchNorm, whose statistics are those of each rank's own samples, on images of four kinds."""
    return Recipe(build=_convnet, batches=images, loss=image_error, hyper={"lr": 1e-2})


def vit() -> Recipe:
    """Hugging Face's vision transformer, one layer, on images of four kinds."""
    _require("transformers", "transformers", "transformers", "the recipe vit")
    return Recipe(build=_vit, batches=images, loss=image_error, hyper={"lr": 1e-2})


def t5() -> Recipe:
    """Hugging Face's T5, an encoder and a decoder layer with tied embeddings, learns to reverse words."""
    _require("transformers", "transformers", "transformers", "the recipe t5")
    return Recipe(build=_t5, batches=words, loss=word_error, hyper={"lr": 3e-3})


def fno() -> Recipe:
    """A Fourier neural operator, complex weights in full, learns the heat equation."""
    return _on_heat("fno", _fno)


def tfno() -> Recipe:
    """An FNO whose weights are complex Tucker factors, on the heat equation."""
    return _on_heat("tfno", functools.partial(_tfno, "tucker"))


def tfno_cp() -> Recipe:
    """An FNO whose weights are complex CP factors, on the heat equation."""
    return _on_heat("tfno_cp", functools.partial(_tfno, "cp"))


def tfno_tt() -> Recipe:
    """An FNO whose weights are complex tensor-train factors, on the heat equation."""
    return _on_heat("tfno_tt", functools.partial(_tfno, "tt"))


def uno() -> Recipe:
    """A U-shaped neural operator, three layers at two resolutions, on the heat equation."""
    return _on_heat("uno", _uno)


def sfno() -> Recipe:
    """A spherical FNO: convolutions over spherical harmonics, on fields over latitude and longitude.

    neuraloperator 2.0 makes weights for ``n_modes[0]`` degrees and asks for ``n_modes[1] // 2`` orders. torch-harmonics
    0.9 cuts both to the smaller one, so the second number of modes is twice the first, which runs with 0.8 and 0.9.
    """
    _require("neuralop", "neuraloperator", "sfno", "the recipe sfno")
    _require("torch_harmonics", "torch-harmonics", "sfno", "the recipe sfno")
    return _on_heat("sfno", _sfno, width=16)


def gino() -> Recipe:
    """A geometry-informed neural operator carries a field from scattered points to others.

    The points are the same for all samples, which GINO demands, so they belong to the problem and not to a batch. It
    runs on neuraloperator's own neighbour search and sums; open3d and torch-scatter are not needed.
    """
    _require("neuralop", "neuraloperator", "neuralop", "the recipe gino")
    return Recipe(build=_gino, batches=waves, loss=wave_error, hyper={"lr": 5e-3})


def _on_heat(name: str, build: Callable[[], nn.Module], width: int = 8) -> Recipe:
    _require("neuralop", "neuraloperator", "neuralop", f"the recipe {name}")
    return Recipe(build=build, batches=functools.partial(heat, 8, width), loss=squared_error, hyper={"lr": 5e-3})


def _require(module: str, package: str, extra: str, purpose: str) -> None:
    """Say at once, before any rank has started, that a package is missing."""
    if importlib.util.find_spec(module) is None:
        raise MissingExtra(package, extra, purpose)


# ------------------------------------------------------------------------------------------------ batches


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
    """Random fields ``x`` (samples, 1, height, width), periodic, and the same after a time of diffusion, ``y``.

    In Fourier space diffusion multiplies wave number k by exp(-t |k|^2): solved exactly.
    """
    x = torch.randn(SAMPLES, 1, height, width, generator=random_numbers(rank, number))
    rows, columns = torch.fft.fftfreq(height, 1 / height), torch.fft.rfftfreq(width, 1 / width)
    damping = torch.exp(-0.1 * (rows[:, None] ** 2 + columns[None, :] ** 2))
    return {"x": x, "y": 2 * torch.fft.irfft2(damping * torch.fft.rfft2(x), s=(height, width))}


def waves(rank: int, world_size: int, number: int) -> Batch:
    """Sums of three plane waves at the points where they are known, ``x``, and at those where they are asked, ``y``.

    Shapes (samples, points, 1).
    """
    generator = random_numbers(rank, number)
    amplitude = torch.randn(SAMPLES, 1, 3, generator=generator)
    phase = 2 * math.pi * torch.rand(SAMPLES, 1, 3, generator=generator)
    direction = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]])
    known, asked = (
        (amplitude * torch.sin(2 * points @ direction + phase)).sum(-1, keepdim=True) for points in scattered_points()
    )
    return {"x": known, "y": asked}


@functools.cache
def scattered_points() -> tuple[Tensor, Tensor]:
    """Points of the unit square: 20 at which a field is known, and 10 at which it is asked."""
    generator = torch.Generator().manual_seed(7)
    return torch.rand(20, 2, generator=generator), torch.rand(10, 2, generator=generator)


@functools.cache
def grid_points() -> Tensor:
    """A regular grid (4, 4, 2) over the unit square."""
    line = torch.linspace(0, 1, 4)
    return torch.stack(torch.meshgrid(line, line, indexing="ij"), dim=-1)


# ------------------------------------------------------------------------------------------------ losses


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
    known, asked, grid = (p[None].to(batch["x"].device) for p in (*scattered_points(), grid_points()))
    output = model(input_geom=known, latent_queries=grid, output_queries=asked, x=batch["x"])
    return nn.functional.mse_loss(output, batch["y"])


# ------------------------------------------------------------------------------------------------ models


class ComplexMLP(nn.Module):
    """Real numbers in and out, one complex layer between."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 12)
        self.turn = nn.Linear(12, 12, dtype=torch.complex64)
        self.leave = nn.Linear(24, 2)

    def forward(self, x: Tensor) -> Tensor:
        turned = self.turn(torch.tanh(self.enter(x)).to(torch.complex64))
        return self.leave(torch.tanh(torch.view_as_real(turned).flatten(-2)))


class DropoutBlock(nn.Sequential):
    """A layer and its dropout; worth recomputing as a whole."""


class ConvBlock(nn.Sequential):
    """A convolution, its BatchNorm and what follows; worth recomputing as a whole."""


def _dropout() -> nn.Module:
    block = DropoutBlock(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.2))
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), block, nn.Linear(16, 2))


def _convnet() -> nn.Module:
    return nn.Sequential(
        ConvBlock(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()),
        ConvBlock(nn.Conv2d(4, 4, 3, padding=1, stride=2), nn.BatchNorm2d(4), nn.ReLU()),
        nn.Flatten(),
        nn.Linear(4 * 16, 4),
    )


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=8,
        patch_size=4,
        num_channels=1,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_labels=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.2,  # the usual 0.02 is meant for widths of hundreds
    )
    return ViTForImageClassification(config)


def small_t5(words: int, width: int, heads: int, layers: int, **changes: Any) -> nn.Module:
    """Hugging Face's T5 with random weights and tied embeddings, for examples, tests and benchmarks.

    Args:
        words: size of the vocabulary.
        width: of the embeddings; that of all heads together too, and four times as much between.
        heads: of each attention.
        layers: of the encoder, and as many of the decoder.
        **changes: what else transformers' ``T5Config`` takes, or instead.
    """
    from transformers import T5Config, T5ForConditionalGeneration

    settings: dict[str, Any] = {
        "vocab_size": words,
        "d_model": width,
        "d_kv": width // heads,
        "d_ff": 4 * width,
        "num_layers": layers,
        "num_heads": heads,
        "use_cache": False,
        "tie_word_embeddings": True,
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
    }
    return T5ForConditionalGeneration(T5Config(**(settings | changes)))


def _t5() -> nn.Module:
    return small_t5(words=20, width=16, heads=2, layers=1, d_ff=32, dropout_rate=0.0)


SMALL: dict[str, Any] = {
    "in_channels": 1,
    "out_channels": 1,
    "hidden_channels": 6,
    "n_layers": 2,
    "projection_channel_ratio": 2,
    "use_channel_mlp": False,
}
"""What the operators on regular grids share."""


def _fno() -> nn.Module:
    from neuralop.models import FNO

    return FNO(n_modes=(4, 4), **SMALL)


def _tfno(factorization: str) -> nn.Module:
    from neuralop.models import TFNO

    return TFNO(n_modes=(4, 4), factorization=factorization, rank=0.4, **SMALL)


def _uno() -> nn.Module:
    from neuralop.models import UNO

    with contextlib.redirect_stdout(io.StringIO()):  # it prints its skips
        return UNO(
            in_channels=1,
            out_channels=1,
            hidden_channels=4,
            uno_out_channels=[4, 4, 4],
            uno_n_modes=[[4, 4]] * 3,
            uno_scalings=[[1.0, 1.0], [0.5, 0.5], [2, 2]],
            horizontal_skips_map={2: 0},
            n_layers=3,
            channel_mlp_skip="linear",
            lifting_channels=4,
            projection_channels=4,
        )


def _sfno() -> nn.Module:
    from neuralop.models import SFNO

    return SFNO(n_modes=(4, 8), **{**SMALL, "use_channel_mlp": True})  # without, it learns little


def _gino() -> nn.Module:
    from neuralop.models import GINO

    return GINO(
        in_channels=1,
        out_channels=1,
        gno_coord_dim=2,
        in_gno_radius=0.5,
        out_gno_radius=0.5,
        gno_embed_channels=4,
        in_gno_channel_mlp_hidden_layers=[8],
        out_gno_channel_mlp_hidden_layers=[8],
        gno_use_open3d=False,
        gno_use_torch_scatter=False,
        fno_n_modes=(3, 3),
        fno_hidden_channels=6,
        fno_n_layers=1,
        fno_use_channel_mlp=False,
        projection_channel_ratio=2,
    )
