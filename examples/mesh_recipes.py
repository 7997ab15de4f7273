"""Models that are divided over a mesh, for ``fsshard parity --mesh``: are they the training of one process?

    fsshard parity examples.mesh_recipes:weather --mesh data=2,tp=2 --mesh data=2,cp=2 --mesh data=1,cp=2,tp=2
    fsshard parity examples.mesh_recipes:perceptron --mesh data=2,tp=2 --backends fsdp2,ddp
    fsshard parity examples.mesh_recipes:fno --mesh data=4,domain=1 --mesh data=2,domain=2 --mesh data=1,domain=4

Each recipe has one function more than those of ``fsshard.recipes``: ``split(model, mesh)`` divides the model, as a
training does before it calls ``fsshard.wrap``, and returns what ``wrap`` has to be told. Build, batches, loss and
optimizer say nothing of meshes: one process runs them as they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

from examples.mesh_layers import sharded_parameters, split_sequence, split_tensors
from examples.vit import ViT
from fsshard import recipes
from fsshard.parallel import shard_domain
from fsshard.parity import Recipe, Split
from fsshard.recipes import samples

__all__ = ["fno", "perceptron", "weather"]


def weather() -> Recipe:
    """The vision transformer of ``weather_vit.py``, small, divided by hand over ``tp`` and ``cp``."""
    return Recipe(build=_vit, batches=fields, loss=squared_error, hyper={"lr": 1e-3}, clip=1.0, split=split_vit)


def _vit() -> ViT:
    return ViT(channels=3, shape=(8, 16), patch=4, width=16, depth=2, heads=4)


def fields(rank: int, world_size: int, number: int) -> tuple[Tensor, Tensor]:
    """Two random fields, and what they are to become."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    before = torch.randn(2, 3, 8, 16, generator=generator)
    return before, before.roll(1, dims=-1)


def squared_error(model: Callable[..., Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    """The mean over all points of all samples."""
    given, wanted = batch
    return functional.mse_loss(model(given), wanted)


def split_vit(model: nn.Module, mesh: DeviceMesh) -> dict[str, Any]:
    """Some heads and hidden numbers to each rank of ``tp``, some tokens to each of ``cp``; the mesh names both or one.

    Every rank of ``cp`` puts the whole forecast together and has the whole loss of it, so ``squared_error`` stays.
    """
    assert isinstance(model, ViT)
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    settings: dict[str, Any] = {"device_mesh": mesh["data"]}
    if sizes.get("tp", 1) > 1:
        split_tensors(model, mesh["tp"])
        settings["sharded"] = sharded_parameters(mesh["tp"])
    if sizes.get("cp", 1) > 1:
        split_sequence(model, mesh["cp"])
        settings["replicated"] = {".": mesh["cp"]}
    return settings


def perceptron() -> Recipe:
    """Three linear layers, divided by torch's ``parallelize_module``: the parameters are DTensors."""
    return Recipe(build=_perceptron, batches=points, loss=squared_error, hyper={"lr": 1e-2}, split=split_linear)


def _perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2))


def points(rank: int, world_size: int, number: int) -> tuple[Tensor, Tensor]:
    """Eight points, and two functions of them."""
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1000 * number + rank))
    return x, torch.stack([x.sum(1).sin(), x.square().mean(1)], dim=1)


def split_linear(model: nn.Module, mesh: DeviceMesh) -> dict[str, Any]:
    """The first layer cut by its outputs, the second by its inputs; DTensors tell ``wrap`` themselves what they are."""
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return {"device_mesh": mesh["data"]}


def fno() -> Recipe:
    """A Fourier neural operator on the heat equation, its fields cut into slabs: every rank has all of the weights."""
    return dataclasses.replace(recipes.fno(), name="fno", split=split_fields)


def split_fields(model: nn.Module, mesh: DeviceMesh) -> Split:
    """A slab of the same samples to each rank of ``domain``; ``wrap`` runs over all ranks, so it need be told nothing.

    A rank's loss is that of whole fields, so that the mean over all ranks is the loss of one process.
    """
    domain = shard_domain(model, mesh["domain"])

    def loss(model: Callable[..., Tensor], batch: samples.Batch) -> Tensor:
        return domain.mse_loss(model(domain.scatter(batch["x"])), domain.scatter(batch["y"]))

    return Split(loss=loss)
