"""The advice of the fronts, followed: in the words of those who call them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsshard
from tests.advice.following import DIVIDED, batch, cases, is_right, plain, refused, square
from tests.training_runs import check_equal, shared_folder


def case_fabric() -> None:
    from tests.compat.lightning.fabric_trainings import fabric_of

    for backend in DIVIDED:
        fabric, module = fabric_of(backend), plain()
        fabric.launch()
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


def case_accelerate() -> None:
    from tests.compat.accelerate.trainings import accelerator_of

    for backend in DIVIDED:
        accelerator = accelerator_of(backend)
        module = plain()
        model, _ = accelerator.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
        with refused("on every rank call accelerator.get_state_dict(model), or accelerator.save_model(model, folder)"):
            accelerator.unwrap_model(model).state_dict()
        assert torch.equal(accelerator.get_state_dict(model)["0.weight"], plain()[0].weight)
        with shared_folder() as folder:
            accelerator.save_model(model, str(folder / "whole"))
            accelerator.save_state(str(folder / "state"))
            with refused("load it before prepare(), or on every rank call accelerator.load_state(folder)"):
                accelerator.unwrap_model(model).load_state_dict(plain().state_dict())
            accelerator.load_state(str(folder / "state"))


def case_accelerates_settings() -> None:
    from accelerate.utils import DataLoaderConfiguration, DistributedDataParallelKwargs
    from torch.utils.data import DataLoader, TensorDataset

    from tests.compat.accelerate.trainings import accelerator_of

    with refused('pass fsshard={"compile": True}, which compiles unit by unit'):
        accelerator_of("ddp", dynamo_backend="aot_eager")
    with refused(": ...} where the backend takes it"):
        accelerator_of("ddp", kwargs_handlers=[DistributedDataParallelKwargs(bucket_cap_mb=1)])
    for settings in ({"compile": {"backend": "aot_eager"}}, {"bucket_cap_mb": 1}):
        is_right(accelerator_of({"backend": "ddp", **settings}).prepare_model(plain()))
    data = TensorDataset(torch.ones(5, 4))
    for even, drop_last in ((False, False), (True, False), (False, True)):
        accelerator = accelerator_of("fsdp2", dataloader_config=DataLoaderConfiguration(even_batches=even))
        if even or drop_last:
            loader = accelerator.prepare(DataLoader(data, batch_size=2, drop_last=drop_last))
            numbers = [0, 0]
            dist.all_gather_object(numbers, len(list(loader)))
            assert numbers[0] == numbers[1] > 0
        else:
            with refused("leave it at True (gather_for_metrics drops what was added), or drop_last=True"):
                accelerator.prepare(DataLoader(data, batch_size=2, drop_last=drop_last))


def case_lightning() -> None:
    from tests.compat.lightning.trainings import Module, loader, trainer_of

    class Asks(Module):
        def on_train_start(self) -> None:
            with refused("on every rank call trainer.save_checkpoint(file)"):
                self.first.state_dict()
            with refused("load it before fit(), or call fit(module, ckpt_path=file)"):
                self.first.load_state_dict(nn.Linear(6, 8).state_dict())

    def fit(steps: int, parts: bool = False, **settings: Any) -> Any:
        trainer = trainer_of("fsdp2", 2, {"save_distributed_checkpoint": parts}, max_steps=steps)
        torch.manual_seed(0)
        trainer.fit(Asks(), loader(), **settings)
        return trainer

    trainer = fit(1)
    with shared_folder() as folder:
        trainer.save_checkpoint(folder / "whole.ckpt")
        assert fit(2, ckpt_path=folder / "whole.ckpt").global_step == 2
        whole = torch.load(folder / "whole.ckpt")["state_dict"]
        fit(1, parts=True).save_checkpoint(folder / "weights", weights_only=True)
        with refused("or make one file of the weights (fsshard export), which module.load_state_dict takes before fit"):
            fit(2, ckpt_path=folder / "weights")
        if dist.get_rank() == 0:
            fsshard.export(folder / "weights", folder / "weights.pt", "torch")
        dist.barrier()
        module = Module()
        module.load_state_dict(torch.load(folder / "weights.pt"))
        check_equal(dict(module.state_dict()), dict(whole))


def case_hugging_face() -> None:
    import transformers

    from tests.compat.transformers.trainings import Complex, trainer_of

    class Asks(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, model: Any, **__: Any) -> None:
            with refused("on every rank call trainer.save_model(folder)"):
                model.state_dict()
            with refused("load it before train(), or call train(resume_from_checkpoint=folder)"):
                model.load_state_dict(Complex().state_dict())

    with shared_folder() as folder:
        trainer = trainer_of("fsdp2", str(folder), Complex(), max_steps=1, eval_strategy="no")
        trainer.add_callback(Asks())
        trainer.train()
        trainer.save_model(str(folder / "whole"))
        dist.barrier()
        assert list((folder / "whole").glob("*.safetensors"))
        trainer._save_checkpoint(trainer.model, None)
        dist.barrier()
        again = trainer_of("fsdp2", str(folder), Complex(), max_steps=2, eval_strategy="no")
        assert again.train(resume_from_checkpoint=str(folder / "checkpoint-1")).global_step == 2


def case_hugging_faces_settings() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    from tests.compat.transformers.trainings import Complex, trainer_of

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tp"))
    ours = {"bucket_cap_mb": 1, "static_graph": True, "broadcast_buffers": False, "compile": {"backend": "aot_eager"}}
    shared = {"backend": "fsdp2", "device_mesh": mesh["data"], "replicated": {}}
    ddp, once = {"backend": "ddp"}, {"max_steps": 1, "eval_strategy": "no"}
    refusals = (
        ('pass fsshard={"backend": "ddp", "bucket_cap_mb": ...}', ddp, {"ddp_bucket_cap_mb": 1}),
        ('pass fsshard={"backend": "ddp", "static_graph": ...}', ddp, {"ddp_static_graph": True}),
        ('pass fsshard={"broadcast_buffers": ...}', ddp, {"ddp_broadcast_buffers": False}),
        ('pass fsshard={"compile": True}', ddp, {"torch_compile": True}),
        ("write the loop with fsshard.wrap and samplers from fsshard.data_rank(mesh)", shared, {}),
    )
    with shared_folder() as folder:
        for told, settings, arguments in refusals:
            with refused(told):
                trainer_of(settings, str(folder), Complex(), **arguments)
        trainer_of({**ddp, **ours}, str(folder), Complex(torch.float32), **once).train()
        trainer = trainer_of("fsdp2", str(folder), Complex(torch.float32), bf16=True, **once)
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

    model, schedule = fsshard.wrap(plain(), backend="fsdp2"), Schedule()
    with shared_folder() as folder:
        with refused("or allow them with torch.serialization.add_safe_globals"):
            save_training_state(folder, "model", model, {"epoch": 1}, scheduler=schedule)
        assert not list(folder.iterdir())
        with torch.serialization.safe_globals([Fraction]):
            save_training_state(folder, "model", model, {"epoch": 1}, scheduler=schedule)
        schedule.state = None
        with refused("if you trust the file, allow them with torch.serialization.add_safe_globals"):
            load_training_state(folder, "model", model, scheduler=schedule)
        with torch.serialization.safe_globals([Fraction]):
            assert load_training_state(folder, "model", model, scheduler=schedule)["epoch"] == 1
        assert schedule.state == Fraction(1, 3)


def case_data_parallel() -> None:
    for backend in ("ddp", "fairscale", *DIVIDED):
        model = nn.DataParallel(plain())
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
