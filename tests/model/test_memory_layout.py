"""Parameters that do not lie in memory in the order of their indices: state, files and training as the bare model's."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

import fsshard
from fsshard.errors import RankMismatch
from tests.by_hand import train
from tests.on_ranks import on_backends
from tests.training_runs import DISTRIBUTED, differences, gradients, ranks_of

BACKENDS = (*DISTRIBUTED, "none")


class Weighted(nn.Module):
    """A product with a weight that is laid out in some way; all its neighbours in the unit are odd in size."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.before = nn.Parameter(torch.randn(3))
        self.weight = nn.Parameter(weight)
        self.after = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.reshape(self.weight.shape[0], -1)
        seen = x[:, : weight.shape[1]].to(weight.dtype) @ weight.T
        return torch.view_as_real(seen).sum(-1) if seen.is_complex() else seen


class Linear(nn.Module):
    """``F.linear``, and sums of the neighbours."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(weight.shape[1], weight.shape[0])
        self.linear.weight = nn.Parameter(weight)
        self.odd = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x[:, : self.linear.in_features]) * self.odd.sum()


def convolutions(dims: int) -> nn.Module:
    """A network for images or volumes in ``channels_last``."""
    conv, memory = (
        (nn.Conv2d, torch.channels_last) if dims == 2 else (nn.Conv3d, torch.channels_last_3d)  # type: ignore[attr-defined]
    )
    made = nn.Sequential(
        conv(2, 5, 3, padding=1), nn.ReLU(), conv(5, 4, 1), nn.ReLU(), conv(4, 4, 3, padding=1, groups=2), conv(4, 1, 2)
    )
    return made.to(memory_format=memory)  # type: ignore[no-any-return]


LAYOUTS: dict[str, Callable[[], nn.Module]] = {
    "channels_last": lambda: convolutions(2),
    "channels_last_3d": lambda: convolutions(3),
    "transposed": lambda: Weighted(torch.randn(7, 5).T),
    "transposed linear": lambda: Linear(torch.randn(7, 5).T),
    "three dimensions": lambda: Weighted(torch.randn(3, 4, 5).permute(1, 2, 0)),
    "every second": lambda: Weighted(torch.randn(5, 14)[:, ::2]),
    "columns transposed": lambda: Weighted(torch.randn(14, 5)[3:10].T),
    "linear, every second": lambda: Linear(torch.randn(5, 14)[:, ::2]),
    "rows": lambda: Weighted(torch.randn(9, 7)[2:7]),
    "one row": lambda: Weighted(torch.randn(7, 3)[:, :1].T),
    "complex transposed": lambda: Weighted(torch.randn(7, 5, dtype=torch.complex64).T),
    "complex, every second": lambda: Weighted(torch.randn(5, 14, dtype=torch.complex64)[:, ::2]),
    "complex of planes": lambda: Weighted(torch.view_as_complex(torch.randn(4, 6, 3, 2).permute(2, 0, 1, 3))),
}


def made(layout: str) -> nn.Module:
    """The same weights at every call."""
    torch.manual_seed(0)
    return LAYOUTS[layout]()


def batch(layout: str, rank: int, step: int) -> Tensor:
    """A rank's input."""
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(10 * rank + step))
    dims = 3 if layout.endswith("3d") else 2
    return x[:, : 2 * 4**dims].reshape(-1, 2, *[4] * dims) if layout.startswith("channels") else x


def packed(layout: str) -> nn.Module:
    """The bare model, with the gaps closed that slices of larger tensors have."""
    model = made(layout)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


def by_hand(model: nn.Module, layout: str, ranks: int, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Replicas of the bare model, averaged by hand."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def loss(replica: Any, rank: int, step: int) -> Tensor:
        return replica(batch(layout, rank, step)).square().mean()  # type: ignore[no-any-return]

    train(model, optimizer, loss, steps=steps, ranks=ranks)
    return model, optimizer


def step_once(model: Any, optimizer: Any, layout: str, step: int) -> None:
    """One step of this rank."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    optimizer.zero_grad()
    model(batch(layout, rank, step)).square().mean().backward()
    optimizer.step()


def wrapped(layout: str, backend: str, *, zero: bool = False, **settings: Any) -> tuple[Any, Any]:
    """The model of a layout and its optimizer under ``backend``."""
    model = made(layout)
    if zero:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    units = {type(part) for part in model.modules()} & {nn.Conv2d, nn.Conv3d, nn.Linear}
    sharded = fsshard.wrap(
        model, backend=backend, auto_wrap_policy=units or None, find_unused_parameters=True, **settings
    )
    return sharded, fsshard.build_optimizer(sharded, torch.optim.Adam, lr=0.01)


def held(model: Any, optimizer: Any, known: nn.Module) -> dict[str, Any]:
    """Weights, gradients and states by name, of a bare model or a wrapped one."""
    if model is known:
        names = [name for name, _ in model.named_parameters()]
        state = {names[key]: value for key, value in optimizer.state_dict()["state"].items()}
        found = {n: p.grad for n, p in model.named_parameters()}
    else:
        state, found = optimizer.state_dict()["state"], dict(gradients(model))
    state = {name: {key: state[name][key] for key in sorted(state[name])} for name in sorted(state)}
    return {"weights": dict(model.state_dict()), "state": state, "gradients": found}


@pytest.mark.long
@on_backends(BACKENDS)
def test_every_layout_comes_and_goes_as_in_the_bare_model(backend: str, tmp_path: Path) -> None:
    """Layout by layout, after steps and after a way through a file."""
    found = []
    for layout in LAYOUTS:
        model, optimizer = wrapped(layout, backend)
        ways = {"fresh": (dict(made(layout).state_dict()), dict(model.state_dict()))}
        for step in range(2):
            step_once(model, optimizer, layout, step)
        bare, plain = by_hand(packed(layout), layout, ranks_of(backend), 2)
        expected = held(bare, plain, bare)
        ways["trained"] = (expected, held(model, optimizer, bare))
        with model.full_parameters() as whole:
            ways["full_parameters"] = (expected["weights"], dict(whole))
        fsshard.save(tmp_path / layout, model, optimizer)
        other, its = wrapped(layout, backend, zero=True)
        fsshard.load(tmp_path / layout, other, its)
        ways["loaded"] = (expected["weights"], dict(other.state_dict()))
        ways["loaded state"] = (expected["state"], held(other, its, bare)["state"])
        other.load_state_dict({name: 2 * value for name, value in expected["weights"].items()})
        ways["a state dict"] = ({n: 2 * v for n, v in expected["weights"].items()}, dict(other.state_dict()))
        for way, (one, two) in ways.items():
            found += [f"{layout}, {way}{d}" for d in differences(one, two)]
            found += [f"{layout}, {way}: {d}" for d in strides(one, two)]
    assert not found, "\n".join(found)


def strides(one: dict[str, Any], two: dict[str, Any]) -> list[str]:
    """Where the layouts of two dicts of tensors differ, of those that have one."""
    return [
        f"{key} has strides {two[key].stride()}, expected {value.clone().stride()}"
        for key, value in one.items()
        if isinstance(value, Tensor) and key in two and value.clone().stride() != two[key].stride()
    ]


@on_backends(["fsdp", "ddp"])
def test_ranks_have_the_same_layouts(backend: str) -> None:
    """torch's FSDP1 trains on what it has mixed up, without a word (2.13)."""
    model = nn.Sequential(nn.Conv2d(2, 3, 3))
    if dist.get_rank():
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    with pytest.raises(RankMismatch) as told:
        fsshard.wrap(model, backend=backend)
    told = str(told.value)
    assert re.search(r"0\.weight +\(3, 2, 3, 3\) torch\.float32 +\(3, 2, 3, 3\) torch\.float32 with dimensions", told)


def job_raw_fsdp1() -> list[bool]:
    """Return whether FullyShardedDataParallel trains a slice of a larger tensor as the values that it holds."""
    weight = torch.arange(24.0).reshape(4, 6)[:, :3]
    model = nn.Linear(3, 4, bias=False)
    model.weight = nn.Parameter(weight.clone() if dist.get_world_size() == 1 else weight)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            raw = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
        return [torch.equal(raw(torch.eye(3)), weight.T)]
    except RuntimeError as error:
        return ["out of bounds" not in str(error)]


def test_raw_fsdp1_does_not_take_slices(ranks: Any) -> None:
    """It takes the elements that follow the first one in memory (torch 2.13)."""
    assert ranks.run(job_raw_fsdp1, 2) == [[False]] * 2
