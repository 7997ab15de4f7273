"""Numbers of what the ranks share, for a log: everybody's, or a typed error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fsshard
from fsshard.errors import FsshardError

NUMBERS: dict[str, Any] = {
    "float": lambda p: float(p.norm()),
    "item": lambda p: p.abs().sum().item(),
    "truth": lambda p: bool(p.abs().sum()),
}


def net() -> nn.Sequential:
    """The same on every rank."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def whole(value: Any) -> float:
    """A number that every rank has."""
    summed: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return summed.item()


def job_numbers(merge_below: int) -> tuple[list[str], list[float], list[float]]:
    """Which numbers of parts are given; norms of weights and gradients beside those of the whole."""
    model = fsshard.wrap(net(), backend="fsdp2", auto_wrap_policy={nn.Linear}, merge_below=merge_below)
    fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
    bare = net()
    for trained in (model, bare):
        trained(torch.ones(4, 6)).square().mean().backward()
    given = []
    with torch.no_grad():
        for parameter in model.parameters():
            for tensor in (parameter, parameter.grad):
                for name, number in NUMBERS.items():
                    told = ""
                    try:
                        number(tensor)
                    except FsshardError as error:
                        told = str(error)
                    if "value.full_tensor().item()" not in told:
                        given.append(name)
    got = [whole(t.norm()) for p in model.parameters() for t in (p.detach(), p.grad) if t is not None]
    expected = [whole(t.norm()) for p in bare.parameters() for t in (p.detach(), p.grad) if t is not None]
    return given, got, expected


def job_raw() -> tuple[float, float]:
    """What torch gives each rank for the norm of a weight, and that of the whole."""
    raw = net()
    expected = float(raw[0].weight.norm())
    # A mesh with a name of its own: an equal one of ours, of an earlier test, would be guarded.
    fully_shard(raw, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("of_nobody_else",)))
    return float(raw[0].weight.norm()), expected


def test_torch_gives_each_rank_its_own(ranks: Any) -> None:
    """The reason for the guard; it goes when this fails."""
    (first, expected), (second, _) = ranks.run(job_raw, 2)
    assert first != second and max(first, second) < expected


@pytest.mark.parametrize("merge_below", [0, 2**20])
def test_a_number_is_never_a_parts(ranks: Any, merge_below: int) -> None:
    """Weights and gradients; what is gathered first is right."""
    for given, got, expected in ranks.run(job_numbers, 2, merge_below):
        assert given == [] and got == pytest.approx(expected, rel=1e-6)
