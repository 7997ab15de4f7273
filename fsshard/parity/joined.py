"""One process on the joined batch of all ranks, and how large its rounding errors are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fsshard.errors import ConfigurationError
from fsshard.parity.bounds import ORDERS, measured_bound, unit_roundoff
from fsshard.parity.engine import WrappedEngine
from fsshard.parity.recipe import Recipe
from fsshard.parity.trace import real_view

__all__ = ["NotComparable", "Rounding", "measure", "reordered", "samples_of", "unchanged"]


class NotComparable(ConfigurationError):
    """The comparison that was asked for has no meaning for this model."""


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


@dataclass
class _Draw:
    loss: float
    gradients: dict[str, Tensor]


def measure(engine: WrappedEngine, recipe: Recipe, batches: list[list[Any]], step: int) -> Rounding:
    """The bounds of one step; leaves the engine as it was.

    Each rank's own batch runs through this process too. That gives the ranks' local gradients to the last bit, hence
    the difference between the joined gradient and their mean, which no engine has a part in. Other orders of the
    samples tell whether that difference is rounding.

    Args:
        engine: one process.
        recipe: what is trained.
        batches: per accumulated batch the ranks' batches.
        step: seeds the orders.

    Raises:
        NotComparable: the model draws random numbers, or mixes samples, so the joined batch is another problem.
    """
    base = _evaluate(engine, recipe, [recipe.joined(parts) for parts in batches])
    result = Rounding()
    parts = _parts(engine, recipe, batches, result)
    spread = dict.fromkeys(base.gradients, 0.0)
    losses, draws = 0.0, 0
    for joined in _orders(recipe, batches, step):
        draw = _evaluate(engine, recipe, joined)
        draws += 1
        losses = max(losses, abs(draw.loss - base.loss))
        for name, gradient in base.gradients.items():
            spread[name] = max(spread[name], _apart(gradient, draw.gradients[name]))
    _check_samples_stay_apart(base, parts, losses, spread, draws)
    result.loss = abs(parts.loss - base.loss) + 2 * unit_roundoff(torch.float32) * abs(base.loss)
    for name, gradient in base.gradients.items():
        result.gradients[name] = (real_view(gradient).double() - parts.gradients[name]).abs()
    # At most: every batch may have been reduced by itself. What was measured is far larger in any case.
    result.reductions = dict.fromkeys(base.gradients, recipe.accumulate)
    return result


def _parts(engine: WrappedEngine, recipe: Recipe, batches: list[list[Any]], result: Rounding) -> _Draw:
    """Mean over the ranks' own batches, one after the other in this process; fills in the magnitudes."""
    world = len(batches[0])
    mean = _Draw(0.0, {})
    for rank in range(world):
        draw = _evaluate(engine, recipe, [parts[rank] for parts in batches])
        mean.loss += draw.loss / world
        for name, gradient in draw.gradients.items():
            real = real_view(gradient)
            mean.gradients[name] = mean.gradients.get(name, 0) + real.double() / world
            result.magnitudes[name] = result.magnitudes.get(name, 0) + real.abs() / world
    return mean


def _evaluate(engine: WrappedEngine, recipe: Recipe, batches: Sequence[Any]) -> _Draw:
    """Loss and gradients of one step on these batches, without a trace of it left behind."""
    with unchanged(engine):
        loss = 0.0
        for batch in batches:
            part = recipe.loss(engine.model, batch) / len(batches)
            part.backward()
            loss += float(part.detach())
        gradients = {name: value.clone() for name, value in engine.gradients() if value is not None}
    return _Draw(loss, gradients)


@contextlib.contextmanager
def unchanged(engine: WrappedEngine, *, random_numbers: bool = False) -> Iterator[None]:
    """Put buffers and gradients back afterwards, and random numbers, if there may be any."""
    before = torch.get_rng_state()
    buffers = [(name, buffer.clone()) for name, buffer in engine.buffers()]
    try:
        yield
        after = torch.get_rng_state()
    finally:
        torch.set_rng_state(before)
        engine.zero_grad()
        now = dict(engine.buffers())
        with torch.no_grad():
            for name, value in buffers:
                now[name].copy_(value)
    if not random_numbers and not torch.equal(before, after):
        raise NotComparable(
            "the model draws random numbers (dropout?): one process draws others than the ranks do, so only runs with "
            "the same number of ranks can be compared"
        )


def _orders(recipe: Recipe, batches: list[list[Any]], step: int) -> Iterator[list[Any]]:
    """The joined batches with their samples in other orders."""
    generator = torch.Generator().manual_seed(step + 1)
    if recipe.join is not None:  # only the ranks' batches can be moved
        for _ in range(ORDERS):
            yield [recipe.joined([parts[i] for i in _shuffled(len(parts), generator)]) for parts in batches]
        return
    joined = [recipe.joined(parts) for parts in batches]
    for _ in range(ORDERS):
        order = _shuffled(samples_of(joined[0]), generator)
        yield [reordered(batch, order) for batch in joined]


def _shuffled(count: int, generator: torch.Generator) -> list[int]:
    return torch.randperm(count, generator=generator).tolist()


def samples_of(batch: Any) -> int:
    sizes = {tensor.shape[0] for tensor in _tensors(batch) if tensor.dim()}
    if len(sizes) != 1:
        raise NotComparable(
            f"tensors of the joined batch have {sorted(sizes)} rows: samples must lie along dim 0 of every tensor, or "
            "the recipe needs a join function"
        )
    return sizes.pop()


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, dict):
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from _tensors(value)


def reordered(batch: Any, order: list[int]) -> Any:
    if isinstance(batch, Tensor):
        return batch[order] if batch.dim() else batch
    if isinstance(batch, dict):
        return type(batch)((key, reordered(value, order)) for key, value in batch.items())
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(reordered(value, order) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(reordered(value, order) for value in batch)
    return batch


def _apart(one: Tensor, other: Tensor) -> float:
    return float((real_view(one).double() - real_view(other).double()).abs().max()) if one.numel() else 0.0


def _check_samples_stay_apart(base: _Draw, parts: _Draw, losses: float, spread: dict[str, float], draws: int) -> None:
    """Within this process, with no engine in the game: is the joined batch the mean of the ranks' batches?"""
    wrong = abs(parts.loss - base.loss) > measured_bound(losses, abs(base.loss), 1, draws, torch.float32)
    what = f"the loss is {base.loss:.9g} on the joined batch and {parts.loss:.9g} as the mean over its parts"
    for name, gradient in base.gradients.items():
        if wrong or not gradient.numel():
            continue
        real = real_view(gradient)
        apart = float((real.double() - parts.gradients[name]).abs().max())
        wrong = apart > measured_bound(spread[name], float(real.abs().max()), real.numel(), draws, gradient.dtype)
        what = f"the gradient of {name} on the joined batch differs by {apart:.3g} from the mean over its parts"
    if wrong:
        raise NotComparable(
            f"{what}, within one process: the model or its loss mixes samples (BatchNorm, a sum, a mean over unequal "
            "numbers of tokens), so one process on the joined batch trains something else; compare at equal ranks"
        )
