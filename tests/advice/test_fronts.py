"""The advice of the fronts, followed: in the words of those who call them."""

from __future__ import annotations

import os
import warnings
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsshard
from fsshard.compat.accelerate.arguments import warn_of_one_process
from tests.advice.following import DIVIDED, batch, cases, is_right, plain, refused, square
from tests.training_runs import shared_folder


def fabric_over(strategy: Any) -> Any:
    import lightning

    warnings.filterwarnings("ignore", module="lightning")
    fabric = lightning.Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
    fabric.launch()
    return fabric


def case_fabric() -> None:
    from fsshard.compat.lightning import FabricStrategy

    for backend in DIVIDED:
        fabric, module = fabric_over(FabricStrategy(backend)), plain()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        model, optimizer, scheduler = fabric.setup(module, optimizer, scheduler=scheduler)
        fabric.backward(square(model, batch()))
        optimizer.step()
        scheduler.step()
        assert optimizer.param_groups[0]["lr"] == 0.05
        with shared_folder() as folder:
            with refused("on every rank write fabric.save(file, {'model': model}), whose file has the whole weights"):
                model.state_dict()
            fabric.save(folder / "whole.ckpt", {"model": model})
            fabric.barrier()
            bare = plain()
            bare.load_state_dict(torch.load(folder / "whole.ckpt")["model"])
            again = fabric.setup_module(plain())
            with refused("on every rank write fabric.load(file, {'model': model})"):
                again.load_state_dict(bare.state_dict())
            fabric.load(folder / "whole.ckpt", {"model": again})
            assert torch.equal(again._forward_module.state_dict()["0.weight"], bare[0].weight)
        with refused("an optimizer is set up together with its model, fabric.setup(model, optimizer)"):
            fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))


def forget_accelerates_state() -> None:
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def case_accelerate() -> None:
    from fsshard.compat.accelerate import Accelerator

    for backend in DIVIDED:
        accelerator = Accelerator(cpu=True, fsshard={"backend": backend})
        module = plain()
        model, _ = accelerator.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
        with refused("on every rank call accelerator.get_state_dict(model), or accelerator.save_model(model, folder)"):
            accelerator.unwrap_model(model).state_dict()
        state = accelerator.get_state_dict(model)
        assert torch.equal(state["0.weight"], plain()[0].weight)
        with shared_folder() as folder:
            accelerator.save_model(model, str(folder / "whole"))
            accelerator.save_state(str(folder / "state"))
            with refused("load it before prepare(), or on every rank call accelerator.load_state(folder)"):
                accelerator.unwrap_model(model).load_state_dict(plain().state_dict())
            accelerator.load_state(str(folder / "state"))
        forget_accelerates_state()


def case_accelerates_settings() -> None:
    from accelerate.utils import DataLoaderConfiguration, DistributedDataParallelKwargs
    from torch.utils.data import DataLoader, TensorDataset

    from fsshard.compat.accelerate import Accelerator

    with refused('pass fsshard={"compile": True}, which compiles unit by unit'):
        Accelerator(cpu=True, fsshard={"backend": "ddp"}, dynamo_backend="aot_eager")
    with refused(": ...} where the backend takes it"):
        handlers = [DistributedDataParallelKwargs(bucket_cap_mb=1)]
        Accelerator(cpu=True, fsshard={"backend": "ddp"}, kwargs_handlers=handlers)
    for settings in ({"compile": {"backend": "aot_eager"}}, {"bucket_cap_mb": 1}):
        accelerator = Accelerator(cpu=True, fsshard={"backend": "ddp", **settings})
        is_right(accelerator.prepare_model(plain()))
        forget_accelerates_state()
    data = TensorDataset(torch.ones(5, 4))
    for even, drop_last in ((False, False), (True, False), (False, True)):
        config = DataLoaderConfiguration(even_batches=even)
        accelerator = Accelerator(cpu=True, fsshard={"backend": "fsdp2"}, dataloader_config=config)
        if even or drop_last:
            loader = accelerator.prepare(DataLoader(data, batch_size=2, drop_last=drop_last))
            numbers = [0, 0]
            dist.all_gather_object(numbers, len(list(loader)))
            assert numbers[0] == numbers[1] > 0
        else:
            with refused("leave it at True (gather_for_metrics drops what was added), or drop_last=True"):
                accelerator.prepare(DataLoader(data, batch_size=2, drop_last=drop_last))
        forget_accelerates_state()


def case_lightning() -> None:
    import lightning

    from fsshard.compat.lightning import Strategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = plain()

        def training_step(self, x: Any, number: int) -> Any:
            return square(self, x[0])

        def forward(self, x: Any) -> Any:
            return self.layers(x)

        def on_train_start(self) -> None:
            with refused("on every rank call trainer.save_checkpoint(file)"):
                self.layers.state_dict()
            with refused("load it before fit(), or call fit(module, ckpt_path=file)"):
                self.layers.load_state_dict(plain().state_dict())

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    warnings.filterwarnings("ignore", module="lightning")

    def fit(module: Module, steps: int, parts: bool = False, **settings: Any) -> Any:
        quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        files = {"enable_checkpointing": False, "max_steps": steps}
        strategy = Strategy("fsdp2", save_distributed_checkpoint=parts)
        trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy=strategy, **files, **quiet)
        data = torch.utils.data.TensorDataset(torch.ones(8, 4))
        trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=2), **settings)
        return trainer

    module = Module()
    module.layers.load_state_dict(plain().state_dict())
    trainer = fit(module, 1)
    with shared_folder() as folder:
        trainer.save_checkpoint(folder / "whole.ckpt")
        assert fit(Module(), 2, ckpt_path=folder / "whole.ckpt").global_step == 2
        whole = torch.load(folder / "whole.ckpt")["state_dict"]
        fit(Module(), 1, parts=True).save_checkpoint(folder / "weights", weights_only=True)
        with refused("or make one file of the weights (fsshard export), which module.load_state_dict takes before fit"):
            fit(Module(), 2, ckpt_path=folder / "weights")
        if dist.get_rank() == 0:
            fsshard.export(folder / "weights", folder / "weights.pt", "torch")
        dist.barrier()
        module = Module()
        module.load_state_dict(torch.load(folder / "weights.pt"))
        assert all(torch.equal(value, whole[key]) for key, value in module.state_dict().items())


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = plain()

    def forward(self, x: Any, labels: Any) -> Any:
        found = self.layers(x)
        return {"loss": (found.sum(1) - labels).square().mean(), "logits": found}


def trainer_of(folder: Any, settings: dict[str, Any], **arguments: Any) -> Any:
    import transformers

    from fsshard.compat.transformers import Trainer

    quiet: dict[str, Any] = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "save_strategy": "no"}
    args = transformers.TrainingArguments(str(folder), per_device_train_batch_size=2, **quiet, **arguments)
    return Trainer(WithLoss(), args, train_dataset=[{"x": [1.0] * 4, "labels": 1.0}] * 8, fsshard=settings)


def case_hugging_face() -> None:
    import transformers

    class Asks(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, model: Any, **__: Any) -> None:
            with refused("on every rank call trainer.save_model(folder)"):
                model.state_dict()
            with refused("load it before train(), or call train(resume_from_checkpoint=folder)"):
                model.load_state_dict(WithLoss().state_dict())

    with shared_folder() as folder:
        trainer = trainer_of(folder, {"backend": "fsdp2"}, max_steps=1)
        trainer.add_callback(Asks())
        trainer.train()
        trainer.save_model(str(folder / "whole"))
        dist.barrier()
        assert list((folder / "whole").glob("*.safetensors"))
        trainer._save_checkpoint(trainer.model, None)
        dist.barrier()
        again = trainer_of(folder, {"backend": "fsdp2"}, max_steps=2)
        assert again.train(resume_from_checkpoint=str(folder / "checkpoint-1")).global_step == 2


def case_hugging_faces_settings() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tp"))
    ours = {"bucket_cap_mb": 1, "static_graph": True, "broadcast_buffers": False, "compile": {"backend": "aot_eager"}}
    shared = {"backend": "fsdp2", "device_mesh": mesh["data"], "replicated": {}}
    refusals: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
        ('pass fsshard={"backend": "ddp", "bucket_cap_mb": ...}', {}, {"ddp_bucket_cap_mb": 1}),
        ('pass fsshard={"backend": "ddp", "static_graph": ...}', {}, {"ddp_static_graph": True}),
        ('pass fsshard={"broadcast_buffers": ...}', {}, {"ddp_broadcast_buffers": False}),
        ('pass fsshard={"compile": True}', {}, {"torch_compile": True}),
        ("write the loop over fsshard.wrap with samplers by fsshard.data_rank(mesh)", shared, {}),
    )
    with shared_folder() as folder:
        for told, settings, arguments in refusals:
            with refused(told):
                trainer_of(folder, {"backend": "ddp", **settings}, **arguments)
        trainer_of(folder, {"backend": "ddp", **ours}, max_steps=1).train()
        trainer = trainer_of(folder, {"backend": "fsdp2"}, max_steps=1, bf16=True)
        trainer.train()
    with refused("call trainer.model_wrapped.clip_grad_norm_(max_norm)"):
        trainer.accelerator.clip_grad_norm_(trainer.model.parameters(), 1.0)


def case_training_state() -> None:
    from fractions import Fraction

    from fsshard.compat.neuralop.training_state import load_training_state, save_training_state

    class Schedule:
        state: Any = Fraction(1, 3)

        def state_dict(self) -> Any:
            return {"rate": self.state}

        def load_state_dict(self, state: Any) -> None:
            self.state = state["rate"]

    model, schedule, other = fsshard.wrap(plain(), backend="fsdp2"), Schedule(), Schedule()
    with shared_folder() as folder:
        with refused("Leave them out of that state_dict, or allow them with torch.serialization.add_safe_globals"):
            save_training_state(folder, "model", model, {"epoch": 1}, scheduler=schedule)
        other.state = None
        with torch.serialization.safe_globals([Fraction]):
            save_training_state(folder, "model", model, {"epoch": 1}, scheduler=schedule)
            assert load_training_state(folder, "model", model, scheduler=other)["epoch"] == 1
        assert other.state == Fraction(1, 3)


def case_data_parallel() -> None:
    for backend in ("ddp", "fairscale", *DIVIDED):
        model: Any = nn.DataParallel(plain())
        with refused("the model is an nn.DataParallel; wrap the model without it, which is model.module"):
            fsshard.wrap(model, backend=backend)
        is_right(fsshard.wrap(model.module, backend=backend))
    inside = nn.Sequential(nn.DataParallel(plain()))
    with refused("module '0' is an nn.DataParallel; wrap the model without it, which is 0.module"):
        fsshard.wrap(inside, backend="ddp")


def case_names_of_old() -> None:
    for policy, units in (({nn.Linear}, 3), (None, 1)):
        model = fsshard.wrap(plain(), backend="fsdp", fsdp_auto_wrap_policy=policy)
        assert len(model.plan.units) == units
    is_right(model)


@pytest.mark.parametrize("case", cases(globals()), ids=lambda case: case.__name__)
def test_advice_is_right(ranks: Any, case: Any) -> None:
    ranks.run(case, 2)


def test_accelerate_launch_starts_one_process_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it sets is asked of itself; torchrun, which the warning names, says ranks to everyone it starts."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_simple_launcher_cmd_env

    for ranks, warned in ((2, True), (1, False)):
        args = launch_command_parser().parse_args(["--cpu", "--num_processes", str(ranks), "script.py"])
        args, *_ = _validate_launch_command(args)
        _, environment = prepare_simple_launcher_cmd_env(args)
        with patch.dict(os.environ, environment, clear=True), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warn_of_one_process()
            os.environ.update(RANK="0", WORLD_SIZE="2")
            warn_of_one_process()
        assert ["torchrun --nproc-per-node 2 script.py" in str(each.message) for each in caught] == [True] * warned
