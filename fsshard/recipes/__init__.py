"""What is a recipe, and what can I try at once? Twelve trainings, each told without an engine.

    fsshard parity tfno --backends fairscale,fsdp,fsdp2,ddp --world-size 2

Every function here returns a recipe: a model, its batches and its loss. The models are real ones, made small (a step
takes milliseconds) and with random weights, so nothing is downloaded. A batch is a pure function of the rank and its
number: no file, no state, other samples for every rank. Each loss is a mean over the samples of its batch, so the mean
over the ranks' losses is the loss of all their samples together.

Write your own in the same way; a recipe of your model is three functions.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable

from torch import nn

from fsshard.errors import MissingExtra
from fsshard.recipes import models, samples
from fsshard.recipes.recipe import Recipe

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


def mlp() -> Recipe:
    """Plain torch: a perceptron with a complex layer in the middle fits a sum of sines."""
    return Recipe(build=models.ComplexMLP, batches=samples.sines, loss=samples.squared_error, hyper={"lr": 1e-2})


def dropout() -> Recipe:
    """A perceptron with dropout: random numbers are drawn in every forward, others on every rank."""
    return Recipe(build=models.dropout_model, batches=samples.sines, loss=samples.squared_error, hyper={"lr": 1e-2})


def convnet() -> Recipe:
    """Convolution and BatchNorm, whose statistics are those of each rank's own samples, on images of four kinds."""
    return Recipe(build=models.convnet_model, batches=samples.images, loss=samples.image_error, hyper={"lr": 1e-2})


def vit() -> Recipe:
    """Hugging Face's vision transformer, one layer, on images of four kinds."""
    _require("transformers", "the recipe vit")
    return Recipe(build=models.vit_model, batches=samples.images, loss=samples.image_error, hyper={"lr": 1e-2})


def t5() -> Recipe:
    """Hugging Face's T5, an encoder and a decoder layer with tied embeddings, learns to reverse words."""
    _require("transformers", "the recipe t5")
    return Recipe(build=models.t5_model, batches=samples.words, loss=samples.word_error, hyper={"lr": 3e-3})


def fno() -> Recipe:
    """A Fourier neural operator, complex weights in full, learns the heat equation."""
    return _on_heat("fno", models.fno_model)


def tfno() -> Recipe:
    """An FNO whose weights are complex Tucker factors, on the heat equation."""
    return _on_heat("tfno", functools.partial(models.tfno_model, "tucker"))


def tfno_cp() -> Recipe:
    """An FNO whose weights are complex CP factors, on the heat equation."""
    return _on_heat("tfno_cp", functools.partial(models.tfno_model, "cp"))


def tfno_tt() -> Recipe:
    """An FNO whose weights are complex tensor-train factors, on the heat equation."""
    return _on_heat("tfno_tt", functools.partial(models.tfno_model, "tt"))


def uno() -> Recipe:
    """A U-shaped neural operator, three layers at two resolutions, on the heat equation."""
    return _on_heat("uno", models.uno_model)


def sfno() -> Recipe:
    """A spherical FNO: convolutions over spherical harmonics, on fields over latitude and longitude.

    neuraloperator 2.0 makes weights for ``n_modes[0]`` degrees and asks for ``n_modes[1] // 2`` orders. torch-harmonics
    0.9 cuts both to the smaller one, so the second number of modes is twice the first, which runs with 0.8 and 0.9.
    """
    for module in ("neuralop", "torch_harmonics"):
        _require(module, "the recipe sfno", extra="sfno")
    return _on_heat("sfno", models.sfno_model, width=16)


def gino() -> Recipe:
    """A geometry-informed neural operator carries a field from scattered points to others.

    The points are the same for all samples, which GINO demands, so they belong to the problem and not to a batch. It
    runs on neuraloperator's own neighbour search and sums; open3d and torch-scatter are not needed.
    """
    _require("neuralop", "the recipe gino")
    return Recipe(build=models.gino_model, batches=samples.waves, loss=samples.wave_error, hyper={"lr": 5e-3})


def _on_heat(name: str, build: Callable[[], nn.Module], width: int = 8) -> Recipe:
    _require("neuralop", f"the recipe {name}")
    batches = functools.partial(samples.heat, 8, width)
    return Recipe(build=build, batches=batches, loss=samples.squared_error, hyper={"lr": 5e-3})


def _require(module: str, purpose: str, extra: str = "") -> None:
    """Raise at once, before any rank has started, if a package is missing."""
    if importlib.util.find_spec(module) is None:
        package = {"neuralop": "neuraloperator", "torch_harmonics": "torch-harmonics"}.get(module, module)
        raise MissingExtra(package, extra or module, purpose)
