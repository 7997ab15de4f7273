"""The training loop on a mesh of several dimensions, and the one on one process that judges it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsshard.errors import ConfigurationError, RecipeError
from fsshard.parallel.data_rank import data_rank
from fsshard.parallel.meshes import data_dimensions, is_flattened_with_parts, role_of
from fsshard.parity.engine import Engine, WrappedEngine
from fsshard.parity.recipe import Recipe, Split
from fsshard.parity.shadow import built
from fsshard.parity.training import Job, Training
from fsshard.parity.watch import ForwardWatch

__all__ = ["Bare", "SplitTraining", "check_mesh", "data_ranks", "mesh_text", "splits"]


def check_mesh(mesh: object) -> dict[str, int]:
    """A mesh's sizes by the names of its dimensions, if ranks can be arranged so.

    Raises:
        ConfigurationError: it is no such mapping, a name says nothing, or there is no dimension of data.
    """
    if not isinstance(mesh, Mapping) or not mesh or not all(isinstance(name, str) for name in mesh):
        raise ConfigurationError(f'mesh={mesh!r}: expected sizes by name, for example {{"data": 2, "tp": 2}}')
    sizes = dict(mesh)
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ConfigurationError(f"mesh={sizes}: {name!r} has size {size!r}; expected a positive whole number")
        if role_of(name) is None or is_flattened_with_parts(name):
            raise ConfigurationError(
                f"mesh={sizes}: {name!r} does not say whether its ranks see the same samples; call it data, replicate "
                "or shard where they see others, and tp, cp, domain, ... where they see the same"
            )
    if all(role_of(name) == "model" for name in sizes):
        raise ConfigurationError(f"mesh={sizes}: there is no dimension of data; add data=1")
    return sizes


def mesh_text(sizes: Mapping[str, int]) -> str:
    """Write it as on the command line: ``data=2,tp=2``."""
    return ",".join(f"{name}={size}" for name, size in sizes.items())


def data_ranks(sizes: Mapping[str, int]) -> int:
    """Return how many ranks see other samples."""
    return math.prod(size for name, size in sizes.items() if role_of(name) != "model")


def splits(sizes: Mapping[str, int]) -> list[str]:
    """Dimensions of more than one rank along which the model, or every sample, is divided."""
    return [name for name, size in sizes.items() if size > 1 and role_of(name) == "model"]


class Bare(Engine):
    """The recipe's own model and optimizer on one process."""

    name: ClassVar[str] = "one process"

    def __init__(self, recipe: Recipe, module: nn.Module) -> None:
        super().__init__(recipe, module)
        self.model = self.module = module
        named = dict(module.named_parameters())
        groups: list[dict[str, Any]] = [{"params": list(named)}]
        if recipe.param_groups is not None:
            groups = recipe.param_groups(list(named))
        held = [{**group, "params": [named[name] for name in group["params"]]} for group in groups]
        try:
            self.optimizer = recipe.optimizer(held, **recipe.hyper)
        except TypeError as error:
            raise RecipeError(f"recipe.optimizer does not take recipe.hyper {dict(recipe.hyper)!r}: {error}") from error


class SplitTraining(Training):
    """Over a mesh, whose ranks along other dimensions than data have the same samples.

    Attributes:
        mesh: all ranks.
        split: what the recipe has made of the model.
    """

    def __init__(self, job: Job) -> None:
        sizes = job.mesh
        assert sizes is not None
        self.mesh = init_device_mesh(job.device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        self.split = Split()
        super().__init__(job)

    def _made(self) -> tuple[Engine, ForwardWatch]:
        self.sample_rank = data_rank(self.mesh).rank
        module, watch = built(self.recipe, self.job.device, outputs=False)
        self.split = split_by(self.recipe, module, self.mesh)
        engine = self.job.engine
        given = {"backend": engine} if isinstance(engine, str) else dict(engine)
        recomputed = {"activation_checkpointing": self.recipe.activation_checkpointing}
        module = module if self.split.model is None else self.split.model.to(self.job.device)
        return WrappedEngine(self.recipe, module, {**recomputed, **self.split.settings, **given}), watch

    def loss(self, model: Any, batch: Any) -> Tensor:
        found = (self.split.loss or self.recipe.loss)(model, batch)
        if hasattr(found, "full_tensor"):
            raise RecipeError(
                "the loss is a DTensor, and whether ranks have parts of it or the same is for the recipe to say: "
                "return loss.full_tensor()"
            )
        return found

    def loss_of_all(self, value: float) -> float:
        return super().loss_of_all(value) * math.prod(self.mesh[name].size() for name in self.split.adds)


def split_by(recipe: Recipe, module: nn.Module, mesh: DeviceMesh) -> Split:
    """Return what the recipe makes of a model on a mesh.

    Raises:
        RecipeError: it returns something else than a :class:`Split` or a dict, or names dimensions that are not there.
    """
    if recipe.split is None:
        names = data_dimensions(mesh)
        return Split(settings={"device_mesh": mesh[tuple(names)] if mesh.ndim > 1 else mesh})
    found = recipe.split(module, mesh)
    if isinstance(found, Mapping):
        found = Split(settings=found)
    if not isinstance(found, Split):
        raise RecipeError(
            "recipe.split(model, mesh) must return keyword arguments of fsshard.wrap, such as "
            f'{{"device_mesh": mesh["data"]}}, or a fsshard.parity.Split; got {type(found).__name__}'
        )
    unknown = [name for name in found.adds if name not in (mesh.mesh_dim_names or ())]
    if unknown:
        raise RecipeError(f"Split.adds names {unknown[0]!r}; the mesh has {', '.join(mesh.mesh_dim_names or ())}")
    return found
