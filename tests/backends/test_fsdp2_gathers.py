"""When units are gathered: ahead, in the right order, with the right numbers, whatever the forward does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsshard
from fsshard.backends import fsdp2
from fsshard.comm.gloo import collectives as gloo_collectives
from fsshard.launching.pool import RankPool
from fsshard.simulation.simulation import Job, simulate
from tests.models import take_step
from tests.on_ranks import on_ranks
from tests.simulation.recipes import Net, net
from tests.training_runs import check_equal


class Stack(nn.Module):
    """Layers that are called in another order than they are registered in; some may be left out, or fail."""

    def __init__(self, order: tuple[int, ...] = (2, 0, 1)) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.head = nn.Linear(6, 2)
        self.order, self.fail = order, False

    def forward(self, x: Tensor) -> Tensor:
        for number in self.order:
            x = self.layers[number](x).tanh()
            if self.fail:
                raise ArithmeticError("in the middle")
        return self.head(x)


def wrapped(backend: str, **settings: Any) -> tuple[Any, Any]:
    units = {"auto_wrap_policy": {nn.Linear}, "merge_below": 0} if backend == "fsdp2" else {}
    model = fsshard.wrap(Stack(), backend=backend, **units, **settings)
    return model, fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9)


def data(step: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(step))


def train(model: Any, optimizer: Any, step: int) -> float:
    loss = model(data(step)).square().sum()
    loss.backward()
    take_step(optimizer)
    return float(loss.detach())


def events(model: Any, forward: Callable[[], Any]) -> list[str]:
    """Gathers and forwards of the units, in the order in which they begin."""
    found = []
    names = {id(unit): name for name, unit in model.backend.module.named_modules()}
    gather = gloo_collectives.Gather.__call__
    handles = [
        unit.register_forward_hook(lambda unit, args, output: found.append(f"ran {names[id(unit)]}"))
        for unit in model.backend._units[:-1]
    ]

    def counted(*args: Any, **kwargs: Any) -> Any:
        found.append("gather")
        return gather(*args, **kwargs)

    with mock.patch.object(gloo_collectives.Gather, "__call__", counted):
        forward()
    for handle in handles:
        handle.remove()
    return found


def job_order(settings: dict[str, Any]) -> list[list[str]]:
    model, _ = wrapped("fsdp2", **settings)
    found = []
    for step in range(3):
        with torch.no_grad():
            found.append(events(model, lambda step=step: model(data(step))))  # type: ignore[misc]
    return found


def test_the_next_unit_is_gathered_before_the_one_before_it_has_run(ranks: RankPool) -> None:
    for first, second, third in ranks.run(job_order, 2, {}):
        assert first.count("gather") == 5  # guessed wrong: one of four units was gathered once too often
        assert second.count("gather") == 3  # what had arrived for nothing was of use
        assert third == [
            *["gather"] * 2, "ran layers.2", "gather", "ran layers.0", "gather", "ran layers.1", "ran head",
        ]  # fmt: skip


def test_without_fast_collectives_torch_does_as_it_does(ranks: RankPool) -> None:
    for _, _, third in ranks.run(job_order, 2, {"fast_collectives": False}):
        assert "gather" not in third


def job_trains(backend: str, case: str) -> tuple[list[float], list[Tensor]]:
    model, optimizer = wrapped(backend, find_unused_parameters=case == "left out")
    module = model.backend.module
    module = getattr(module, "module", module)
    losses = [train(model, optimizer, 0), train(model, optimizer, 1)]
    if case == "left out":  # layers.1 was gathered for nothing, and is written before it is used
        with torch.no_grad():
            module.order = (2, 0)
            model(data(2))
        module.order = (2,)
        losses.append(train(model, optimizer, 2))
        module.order = (2, 0, 1)
    elif case == "called twice":
        module.order = (2, 0, 2, 1)
    elif case == "raises":
        module.fail = True
        with pytest.raises(ArithmeticError):
            model(data(2))
        module.fail = False
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.detach().mul_(0.5)
    elif case == "load":
        with torch.no_grad():
            module.order = (2, 0)
            model(data(2))
            module.order = (2, 0, 1)
        model.load_state_dict({key: value * 0.5 for key, value in model.state_dict().items()})
    losses += [train(model, optimizer, step) for step in (3, 4)]
    return losses, list(model.state_dict().values())


@pytest.mark.parametrize("case", ["all", "left out", "called twice", "raises", "load"])
def test_numbers_are_those_of_ddp(ranks: RankPool, case: str) -> None:
    (losses, weights), _ = ranks.run(job_trains, 2, "ddp", case)
    for found in ranks.run(job_trains, 2, "fsdp2", case):
        assert found[0] == losses
        assert all(torch.equal(a, b) for a, b in zip(found[1], weights, strict=True))


# ------------------------------------------------------------------------------------------------ the root


ENGINES = {"fast_collectives": False}
"""Ours are waited for as soon as they are needed, and FSDP2 lets go of them at once already."""


def as_the_engine_does() -> Any:
    return mock.patch.object(fsdp2, "gather_ahead", return_value=None)


class Nested(nn.Module):
    """A unit within a unit, and something to compute in the root; ``fails`` makes the forward raise."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.own = nn.Parameter(torch.randn(6, 6) / 2)
        self.block = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Sequential(nn.Linear(5, 7), nn.Tanh()))
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise ZeroDivisionError("in a forward")
        return self.block(x @ self.own)


def nested(**settings: Any) -> Any:
    return fsshard.wrap(Nested(), backend="fsdp2", merge_below=0, **{**ENGINES, **settings})


# ------------------------------------------------------------------------------------------------ memory


def test_a_model_of_one_unit_is_there_once_in_forward() -> None:
    """By simulation: without it the peak is the forward's, where the unit is there twice."""
    job = Job(
        source=net(build=_wide),
        changes={},
        backend="fsdp2",
        mesh=(4,),
        # The reduction of gradients in one order needs more memory than this forward.
        settings={"auto_wrap_policy": None, "fast_collectives": False},
        device="cuda",
    )
    with as_the_engine_does():
        before = simulate(job).usage
    after = simulate(job).usage
    unit = after.by_kind["gathered units"]
    assert before.moment.phase == "forward"
    assert before.by_kind["gathered units"] == pytest.approx(2 * unit, rel=0.02)
    assert after.moment.phase != "forward" and after.peak < before.peak
    assert [(t.kind, t.count, t.nbytes) for t in after.collectives] == [
        (t.kind, t.count, t.nbytes) for t in before.collectives
    ]


def _wide() -> nn.Module:
    return Net(4096)


# ------------------------------------------------------------------------------------------------ numbers


@pytest.mark.parametrize(
    "settings",
    [
        {"auto_wrap_policy": None},
        {"auto_wrap_policy": {nn.Sequential}, "activation_checkpointing": {nn.Tanh, nn.Linear}},
        {"auto_wrap_policy": {nn.Linear}, "reshard_after_forward": True},
    ],
    ids=["one_unit", "recomputed", "root_resharded"],
)
@on_ranks()
def test_the_numbers_are_the_engines(settings: dict[str, Any]) -> None:
    """A training with evaluation, accumulation and a look at the whole parameters in between."""

    def train() -> dict[str, Any]:
        model = nested(**settings)
        optimizer = fsshard.build_optimizer(model, torch.optim.Adam, lr=1e-2)
        seen = []
        for step in range(3):
            model.train()
            with model.no_sync():
                model(data(step)).square().mean().backward()
            model(data(step + dist.get_rank())).square().mean().backward()
            take_step(optimizer)
            model.eval()
            with torch.no_grad():
                seen.append(model(data(9)))
            with torch.inference_mode():
                seen.append(model(data(9)).clone())
            with model.full_parameters(writeback=True) as whole:
                whole["own"].mul_(0.5)
            seen.append(model(data(9)).detach())
        return {"seen": seen, "weights": model.state_dict(), "state": optimizer.state_dict()["state"]}

    with as_the_engine_does():
        reference = train()
    check_equal(reference, train())


def _fail(*_: Any) -> None:
    raise ZeroDivisionError("before a forward")


@pytest.mark.parametrize("where", ["forward", "hook"])
@on_ranks()
def test_after_a_forward_that_failed(where: str) -> None:
    """A forward that raised gathers nothing that a later one would take for new."""
    model, clean = nested(auto_wrap_policy=None), nested(auto_wrap_policy=None)
    for each in (model, clean):
        each(data(0)).sum().backward()
        each.zero_grad()
    if where == "hook":
        handle = model.module.register_forward_pre_hook(_fail, prepend=True)
    model.module.fails = where == "forward"
    with contextlib.suppress(ZeroDivisionError):
        model(data(0))
    if where == "hook":
        handle.remove()
    else:
        model.module.fails = False
        model.module._get_fsdp_state()._reset_iter_state()  # what torch offers after a failed step
    weights = {key: value * 2 for key, value in clean.state_dict().items()}
    for each in (model, clean):
        each.load_state_dict(weights)
    check_equal([clean(data(1)).detach()], [model(data(1)).detach()])
