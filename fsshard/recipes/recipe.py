"""A recipe: a training described in the user's own functions, without any engine."""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import math
import os
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsshard.errors import ConfigurationError, RecipeError
from fsshard.nested import is_array, map_leaves
from fsshard.parallel.meshes import data_dimensions, is_flattened_with_parts, role_of
from fsshard.planning.arguments import PrecisionChoice, Recomputed
from fsshard.planning.text import is_count

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

UNLIKE_ANY = ("join", "name", "seed", "split")
"""Attributes whose names occur in names of anything, so that no misspelling is looked for."""
RecipeLike = Any
"""A :class:`Recipe`, an object like one, a function that returns one, ``"module:attribute"`` naming either, or the name
of one that comes with fsshard (:mod:`fsshard.recipes`), such as ``"tfno"``."""

Arguments = Mapping[str, Any]
"""Keyword arguments by name."""
Sizes = Mapping[str, int]
"""Sizes of a mesh by name."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """The result of ``recipe.split(model, mesh)``, where keyword arguments of ``wrap`` do not say it all.

    Attributes:
        settings: keyword arguments of :func:`fsshard.wrap`: ``device_mesh``, ``replicated``, ``sharded``.
        model: the divided model, with the names of the whole one; None: the model that was given, changed in place.
        loss: ``(model, batch) -> scalar`` of this rank in place of ``recipe.loss``, where that cannot be used as it is:
            a rank that computes a part of every sample takes its part of the batch here. None: ``recipe.loss``.
        adds: dimensions of the mesh along which the ranks' losses add up to that of one process. Along all others it
            is their mean.
    """

    settings: Arguments = field(default_factory=dict)
    model: nn.Module | None = None
    loss: Callable[[Callable[..., Any], Any], Tensor] | None = None
    adds: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = [name for name in self.adds if isinstance(name, str)]
        if isinstance(self.adds, str) or len(names) < len(self.adds):
            raise RecipeError(f'Split.adds must name dimensions, for example ("cp",), got {self.adds!r}')


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A training, described without an engine.

    Any object with the three functions ``build``, ``batches`` and ``loss`` is a recipe, and so is a function without
    arguments that returns one; the other attributes have defaults. One that is spelt almost like them raises.

    Attributes:
        build: makes the model; the random generators are seeded by ``seed`` before it is called.
        batches: ``(rank, world_size, number) -> batch``: the ``number``-th batch of a rank, with its samples along
            dim 0 of every tensor. A step takes ``accumulate`` batches: step s takes numbers s * accumulate and up.
        loss: ``(model, batch) -> scalar``, a mean over the samples of the batch; ``model`` is the wrapped one.
        optimizer: an optimizer class.
        hyper: the optimizer's keyword arguments.
        param_groups: ``names -> param_groups``, of dicts whose ``"params"`` are names. None: one group.
        scheduler: ``optimizer -> LR scheduler``, stepped after each step. None: none.
        precision: ``mixed_precision`` of :func:`fsshard.wrap`. Forwards run under ``model.autocast()`` then, and
            float16 with a ``GradScaler``.
        activation_checkpointing: which blocks are recomputed, as for :func:`fsshard.plan`.
        accumulate: batches per step; all but the last run under ``no_sync`` unless ``no_sync`` is False.
        no_sync: whether accumulation leaves out the reductions between.
        clip: the largest gradient norm, or ``(max_norm, norm_type)``; None does not clip.
        seed: of weights and of random numbers drawn in training (each rank draws others).
        settings: further keyword arguments of :func:`fsshard.wrap`, for every backend.
        join: ``batches of all ranks -> one batch``; None concatenates tensors along dim 0.
        split: ``(model, mesh) -> keyword arguments of wrap``, or a :class:`~fsshard.parity.Split`: divides a fresh
            model along the dimensions of a mesh other than data, as a training would before it calls ``wrap``.
            Needed for ``compare(mesh=...)`` with such dimensions. Ranks that share samples get the same batches.
        name: what reports call it.
    """

    build: Callable[[], nn.Module]
    batches: Callable[[int, int, int], Any]
    loss: Callable[[Callable[..., Any], Any], Tensor]
    optimizer: type[Optimizer] = torch.optim.Adam
    hyper: Arguments = field(default_factory=lambda: {"lr": 1e-3})
    param_groups: Callable[[list[str]], list[dict[str, Any]]] | None = None
    scheduler: Callable[[Optimizer], Any] | None = None
    precision: PrecisionChoice = None
    activation_checkpointing: Recomputed = None
    accumulate: int = 1
    no_sync: bool = True
    clip: float | tuple[float, float] | None = None
    seed: int = 0
    settings: Arguments = field(default_factory=dict)
    join: Callable[[Sequence[Any]], Any] | None = None
    split: Callable[[nn.Module, DeviceMesh], Arguments | Split] | None = None
    name: str = ""

    def __post_init__(self) -> None:
        optional = "param_groups", "scheduler", "join", "split"
        for name in ("build", "batches", "loss", *optional):
            value = getattr(self, name)
            if not callable(value) and (value is not None or name not in optional):
                raise RecipeError(f"recipe.{name}: expected a function, got {value!r}")
        if not (isinstance(self.optimizer, type) and issubclass(self.optimizer, Optimizer)):
            raise RecipeError(f"recipe.optimizer: expected a torch.optim.Optimizer class, got {self.optimizer!r}")
        if not is_count(self.accumulate):
            raise RecipeError(f"recipe.accumulate: expected a positive integer, got {self.accumulate!r}")
        for name in ("hyper", "settings"):
            value = getattr(self, name)
            if not isinstance(value, Mapping):
                raise RecipeError(f"recipe.{name}: expected a dict of keyword arguments, got {value!r}")
        self._check_clip()
        # The loop calls step() without a closure.
        check_steps_alone(self.optimizer)

    def _check_clip(self) -> None:
        if self.clip is None:
            return
        numbers = self.clip if isinstance(self.clip, tuple) else (self.clip, 2.0)
        valid = len(numbers) == 2
        for number in numbers:
            if not isinstance(number, (int, float)) or isinstance(number, bool) or not number > 0:
                valid = False
        if not valid:
            raise RecipeError(f"recipe.clip: expected a positive norm, or (max_norm, norm_type), got {self.clip!r}")

    @property
    def clipping(self) -> tuple[float, float] | None:
        """Return ``(max_norm, norm_type)``, or None."""
        if self.clip is None or isinstance(self.clip, tuple):
            return self.clip
        return float(self.clip), 2.0

    def joined(self, batches: Sequence[Any]) -> Any:
        """Make one batch of the ranks' batches."""
        if len(batches) == 1:
            return batches[0]
        join = self.join or join_batches
        return join(batches)


def check_steps_alone(optimizer: type[Optimizer]) -> None:
    """Raise RecipeError for a class whose ``step`` cannot do without a closure, as LBFGS's."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise RecipeError(
            f"recipe.optimizer: expected a class whose step() runs without a closure, got {optimizer.__name__}, which "
            "runs forward and backward itself; give another, and train by this one in a script of your own"
        )


def check_loss(loss: Any) -> Tensor:
    """Return ``loss``, without dimensions, or raise RecipeError if it is no tensor of one real number."""
    if not isinstance(loss, Tensor):
        raise RecipeError(f"recipe.loss must return one real number as a tensor, got {type(loss).__name__}")
    if loss.numel() != 1 or not loss.is_floating_point():
        kind = f"shape {tuple(loss.shape)}, {loss.dtype}"
        raise RecipeError(f"recipe.loss must return one real number as a tensor, got {kind}")
    return loss.reshape(())


def join_batches(batches: Sequence[Any]) -> Any:
    """Make one batch of several, tensors and arrays concatenated along dim 0; RecipeError if anything else differs."""
    try:
        return map_leaves(_joined, *batches)
    except (TypeError, ValueError, KeyError, IndexError) as error:
        raise RecipeError(
            f"the batches of the ranks cannot be joined ({type(error).__name__}: {error}); give the recipe a join "
            "function"
        ) from error


def _joined(first: Any, *others: Any) -> Any:
    if is_array(first):
        concatenate = torch.cat if isinstance(first, Tensor) else np.concatenate
        return concatenate([first, *others])
    if any(bool(other != first) for other in others):
        raise ValueError(f"they hold different {type(first).__name__} objects")
    return first


def resolve(source: RecipeLike) -> Recipe:
    """Return the recipe that ``source`` means, or raise RecipeError if it means none."""
    value = source
    name = type(source).__name__
    if isinstance(source, str):
        value = _imported(source)
        name = source
    is_recipe = isinstance(value, Recipe) or _like_recipe(value)
    if callable(value) and not is_recipe:
        function_name = _function_name(value)
        needed = _needed(value)
        if needed:
            raise RecipeError(f"{function_name}() needs {', '.join(needed)}; a recipe function takes no arguments")
        if not isinstance(source, str):
            name = function_name
        value = value()
    if isinstance(value, Recipe):
        # An unnamed one is called by what it was asked for.
        if value.name:
            return value
        return replace(value, name=name)
    if not _like_recipe(value):
        raise RecipeError(
            f"{name!r} is not a recipe: expected build(), batches(rank, world_size, number) and loss(model, batch), "
            f"or a function without arguments that returns an object with them; got {type(value).__name__}"
        )
    return _as_recipe(value, name)


def _function_name(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__qualname__", "") or type(function).__name__


def _as_recipe(value: Any, name: str) -> Recipe:
    """Return the recipe that an object is like; raise RecipeError for attributes that look misspelt."""
    attributes: dict[str, Any] = {"name": name}
    defaults = []
    for each in fields(Recipe):
        own_name = each.name
        if hasattr(value, own_name):
            attributes[own_name] = getattr(value, own_name)
        elif own_name not in UNLIKE_ANY:
            defaults.append(own_name)
    for attribute in dir(value):
        if attribute.startswith("_"):
            continue
        # A default must not stand in for one that is misspelt.
        near = [default for default in defaults if default in attribute]
        near += difflib.get_close_matches(attribute, defaults, n=1, cutoff=0.75)
        if near:
            raise RecipeError(
                f"{type(value).__name__}.{attribute} is not an attribute of a recipe; does it mean {near[0]}? If so, "
                f"rename it; if not, set {near[0]} too"
            )
    return Recipe(**attributes)


def _imported(spec: str) -> Any:
    module_name, colon, attribute = spec.partition(":")
    if not colon:
        module_name = "fsshard.recipes"
        attribute = spec
        names = importlib.import_module(module_name).__all__
        if spec not in names:
            raise RecipeError(
                f"{spec!r}: expected 'module:attribute', for example train:recipe, or a built-in recipe: "
                f"{', '.join(names)}{_meant(spec, names)}"
            )
    elif not module_name or not attribute:
        raise RecipeError(f"{spec!r}: expected 'module:attribute', for example train:recipe")
    folder = os.getcwd()
    # A console script has no current folder on its path, as `python script.py` has.
    if folder not in sys.path and "" not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            # The module is there, and something that it imports is not.
            raise
        raise RecipeError(
            f"{spec!r}: there is no module {error.name!r} (looked in {folder} too); write train:recipe for train.py"
        ) from error
    value = module
    for part in attribute.split("."):
        if not hasattr(value, part):
            recipes = _recipes_of(module, part)
            raise RecipeError(f"{spec!r}: {module_name} has no {part!r}; {recipes}")
        value = getattr(value, part)
    return value


def _recipes_of(module: Any, name: str) -> str:
    """Write which recipes a module has, and which of them may have been meant by a name that it does not have."""
    names = []
    for own_name, value in vars(module).items():
        if own_name.startswith("_"):
            continue
        if isinstance(value, Recipe) or _makes_one(value, module):
            names.append(own_name)
    if not names:
        return "it has no recipe"
    return f"it has {', '.join(names)}{_meant(name, names)}"


def _meant(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    return f"; does it mean {near[0]}?" if near else ""


def _makes_one(value: Any, module: Any) -> bool:
    """Return whether a value is the module's own, and a function without arguments or an object like a recipe."""
    if isinstance(value, functools.partial):
        return not _needed(value)
    if inspect.isfunction(value) and value.__module__ == module.__name__:
        return not _needed(value)
    return type(value).__module__ == module.__name__ and _like_recipe(value)


def _needed(function: Callable[..., Any]) -> list[str]:
    """Return the names of the arguments that have no default."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        # It is a builtin without a signature.
        return []
    names = []
    for parameter in parameters:
        is_rest = parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        if parameter.default is parameter.empty and not is_rest:
            names.append(parameter.name)
    return names


def _like_recipe(value: Any) -> bool:
    if isinstance(value, type):
        return False
    return all(callable(getattr(value, name, None)) for name in ("build", "batches", "loss"))


def seed_all(number: int) -> None:
    """Seed every global generator that a training may draw from."""
    random.seed(number)
    np.random.seed(number % 2**32)
    # This seeds every CUDA device, too.
    torch.manual_seed(number)


# ---------------------------------------------------------------------------------------------------------- meshes


def split_by(recipe: Recipe, module: nn.Module, mesh: DeviceMesh) -> Split:
    """Return what the recipe makes of a model on a mesh, or raise RecipeError if that is no split of it."""
    if recipe.split is None:
        dims = tuple(data_dimensions(mesh))
        data = mesh[dims] if mesh.ndim > 1 else mesh
        return Split(settings={"device_mesh": data})
    split = recipe.split(module, mesh)
    if isinstance(split, Mapping):
        split = Split(settings=split)
    if not isinstance(split, Split):
        raise RecipeError(
            "recipe.split(model, mesh) must return keyword arguments of fsshard.wrap, such as "
            f'{{"device_mesh": mesh["data"]}}, or a fsshard.parity.Split; got {type(split).__name__}'
        )
    names = mesh.mesh_dim_names or ()
    for name in split.adds:
        if name not in names:
            raise RecipeError(f"Split.adds names {name!r}; the mesh has {', '.join(names)}")
    return split


def check_mesh(mesh: object) -> dict[str, int]:
    """Return a mesh's sizes by name, or raise ConfigurationError if data ranks cannot be arranged so."""
    if not isinstance(mesh, Mapping) or not mesh or not all(isinstance(name, str) for name in mesh):
        raise ConfigurationError(f'mesh={mesh!r}: expected sizes by name, for example {{"data": 2, "tp": 2}}')
    sizes = dict(mesh)
    for name, size in sizes.items():
        if not is_count(size):
            raise ConfigurationError(f"mesh={sizes}: {name!r} has size {size!r}; expected a positive whole number")
        if role_of(name) is None or is_flattened_with_parts(name):
            raise ConfigurationError(
                f"mesh={sizes}: {name!r} does not say whether its ranks see the same samples; call it data, replicate "
                "or shard where they see others, and tp, cp, domain, ... where they see the same"
            )
    if all(role_of(name) == "model" for name in sizes):
        raise ConfigurationError(f"mesh={sizes}: no dimension is data-parallel; add data=1")
    return sizes


def mesh_text(sizes: Sizes) -> str:
    """Write it as on the command line: ``data=2,tp=2``."""
    parts = [f"{name}={size}" for name, size in sizes.items()]
    return ",".join(parts)


def data_ranks(sizes: Sizes) -> int:
    """Return how many ranks see other samples."""
    ranks = [size for name, size in sizes.items() if role_of(name) != "model"]
    return math.prod(ranks)


def splits(sizes: Sizes) -> list[str]:
    """Dimensions of more than one rank along which the model, or every sample, is divided."""
    return [name for name, size in sizes.items() if size > 1 and role_of(name) == "model"]
