"""ShardedOptimizer: never wrong in silence."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import nn

import fsshard
from fsshard.errors import OptimizerError, StateDictError, UnsupportedByBackend
from tests.models import Net, batch, net, take_step, two_heads, with_adam
from tests.on_ranks import on_backends, on_ranks
from tests.optimizers import MyLion, MyMuon
from tests.sharded.training import ALL, train
from tests.training_runs import DISTRIBUTED, Run, check_equal, differences, loss_of, ranks_of, wrapped


def step(model: Any, optimizer: Any, number: int = 0) -> float:
    return train(model, optimizer, [number])[0]


# ------------------------------------------------------------------------------------------------ handing one over


HANDED = [{"lr": 0.01, "weight_decay": 0.01}, {"lr": 0.003, "weight_decay": 0.1}]


@on_backends(ALL)
def test_a_live_optimizer_is_repointed(backend: str) -> None:
    """Groups that keep their settings, beside the same optimizer built afterwards."""
    module = net()
    parameters = list(module.parameters())
    halves = [parameters[:3], parameters[3:]]
    old = torch.optim.AdamW(
        [{"params": half, **kept} for half, kept in zip(halves, HANDED, strict=True)], betas=(0.8, 0.95)
    )
    model, optimizer = fsshard.wrap(module, old, backend=backend)
    reference = fsshard.wrap(net(), backend="ddp" if backend != "none" else "none")
    names = [name for name, _ in reference.named_parameters()]
    groups = [{"params": half, **kept} for half, kept in zip((names[:3], names[3:]), HANDED, strict=True)]
    built = fsshard.build_optimizer(reference, torch.optim.AdamW, groups, betas=(0.8, 0.95))
    for number in range(3):
        step(model, optimizer, number)
        step(reference, built, number)
    with pytest.raises(OptimizerError, match="use the one that wrap returned"):
        old.step()
    assert [{key: group[key] for key in HANDED[0]} for group in optimizer.param_groups] == HANDED
    check_equal(reference.state_dict(), model.state_dict())


@on_ranks(1)
def test_wrong_arguments_of_build_optimizer() -> None:
    bare, model = net(), fsshard.wrap(net(), backend="ddp")
    settings = "got an instance of Adam; pass the class and its settings: build_optimizer(model, Adam, lr=...)"
    for what, kind, text in (
        (bare, torch.optim.Adam, "got Net; wrap it first"),
        (model.parameters(), torch.optim.Adam, "got generator; pass the model; some of its parameters go third"),
        (model, torch.optim.Adam(model.parameters()), settings),
        (model, "Adam", "expected a class of torch.optim, got 'Adam'"),
    ):
        with pytest.raises(OptimizerError, match=re.escape(text)):
            fsshard.build_optimizer(what, kind, lr=0.1)  # type: ignore[arg-type]
    fsshard.build_optimizer(model, torch.optim.Adam, lr=0.1)


@on_ranks()
def test_what_cannot_be_handed_over() -> None:
    module = net()
    optimizer = torch.optim.Adam(module.parameters())
    module(batch(0)).sum().backward()
    optimizer.step()
    for given, text in (
        (optimizer, "has taken steps already"),
        (torch.optim.Adam(Net().parameters()), "expected parameters of the model, got "),
        ("fsdp2", "expected a torch.optim.Optimizer, got str; did you mean backend='fsdp2'"),
        (3, "expected a torch.optim.Optimizer, got int$"),
    ):
        with pytest.raises(OptimizerError, match=text):
            fsshard.wrap(module, given, backend="ddp")  # type: ignore[call-overload]


@on_backends(ALL)
def test_a_group_may_be_empty(backend: str) -> None:
    """Hugging Face's Trainer makes one where all parameters decay."""
    finals = []
    for rest in ([], [{"params": [], "weight_decay": 0.0}]):
        model = fsshard.wrap(net(), backend=backend)
        groups = [{"params": list(model.parameters())}, *rest]
        optimizer = fsshard.build_optimizer(model, torch.optim.AdamW, groups, lr=0.01)
        step(model, optimizer)
        optimizer.load_state_dict(optimizer.state_dict())
        step(model, optimizer, 1)
        finals.append(model.state_dict())
    check_equal(*finals)


@on_ranks()
def test_adagrad_has_state_before_its_first_step() -> None:
    module = net()
    model, optimizer = fsshard.wrap(module, torch.optim.Adagrad(module.parameters(), lr=0.1), backend="fsdp2")
    assert step(model, optimizer) > 0


# ------------------------------------------------------------------------------------------------ foreign optimizers


@pytest.mark.covering
@pytest.mark.parametrize("when", ["before", "after", "of the inner module"])
@on_backends(ALL)
def test_a_plain_optimizer_over_managed_parameters_raises(backend: str, when: str) -> None:
    """Otherwise it would update stale parameters, or one shard by its local gradient, and say nothing."""
    module = net()
    before = torch.optim.SGD(module.parameters(), lr=0.1)
    model = fsshard.wrap(module, backend=backend)
    if backend == "fairscale":
        fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
    if when == "before":
        optimizer = before
    elif when == "after":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    else:
        optimizer = torch.optim.SGD(model.module.parameters(), lr=0.1)
    model(batch(0)).square().mean().backward()
    with pytest.raises(OptimizerError, match=r"fsshard\.build_optimizer"):
        optimizer.step()


@on_ranks(1)
def test_a_compiled_step_of_another_model_is_left_alone() -> None:
    """A bare model whose optimizer's step is compiled, while a wrapped model lives: its step is looked at, too."""
    model, weights = fsshard.wrap(net(), backend="none"), []
    for compiled in (False, True):
        torch.manual_seed(0)
        bare = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(bare.parameters(), lr=0.1)
        step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
        for number in range(3):
            bare(torch.full((2, 3), float(number))).sum().backward()
            step()
            optimizer.zero_grad()
        weights.append(dict(bare.state_dict()))
    check_equal(*weights)
    managed = torch.optim.SGD(model.parameters(), lr=0.1)
    model(batch(0)).square().mean().backward()
    with pytest.raises(OptimizerError, match=r"fsshard\.build_optimizer"):
        torch.compile(managed.step, backend="eager")()


@on_backends(DISTRIBUTED)
def test_names_of_named_parameters_stay_in_groups(backend: str) -> None:
    """As in torch since 2.6."""
    model = fsshard.wrap(net(), backend=backend)
    named = list(model.named_parameters())
    groups = [{"params": named[:2]}, {"params": named[2:], "lr": 0.1}]
    bare = torch.optim.Adam([{"params": list(net().named_parameters())[:2]}])
    optimizer = fsshard.build_optimizer(model, torch.optim.Adam, groups)
    step(model, optimizer)
    held = fsshard.build_optimizer(model, torch.optim.Adam, [{"params": model.parameters(), "note": object()}])
    saved = [group["param_names"] for group in optimizer.state_dict()["param_groups"]]
    first = [group["param_names"] for group in optimizer.param_groups]
    every = [name for name, _ in named]
    native = bare.param_groups[0]["param_names"]
    assert first == saved == [every[:2], every[2:]]
    assert first[0] == native
    assert "param_names" not in held.param_groups[0]


# ------------------------------------------------------------------------------------------------ groups and schedulers


@pytest.mark.parametrize("form", ["pairs", "parameters", "groups"])
@on_ranks()
def test_forms_of_param_groups(form: str) -> None:
    """Parameters as ``named_parameters`` shows them have the original shapes, so grouping by ndim works everywhere."""

    def build(backend: str) -> fsshard.ShardedModule:
        model = fsshard.wrap(net(), backend=backend)
        pairs = list(model.named_parameters())
        given = {
            "pairs": pairs,
            "parameters": [p for _, p in pairs],
            "groups": [
                {"params": [p for n, p in pairs if p.ndim < 2]},
                {"params": [n for n, p in pairs if p.ndim > 1]},
            ],
        }[form]
        optimizer = fsshard.build_optimizer(model, torch.optim.Adam, given, lr=0.01)
        for number in range(3):
            step(model, optimizer, number)
        return model

    reference = build("ddp").state_dict()
    wrong = [d for backend in DISTRIBUTED[1:] for d in differences(reference, build(backend).state_dict())]
    assert not wrong


@on_backends(DISTRIBUTED)
def test_groups_are_put_in_place_of_others(backend: str) -> None:
    """As Lightning's BaseFinetuning does when it goes on: ends where an optimizer that was built with them does."""
    groups = [{"params": ["first.weight"], "lr": 0.2}, {"params": ["middle.0.weight"]}]

    def train(built_with: Any) -> tuple[Any, Any]:
        model = fsshard.wrap(net(), backend=backend)
        optimizer = fsshard.build_optimizer(model, torch.optim.Adam, built_with, lr=0.1)
        if built_with is not groups:
            named = dict(model.named_parameters())
            optimizer.param_groups = [{**group, "params": [named[n] for n in group["params"]]} for group in groups]
        for number in range(2):
            step(model, optimizer, number)
        return model.state_dict(), optimizer.state_dict()["param_groups"]

    if backend == "fairscale":
        with pytest.raises(UnsupportedByBackend, match=r"param_groups = \.\.\..*build a second optimizer"):
            train(["first.weight"])
    else:
        (weights, told), (expected, also) = train(["first.weight"]), train(groups)
        assert told == also
        check_equal(expected, weights)


@on_ranks()
def test_groups_that_cannot_be_put_there_change_nothing() -> None:
    model = fsshard.wrap(net(), backend="fsdp2")
    optimizer = fsshard.build_optimizer(model, torch.optim.SGD, ["first.weight"], lr=0.1)
    told = []
    for given in ([], [["first.weight"], ["middle.0.weight", "first.weight"]], [["nowhere"]]):
        with pytest.raises(OptimizerError) as error:
            optimizer.param_groups = [{"params": names} for names in given]
        told.append(str(error.value))
    kept = optimizer.state_dict()["param_groups"][0]["params"]
    words = ("there is no group", "given twice", "nowhere")
    assert all(map(str.__contains__, told, words)) and kept == ["first.weight"]


# ------------------------------------------------------------------------------------------------ frozen and unused


def job_unused(backend: str, heads: list[str], find: bool) -> dict[str, Any]:
    model = fsshard.wrap(two_heads(), backend=backend, auto_wrap_policy=None, find_unused_parameters=find)
    optimizer = fsshard.build_optimizer(model, torch.optim.AdamW, lr=0.01, weight_decay=0.1)
    for number in range(3):
        head = heads[torch.distributed.get_rank()]
        model(batch(number), head).square().mean().backward()
        model.clip_grad_norm_(0.05)
        take_step(optimizer)
    return model.state_dict()


@pytest.mark.parametrize("heads", [["a", "a"], ["a", "b"]], ids=["unused by all", "used by some"])
def test_unused_parameters(ranks: Any, heads: list[str]) -> None:
    """A parameter that no rank used has no gradient and is not moved, even by weight decay; others count as zeros."""
    reference = ranks.run(job_unused, 2, "ddp", heads, True)
    assert torch.equal(reference[0]["b.weight"], two_heads().b.weight) == (heads == ["a", "a"])
    for backend in DISTRIBUTED[1:]:
        for one, other in zip(reference, ranks.run(job_unused, 2, backend, heads, True), strict=True):
            assert list(differences(one, other)) == [], backend


@pytest.mark.parametrize("backend", DISTRIBUTED)
def test_an_unexpected_unused_parameter_raises(ranks: Any, backend: str) -> None:
    for error in ranks.run_expecting_errors(job_unused, 2, backend, ["a", "a"], False):
        assert isinstance(error, OptimizerError)
        assert "b.weight" in str(error) and "find_unused_parameters=True" in str(error)


# ------------------------------------------------------------------------------------------------ state


@pytest.mark.parametrize(
    ("kind", "text"),
    [("name", "nonsense"), ("shape", "expected (6, 4), got (2, 2)"), ("groups", "param_groups"), ("type", "missing")],
)
@on_ranks()
def test_state_that_does_not_fit(kind: str, text: str) -> None:
    model, optimizer = with_adam(net(), backend="fsdp2")
    step(model, optimizer)
    state = optimizer.state_dict()
    if kind == "name":
        state["param_groups"][0]["params"][0] = "nonsense"
    elif kind == "shape":
        state["state"]["first.weight"]["exp_avg"] = torch.zeros(2, 2)
    elif kind == "groups":
        state["param_groups"] *= 2
    elif kind == "type":
        state = {"state": {}}
    with pytest.raises(StateDictError) as raised:
        optimizer.load_state_dict(state)
    assert text in str(raised.value)


@pytest.mark.parametrize(("kind", "whole"), [(torch.optim.Adam, False), (MyLion, False), (MyMuon, True)])
@on_backends(ALL)
def test_a_state_that_is_kept_is_the_latest(backend: str, kind: Any, whole: bool) -> None:
    """In a step it lies under what the optimizer was shown."""
    model = fsshard.wrap(net(), backend=backend)
    optimizer = fsshard.build_optimizer(model, kind, whole=whole, lr=0.01)
    held, stored = optimizer.state, {id(p) for group in optimizer.param_groups for p in group["params"]}
    for number in range(3):
        step(model, optimizer, number)
        found = {id(p): {key: value.clone() for key, value in state.items()} for p, state in held.items()}
        assert len(held) == len(found) and found.keys() <= stored
        for parameter, state in optimizer.state.items():
            assert parameter in held and all(torch.equal(state[key], found[id(parameter)][key]) for key in state)
        assert found == {} or any(value.any() for state in found.values() for value in state.values())
    new = torch.nn.Parameter(torch.zeros(1))
    assert held.get(new) is None and new not in held
    assert held[new] == {} and held.pop(new) == {} and new not in held  # as torch's
    for copied in (held.copy(), copy.copy(held), *([copy.deepcopy(held)] if backend == "ddp" else [])):
        assert type(copied) is dict and len(copied) == len(held)


@on_backends(["fsdp2", "fsdp", "fairscale", "ddp"])
def test_counters_of_a_zero_dim_parameter_are_not_cut(backend: str) -> None:
    """Its step counter has its shape; a rank without a part of it must keep the counter whole all the same.

    Two steps, the state handed back to the optimizer, one step more, against three steps in one go.
    """
    found = []
    for reload in (False, True):
        run = Run("zero_dim", backend)
        model, optimizer = wrapped(run)
        for number in range(3):
            if reload and number == 2:
                optimizer.load_state_dict(optimizer.state_dict())
            loss_of(run, model, number).backward()
            take_step(optimizer)
        found.append({"weights": model.state_dict(), "state": optimizer.state_dict()})
    check_equal(*found)


class Remembers(torch.optim.Optimizer):
    """Writes in place into what its groups and its state hold: numbers, lists and tensors."""

    def __init__(self, parameters: Any, lr: Any) -> None:
        super().__init__(parameters, {"lr": lr, "rates": [], "bounds": {"low": torch.zeros(())}})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state.setdefault("seen", []).append(len(state.get("seen", [])))
                moment = state.setdefault("moment", torch.zeros_like(parameter)).add_(parameter.grad)
                parameter.sub_(group["lr"] * moment)
            group["rates"].append(float(group["lr"]))
            group["bounds"]["low"].add_(1)
            group["lr"].mul_(0.5)  # as torch's schedulers do


@pytest.mark.parametrize("backend", ALL)
@on_ranks(ranks_of)
def test_a_state_that_was_loaded_or_given_is_shared_with_nobody(backend: str) -> None:
    """Go back twice to one state, with two steps after each: both times, and without us, the same comes of it."""
    bare, rates = net(), torch.tensor(0.125)
    model = fsshard.wrap(net(), backend=backend)
    optimizer = fsshard.build_optimizer(model, Remembers, lr=torch.tensor(0.125), separable=True)
    plain = Remembers(bare.parameters(), rates)
    for owner, stepped in ((bare, plain), (model, optimizer)):
        train(owner, stepped, range(2))
    weights, kept = model.state_dict(), optimizer.state_dict()
    before, found = copy.deepcopy(kept), []
    train(bare, plain, range(2, 4))
    for _ in range(2):
        model.load_state_dict(weights)
        optimizer.load_state_dict(kept)
        train(model, optimizer, range(2, 4))
        found.append({"weights": model.state_dict(), "optimizer": optimizer.state_dict()})
        assert optimizer.param_groups[0]["rates"] == plain.param_groups[0]["rates"] == [0.125 / 2**n for n in range(4)]
    assert backend != "none" or not list(differences(bare.state_dict(), found[0]["weights"]))
    assert all(state["seen"] == [0, 1, 2, 3] for state in found[0]["optimizer"]["state"].values())
    assert not [*differences(before, kept), *differences(found[0], found[1])]
