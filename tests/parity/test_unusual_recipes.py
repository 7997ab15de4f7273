"""Recipes that are legal though unusual, engines that look right though they are not, and mistakes that users make."""

from __future__ import annotations

import dataclasses
import enum
import functools
import random
from collections import UserDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from fsshard.errors import FsshardError, RecipeError
from fsshard.parity import Engine, Recipe, compare
from tests.parity.faults import RawDDP, Sabotaged, loss, normal, real_mlp
from tests.zoo import generator


def recipe(**changes: Any) -> Recipe:
    return Recipe(**{"build": real_mlp, "batches": normal(4, 6), "loss": loss, "hyper": {"lr": 1e-3}, **changes})


def x(rank: int, number: int) -> Tensor:
    return torch.randn(4, 6, generator=generator(rank, number))


# ------------------------------------------------------------------------------------------ state outside of tensors


class Random(nn.Module):
    """Draws from Python's and numpy's generators."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(x + random.random() * self.first(x)) * float(np.random.rand())


class Counting(nn.Module):
    """Depends on how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(6, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x) * (1 + 0.1 * self.calls)


class Remembering(nn.Module):
    """Replaces a buffer by its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.register_buffer("last", torch.zeros(1, 6))

    def forward(self, x: Tensor) -> Tensor:
        self.last = x.detach().clone()
        return self.linear(x)


drawing = functools.partial(recipe, build=Random)
counting = functools.partial(recipe, build=Counting)
remembering = functools.partial(recipe, build=Remembering)


@pytest.mark.parametrize(
    ("source", "world_size", "expected"),
    [
        (drawing, 2, {"exact"}),
        pytest.param(drawing, 3, {"exact", "bound"}, marks=pytest.mark.long),
        (counting, 3, {"exact", "bound"}),
        (remembering, 2, {"exact"}),
    ],
    ids=["drawing", "drawing at 3", "counting", "remembering"],
)
def test_what_models_do_besides_computing(
    ranks: Any, source: Callable[[], Recipe], world_size: int, expected: set[str]
) -> None:
    report = compare(source, backends=["fsdp", "fsdp2"], world_sizes=[world_size], steps=2, pool=ranks)
    assert {cell.verdict for cell in report} <= expected


def test_random_numbers_of_python_and_numpy_are_noticed(ranks: Any) -> None:
    report = compare(drawing, backends=["none"], world_sizes=[2], steps=1, pool=ranks)
    assert "draws random numbers" in report["none", 2].reason


# ------------------------------------------------------------------------------------------ batches of all kinds


class Mode(enum.Enum):
    PLAIN = 1


@dataclasses.dataclass
class Pair:
    x: Tensor
    y: Any


class Named(NamedTuple):
    x: Tensor
    scale: Tensor


def _of_all_kinds(rank: int, world_size: int, number: int) -> Any:
    pair = Pair(x(rank, number), {"more": [x(rank, number)]})
    named = Named(x(rank, number), torch.full((4,), 2.0))
    return UserDict(x=x(rank, number).numpy(), k=4, mode=Mode.PLAIN, pair=pair, named=named)


def _loss_of_all_kinds(model: Any, batch: Any) -> Tensor:
    inputs = (torch.as_tensor(batch["x"]), batch["pair"].x, batch["pair"].y["more"][0], batch["named"].x)
    return sum((loss(model, each) for each in inputs), torch.zeros(()))


all_kinds = functools.partial(recipe, batches=_of_all_kinds, loss=_loss_of_all_kinds)


def test_batches_of_all_kinds(ranks: Any) -> None:
    report = compare(all_kinds, backends=["fsdp2", "none"], world_sizes=[2], steps=2, pool=ranks)
    assert [cell.verdict for cell in report] == ["exact", "exact"], str(report)


# ------------------------------------------------------------------------------------------ settings


class Part(nn.Module):
    """A unit with a frozen bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.first.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def parts() -> nn.Module:
    return nn.Sequential(Part(), Part(), nn.Linear(6, 3))


partly_frozen = functools.partial(
    recipe, build=parts, settings={"auto_wrap_policy": {Part}}, activation_checkpointing=True
)


def test_strategies_and_units_of_ones_own(ranks: Any) -> None:
    """True means the units of the recipe's own policy; FSDP1 keeps units whole with a frozen part in them."""
    kept = {"backend": "fsdp", "sharding_strategy": "SHARD_GRAD_OP"}
    alone = {"backend": "none", "find_unused_parameters": False}
    report = compare(partly_frozen, backends=[kept, "fsdp", "fsdp2", alone], world_sizes=[2], steps=2, pool=ranks)
    assert [cell.verdict for cell in report] == ["exact", "exact", "exact", "exact"], str(report)
    assert report.cells[0].backend == "fsdp(sharding_strategy='SHARD_GRAD_OP')"


# ------------------------------------------------------------------------------------------ engines


class OtherRate(Sabotaged):
    """Trains with another learning rate; at three ranks rounding must not excuse it."""

    name, settings = "other rate", {"backend": "fsdp2"}

    def __init__(self, recipe: Recipe, module: nn.Module) -> None:
        super().__init__(recipe, module)
        self.optimizer.param_groups[0]["lr"] *= 2


def test_a_wrong_learning_rate_is_no_rounding(ranks: Any) -> None:
    cell = compare(recipe, backends=[OtherRate], world_sizes=[3], steps=2, pool=ranks).cells[0]
    assert cell.verdict == "different"
    first = cell.first_divergence
    assert first is not None
    assert (first.step, first.quantity, first.name) == (0, "param_groups", "group 0: lr")
    assert (first.difference.expected, first.difference.got) == ("0.001", "0.002")


class Dropping(Sabotaged):
    """Replaces what is not finite by zeros, as a careless scaler might."""

    name, settings = "dropping", {"backend": "fsdp2"}

    def gradients(self) -> Iterator[tuple[str, Tensor | None]]:
        for name, gradient in super().gradients():
            yield name, None if gradient is None else torch.nan_to_num(gradient, 0.0, 0.0, 0.0)


def overflow() -> Recipe:
    return recipe(loss=lambda model, batch: loss(model, batch) * 1e38 * 1e38, optimizer=torch.optim.SGD)


def test_an_overflow_excuses_nothing(ranks: Any) -> None:
    report = compare(overflow, backends=[Dropping, "fsdp2"], world_sizes=[3], steps=1, pool=ranks)
    assert [cell.verdict for cell in report] == ["different", "exact"], str(report)


def clipped_double() -> Recipe:
    loss_of = lambda model, batch: loss(model, batch.double())  # noqa: E731
    return recipe(build=lambda: real_mlp().double(), loss=loss_of, clip=0.05)


def test_a_norm_in_float64_shows_the_order_of_its_sum(ranks: Any) -> None:
    """Which differs between engines, in the last bits; from there on the steps are judged by their own norm."""
    report = compare(clipped_double, backends=["fsdp2", "fairscale", RawDDP], world_sizes=[2], steps=2, pool=ranks)
    assert report.ok, str(report)


class Mute(RawDDP):
    """Shows no gradients, and adds them in an order of its own."""

    name = "mute"

    def __init__(self, recipe: Recipe, module: nn.Module) -> None:
        Engine.__init__(self, recipe, module)
        self.model = self.module = module
        self.optimizer = recipe.optimizer(module.parameters(), **recipe.hyper)

    def step(self) -> None:
        for parameter in self.module.parameters():
            parts = [torch.empty_like(parameter) for _ in range(torch.distributed.get_world_size())]
            torch.distributed.all_gather(parts, parameter.grad)
            parameter.grad = sum(reversed(parts[1:]), parts[0]) / len(parts)  # type: ignore[assignment]
        super().step()

    def gradients(self) -> Iterator[tuple[str, Tensor | None]]:
        yield from ()


def test_without_gradients_nobody_can_tell_at_three_ranks(ranks: Any) -> None:
    report = compare(recipe, backends=[Mute], world_sizes=[2, 3], steps=2, pool=ranks)
    assert report["mute", 2].verdict == "exact"
    assert report["mute", 3].verdict == "refused"
    assert "shows no gradients" in report["mute", 3].reason


# ------------------------------------------------------------------------------------------ mistakes

needs_closure = functools.partial(recipe, optimizer=torch.optim.LBFGS)
misspelt = functools.partial(recipe, hyper={"lrr": 1})


def no_loss() -> Recipe:
    return recipe(loss=lambda model, batch: None)


@pytest.mark.parametrize(
    ("source", "error", "text"),
    [
        (needs_closure, RecipeError, "got LBFGS, which runs forward and backward itself; give another"),
        (misspelt, RecipeError, "does not take recipe.hyper.*lrr"),
        (no_loss, RecipeError, "must return one real number as a tensor, got NoneType"),
    ],
    ids=["needs a closure", "misspelt", "no loss"],
)
def test_mistakes_are_told_as_they_are(
    ranks: Any, source: Callable[[], Recipe], error: type[FsshardError], text: str
) -> None:
    with pytest.raises(error, match=text):
        compare(source, world_sizes=[2], steps=1, pool=ranks)


# ------------------------------------------------------------------------------- recipes with which all agree


def same_batches() -> Recipe:
    return recipe(batches=lambda rank, world_size, number: x(0, number), accumulate=2)


def sometimes_other_batches() -> Recipe:
    return recipe(batches=lambda rank, world_size, number: x(rank if number == 3 else 0, number), accumulate=2)


def diverging() -> Recipe:
    """Finite at first; the update is so large that the next loss is not."""
    loss_of = lambda model, batch: loss(model, batch) * 1e30  # noqa: E731
    return recipe(loss=loss_of, optimizer=torch.optim.SGD, hyper={"lr": 1.0})


standing = functools.partial(recipe, hyper={"lr": 0.0})


@pytest.mark.parametrize(
    ("source", "reference", "text"),
    [
        (same_batches, "ddp", "all ranks get the same batches"),
        (same_batches, "none", "all ranks get the same batches"),
        (standing, "ddp", "no weight changed in 2 steps"),
        (diverging, "ddp", "at step 1 on rank 0"),
        (sometimes_other_batches, "ddp", ""),
    ],
)
def test_what_a_recipe_cannot_show_is_told(ranks: Any, source: Callable[[], Recipe], reference: str, text: str) -> None:
    report = compare(source, backends=[reference], world_sizes=[2, 1], steps=2, reference=reference, pool=ranks)
    assert report.ok
    assert len(report.warnings) == bool(text)  # once, though two world sizes have it
    assert all(text in warning and f"warning: {warning}" in str(report) for warning in report.warnings)
    assert ("1 warning" in str(report)) == bool(text)


class Lonely(Engine):
    """Reduces nothing: every rank trains by itself."""

    name = "lonely"

    def __init__(self, recipe: Recipe, module: nn.Module) -> None:
        super().__init__(recipe, module)
        self.model = self.module = module
        self.optimizer = recipe.optimizer(module.parameters(), **recipe.hyper)


class RawShards(Engine):
    """Torch's FSDP2; weights, and the optimizer's state, are gathered by what every engine inherits."""

    name = "raw fsdp2"

    def __init__(self, recipe: Recipe, module: nn.Module) -> None:
        super().__init__(recipe, module)
        self.model = self.module = fully_shard(module)
        self.optimizer = recipe.optimizer(self.model.parameters(), **recipe.hyper)

    def gradients(self) -> Iterator[tuple[str, Tensor | None]]:
        yield from ((name, parameter.grad.full_tensor()) for name, parameter in self.module.named_parameters())


class RawFlat(RawShards):
    """Torch's FSDP1, whose gradients nothing gathers."""

    name = "raw fsdp1"

    def __init__(self, recipe: Recipe, module: nn.Module) -> None:
        Engine.__init__(self, recipe, module)
        self.model = self.module = FullyShardedDataParallel(module, use_orig_params=True, device_id=torch.device("cpu"))
        self.optimizer = recipe.optimizer(self.model.parameters(), **recipe.hyper)

    def gradients(self) -> Iterator[tuple[str, Tensor | None]]:
        yield from ()

    def groups(self) -> list[dict[str, Any]]:
        return []


def test_an_engine_of_ones_own_over_what_torch_has_divided(ranks: Any) -> None:
    report = compare(recipe, backends=["fsdp2", RawShards, RawFlat], world_sizes=[2], steps=2, pool=ranks)
    assert [cell.verdict for cell in report.cells] == ["exact"] * 3, str(report)
    compared = [{quantity for step in cell.steps for quantity in step.differences} for cell in report.cells]
    assert all({"weight", "state"} <= quantities for quantities in compared)


def test_an_engine_that_reduces_nothing_passes_only_with_a_warning(ranks: Any) -> None:
    found = [
        compare(source, backends=[Lonely], world_sizes=[2], steps=2, pool=ranks) for source in (same_batches, recipe)
    ]
    assert [(report.ok, len(report.warnings)) for report in found] == [(True, 1), (False, 0)]
    first = found[1].cells[0].first_divergence
    assert first is not None and (first.step, first.quantity, first.name) == (0, "gradient", "0.weight")
