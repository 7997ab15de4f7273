"""Bound how far rounding alone may carry a step: in closed form for the sum over ranks, measured for everything else.

Every step starts from the same weights and optimizer state on both sides (a run that has come apart within its bound
is put back onto the reference after each step), so a step's bound never has to follow errors through a trajectory.
docs/proof.md has the argument for each quantity.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from functools import partial
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from fsshard.errors import ConfigurationError
from fsshard.nested import is_array, leaves, map_leaves
from fsshard.parity.one_process import Draw, Shadow, perturbed
from fsshard.parity.sketch import digest, real_view, sketch
from fsshard.parity.trace import Rounding, Step
from fsshard.planning.policies import resolve_precision
from fsshard.recipes.recipe import Recipe

# Makes, per accumulated batch, the batches of the ranks.
MakeBatches = Callable[[], list[list[Any]]]

# Draws of a whole training that runs freely.
ORDERS = 8
# Draws of a step with a common start. One process is cheap compared to several ranks, and with more draws the bound
# is nearer to them: 9 times the largest of 32, of 8 it is 75 times (spread_factor).
DRAWS = 32
# Probability that a tensor which differs by rounding alone exceeds the measured bound.
FALSE_ALARM = 1e-9


# Why runs on other numbers of ranks are not compared.
DRAWS_RANDOM_NUMBERS = (
    "the model draws random numbers (dropout?): one process draws different numbers than the ranks do, so only runs "
    "with the same number of ranks can be compared"
)


class NotComparable(ConfigurationError):
    """The comparison makes no sense for this model."""


# ---------------------------------------------------------------------------------------------------- in closed form


def unit_roundoff(dtype: torch.dtype) -> float:
    """Return u: half the distance from 1 to the next number, of the real type behind a complex one."""
    return torch.finfo(dtype).eps / 2


def reduction_roundings(world_size: int, reductions: int = 1, *, aligned: bool = False) -> int:
    """Return how many roundings an order of the mean over ranks commits at most; 0 where all orders agree.

    Args:
        world_size: the ranks.
        reductions: those whose results are added (accumulation without ``no_sync``).
        aligned: both sides add up over ranks in the order of :mod:`fsshard.comm.tree`.
    """
    # One rank reduces nothing, and its sums run in the order of the batches.
    if world_size == 1:
        return 0
    # Two summands have one order only.
    if reductions == 1 and (world_size == 2 or aligned):
        return 0
    summands = world_size * reductions
    is_power_of_two = world_size & (world_size - 1) == 0
    if is_power_of_two:
        return summands - 1
    # Division by N is rounded then, and engines divide before, after, or both.
    return summands - 1 + 2 * reductions


def underflow(dtype: torch.dtype, world_size: int, reductions: int) -> float:
    """Return what divisions of subnormal numbers may add, on both sides."""
    if world_size == 1:
        return 0.0
    # Below the normal numbers halving rounds too, and engines halve at different places: half a unit for each summand
    # where they divide before the sum, or once after it.
    numbers = torch.finfo(dtype)
    smallest = numbers.smallest_normal * numbers.eps
    return 2 * (world_size + 1) * reductions * smallest


def reduction_bound(magnitude: Tensor, roundings: int) -> Tensor:
    """Return ``2 gamma_k`` times ``magnitude``, sum over ranks of |g_r| / N, by element (real view), in float64."""
    # An order of a sum with k roundings is within gamma_k = k u / (1 - k u) times the sum of moduli of the exact one
    # (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 4.2), two orders within twice that. One
    # rounding more is counted for those in ``magnitude`` itself.
    ku = (roundings + 1) * unit_roundoff(magnitude.dtype)
    gamma = ku / (1 - ku)
    return 2 * gamma * magnitude.double()


# -------------------------------------------------------------------------------------------------------- measured


@functools.lru_cache(maxsize=4096)
def spread_factor(elements: int, draws: int, false_alarm: float = FALSE_ALARM) -> float:
    """Return how far beyond the largest of the observed rounding errors the next draw of them may reach.

    Args:
        elements: of the tensor (a complex number has two).
        draws: observed evaluations. 8 say little about the ninth: the factor is 70 to 90 then.
        false_alarm: probability that rounding alone exceeds the bound.
    """
    # Model (Higham and Mary, SIAM J. Sci. Comput. 41(5), 2019: rounding errors as random variables of mean zero): the
    # error of an element is normal with one sigma in all evaluations, whose draws are independent; elements may depend
    # on each other in any way (all elements of a small factor of a tensor carry the same sums). Then the largest
    # observed modulus is at least ``a sigma`` except with probability ``(2 Phi(a) - 1)^draws``, and the largest of the
    # next evaluation at most ``b sigma`` except with probability ``elements (2 - 2 Phi(b))``. With half of
    # ``false_alarm`` for either, b / a is the factor.
    half = false_alarm / 2
    normal = NormalDist()
    per_draw = half ** (1 / max(1, draws))
    a = normal.inv_cdf((1 + per_draw) / 2)
    per_element = half / max(1, elements)
    b = -normal.inv_cdf(per_element / 2)
    return max(1.0, b / a)


def measured_bound(spread: float, largest: float, elements: int, draws: int, dtype: torch.dtype) -> float:
    """Return the bound of a tensor between two orders of the same samples, by ``spread``, the largest difference seen.

    ``largest`` is the largest modulus of its ``elements``.
    """
    # The few draws of a small tensor may all be zero, so at least one rounding of its largest element is assumed.
    # Observed differences carry both sides' errors, as the difference that is to be judged does.
    least = unit_roundoff(dtype) * largest
    if draws == 0 or not math.isfinite(spread):
        return 2 * least
    return spread_factor(elements, draws) * max(spread, least)


def measure(shadow: Shadow, recipe: Recipe, batches: MakeBatches, step: int) -> Rounding:
    """Measure the bounds of one step on this process, by a model with its weights and buffers.

    ``batches`` makes, per accumulated batch, the ranks' batches; ``step`` seeds the draws.

    Raises:
        NotComparable: low precision, or the model draws random numbers or mixes samples: then other ranks train
            something else.
    """
    precision = recipe.settings.get("mixed_precision", recipe.precision)
    if not resolve_precision(precision).is_full:
        raise NotComparable(
            "mixed precision: in bfloat16 and float16 kernels round a joined batch very differently from the ranks' "
            "own batches, so only runs with the same number of ranks can be compared"
        )

    def joined() -> list[Any]:
        return list(map(recipe.joined, batches()))

    base = shadow.evaluate(joined)
    if base.drew:
        raise NotComparable(DRAWS_RANDOM_NUMBERS)
    spread = dict.fromkeys(base.gradients, 0.0)
    loss = 0.0
    for number in range(DRAWS):
        # A seed of its own for each draw of each step.
        generator = torch.Generator().manual_seed(1000 * step + number + 1)
        with perturbed(generator):
            draw = shadow.evaluate(joined)
        loss = max(loss, abs(draw.loss - base.loss))
        for name, gradient in base.gradients.items():
            other = real_view(draw.gradients[name])
            spread[name] = max(spread[name], _apart(gradient, other))
    bounds = Rounding(loss=measured_bound(loss, abs(base.loss), 1, DRAWS, torch.float32))
    for name, gradient in base.gradients.items():
        numbers = real_view(gradient)
        elements = numbers.numel()
        if elements:
            largest = float(numbers.abs().max())
            bounds.gradients[name] = measured_bound(spread[name], largest, elements, DRAWS, gradient.dtype)
    if len(batches()[0]) > 1:
        _check_samples_stay_apart(base, shadow, batches, bounds)
    return bounds


def _apart(gradient: Tensor, other: Tensor) -> float:
    if not gradient.numel():
        return 0.0
    difference = real_view(gradient).double() - other.double()
    return float(difference.abs().max())


def _check_samples_stay_apart(base: Draw, shadow: Shadow, batches: MakeBatches, bounds: Rounding) -> None:
    """Raise unless the joined batch is the mean of the ranks' batches, within this process, with no engine in it."""
    ranks = len(batches()[0])
    loss = 0.0
    means: dict[str, Tensor] = {}
    for rank in range(ranks):
        draw = shadow.evaluate(partial(_batches_of, batches, rank))
        # The engines' mean is that of equal shares, too.
        loss += draw.loss / ranks
        for name, gradient in draw.gradients.items():
            means[name] = means.get(name, 0) + real_view(gradient).double() / ranks
    if abs(loss - base.loss) > bounds.loss:
        raise _mixes_samples(
            f"the loss is {base.loss:.9g} on the joined batch and {loss:.9g} as the mean over its parts"
        )
    for name, bound in bounds.gradients.items():
        apart = _apart(base.gradients[name], means[name])
        if apart > bound:
            raise _mixes_samples(
                f"the gradient of {name} on the joined batch differs by {apart:.3g} from the mean over its parts"
            )


def _batches_of(batches: MakeBatches, rank: int) -> list[Any]:
    return [of_ranks[rank] for of_ranks in batches()]


def _mixes_samples(difference: str) -> NotComparable:
    return NotComparable(
        f"{difference}, within one process: the model or its loss mixes samples (BatchNorm, a sum, a mean over unequal "
        "numbers of tokens), so one process on the joined batch trains something else; compare runs with the same "
        "number of ranks"
    )


# ------------------------------------------------------------------------------------------------------- batches


def part_of(batch: Any, rank: int, ranks: int) -> Any:
    """Return one rank's samples of a joined batch, or raise NotComparable if they cannot be divided evenly."""
    sizes = {leaf.shape[0] for leaf in _arrays(batch)}
    if len(sizes) != 1:
        raise NotComparable(
            f"tensors of the batch have {sorted(sizes)} rows: samples must lie along dim 0 of every tensor, or the "
            "recipe needs a join function"
        )
    samples = sizes.pop()
    if samples % ranks:
        raise NotComparable(
            f"the {samples} samples of a joined batch cannot be divided evenly among {ranks} ranks; compare with a "
            "number of ranks that divides them"
        )
    of_rank = samples // ranks
    begin = rank * of_rank
    rows = slice(begin, begin + of_rank)
    return map_leaves(lambda leaf: leaf[rows] if is_array(leaf) else leaf, batch)


def note_batches(step: Step, batches: list[list[Any]], *, sketched: bool) -> None:
    """Note digests per accumulated batch and rank, and sketches by "accumulated batch.rank.tensor"."""
    sketches = {}
    for micro, of_ranks in enumerate(batches):
        step.batches.append(list(map(digest, of_ranks)))
        if not sketched:
            continue
        for rank, batch in enumerate(of_ranks):
            for number, array in enumerate(_arrays(batch)):
                sketches[f"{micro}.{rank}.{number}"] = sketch(torch.as_tensor(array))
    if sketched:
        step.sketches["batch"] = sketches


def _arrays(batch: Any) -> list[Any]:
    return [leaf for leaf in leaves(batch) if is_array(leaf)]
