"""Trains on one process on the joined batch of all ranks, and estimates how large its rounding errors are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fsshard.errors import ConfigurationError
from fsshard.model.nested import is_array, leaves, map_leaves
from fsshard.parity.bounds import ORDERS, measured_bound, unit_roundoff
from fsshard.parity.recipe import Recipe
from fsshard.parity.shadow import Draw, Shadow
from fsshard.parity.trace import real_view
from fsshard.planning.policies import resolve_precision

__all__ = [
    "NotComparable",
    "Rounding",
    "check_full_precision",
    "check_samples_stay_apart",
    "largest_apart",
    "measure",
    "reordered",
    "samples_of",
]


class NotComparable(ConfigurationError):
    """The comparison makes no sense for this model."""


@dataclass
class Rounding:
    """Bounds between the joined batch and the same batch on several ranks, in one step.

    Attributes:
        loss: for the loss.
        gradients: by name, element by element of the real view: how far the mean of the ranks' own gradients is from
            the gradient of the joined batch.
        magnitudes: by name, sum over ranks of |local gradient| / N, element by element.
        reductions: by name, how many reductions make up the gradient.
    """

    loss: float = 0.0
    gradients: dict[str, Tensor] = field(default_factory=dict)
    magnitudes: dict[str, Tensor] = field(default_factory=dict)
    reductions: dict[str, int] = field(default_factory=dict)


def check_full_precision(recipe: Recipe) -> None:
    """Raise if other numbers of ranks cannot be compared because of the recipe's precision."""
    if not resolve_precision(recipe.settings.get("mixed_precision", recipe.precision)).is_full:
        raise NotComparable(
            "mixed precision: in bfloat16 and float16 kernels round a joined batch very differently from the ranks' "
            "own batches, so only runs with the same number of ranks can be compared"
        )


def measure(shadow: Shadow, recipe: Recipe, batches: Callable[[], list[list[Any]]], step: int) -> Rounding:
    """The bounds of one step.

    Each rank's own batch runs through this process too. That gives the ranks' local gradients to the last bit, hence
    the difference between the joined gradient and their mean, which no engine has a part in. Other orders of the
    samples tell whether that difference is rounding.

    Args:
        shadow: a copy of the model, with this step's weights and buffers.
        recipe: what is trained.
        batches: makes, per accumulated batch, the ranks' batches.
        step: seeds the orders.

    Raises:
        NotComparable: the model draws random numbers, or mixes samples, so the joined batch is another problem.
    """
    check_full_precision(recipe)
    base = shadow.evaluate(lambda: [recipe.joined(parts) for parts in batches()])
    if base.drew:
        raise NotComparable(
            "the model draws random numbers (dropout?): one process draws other numbers than the ranks do, so only "
            "runs with the same number of ranks can be compared"
        )
    result = Rounding()
    parts = _parts(shadow, batches, result)
    spread, losses = dict.fromkeys(base.gradients, 0.0), 0.0
    for number in range(ORDERS):
        generator = torch.Generator().manual_seed(1000 * step + number + 1)
        draw = shadow.evaluate(lambda generator=generator: [_shuffled(recipe, b, generator) for b in batches()])  # type: ignore[misc]
        losses = max(losses, abs(draw.loss - base.loss))
        for name, gradient in base.gradients.items():
            spread[name] = max(spread[name], largest_apart(gradient, draw.gradients[name]))
    check_samples_stay_apart(base, parts, losses, spread)
    result.loss = abs(parts.loss - base.loss) + 2 * unit_roundoff(torch.float32) * abs(base.loss)
    for name, gradient in base.gradients.items():
        result.gradients[name] = (real_view(gradient).double() - parts.gradients[name]).abs()
    # At most: every batch may have been reduced by itself. What was measured is far larger in any case.
    result.reductions = dict.fromkeys(base.gradients, recipe.accumulate)
    return result


def _parts(shadow: Shadow, batches: Callable[[], list[list[Any]]], result: Rounding) -> Draw:
    """Mean over the ranks' own batches, one after the other in this process; fills in the magnitudes."""
    given = batches()
    world, several = len(given[0]), len(given) > 1
    mean = Draw(0.0, {}, False)
    for rank in range(world):
        draw = shadow.evaluate(lambda rank=rank: [parts[rank] for parts in batches()])  # type: ignore[misc]
        mean.loss += draw.loss / world
        for name, gradient in draw.gradients.items():
            mean.gradients[name] = mean.gradients.get(name, 0) + real_view(gradient).double() / world
        if several:  # each batch's, and so from a run in which they are not added up
            moduli = shadow.moduli(lambda rank=rank: [parts[rank] for parts in batches()])  # type: ignore[misc]
        else:
            moduli = {name: real_view(gradient).abs() for name, gradient in draw.gradients.items()}
        for name, modulus in moduli.items():
            result.magnitudes[name] = result.magnitudes.get(name, 0) + modulus / world
    return mean


def _shuffled(recipe: Recipe, parts: list[Any], generator: torch.Generator) -> Any:
    """The joined batch with its samples in another order; with a join of the user's own, with its parts so."""
    if recipe.join is not None:
        return recipe.joined([parts[i] for i in torch.randperm(len(parts), generator=generator).tolist()])
    joined = recipe.joined(parts)
    return reordered(joined, torch.randperm(samples_of(joined), generator=generator).tolist())


def samples_of(batch: Any) -> int:
    """How many samples a batch has, along dim 0 of every tensor and array.

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
    """The batch with its samples in this order."""
    return map_leaves(lambda leaf: leaf[order] if is_array(leaf) else leaf, batch)


def largest_apart(one: Tensor, other: Tensor) -> float:
    """The largest modulus of a difference of two real or imaginary parts; 0 where there are no elements."""
    return float((real_view(one).double() - real_view(other).double()).abs().max()) if one.numel() else 0.0


def check_samples_stay_apart(base: Draw, parts: Draw, losses: float, spread: dict[str, float]) -> None:
    """Within this process, with no engine in the game: is the joined batch the mean of the ranks' batches?"""
    wrong = abs(parts.loss - base.loss) > measured_bound(losses, abs(base.loss), 1, ORDERS, torch.float32)
    what = f"the loss is {base.loss:.9g} on the joined batch and {parts.loss:.9g} as the mean over its parts"
    for name, gradient in base.gradients.items():
        if wrong or not gradient.numel():
            continue
        real = real_view(gradient)
        apart = float((real.double() - parts.gradients[name]).abs().max())
        wrong = apart > measured_bound(spread[name], float(real.abs().max()), real.numel(), ORDERS, gradient.dtype)
        what = f"the gradient of {name} on the joined batch differs by {apart:.3g} from the mean over its parts"
    if wrong:
        raise NotComparable(
            f"{what}, within one process: the model or its loss mixes samples (BatchNorm, a sum, a mean over unequal "
            "numbers of tokens), so one process on the joined batch trains something else; compare runs with the same "
            "number of ranks"
        )
