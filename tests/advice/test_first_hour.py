"""Mistakes of a first hour, each told what to write; the same test writes it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsshard
from fsshard.errors import CheckpointError, ConfigurationError, LaunchError, ModelError, OptimizerError, RankFailed
from tests.advice.following import is_right, plain, refused
from tests.forked import forking
from tests.models import take_step
from tests.on_ranks import on_backends, on_ranks
from tests.sharded.training import ALL
from tests.training_runs import check_equal

AdamW = torch.optim.AdamW


@on_backends(["ddp", "fsdp2"])
def test_settings_of_an_optimizer(backend: str) -> None:
    model = fsshard.wrap(plain(), backend=backend)
    with refused("settings go by name: build_optimizer(model, AdamW, lr=0.001)", OptimizerError):
        fsshard.build_optimizer(model, AdamW, 1e-3)
    with refused("pass a class such as torch.optim.AdamW", OptimizerError):
        fsshard.build_optimizer(model, "AdamW", lr=1e-3)  # type: ignore[arg-type]
    with refused(": expected a number, got a str; write ", OptimizerError):
        fsshard.build_optimizer(model, AdamW, lr="1e-3")
    with refused("pass the model; some of its parameters go third", OptimizerError):
        fsshard.build_optimizer(model.parameters(), AdamW, lr=1e-3)  # type: ignore[arg-type]
    some = [name for name, _ in model.named_parameters()][:2]
    optimizer = fsshard.build_optimizer(model, AdamW, some, lr=float("1e-3"))
    assert optimizer.param_groups[0]["lr"] == 0.001 and [entry.name for entry in optimizer.entries] == some


@on_ranks()
def test_parameters_of_a_loss() -> None:
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = plain()
            self.scale = nn.Parameter(torch.ones(2))

        def forward(self, x: Any) -> Any:
            return self.net(x) * self.scale

    model = fsshard.wrap(plain(), backend="fsdp2")
    with refused("a part of the model before fsshard.wrap, or wrap it by itself and build an optimizer of its own"):
        fsshard.build_optimizer(model, AdamW, [nn.Parameter(torch.ones(2))])
    is_right(fsshard.wrap(WithLoss(), backend="fsdp2"), WithLoss)


@on_backends(["ddp", "fsdp2", "fsdp", "fairscale"])
def test_ddp_around_it(backend: str) -> None:
    model = fsshard.wrap(plain(), backend=backend)
    with refused("call it as it is, with backend='ddp' for DDP", ModelError):
        nn.parallel.DistributedDataParallel(model)
    is_right(fsshard.wrap(plain(), backend="ddp"))


@on_backends(["fsdp2", "fsdp"])
def test_copies_of_a_sharded_module(backend: str) -> None:
    model = fsshard.wrap(plain(), backend=backend)
    with refused("or load the state dict into a bare model"):
        copy.deepcopy(model.module)
    bare = plain()
    bare.load_state_dict(model.state_dict())
    assert torch.equal(bare[0].weight, plain()[0].weight)


@on_ranks()
def test_what_was_saved_beside_the_model() -> None:
    folders = [None]
    if dist.get_rank() == 0:
        import tempfile

        folders = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders)
    model = fsshard.wrap(plain(), backend="fsdp2")
    fsshard.save(f"{folders[0]}/one", model, epoch=3)
    loaded = fsshard.load(f"{folders[0]}/one", model)
    assert loaded["epoch"] == loaded.state["epoch"] == 3
    with pytest.raises(KeyError, match="'step' is not among what was saved beside the model and optimizer: 'epoch'"):
        loaded["step"]


@pytest.mark.parametrize("backend", ALL)
@on_ranks(1)
def test_a_dimension_that_is_called_as_in_the_guide_of_fields(backend: str) -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("data", "dx", "dy"))
    assert fsshard.data_rank(mesh) == (0, 1)
    fsshard.wrap(plain(), backend=backend, device_mesh=mesh["data"], replicated={})


def test_records_and_checkpoints_that_are_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from fsshard.checkpoint.interop.importing import import_checkpoint
    from fsshard.cli.app import main
    from fsshard.parity.scripts.command import run

    file = tmp_path / "file.txt"
    file.touch()
    with refused("expected a folder for the record, got the file", ConfigurationError):
        run(["python", "-c", ""], file)
    assert run(["python", "-c", ""], tmp_path / "record") == 0
    assert main(["trace", str(tmp_path / "other"), "--steps", "5:2", "--", "python", "-c", ""]) == 2
    assert "expected FIRST before STOP, for example 0:50" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="expected a checkpoint, found no such file or folder"):
        import_checkpoint(tmp_path / "nix", tmp_path / "out")


class Unlooking(torch.optim.Optimizer):
    """Does not look whether a parameter has a gradient."""

    def __init__(self, parameters: Any, lr: float = 0.1, chosen: Any = None) -> None:
        super().__init__([*parameters, *(chosen or ())], {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad, alpha=-group["lr"])


@on_backends(["ddp", "fairscale", "fsdp", "fsdp2"])
def test_an_optimizer_that_does_not_look_for_gradients(backend: str) -> None:
    """Two numbers in a model: a flat part of one rank has none of them."""

    def small() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))

    model = fsshard.wrap(small(), backend=backend)
    optimizer = fsshard.build_optimizer(model, Unlooking, lr=0.1)
    bare = small()
    judge = Unlooking(bare.parameters(), lr=0.1)
    for _ in range(2):
        for each, own in ((model, optimizer), (bare, judge)):
            each(torch.ones(2, 1)).square().sum().backward()
            take_step(own)
    saved = model.state_dict()
    check_equal(dict(bare.state_dict()), dict(saved))


@on_ranks()
def test_parameters_by_keyword() -> None:
    model = fsshard.wrap(plain(), backend="ddp")
    first, *others = model.parameters()
    with refused("give them as a group of their own, with the settings that the class reads there", OptimizerError):
        fsshard.build_optimizer(model, Unlooking, others, chosen=[first])
    optimizer = fsshard.build_optimizer(model, Unlooking, [{"params": others}, {"params": [first], "lr": 0.2}])
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]


@on_ranks()
def test_gradients_that_have_no_shape_on_a_rank() -> None:
    model = fsshard.wrap(plain(), backend="fsdp")
    model(torch.ones(2, 4)).sum().backward()
    with refused("to change gradients number by number, or to clip their values, use backend='fsdp2', 'fairscale' or"):
        nn.utils.clip_grad_value_(model.parameters(), 0.1)
    model = fsshard.wrap(plain(), backend="fsdp2")
    bare = plain()
    for each in (model, bare):
        each(torch.ones(2, 4)).sum().backward()
        nn.utils.clip_grad_value_(each.parameters(), 0.1)
    for shard, whole in zip(model.parameters(), bare.parameters(), strict=True):
        assert torch.equal(shard.grad.full_tensor(), whole.grad)  # type: ignore[union-attr]


def case_destroyed(ctx: Any, folder: str) -> str:
    model = fsshard.wrap(plain(), backend="fsdp2")
    optimizer = fsshard.build_optimizer(model, AdamW)
    calls = (
        lambda: fsshard.save(folder, model, optimizer),
        lambda: fsshard.load(folder, model),
        model.state_dict,
        optimizer.state_dict,
    )
    for call in calls:
        call()
    dist.barrier()
    dist.destroy_process_group()
    for call in calls:
        with refused("call this before torch.distributed.destroy_process_group()", LaunchError):
            call()
    return "refused"


def test_calls_behind_the_end_of_the_process_group(tmp_path: Path) -> None:
    with refused("write def train(ctx, ...): the context first, then a parameter for each of args", LaunchError):
        fsshard.launch(case_destroyed, 1)
    with forking():
        assert fsshard.launch(case_destroyed, 1, (str(tmp_path / "one"),)) == "refused"


def train_and_save_on_rank_0(ctx: Any) -> None:
    model = fsshard.wrap(plain(), backend="fsdp2")
    optimizer = fsshard.build_optimizer(model, AdamW)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    if ctx.rank == 0:
        optimizer.state_dict()


def test_an_optimizers_state_on_one_rank_alone() -> None:
    with forking(), refused("All ranks must call optimizer.state_dict() equally often", RankFailed):
        fsshard.launch(train_and_save_on_rank_0, 2)
