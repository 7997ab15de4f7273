"""torch's own checkpoint calls, such as get_state_dict and dcp.save, with a wrapped model and its optimizer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard

import fsshard
from fsshard.sharded.torch_checkpoint_calls import by_name
from tests.models import Spectral, take_step
from tests.on_ranks import on_backends, on_ranks
from tests.sets import often
from tests.training_runs import check_equal, differences

ENGINES: dict[str, dict[str, Any]] = {
    "none": {"backend": "none"},
    "ddp": {"backend": "ddp"},
    "fsdp": {"backend": "fsdp"},
    "fsdp2": {"backend": "fsdp2"},
    "fairscale": {"backend": "fairscale", "implementation": "native"},
}
LEAVES = 4
"""Micro-batches of a step, over all ranks: with these a training has the same bits on 1, 2 and 4 ranks."""


class Net(nn.Module):
    """A root with a parameter and buffers of its own, a complex layer, a tied weight, and one that is frozen."""

    table: Tensor
    scratch: Tensor

    def __init__(self, *, is_complex: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(5))
        self.first = nn.Linear(4, 6)
        self.middle = Spectral(6) if is_complex else nn.Linear(6, 6)
        self.tied = nn.Linear(4, 6, bias=False)
        self.tied.weight = self.first.weight
        self.last = nn.Linear(6, 5)
        self.last.bias.requires_grad_(False)
        self.register_buffer("table", torch.randn(3))
        self.register_buffer("scratch", torch.ones(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.middle(self.first(x))) + self.tied(x)
        return self.last(hidden) * self.scale + self.table.sum() * self.scratch.sum()


def net(*, is_complex: bool = True, seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net(is_complex=is_complex)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Return two groups: what decays and what does not."""
    named = [(name, value) for name, value in model.named_parameters() if value.requires_grad]
    return [
        {"params": [value for name, value in named if "bias" not in name], "weight_decay": 0.1},
        {"params": [value for name, value in named if "bias" in name], "weight_decay": 0.0},
    ]


def wrapped(engine: str, *, is_complex: bool = True, seed: int = 0) -> tuple[Any, Any, Any]:
    """Return a wrapped model, its AdamW in two groups, and a schedule of the learning rate."""
    units = {nn.Linear, Spectral} if is_complex else {nn.Linear}
    model = fsshard.wrap(net(is_complex=is_complex, seed=seed), auto_wrap_policy=units, **ENGINES[engine])
    optimizer = fsshard.build_optimizer(model, torch.optim.AdamW, groups_of(model), lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def samples(step: int, leaf: int) -> Tensor:
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(100 * step + leaf))


def train(model: Any, optimizer: Any, scheduler: Any, steps: range) -> None:
    for step in steps:
        for leaf in model.leaves(LEAVES, seed=step):
            model(samples(step, leaf)).square().mean().backward()
        take_step(optimizer)
        scheduler.step()


class AppState(Stateful):
    """The class of torch's tutorial on distributed checkpoints."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        model_state_dict, optimizer_state_dict = get_state_dict(self.model, self.optimizer)
        return {"model": model_state_dict, "optim": optimizer_state_dict}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state_dict["model"], optim_state_dict=state_dict["optim"]
        )


def job_trained(engine: str, steps: tuple[int, int], folder: str) -> Any:
    """Go on from ``folder`` if it holds a checkpoint, save there, and return weights, states and groups."""
    first, last = steps
    model, optimizer, scheduler = wrapped(engine, seed=first)
    app = {"app": AppState(model, optimizer), "scheduler": scheduler}
    if first:
        dcp.load(app, checkpoint_id=folder)
    train(model, optimizer, scheduler, range(first, last))
    if folder:
        dcp.save(app, checkpoint_id=folder)
    return dict(model.state_dict()), optimizer.state_dict()


def test_a_training_moves_between_engines_and_numbers_of_ranks(ranks: Any, tmp_path: Path) -> None:
    stayed = ranks.run(job_trained, 1, "none", (0, 5), "")[0]
    folder = str(tmp_path / "moving")
    ways = [("fsdp2", 2), ("fairscale", 4), ("fsdp", 2), ("ddp", 4), ("none", 1)]
    for step, (engine, size) in enumerate(ways):
        found = ranks.run(job_trained, size, engine, (step, step + 1), folder)
    check_equal(stayed[0], found[0][0])
    check_equal(stayed[1], found[0][1])


# ------------------------------------------------------------------------------------------------ what is returned


@on_backends(ENGINES)
def test_names_and_whole_tensors_are_returned(backend: str) -> None:
    """As by the wrapped model's own state dicts."""
    model, optimizer, scheduler = wrapped(backend)
    train(model, optimizer, scheduler, range(2))
    weights, states = dict(model.state_dict()), optimizer.state_dict()
    assert [*weights] == [*net().state_dict()]
    assert [name for name, _ in model.named_parameters(recurse=False)] == ["scale"]
    found = []
    for options in (None, StateDictOptions(full_state_dict=True), StateDictOptions(cpu_offload=True)):
        both = get_state_dict(model, optimizer, options=options)
        found += [*differences(weights, both[0]), *differences(states, both[1])]
        assert type(both[1]["state"]) is dict
    flat = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    assert {"state.middle.weight.exp_avg", "param_groups.first.bias.weight_decay"} <= {*flat}
    found += differences(states["state"]["middle.weight"]["exp_avg"], flat["state.middle.weight.exp_avg"])
    rank0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
    both = get_state_dict(model, optimizer, options=rank0)
    if dist.is_initialized() and dist.get_rank():
        assert both == ({}, {})
    else:
        found += [*differences(weights, both[0]), *differences(states, both[1])]
    trained = get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
    assert {*weights} - {*trained} == {"last.bias"}
    assert not found


def state_of(optimizer: Any) -> dict[str, Any]:
    """Return the optimizer's state dict; torch makes lists of tuples on its way with ``full_state_dict``."""
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        group["betas"] = tuple(group["betas"])
    return state


@on_backends(often(ENGINES, "fsdp", "fairscale"))
def test_what_was_returned_is_set(backend: str) -> None:
    """What another training has, in each way."""
    model, optimizer, scheduler = wrapped(backend)
    train(model, optimizer, scheduler, range(2))
    weights, states = dict(model.state_dict()), optimizer.state_dict()
    found = []
    for settings in ({}, {"full_state_dict": True}, {"flatten_optimizer_state_dict": True}, {"strict": False}):
        options = StateDictOptions(**settings)
        given = get_state_dict(model, optimizer, options=options)
        other, others, _ = wrapped(backend, seed=1)
        get_optimizer_state_dict(other, others)
        set_state_dict(other, others, model_state_dict=given[0], optim_state_dict=given[1], options=options)
        found += [f"{settings}: {text}" for text in differences(weights, dict(other.state_dict()))]
        found += [f"{settings}: {text}" for text in differences(states, state_of(others))]
    other, others, _ = wrapped(backend, seed=1)
    set_model_state_dict(other, dict(weights))
    set_optimizer_state_dict(other, others, optimizer.state_dict())
    found += [*differences(weights, dict(other.state_dict())), *differences(states, state_of(others))]
    assert not found


@pytest.mark.parametrize("engine", [engine for engine in ENGINES if engine != "none"])
@on_ranks()
def test_rank_0_has_it_all(engine: str) -> None:
    model, optimizer, scheduler = wrapped(engine)
    train(model, optimizer, scheduler, range(2))
    weights, states = dict(model.state_dict()), optimizer.state_dict()
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    given = get_state_dict(model, optimizer, options=options)
    other, others, _ = wrapped(engine, seed=1)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    # set_state_dict takes an empty dict to mean that the model is not asked for, on that rank alone (torch 2.13).
    set_model_state_dict(other, given[0], options=options)
    set_optimizer_state_dict(other, others, given[1], options=options)
    found = [*differences(weights, dict(other.state_dict())), *differences(states, state_of(others))]
    assert not found


# ------------------------------------------------------------------------------------------------ before a step


def small(engine: str, **settings: Any) -> tuple[Any, Any]:
    """Return a wrapped model of two parameters, of which some of four ranks hold nothing, and its optimizer."""
    torch.manual_seed(0)
    model = fsshard.wrap(nn.Linear(3, 2), **ENGINES[engine], **settings)
    return model, fsshard.build_optimizer(model, torch.optim.AdamW)


@pytest.mark.parametrize("engine", often(["fsdp", "fsdp2", "fairscale"], "fsdp"))
@on_ranks(4)
def test_some_ranks_have_no_part(tmp_path: Path, engine: str) -> None:
    folder = str(tmp_path / "saved")
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    model, optimizer = small(engine)
    fresh = get_optimizer_state_dict(model, optimizer, options=flat)  # what dcp.load fills
    assert {f"state.{name}.{key}" for name in ("weight", "bias") for key in ("step", "exp_avg")} <= {*fresh}
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    states = optimizer.state_dict()
    fsshard.save(folder, model, optimizer)
    other, others = small(engine)
    set_optimizer_state_dict(other, others, get_optimizer_state_dict(model, optimizer, options=flat), options=flat)
    third, thirds = small(engine)
    fsshard.load(folder, third, thirds)
    read = get_optimizer_state_dict(third, thirds)
    found = [*differences(states, others.state_dict()), *differences(states, read)]
    assert not found


@pytest.mark.parametrize("engine", [engine for engine in ENGINES if engine != "none"])
@on_ranks()
def test_before_a_step(engine: str) -> None:
    model, optimizer = small(engine, find_unused_parameters=True)
    before = dict(model.state_dict())
    states = get_optimizer_state_dict(model, optimizer)["state"]
    assert {*states} == {*before}
    for state in states.values():
        assert {*state} == {"step", "exp_avg", "exp_avg_sq"}
    check_equal(before, dict(model.state_dict()))
    assert optimizer.param_groups[0]["lr"] == 1e-3
    plain = fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)  # has no state, before a step and after
    both = get_state_dict(model, plain)
    assert both[1]["state"] == {}
    set_state_dict(model, plain, model_state_dict=both[0], optim_state_dict=both[1])


@pytest.mark.parametrize("engine", ["fsdp", "fsdp2", "fairscale"])
@on_ranks()
def test_several_optimizers(engine: str) -> None:
    model = fsshard.wrap(net(), **ENGINES[engine])
    names = [name for name, value in model.named_parameters() if value.requires_grad]
    optimizers = [
        fsshard.build_optimizer(model, torch.optim.AdamW, names[:2]),
        fsshard.build_optimizer(model, torch.optim.SGD, names[2:4], lr=0.1, momentum=0.9),
        fsshard.build_optimizer(model, torch.optim.Adam, names[4:]),
    ]
    model(samples(0, 0)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    before = [optimizer.state_dict() for optimizer in optimizers]
    both = get_optimizer_state_dict(model, optimizers)
    assert [group["params"] for group in both["param_groups"]] == [names[:2], names[2:4], names[4:]]
    set_optimizer_state_dict(model, optimizers, both)
    found = [*differences(before, [optimizer.state_dict() for optimizer in optimizers])]
    assert not found


# ------------------------------------------------------------------------------------------------ numbers and names


def test_a_number_stands_for_a_name() -> None:
    state = by_name({"a.weight": {"step": 1}, "params": {"step": 2}}, ["a.weight", "params"])
    for number, name in enumerate(["a.weight", "params"]):
        state[number] = state.pop(name)
    group = by_name({"lr": 0.1, "params": ["a.weight"]}, ["a.weight", "params"])
    group["params"] = [1, 0]
    assert state == {"a.weight": {"step": 1}, "params": {"step": 2}}
    assert group == {"lr": 0.1, "params": ["params", "a.weight"]}


def test_a_state_dict_is_read_by_torch_load(tmp_path: Path) -> None:
    state = {"state": by_name({"a": {"step": torch.ones(())}}, ["a"])}
    torch.save(state, tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True) == state
    assert copy.deepcopy(state) == state


# ------------------------------------------------------------------------------------------------ raw FSDP2


def raw_fsdp2() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model = net(is_complex=False)
    for module in (model.middle, model.last, model):
        fully_shard(module)
    optimizer = torch.optim.AdamW(groups_of(model), lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def job_raw(folder: str, loads: bool) -> Any:
    model, optimizer, scheduler = raw_fsdp2()
    if loads:
        for value in model.parameters():
            torch.nn.init.zeros_(value)
        dcp.load({"app": AppState(model, optimizer)}, checkpoint_id=folder)
    else:
        for step in range(2):
            model(samples(step, dist.get_rank())).square().mean().backward()
            take_step(optimizer)
            scheduler.step()
        dcp.save({"app": AppState(model, optimizer)}, checkpoint_id=folder)
    return get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))


def job_wrapped(engine: str, reads: str, writes: str) -> Any:
    model, optimizer, _ = wrapped(engine, is_complex=False, seed=1)
    app = {"app": AppState(model, optimizer)}
    dcp.load(app, checkpoint_id=reads)
    dcp.save(app, checkpoint_id=writes)
    return get_state_dict(model, optimizer)


@pytest.mark.parametrize("engine", often(ENGINES, "fsdp2", "fairscale"))
def test_raw_fsdp2_reads_and_is_read(ranks: Any, tmp_path: Path, engine: str) -> None:
    theirs, ours = str(tmp_path / "theirs"), str(tmp_path / "ours")
    written = ranks.run(job_raw, 2, theirs, False)[0]
    for read in ranks.run(job_wrapped, 1 if engine == "none" else 2, engine, theirs, ours):
        assert not [*differences(written[0], read[0]), *differences(written[1]["state"], read[1]["state"])]
        assert read[1]["param_groups"][0]["lr"] == 2.5e-3
    back = ranks.run(job_raw, 2, ours, True)[0]
    assert not [*differences(written[0], back[0]), *differences(written[1], back[1])]
