"""OSS: consolidating, saving and loading its state, and what the state costs."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsshard.oss.optimizer import OSS
from tests.on_ranks import on_ranks
from tests.oss.trainings import (
    OPTIMIZERS,
    batches,
    build,
    ddp,
    fill,
    mlp,
    refusal,
    same,
    step,
    two_groups,
    weights,
    whole_state,
)

STATEFUL = (
    "SGD nesterov",
    "Adam",
    "Adam tensor lr",
    "AdamW fused",
    "Adadelta",
    "RMSprop",
    "Adagrad",
    "ASGD",
    "Adafactor",
)


def begin(kind: str, name: str) -> Any:
    cls, settings = OPTIMIZERS[name]
    model = mlp()
    optimizer = build(kind, two_groups(model), getattr(torch.optim, cls), **copy.deepcopy(settings))
    for batch in batches(3):
        step(ddp(model), optimizer, batch)
    return model, optimizer


def resume(kind: str, name: str, model: nn.Module, state: dict[str, Any]) -> list[Tensor]:
    """With other settings, which the state replaces."""
    cls, settings = OPTIMIZERS[name]
    other = mlp(7)
    other.load_state_dict(model.state_dict())
    optimizer = build(kind, two_groups(other), getattr(torch.optim, cls), **copy.deepcopy({**settings, "lr": 1e-9}))
    optimizer.load_state_dict(state)
    for batch in batches(3, seed=200):
        step(ddp(other), optimizer, batch)
    return weights(other)


def saved(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.long)])
@on_ranks()
def test_state_goes_to_the_plain_optimizer_and_back(world_size: int) -> None:
    for name in STATEFUL:
        model, plain = begin("plain", name)
        twin, sharded = begin("oss", name)
        state = saved(whole_state(sharded))
        untouched = copy.deepcopy(state)
        found = [resume("oss", name, twin, state)]
        assert same(state, untouched), name
        found += [resume("plain", name, twin, state), resume("oss", name, model, saved(plain.state_dict()))]
        for batch in batches(3, seed=200):
            step(ddp(model), plain, batch)
        assert all(same(each, weights(model)) for each in found), name


@on_ranks()
def test_the_state_is_empty_until_one_is_loaded() -> None:
    _, plain = begin("plain", "AdamW fused")
    optimizer = OSS(two_groups(mlp()), optim=torch.optim.AdamW, lr=0.01, fused=True)
    assert len(optimizer.state) == 0
    optimizer.load_state_dict(plain.state_dict())
    for p, owner in optimizer._param_to_rank.items():
        assert optimizer.state[p] == (optimizer.optim.state[p] if owner == optimizer.rank else {})


class Spectral(nn.Module):
    """A complex weight behind a real one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.lift = nn.Parameter(torch.randn(5))
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))


@on_ranks()
def test_moments_of_complex_weights_are_complex() -> None:
    found = []
    for kind in ("plain", "oss"):
        model = Spectral()
        optimizer = build(kind, model.parameters(), torch.optim.Adam, lr=0.1)
        for factor in (1.0, 0.5):
            for p in model.parameters():
                p.grad = p.detach() * factor
            optimizer.step()
        found.append((weights(model), whole_state(optimizer)))
    other = OSS(Spectral().parameters(), optim=torch.optim.Adam, lr=0.1)
    other.load_state_dict(found[1][1])
    assert same(*found) and same(whole_state(other), found[0][1])
    assert found[1][1]["state"][1]["exp_avg"].is_complex()


@on_ranks(3)
def test_what_was_consolidated_is_a_copy_and_says_when_it_is_old() -> None:
    _, optimizer = begin("oss", "Adam")
    optimizer.consolidate_state_dict(recipient_rank=-1)
    first = optimizer.state_dict()
    held = copy.deepcopy(first)
    fill(optimizer._param_to_rank)
    optimizer.step()
    with pytest.warns(UserWarning, match="before the last step"):
        optimizer.state_dict()
    assert same(first["state"], held["state"])


@pytest.mark.parametrize(("world_size", "recipient"), [(1, 0), (3, 0), (3, 2)])
@on_ranks()
def test_only_the_recipient_has_it(world_size: int, recipient: int) -> None:
    _, optimizer = begin("oss", "Adam")
    kind, text = refusal(optimizer.state_dict)
    assert kind == "NotConsolidated" and "has only its own part" in text
    optimizer.consolidate_state_dict(recipient_rank=recipient)
    assert refusal(optimizer.state_dict) == (None if dist.get_rank() == recipient else (kind, text))


@on_ranks()
def test_a_state_dict_that_does_not_fit_is_refused_by_name() -> None:
    _, plain = begin("plain", "Adam")
    good = plain.state_dict()
    model = mlp()
    optimizer = OSS(two_groups(model), optim=torch.optim.Adam, lr=0.01)
    named = OSS(dict(model.named_parameters()).items(), optim=torch.optim.Adam, lr=0.01)
    other = mlp()
    flat = torch.optim.Adam(other.parameters(), lr=0.01)
    fill(other)
    flat.step()

    def told(change: Any, target: OSS = optimizer, source: dict[str, Any] = good) -> str:
        state = copy.deepcopy(source)
        change(state)
        kind, text = refusal(lambda: target.load_state_dict(state))
        assert kind == "OptimizerStateMismatch"
        return text

    sizes = "number of parameters in each group: expected [3, 3], got "
    assert f"{sizes}[3]" in told(lambda state: state["param_groups"].pop())
    assert f"{sizes}[3, 2]" in told(lambda state: state["param_groups"][1]["params"].pop())
    assert "unexpected: state of parameter 77" in told(lambda state: state["state"].update({77: {"step": 1}}))
    text = told(lambda state: state["state"][2].update(exp_avg=torch.zeros(3)))
    assert "parameter 2 (in group 0): exp_avg: expected (3, 16), got (3,)" in text
    text = told(lambda state: state["state"][2].update(exp_avg_sq=torch.zeros(3)), named, flat.state_dict())
    assert "2.weight: exp_avg_sq: expected (16, 15), got (3,)" in text
    assert "missing: param_groups" in told(lambda state: state.pop("param_groups"))
    assert len(optimizer.optim.state) == 0
