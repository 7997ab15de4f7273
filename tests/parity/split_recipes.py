"""The vision transformer of tests/parallel/split_vit.py as recipes, divided rightly and wrongly."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from examples.mesh_recipes import perceptron
from fsshard.parity import Recipe, Split
from tests.parallel import split_vit
from tests.parallel.split_vit import CHANNELS, TOKENS


def right() -> Recipe:
    """SGD with momentum, clipped."""
    return Recipe(
        build=split_vit.ViT,
        batches=batch,
        loss=functools.partial(split_vit.loss_of, cp=None),
        optimizer=torch.optim.SGD,
        hyper={"lr": 0.05, "momentum": 0.9},
        clip=0.05,
        split=split,
        name="split_vit",
    )


def batch(rank: int, world_size: int, number: int) -> Tensor:
    return torch.randn(2, TOKENS, CHANNELS, generator=torch.Generator().manual_seed(100 + 10 * number + rank))


def split(whole: nn.Module, mesh: DeviceMesh) -> Split:
    """This rank's part, of tokens along cp and of weights along tp."""
    tp, cp = split_vit.group_of(mesh, "tp"), split_vit.group_of(mesh, "cp")
    model = split_vit.ViT(tp, cp)
    model.load_state_dict(split_vit.split_of(whole.state_dict(), tp))
    settings = {"device_mesh": mesh["data"], **split_vit.said_of(mesh)}
    return Split(settings=settings, model=model, loss=functools.partial(split_vit.loss_of, cp=cp), adds=("cp",))


def adam() -> Recipe:
    """Every step of Adam begins with one process's state, so that its amplified rounding does not add up."""
    return dataclasses.replace(right(), optimizer=torch.optim.Adam, hyper={"lr": 1e-3}, clip=None, accumulate=2)


def _wrong(how: str, whole: nn.Module, mesh: DeviceMesh) -> Split:
    """Divide as :func:`split` does, but for one mistake."""
    found = split(whole, mesh)
    if how == "unreduced":
        # A matrix that is cut by its inputs does not give its gradient to all: a bias counts for every rank.
        assert found.model is not None
        found.model.get_parameter("blocks.1.fc2.bias").register_hook(lambda gradient: gradient * mesh["tp"].size())
        return found
    if how == "misadded":  # losses of cp are taken for a mean
        return dataclasses.replace(found, adds=())
    settings = {
        "unsaid": {"device_mesh": mesh["data"], "replicated": {}},  # nobody says that ranks of cp share parameters
        "forgotten": {**found.settings, "replicated": {"^(?!pos_embed)": mesh["cp"]}},
        "averaged": {**found.settings, "replicated": {".": (mesh["cp"], "mean")}},  # where the parts add up
    }
    return dataclasses.replace(found, settings=settings[how])


def _with_a_mistake(how: str) -> Recipe:
    return dataclasses.replace(right(), split=functools.partial(_wrong, how))


unsaid, forgotten, unreduced, averaged, misadded = (
    functools.partial(_with_a_mistake, how) for how in ("unsaid", "forgotten", "unreduced", "averaged", "misadded")
)


def of_data() -> Recipe:
    """Nothing is said of other dimensions."""
    return dataclasses.replace(right(), split=None)


class Dropping(nn.Module):
    """Draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(CHANNELS, CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.layer(x), 0.5)


def _square(model: Any, x: Tensor) -> Tensor:
    return model(x).square().mean()


def dropping() -> Recipe:
    return dataclasses.replace(
        right(),
        build=Dropping,
        loss=_square,
        split=lambda model, mesh: {"device_mesh": mesh["data"], "replicated": {".": mesh["tp"]}},
    )


def returning_nothing() -> Recipe:
    nothing = lambda model, mesh: None  # noqa: E731
    return dataclasses.replace(right(), split=nothing)


def adding_unknown() -> Recipe:
    return dataclasses.replace(
        right(), split=lambda model, mesh: Split(settings={"device_mesh": mesh["data"]}, adds=("sp",))
    )


def slabs() -> Recipe:
    """Every rank of domain has a slab of the same samples, and wrap averages over all ranks."""
    return dataclasses.replace(
        right(),
        build=lambda: nn.Sequential(nn.Linear(CHANNELS, 8), nn.Tanh(), nn.Linear(8, CHANNELS)),
        loss=_square,
        split=_slabs,
    )


def _slabs(model: nn.Module, mesh: DeviceMesh) -> Split:
    domain = split_vit.group_of(mesh, "domain")
    return Split(loss=lambda model, x: _square(model, split_vit.my_tokens(x, domain)))


def undecided() -> Recipe:
    """The last layer gives a DTensor, and so does the loss."""
    return dataclasses.replace(perceptron(), loss=_error, split=_kept_distributed)


def decided() -> Recipe:
    """Likewise, but that the loss is each rank's own."""
    return dataclasses.replace(undecided(), loss=_whole_error)


def _kept_distributed(model: nn.Module, mesh: DeviceMesh) -> dict[str, Any]:
    last = ColwiseParallel(output_layouts=Replicate(), use_local_output=False)
    parallelize_module(model, mesh["tp"], {"4": last})
    return {"device_mesh": mesh["data"]}


def _error(model: Any, batch: Any) -> Any:
    x, y = batch
    found = model(x)
    if isinstance(found, DTensor):
        y = DTensor.from_local(y, found.device_mesh, [Replicate()])
    return (found - y).square().mean()


def _whole_error(model: Any, batch: Any) -> Any:
    loss = _error(model, batch)
    return loss.full_tensor() if isinstance(loss, DTensor) else loss
