"""Meshes of several dimensions: which are refused, which are taken for replicas and shards, and how those train."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ShardingStrategy

import fsshard
from fsshard.backends.whole import state_of
from fsshard.errors import ConfigurationError
from tests.models import batch, net, take_step
from tests.on_ranks import on_ranks
from tests.sets import often
from tests.training_runs import DISTRIBUTED, check_equal, differences

STEPS = 3
BOUND = 2.0**-20
"""On four ranks sums have another order: three SGD steps at rate 0.1 with gradients clipped to 0.1 add up rounding
errors of numbers below 1."""


WHOLE = {
    ("data", "tp"): "'tp' splits the model",
    ("dp", "cp"): "'cp' splits the model",
    ("data", "domain"): "'domain' splits the model",
    ("pp", "replicate"): "'pp' splits the model",
    ("DP", "Tensor-Parallel"): "'Tensor-Parallel' splits the model",
}


@on_ranks()
def test_a_mesh_that_splits_the_model_is_refused_whole() -> None:
    """A mesh that splits the model is refused whole, and leaves the model as it was."""
    hybrid = {"backend": "fsdp2", "sharding_strategy": "HYBRID_SHARD"}  # which does not help
    cases = [(("data", "tp"), {"backend": backend}) for backend in DISTRIBUTED]
    for names, settings in [*cases, *((names, hybrid) for names in WHOLE)]:
        module = net()
        before = dict(module.named_parameters())
        data = next(name for name in names if name.lower() in ("data", "dp", "replicate"))
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=names)
        with pytest.raises(ConfigurationError) as caught:
            fsshard.wrap(module, device_mesh=mesh, **settings)
        assert f"{WHOLE[names]}" in str(caught.value) and f"mesh[{data!r}]" in str(caught.value)
        assert all(parameter is before[name] for name, parameter in module.named_parameters())


def job_trained(settings: dict[str, Any], names: tuple[str, str] | None) -> tuple[float, dict[str, Any], Any]:
    if names is not None:
        settings = {**settings, "device_mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=names)}
    model = fsshard.wrap(net(), **settings)
    optimizer = fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9)
    for number in range(STEPS):
        model(batch(number)).square().mean().backward()
        model.clip_grad_norm_(0.1)
        take_step(optimizer)
    entries = model.backend.entries.values()
    states = [state_of(optimizer.inner, entry) for entry in entries]
    held = sum(found["momentum_buffer"].numel() for found in states if found)
    state = {name: found["momentum_buffer"] for name, found in optimizer.state_dict()["state"].items()}
    return held / sum(entry.stored_shape.numel() for entry in entries), model.state_dict(), state


def by_hand() -> tuple[dict[str, Any], Any]:
    """Four replicas, their gradients averaged by hand: nothing of ours but the model and its batches."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number in range(STEPS):
        optimizer.zero_grad()
        for rank in range(4):
            inputs = torch.randn(3, 4, generator=torch.Generator().manual_seed(17 * number + rank))  # that rank's batch
            (model(inputs).square().mean() / 4).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    state = {name: optimizer.state[p]["momentum_buffer"] for name, p in model.named_parameters()}
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, state


SETTINGS: dict[str, dict[str, Any]] = {
    "fsdp": {"backend": "fsdp"},
    "fsdp zero2": {"backend": "fsdp", "sharding_strategy": ShardingStrategy._HYBRID_SHARD_ZERO2},
    "fsdp2": {"backend": "fsdp2"},
    "fsdp2 zero2": {"backend": "fsdp2", "sharding_strategy": "_HYBRID_SHARD_ZERO2"},
    "fairscale": {"backend": "fairscale"},
    "fairscale zero2": {"backend": "fairscale", "sharding_strategy": "_HYBRID_SHARD_ZERO2"},
}


@pytest.mark.parametrize("how", often(SETTINGS, "fsdp", "fsdp2", "fsdp2 zero2", "fairscale"))
def test_the_names_are_enough(ranks: Any, how: str) -> None:
    """Sharded within pairs, replicated across, complex weights too; against four replicas averaged by hand."""
    weights, state = by_hand()
    answers = ranks.run(job_trained, 4, SETTINGS[how], ("dp_replicate", "dp_shard"))
    assert all(list(differences(list(answers[0][1:]), list(answer[1:]))) == [] for answer in answers)
    assert answers[0][0] + answers[1][0] == answers[2][0] + answers[3][0] == 1
    for held, mine, moments in answers:
        assert 0.2 < held < 0.8, "of the optimizer's state"
        assert any(value.is_complex() for value in mine.values())
        for found, wanted in ((mine, weights), (moments, state)):
            assert found.keys() >= wanted.keys()
            for name, value in wanted.items():
                assert (value - found[name]).abs().max() <= BOUND, name


@pytest.mark.parametrize("backend", often(["fsdp", "fsdp2", "fairscale"], "fsdp2"))
@on_ranks(4)
def test_a_resumed_training_has_the_same_bits(backend: str, tmp_path: Any) -> None:
    """And the checkpoint loads under ddp, the optimizer's state too."""
    settings = {"backend": backend}
    folder = str(tmp_path)
    path = f"{folder}/{settings['backend']}"

    def made(**how: Any) -> tuple[Any, Any]:
        model = fsshard.wrap(net(), **how)
        return model, fsshard.build_optimizer(model, torch.optim.Adam, lr=0.01)

    def go_on(model: Any, optimizer: Any, first: int) -> Any:
        for number in range(first, first + 2):
            model(batch(number)).square().mean().backward()
            model.clip_grad_norm_(0.1)
            take_step(optimizer)
        return model.state_dict(), optimizer.state_dict()["state"]

    how = {**settings, "device_mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))}
    model, optimizer = made(**how)
    go_on(model, optimizer, 0)
    fsshard.save(path, model, optimizer)
    saved = model.state_dict(), optimizer.state_dict()["state"]
    again, its = made(**how)
    fsshard.load(path, again, its)
    other, others = made(backend="ddp")
    fsshard.load(path, other, others)
    loaded = other.state_dict(), others.state_dict()["state"]
    there = [*saved, *go_on(model, optimizer, 2)]
    here = [*loaded, *go_on(again, its, 2)]
    check_equal(there, here)
