"""The root's all-gather is begun right before its forward, so that FSDP2 does not keep what arrived beside the copy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsshard
from fsshard.backends import fsdp2
from fsshard.simulation.simulation import Job, simulate
from tests.simulation.recipes import Net, net
from tests.training_runs import differences

ENGINES = {"fast_collectives": False}
"""Ours are waited for as soon as they are needed, and FSDP2 lets go of them at once already."""


@contextlib.contextmanager
def as_the_engine_does() -> Iterator[None]:
    with mock.patch.object(fsdp2, "_gather_ahead", return_value=None):
        yield


class Nested(nn.Module):
    """A unit within a unit, and something to compute in the root; ``fails`` makes the forward raise."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.own = nn.Parameter(torch.randn(3, 6) / 2)
        self.block = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Sequential(nn.Linear(5, 7), nn.Tanh()))
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise ZeroDivisionError("in a forward")
        return self.block(x @ self.own)


def batch(seed: int) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))


def wrapped(**settings: Any) -> Any:
    return fsshard.wrap(Nested(), backend="fsdp2", merge_below=0, **{**ENGINES, **settings})


# ------------------------------------------------------------------------------------------------ memory


def test_a_model_of_one_unit_is_there_once_in_forward() -> None:
    """By simulation: without it the peak is the forward's, where the unit is there twice."""
    job = Job(
        source=net(build=_wide),
        changes={},
        backend="fsdp2",
        mesh=(4,),
        settings={"auto_wrap_policy": None},
        device="cuda",
    )
    with as_the_engine_does():
        before = simulate(job).usage
    after = simulate(job).usage
    unit = after.by_kind["gathered units"]
    assert before.moment.phase == "forward"
    assert before.by_kind["gathered units"] == pytest.approx(2 * unit, rel=0.02)
    assert after.moment.phase != "forward" and after.peak < before.peak
    assert [(t.kind, t.count, t.nbytes) for t in after.traffic] == [(t.kind, t.count, t.nbytes) for t in before.traffic]


def _wide() -> nn.Module:
    return Net(4096)


# ------------------------------------------------------------------------------------------------ numbers


def job_same(settings: dict[str, Any]) -> list[str]:
    """A training with evaluation, accumulation and a look at the whole parameters in between."""

    def train() -> dict[str, Any]:
        model = wrapped(**settings)
        optimizer = fsshard.build_optimizer(model, torch.optim.Adam, lr=1e-2)
        seen = []
        for step in range(3):
            model.train()
            with model.no_sync():
                model(batch(step)).square().mean().backward()
            model(batch(step + dist.get_rank())).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            with torch.no_grad():
                seen.append(model(batch(9)))
            with torch.inference_mode():
                seen.append(model(batch(9)).clone())
            with model.full_parameters(writeback=True) as whole:
                whole["own"].mul_(0.5)
            seen.append(model(batch(9)).detach())
        return {"seen": seen, "weights": model.state_dict(), "state": optimizer.state_dict()["state"]}

    with as_the_engine_does():
        reference = train()
    return list(differences(reference, train()))


@pytest.mark.parametrize(
    "settings",
    [
        {"auto_wrap_policy": None},
        {"auto_wrap_policy": {nn.Sequential}},
        {"auto_wrap_policy": {nn.Sequential}, "activation_checkpointing": {nn.Tanh, nn.Linear}},
        {"auto_wrap_policy": {nn.Linear}, "sharding_strategy": "SHARD_GRAD_OP"},
        {"auto_wrap_policy": {nn.Linear}, "reshard_after_forward": True},
    ],
    ids=["one_unit", "nested", "recomputed", "kept_gathered", "root_resharded"],
)
def test_the_numbers_are_the_engines(ranks: Any, settings: dict[str, Any]) -> None:
    assert ranks.run(job_same, 2, settings) == [[], []]


def job_after_a_failure(where: str) -> list[str]:
    """A forward that raised gathers nothing that a later one would take for new."""
    model, clean = wrapped(auto_wrap_policy=None), wrapped(auto_wrap_policy=None)
    for each in (model, clean):
        each(batch(0)).sum().backward()
        each.zero_grad()
    if where == "hook":
        handle = model.module.register_forward_pre_hook(_fail, prepend=True)
    model.module.fails = where == "forward"
    with contextlib.suppress(ZeroDivisionError):
        model(batch(0))
    if where == "hook":
        handle.remove()
    else:
        model.module.fails = False
        model.module._get_fsdp_state()._reset_iter_state()  # what torch offers after a failed step
    weights = {key: value * 2 for key, value in clean.state_dict().items()}
    for each in (model, clean):
        each.load_state_dict(weights)
    return list(differences([clean(batch(1)).detach()], [model(batch(1)).detach()]))


def _fail(*_: Any) -> None:
    raise ZeroDivisionError("before a forward")


@pytest.mark.parametrize("where", ["forward", "hook"])
def test_after_a_forward_that_failed(ranks: Any, where: str) -> None:
    assert ranks.run(job_after_a_failure, 2, where) == [[], []]
