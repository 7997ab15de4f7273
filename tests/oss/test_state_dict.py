"""OSS: consolidating, saving and loading its state, and what the state costs."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsshard.oss.optimizer import OSS
from tests.oss.trainings import (
    OPTIMIZERS,
    batches,
    build,
    ddp,
    mlp,
    refusal,
    same,
    step,
    two_groups,
    weights,
    whole_state,
)

STATEFUL = [
    "SGD nesterov",
    "Adam",
    "Adam tensor lr",
    "AdamW fused",
    "Adadelta",
    "RMSprop",
    "Adagrad",
    "ASGD",
    "Adafactor",
]


# ------------------------------------------------------------------------------------------------ resuming


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
    found: dict[str, Any] = torch.load(file, weights_only=True)
    return found


def job_resume() -> list[str]:
    wrong = []
    for name in STATEFUL:
        model, plain = begin("plain", name)
        twin, sharded = begin("oss", name)
        state = saved(whole_state(sharded))
        untouched = copy.deepcopy(state)
        found = [resume("oss", name, twin, state)]
        if not same(state, untouched):
            wrong.append(f"{name}: its state dict was changed")
        found += [resume("plain", name, twin, state), resume("oss", name, model, saved(plain.state_dict()))]
        for batch in batches(3, seed=200):
            step(ddp(model), plain, batch)
        wrong += [name for each in found if not same(each, weights(model))]
    return wrong


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.long)])
def test_state_goes_to_the_plain_optimizer_and_back(ranks: Any, world_size: int) -> None:
    assert ranks.run(job_resume, world_size) == [[]] * world_size


def job_loaded() -> Any:
    _, plain = begin("plain", "AdamW fused")
    model = mlp()
    optimizer = OSS(two_groups(model), optim=torch.optim.AdamW, lr=0.01, fused=True)
    before = len(optimizer.state)
    optimizer.load_state_dict(plain.state_dict())
    own = [bool(optimizer.state[p]) == (owner == optimizer.rank) for p, owner in optimizer._param_to_rank.items()]
    live = all(optimizer.state[p] is state for p, state in optimizer.optim.state.items())
    return before, len(optimizer.state), all(own), live, len(optimizer.optim.state) < 6


def test_the_state_is_empty_until_one_is_loaded(ranks: Any) -> None:
    assert ranks.run(job_loaded, 2) == [(0, 6, True, True, True)] * 2


class Spectral(nn.Module):
    """A complex weight behind a real one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.lift = nn.Parameter(torch.randn(5))
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))


def job_complex() -> Any:
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
    return same(*found), same(whole_state(other), found[0][1]), found[1][1]["state"][1]["exp_avg"].is_complex()


def test_moments_of_complex_weights_are_complex(ranks: Any) -> None:
    assert ranks.run(job_complex, 2) == [(True, True, True)] * 2


def job_single() -> Any:
    weight = torch.tensor([1.0], requires_grad=True)
    optimizer = OSS([weight], lr=0.1, momentum=0.9)
    early = refusal(optimizer.state_dict)
    weight.backward()
    optimizer.step()
    optimizer.consolidate_state_dict()
    state = optimizer.state_dict()
    alike = all(state["param_groups"][0][k] == v for k, v in optimizer.param_groups[0].items() if k != "params")
    other = OSS([weight], lr=0.01)
    other.load_state_dict(state)
    other.step()
    return early, alike, other.param_groups[0]["lr"], other.optim.state[weight]["momentum_buffer"].item(), weight.item()


def test_a_single_rank_consolidates_too(ranks: Any) -> None:
    ((early, alike, lr, momentum, weight),) = ranks.run(job_single, 1)
    assert early[0] == "NotConsolidated"
    assert (alike, lr, momentum, weight) == (True, 0.1, pytest.approx(1.9), pytest.approx(0.71))


def job_copy() -> Any:
    _, optimizer = begin("oss", "Adam")
    optimizer.consolidate_state_dict(recipient_rank=-1)
    first = optimizer.state_dict()
    held = copy.deepcopy(first)
    for p in optimizer._param_to_rank:
        p.grad = torch.ones_like(p)
    optimizer.step()
    with pytest.warns(UserWarning, match="before the last step"):
        optimizer.state_dict()
    return same(first["state"], held["state"])


def test_what_was_consolidated_is_a_copy_and_says_when_it_is_old(ranks: Any) -> None:
    assert ranks.run(job_copy, 3) == [True] * 3


def job_who(recipient: int) -> Any:
    _, optimizer = begin("oss", "Adam")
    optimizer.consolidate_state_dict(recipient_rank=recipient)
    return refusal(optimizer.state_dict)


def job_no_such_rank() -> Any:
    return refusal(lambda: OSS(mlp().parameters(), lr=0.1).consolidate_state_dict(2))


@pytest.mark.parametrize("recipient", [0, 2])
def test_only_the_recipient_has_it(ranks: Any, recipient: int) -> None:
    found = ranks.run(job_who, 3, recipient)
    assert [each is None for each in found] == [rank == recipient for rank in range(3)]
    assert all(each is None or (each[0] == "NotConsolidated" and "has only its own part" in each[1]) for each in found)


def test_a_recipient_that_does_not_exist(ranks: Any) -> None:
    assert (
        ranks.run(job_no_such_rank, 2)
        == [("ConfigurationError", "recipient_rank must lie in -1..1 (-1: all ranks), got 2")] * 2
    )


# ------------------------------------------------------------------------------------------------ what does not fit


def job_misfits() -> dict[str, Any]:
    _, plain = begin("plain", "Adam")
    good = plain.state_dict()
    model = mlp()
    optimizer = OSS(two_groups(model), optim=torch.optim.Adam, lr=0.01)
    names = dict(model.named_parameters())
    named = OSS(names.items(), optim=torch.optim.Adam, lr=0.01)

    def with_(change: Any, target: OSS = optimizer, source: dict[str, Any] = good) -> Any:
        state = copy.deepcopy(source)
        change(state)
        return refusal(lambda: target.load_state_dict(state))

    flat = torch.optim.Adam(mlp().parameters(), lr=0.01)
    for p in flat.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    flat.step()
    found = {
        "groups": with_(lambda state: state["param_groups"].pop()),
        "size": with_(lambda state: state["param_groups"][1]["params"].pop()),
        "unknown": with_(lambda state: state["state"].update({77: {"step": 1}})),
        "shape": with_(lambda state: state["state"][2].update(exp_avg=torch.zeros(3))),
        "name": with_(lambda state: state["state"][2].update(exp_avg_sq=torch.zeros(3)), named, flat.state_dict()),
        "nothing": refusal(lambda: optimizer.load_state_dict({"model": 1})),
    }
    return {**found, "state": len(optimizer.optim.state)}


def test_a_state_dict_that_does_not_fit_is_refused_by_name(ranks: Any) -> None:
    for found in ranks.run(job_misfits, 2):
        assert found.pop("state") == 0
        assert {kind for kind, _ in found.values()} == {"OptimizerStateMismatch"}
        text = {what: message for what, (_, message) in found.items()}
        assert "number of param_groups: expected 2, got 1" in text["groups"]
        assert "parameters in group 1: expected 3, got 2" in text["size"]
        assert "unexpected: state of parameter 77" in text["unknown"]
        assert "parameter 2 (in group 0): exp_avg: expected (3, 16), got (3,)" in text["shape"]
        assert "2.weight: exp_avg_sq: expected (16, 15), got (3,)" in text["name"]
        assert "missing: param_groups" in text["nothing"]


# ------------------------------------------------------------------------------------------------ what it costs

MLP = [(256, 64), (256,), (256, 256), (256,), (10, 256), (10,)]
T5 = [(512, 64)] + 4 * ([(64, 64)] * 4 + [(64,)] + [(128, 64), (64, 128), (64,)]) + [(32, 4), (64,)]
TFNO = (
    [(32, 3), (32,)] + 4 * [(32, 8, 2), (8, 8), (6, 6), (4, 4, 2), (32, 32), (32,)] + [(64, 32), (64,), (1, 64), (1,)]
)


def state_bytes(cls: Any, shapes: list[tuple[int, ...]]) -> int:
    parameters = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    optimizer = cls(parameters, optim=torch.optim.AdamW, lr=0.1)
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer.step()
    states = optimizer.optim.state.values()
    return sum(value.nbytes for state in states for value in state.values() if isinstance(value, Tensor))


def job_state_bytes() -> list[tuple[int, int]]:
    from fairscale.optim.oss import OSS as Raw

    return [(state_bytes(OSS, shapes), state_bytes(Raw, shapes)) for shapes in (MLP, T5, TFNO)]


@pytest.mark.parametrize("world_size", [2, 3])
def test_no_rank_keeps_more_state_than_under_the_real_oss(ranks: Any, world_size: int) -> None:
    for found in ranks.run(job_state_bytes, world_size):
        assert all(ours <= 1.02 * raw for ours, raw in found), found
