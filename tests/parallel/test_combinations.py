"""Models that were split before, together with what else wrap can do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import fsshard
from fsshard.errors import ConfigurationError
from tests.models import with_sgd
from tests.on_ranks import on_backends
from tests.parallel.test_dtensors import BOUND, Block, batch, in_parts, on_one_process
from tests.sets import often
from tests.training_runs import DISTRIBUTED, check_equal

STEPS = 4


def trained(model: Any, x_of: Any) -> list[float]:
    optimizer = fsshard.build_optimizer(model, torch.optim.SGD, lr=0.05, momentum=0.9)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        with model.autocast():
            loss = model(x_of(step)).float().square().mean()
        loss.backward()
        model.clip_grad_norm_(0.5)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def job_with(backend: str, settings: dict[str, Any]) -> list[float]:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tp"))
    model = fsshard.wrap(
        in_parts(mesh["tp"]), backend=backend, device_mesh=mesh["data"], auto_wrap_policy={Block}, **settings
    )
    return trained(model, lambda step: batch(1, step))


@pytest.mark.parametrize("backend", often(["none", *DISTRIBUTED], "fsdp2"))
def test_dtensors_are_recomputed(ranks: Any, backend: str) -> None:
    """Recomputed blocks take DTensors again; also on ranks that have no other rank of data."""
    theirs = on_one_process(1)["losses"]
    settings = {"activation_checkpointing": {Block}}
    for ours in ranks.run(job_with, 2, backend, settings):
        assert ours == pytest.approx(theirs, abs=BOUND)


@pytest.mark.parametrize("backend", often(DISTRIBUTED, "fsdp"))
def test_dtensors_in_bfloat16(ranks: Any, backend: str) -> None:
    """bfloat16 has eight bits: 2e-2 of losses below 1, and the same on both ranks."""
    theirs = on_one_process(1)["losses"]
    first, second = ranks.run(job_with, 2, backend, {"mixed_precision": "bf16"})
    assert first == second
    assert first == pytest.approx(theirs, abs=2e-2) and first != pytest.approx(theirs, abs=1e-7)


@on_backends(["ddp", "fsdp2"])
def test_ranks_of_other_dimensions_skip_a_step_together(backend: str) -> None:
    """One rank of tp alone overflows: all skip the step."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tp"))
    model, optimizer = with_sgd(in_parts(mesh["tp"]), backend=backend, device_mesh=mesh["data"])
    scaler = fsshard.GradScaler(model, init_scale=4.0)
    before = model.state_dict()
    scaler.scale(model(batch(1, 0)).square().mean()).backward()
    optimizer.finish_gradients()
    if dist.get_rank() == 1:
        optimizer.local_gradients()[0].view(-1)[0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    after = model.state_dict()
    assert scaler.get_scale() == 2.0
    check_equal(dict(after), dict(before))


def job_two_models(path: str) -> dict[str, Tensor]:
    """Two pairs of ranks train a model each: tensor parallelism in each, one checkpoint of each."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("ensemble", "data", "tp"))
    number = mesh["ensemble"].get_local_rank()
    model = fsshard.wrap(in_parts(mesh["tp"]), backend="fsdp2", device_mesh=mesh["data"])
    trained(model, lambda step: batch(1, 10 * number + step))
    fsshard.save(f"{path}-{number}", model)
    state = model.state_dict()
    again = fsshard.wrap(in_parts(mesh["tp"]), backend="ddp", device_mesh=mesh["data"])
    fsshard.load(f"{path}-{number}", again)
    check_equal(dict(again.state_dict()), dict(state))
    return state


def test_two_models_in_one_job(ranks: Any, tmp_path: Path) -> None:
    one, same, other, too = ranks.run(job_two_models, 4, str(tmp_path / "model"))
    assert all(torch.equal(one[name], same[name]) and torch.equal(other[name], too[name]) for name in one)
    assert not torch.equal(one["head.weight"], other["head.weight"])


def job_torchs_clipping(said: bool) -> float:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tp"))
    model = fsshard.wrap(
        in_parts(mesh["tp"]) if said else torch.nn.Linear(16, 2), backend="fsdp2", device_mesh=mesh["data"]
    )
    fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
    model(batch(1, 0)).square().mean().backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def test_torchs_own_clipping_counts_all_dimensions(ranks: Any) -> None:
    theirs = on_one_process(1)["norms"][0]
    assert ranks.run(job_torchs_clipping, 2, True) == [pytest.approx(theirs, abs=BOUND)] * 2
    for error in ranks.run_expecting_errors(job_torchs_clipping, 2, False):
        assert isinstance(error, ConfigurationError) and "wrap was not told what the others do" in str(error)
