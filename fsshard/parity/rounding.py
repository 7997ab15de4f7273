"""How far rounding alone may carry a step: closed form for the sum over ranks, measured for everything else.

Where engines train on the same number of ranks only the order of the sum over ranks may differ, and
:mod:`fsshard.parity.bounds` has its bound. One process on the samples of several ranks, and a divided model, add in
other orders everywhere. How far that may carry loss and gradients is measured on one process: the same step runs
:data:`DRAWS` times more with every operation rounded otherwise (:mod:`fsshard.parity.perturbed`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fsshard.errors import ConfigurationError
from fsshard.nested import is_array, leaves, map_leaves
from fsshard.parity.bounds import measured_bound
from fsshard.parity.perturbed import perturbed
from fsshard.parity.recipe import Recipe, RecipeLike, resolve
from fsshard.parity.shadow import Draw, Shadow
from fsshard.parity.sketch import Sketch, sketch
from fsshard.parity.trace import digest, real_view
from fsshard.planning.policies import resolve_precision

__all__ = [
    "BatchFacts",
    "NotComparable",
    "Rounding",
    "at_world_size",
    "batch_facts",
    "check_full_precision",
    "check_regrouping",
    "measure",
    "recorded_batches",
    "reordered",
    "samples_of",
]

BatchFacts = tuple[list[list[str]], dict[str, Sketch]]

DRAWS = 32
"""Other roundings of a step that are tried. One process is cheap beside several ranks, and with more draws the bound is
nearer to them: 9 times the largest of 32, of 8 it is 75 times (:func:`fsshard.parity.bounds.spread_factor`)."""


class NotComparable(ConfigurationError):
    """The comparison makes no sense for this model."""


@dataclass
class Rounding:
    """Bounds of one step.

    Attributes:
        loss: measured, for the loss.
        gradients: measured, by name, for all elements of a tensor.
        magnitudes: by name, sum over ranks of |local gradient| / N, element by element of the real view.
        reductions: by name, how many reductions make up the gradient.
    """

    loss: float = 0.0
    gradients: dict[str, float] = field(default_factory=dict)
    magnitudes: Mapping[str, Tensor] = field(default_factory=dict)
    reductions: dict[str, int] = field(default_factory=dict)


def check_full_precision(recipe: Recipe) -> None:
    """Raise if other numbers of ranks cannot be compared because of the recipe's precision."""
    if not resolve_precision(recipe.settings.get("mixed_precision", recipe.precision)).is_full:
        raise NotComparable(
            "mixed precision: in bfloat16 and float16 kernels round a joined batch very differently from the ranks' "
            "own batches, so only runs with the same number of ranks can be compared"
        )


def measure(shadow: Shadow, recipe: Recipe, batches: Callable[[], list[list[Any]]], step: int) -> Rounding:
    """Measure the bounds of one step on this process.

    Args:
        shadow: a copy of the model, with this step's weights and buffers.
        recipe: what is trained.
        batches: makes, per accumulated batch, the ranks' batches.
        step: seeds the draws.

    Raises:
        NotComparable: low precision, or the model draws random numbers or mixes samples: then other ranks train
            something else.
    """
    check_full_precision(recipe)

    def joined() -> list[Any]:
        return [recipe.joined(parts) for parts in batches()]

    base = shadow.evaluate(joined)
    if base.drew:
        raise NotComparable(
            "the model draws random numbers (dropout?): one process draws other numbers than the ranks do, so only "
            "runs with the same number of ranks can be compared"
        )
    spread, loss = dict.fromkeys(base.gradients, 0.0), 0.0
    for number in range(DRAWS):
        with perturbed(torch.Generator().manual_seed(1000 * step + number + 1)):
            draw = shadow.evaluate(joined)
        loss = max(loss, abs(draw.loss - base.loss))
        for name, gradient in base.gradients.items():
            spread[name] = max(spread[name], _largest_apart(gradient, draw.gradients[name]))
    bounds = Rounding(
        loss=measured_bound(loss, abs(base.loss), 1, DRAWS, torch.float32),
        gradients={name: _bound(value, spread[name]) for name, value in base.gradients.items() if value.numel()},
    )
    if len(batches()[0]) > 1:
        _check_samples_stay_apart(base, _mean_of_parts(shadow, batches), bounds)
    return bounds


def _bound(gradient: Tensor, spread: float) -> float:
    real = real_view(gradient)
    return measured_bound(spread, float(real.abs().max()), real.numel(), DRAWS, gradient.dtype)


def _largest_apart(one: Tensor, other: Tensor) -> float:
    return float((real_view(one).double() - real_view(other).double()).abs().max()) if one.numel() else 0.0


def _mean_of_parts(shadow: Shadow, batches: Callable[[], list[list[Any]]]) -> Draw:
    """Return loss and gradients (real views in float64) over the ranks' own batches, one after the other."""
    world, mean = len(batches()[0]), Draw(0.0, {}, False)
    for rank in range(world):
        draw = shadow.evaluate(lambda rank=rank: [parts[rank] for parts in batches()])  # type: ignore[misc]
        mean.loss += draw.loss / world
        for name, gradient in draw.gradients.items():
            mean.gradients[name] = mean.gradients.get(name, 0) + real_view(gradient).double() / world
    return mean


def _check_samples_stay_apart(base: Draw, parts: Draw, bounds: Rounding) -> None:
    """Raise unless the joined batch is the mean of the ranks' batches, within this process, with no engine in it."""
    what = ""
    if abs(parts.loss - base.loss) > bounds.loss:
        what = f"the loss is {base.loss:.9g} on the joined batch and {parts.loss:.9g} as the mean over its parts"
    for name, bound in bounds.gradients.items():
        apart = float((real_view(base.gradients[name]).double() - parts.gradients[name]).abs().max())
        if not what and apart > bound:
            what = f"the gradient of {name} on the joined batch differs by {apart:.3g} from the mean over its parts"
    if what:
        raise NotComparable(
            f"{what}, within one process: the model or its loss mixes samples (BatchNorm, a sum, a mean over unequal "
            "numbers of tokens), so one process on the joined batch trains something else; compare runs with the same "
            "number of ranks"
        )


# --------------------------------------------------------------------------- the same samples on other ranks


def samples_of(batch: Any) -> int:
    """Return how many samples a batch has, along dim 0 of every tensor and array.

    Raises:
        NotComparable: they do not agree.
    """
    sizes = {leaf.shape[0] for leaf in leaves(batch) if is_array(leaf)}
    if len(sizes) != 1:
        raise NotComparable(
            f"tensors of the batch have {sorted(sizes)} rows: samples must lie along dim 0 of every tensor, or the "
            "recipe needs a join function"
        )
    return int(sizes.pop())


def reordered(batch: Any, order: list[int]) -> Any:
    """Return the batch with its samples in this order."""
    return map_leaves(lambda leaf: leaf[order] if is_array(leaf) else leaf, batch)


def at_world_size(source: RecipeLike, world_size: int) -> Any:
    """Return a source of the recipe, with the batches of ``world_size`` ranks divided among however many train."""
    return functools.partial(_regrouped, source, world_size)


def _regrouped(source: RecipeLike, world_size: int) -> Recipe:
    recipe = resolve(source)

    def batches(rank: int, ranks: int, number: int) -> Any:
        joined = recipe.joined([recipe.batches(r, world_size, number) for r in range(world_size)])
        samples = samples_of(joined)
        if samples % ranks:
            raise NotComparable(
                f"the {samples} samples of a batch of {world_size} ranks cannot be divided evenly among {ranks}; "
                "compare with a number of ranks that divides them"
            )
        share = samples // ranks
        return reordered(joined, list(range(rank * share, (rank + 1) * share)))

    return replace(recipe, batches=batches)


def batch_facts(batches: list[list[Any]], *, sketched: bool = True) -> BatchFacts:
    """Digests per accumulated batch and rank; and sketches of their tensors by "accumulated batch.rank.tensor"."""
    found = {}
    for micro, parts in enumerate(batches if sketched else []):
        for rank, batch in enumerate(parts):
            arrays = [leaf for leaf in leaves(batch) if is_array(leaf)]
            found.update({f"{micro}.{rank}.{number}": sketch(torch.as_tensor(x)) for number, x in enumerate(arrays)})
    return [[digest(batch) for batch in parts] for parts in batches], found


def recorded_batches(source: RecipeLike, world_size: int, steps: int) -> list[BatchFacts]:
    """Per step, what :func:`batch_facts` says of the batches of ``world_size`` ranks. On one rank."""
    recipe = resolve(source)
    return [batch_facts(_of_all_ranks(recipe, world_size, step)) for step in range(steps)]


def _of_all_ranks(recipe: Recipe, world_size: int, step: int) -> list[list[Any]]:
    numbers = range(step * recipe.accumulate, (step + 1) * recipe.accumulate)
    return [[recipe.batches(rank, world_size, number) for rank in range(world_size)] for number in numbers]


def check_regrouping(source: RecipeLike, world_size: int, device: str) -> None:
    """Raise if other numbers of ranks train something else on the same samples. On one rank.

    Raises:
        NotComparable: the model draws random numbers, mixes samples, or is in low precision.
    """
    recipe = resolve(source)
    shadow = Shadow(recipe, device)
    shadow.load(dict(shadow.module.named_parameters()).items(), shadow.module.named_buffers())
    measure(shadow, recipe, lambda: _of_all_ranks(recipe, world_size, 0), 0)
