"""Trainings that are done by hand and under every engine: the zoo, the recipes, and models of known classes of faults.

No comparison of engines would show a fault that all of them have: weights of any layout, memory that is shared. Each is
trained right, or refused in words.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.training_runs import call
from tests.zoo import ZOO, generator, mean_square, seeded

RECIPES = ("mlp", "dropout", "convnet", "vit", "t5", "fno", "tfno", "tfno_cp", "tfno_tt", "uno", "sfno", "gino")
"""Names of functions in fsshard/recipes."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """One training that can be done by hand and under every engine.

    Attributes:
        build: makes the model, the same one each time.
        loss: ``(model, rank, step)`` -> the loss on that rank's batch.
        hyper: arguments of Adam.
        settings: of ``fsshard.wrap``.
        refused: backend -> a part of the message of the typed error that it raises.
    """

    build: Callable[[], nn.Module]
    loss: Callable[[Any, int, int], Tensor]
    hyper: Mapping[str, Any] = field(default_factory=lambda: {"lr": 1e-2})
    settings: Mapping[str, Any] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)


# ------------------------------------------------------------------------------------------------ of the tables


def of_zoo(name: str) -> Training:
    """A case of the zoo."""
    case = ZOO[name]
    # Autograd adds up at a unit's inputs what enters several units (T5's encoder output): another order of sums than
    # the bare model has, so one unit.
    settings = {"auto_wrap_policy": None} if name == "t5" else {}
    return Training(
        build=case.build,
        loss=lambda model, rank, step: case.loss(call(model, case.batch(rank, step))),
        settings=settings,
        refused={"fairscale": "one optimizer over storage of several dtypes"} if name == "two_precisions" else {},
    )


def of_recipe(name: str) -> Training:
    """A recipe of the examples.

    Raises:
        MissingExtra: its package is not installed.
    """
    from fsshard import recipes

    recipe = getattr(recipes, name)()
    return Training(
        build=seeded(recipe.build),
        loss=lambda model, rank, step: recipe.loss(model, recipe.batches(rank, 2, step)),
        hyper=recipe.hyper,
        settings={"auto_wrap_policy": None} if name == "t5" else {},
    )


def on_numbers(build: Callable[[], nn.Module], *shape: int, **changes: Any) -> Training:
    """A model whose outputs' mean square on random inputs is the loss."""

    def loss(model: Any, rank: int, step: int) -> Tensor:
        return mean_square(model(torch.randn(*shape, generator=generator(rank, step))))

    return Training(build=seeded(build), loss=loss, **changes)


class Together(nn.Module):
    """Cases of the zoo side by side, each on its own inputs."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.cases = nn.ModuleDict({name: ZOO[name].build() for name in names})

    def forward(self, batches: dict[str, Any]) -> dict[str, Any]:
        return {name: call(self.cases[name], batch) for name, batch in batches.items()}


def together(*names: str) -> Training:
    """Train several cases of the zoo as one model, whose loss is the sum of theirs."""

    def loss(model: Any, rank: int, step: int) -> Tensor:
        outputs = model({name: ZOO[name].batch(rank, step) for name in names})
        return torch.stack([ZOO[name].loss(output) for name, output in outputs.items()]).sum()

    return Training(build=functools.partial(Together, names), loss=loss)


# ------------------------------------------------------------------------------------------------ layouts


class Turned(nn.Module):
    """Products with a matrix and with its transpose, both transposed in memory; a row; a slice of a larger tensor."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 5, dtype=dtype)
        self.inner.weight = nn.Parameter((0.5 * torch.randn(4, 5, dtype=dtype)).T)
        self.square = nn.Parameter((0.5 * torch.randn(5, 5, dtype=dtype)).T)
        self.row = nn.Parameter(torch.randn(5, 1, dtype=dtype).T)
        self.cut = nn.Parameter((0.5 * torch.randn(5, 9, dtype=dtype))[:, 1:8].T)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x.to(self.row.dtype)) @ self.square
        return ((y @ self.square.T) * self.row) @ self.cut.T


def channels_last() -> nn.Module:
    """Convolutions of every kind whose strides are ambiguous: depthwise, 1x1, one channel, transposed."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, groups=8),
        nn.Conv2d(8, 6, 1),
        nn.BatchNorm2d(6),
        nn.ConvTranspose2d(6, 1, 3),
        nn.Conv2d(1, 4, 3),
    )
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


# ------------------------------------------------------------------------------------------------ memory


class Sharing(nn.Module):
    """Two parameters over one memory: what the optimizer does to one it does to the other."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.other.weight.data = self.one.weight.data

    def forward(self, x: Tensor) -> Tensor:
        return self.other(torch.tanh(self.one(x)))


class Remembering(nn.Module):
    """A buffer over the memory of a weight, which changes with it."""

    same: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.register_buffer("same", self.linear.weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + F.linear(x, self.same)


class Neighbours(nn.Module):
    """Parameters that are parts of one table, and have no element in common."""

    def __init__(self) -> None:
        super().__init__()
        table = 0.5 * torch.randn(3, 4, 8)
        self.planes = nn.ParameterList(nn.Parameter(plane) for plane in table[:2])
        self.columns = nn.ParameterList(nn.Parameter(half) for half in table[2].split(4, dim=1))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x @ self.planes[0]) @ self.planes[1].T
        return y @ self.columns[0] @ self.columns[1]


def hooked() -> nn.Module:
    """Gradients that are changed as they come."""

    def clamp(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.clamp_(-0.01, 0.01)

    model = mlp()
    model[2].weight.register_hook(lambda gradient: 2 * gradient)
    model[0].bias.register_post_accumulate_grad_hook(clamp)
    return model  # type: ignore[no-any-return]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


MOVING = ("fsdp", "fsdp2", "fairscale")
"""Backends that give each parameter memory of its own."""
NOT_HOOKED = "gradient hooks on parameters (0.bias, 2.weight), which its engine would not call"
NOT_SHARED = "'one.weight' and 'other.weight' are two tensors that share memory"
NOT_IN_A_BUFFER = "'linear.weight' and 'same' are two tensors that share memory"

OWN: dict[str, Training] = {
    "sharing": on_numbers(Sharing, 4, 4, refused=dict.fromkeys(MOVING, NOT_SHARED)),
    "remembering": on_numbers(Remembering, 4, 4, refused=dict.fromkeys(MOVING, NOT_IN_A_BUFFER)),
    "neighbours": on_numbers(Neighbours, 4, 4),
    "hooked": on_numbers(hooked, 4, 4, refused=dict.fromkeys(("fsdp", "fsdp2"), NOT_HOOKED)),
    "turned": on_numbers(functools.partial(Turned, torch.float32), 4, 4),
    "turned_complex": on_numbers(functools.partial(Turned, torch.complex64), 4, 4),
    "channels_last": on_numbers(channels_last, 4, 3, 8, 8, settings={"auto_wrap_policy": {nn.Conv2d}}),
}
"""Models of classes of faults."""

TOGETHER = ("mlp_complex", "zero_dim", "odd_first", "holders", "frozen", "transposed", "recurrent")

TRAININGS: dict[str, Callable[[], Training]] = {
    "together": functools.partial(together, *TOGETHER),
    **{f"zoo-{name}": functools.partial(of_zoo, name) for name in ZOO},
    **{f"recipe-{name}": functools.partial(of_recipe, name) for name in RECIPES},
    **{name: functools.partial(OWN.__getitem__, name) for name in OWN},
}
