"""A small model with everything in it, trained and saved on ranks, for the tests of export and import."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fsshard
from tests.models import Spectral, take_step
from tests.training_runs import differences


class Everything(nn.Module):
    """Complex weights, a tied one, an odd one, one without dimensions, a buffer."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), Spectral(8), nn.Linear(8, 8, bias=False)])
        self.layers[2].weight = self.layers[0].weight
        self.odd = nn.Parameter(torch.randn(3))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("count", torch.tensor(7))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x * self.scale + self.odd.sum()


def everything(seed: int = 0) -> Everything:
    """The same weights at every call."""
    torch.manual_seed(seed)
    return Everything()


def step(model: Any, optimizer: Any, number: int) -> None:
    """One step; the same on every rank."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
    model(x).square().mean().backward()
    take_step(optimizer)


def optimizer_of(model: Any, lr: float = 1e-2) -> Any:
    """Two groups, so that numbers and order matter."""
    groups = [{"params": ["odd", "scale"], "lr": lr}]
    first = {name for group in groups for name in group["params"]}
    rest = [name for name, _ in model.named_parameters() if name not in first]
    return fsshard.build_optimizer(model, torch.optim.AdamW, [*groups, {"params": rest, "lr": 2 * lr}])


def train(backend: str, steps: int = 2) -> tuple[Any, Any]:
    """A wrapped model and its optimizer after some steps."""
    model = fsshard.wrap(everything(), backend=backend, auto_wrap_policy={nn.Linear, Spectral})
    optimizer = optimizer_of(model)
    for number in range(steps):
        step(model, optimizer, number)
    return model, optimizer


def job_save(path: Path, backend: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Train, save, and tell the state dicts, and what the model is after one more step."""
    model, optimizer = train(backend)
    fsshard.save(path, model, optimizer, epoch=3)
    state, optimizer_state = model.state_dict(), optimizer.state_dict()
    state = {key: value.clone() for key, value in state.items()}
    step(model, optimizer, 2)
    return state, optimizer_state, model.state_dict()


def job_live(path: Path, backend: str, names: list[str]) -> list[list[str]]:
    """Export a live model in several formats."""
    model, optimizer = train(backend)
    written = []
    for name in names:
        with_optimizer = optimizer if name.endswith((".pt", "dcp")) else False
        files = fsshard.export(model, path / name, "dcp" if name == "dcp" else None, optimizer=with_optimizer)
        written.append([file.name for file in files])
    return written


def same(expected: dict[str, Any], got: dict[str, Any]) -> bool:
    """Equal to the last bit, in whatever order."""
    return not list(differences(dict(sorted(expected.items())), dict(sorted(got.items()))))


class Planted:
    """Pickled, it leaves a file behind wherever it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self._marker}",)
