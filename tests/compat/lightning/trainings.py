"""Trainings by Lightning's Trainer, over its own DDP and over ours. What each rank runs."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fsshard.compat.lightning import Strategy
from fsshard.compat.lightning.environment import Launched

ENGINES = ("ddp", "fsdp", "fsdp2", "fairscale")


class Module(lightning.LightningModule):
    """A complex weight, a BatchNorm, a schedule, validations in between; remembers all losses."""

    def __init__(self, complex_weight: bool = True) -> None:
        super().__init__()
        dtype = torch.complex64 if complex_weight else torch.float32
        self.first, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.weight = nn.Parameter(torch.randn(8, 4, dtype=dtype))
        self.losses: list[float] = []
        self.validations: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        found = self.norm(self.first(x)).to(self.weight.dtype) @ self.weight
        return found.abs().sum(1)

    def training_step(self, batch: Any, number: int) -> Tensor:
        loss = (self(batch[0]) - batch[1]).square().mean()
        self.losses.append(loss.item())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        loss = (self(batch[0]) - batch[1]).square().mean()
        self.validations.append(loss.item())
        self.log("validation", loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}


class Manual(Module):
    """Takes its steps itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def loader() -> DataLoader[Any]:
    numbers = torch.Generator().manual_seed(1)
    x, y = torch.randn(32, 6, generator=numbers), torch.randn(32, generator=numbers)
    return DataLoader(TensorDataset(x, y), 4)


def strategy_of(engine: str, **settings: Any) -> Any:
    """Lightning's own, or ours over an engine."""
    return DDPStrategy(cluster_environment=Launched()) if engine == "lightning" else Strategy(engine, **settings)


def trainer_of(strategy: Any, epochs: int, **arguments: Any) -> lightning.Trainer:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    quiet: dict[str, Any] = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "logger"), False)
    quiet["enable_checkpointing"] = any(isinstance(each, ModelCheckpoint) for each in arguments.get("callbacks", ()))
    return lightning.Trainer(
        accelerator="cpu", devices=torch.distributed.get_world_size(), strategy=strategy, max_epochs=epochs, **quiet,
        **arguments,
    )  # fmt: skip


class Weights(Callback):
    """Whole weights at the end of the training, before the strategy lets go of them."""

    def __init__(self) -> None:
        self.state: dict[str, Tensor] = {}

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        state = trainer.strategy.lightning_module_state_dict()
        self.state = {name: value.clone() for name, value in state.items()}


def fit(engine: str, arguments: dict[str, Any], epochs: int = 2, **more: Any) -> dict[str, Any]:
    """Losses, validations and, on rank 0, weights."""
    torch.manual_seed(0)
    module, weights = Module(more.pop("complex_weight", True)), Weights()
    checkpoints = more.pop("callbacks", [])
    trainer = trainer_of(strategy_of(engine), epochs, callbacks=[weights, *checkpoints], **arguments)
    with contextlib.redirect_stderr(io.StringIO()):
        trainer.fit(module, loader(), loader(), **more)
    return {"losses": module.losses, "validations": module.validations, "state": weights.state, "trainer": trainer}


def told(found: dict[str, Any]) -> dict[str, Any]:
    """What can travel."""
    return {key: value for key, value in found.items() if key != "trainer"}


CASES: dict[str, dict[str, Any]] = {
    "clipped": {"gradient_clip_val": 0.5},
    "accumulated": {"accumulate_grad_batches": 2},
    "bf16": {"precision": "bf16-mixed"},
    "fp16": {"precision": "16-mixed"},
    "by value": {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
}


def every_case(engine: str) -> dict[str, dict[str, Any]]:
    return {case: told(fit(engine, given, complex_weight=case != "by value")) for case, given in CASES.items()}


def resumed(engine: str, folder: str, epochs: int, path: str | None) -> dict[str, Any]:
    """A training that writes Lightning's checkpoints, from one of them on, and a test of what came out."""
    keep = ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1, every_n_epochs=1)
    found = fit(engine, {}, epochs, callbacks=[keep], ckpt_path=path)
    trainer = found["trainer"]
    tested = trainer.validate(trainer.lightning_module, loader(), verbose=False)
    return {**told(found), "tested": tested}


def refused(what: str) -> str:
    """The error's type and text."""
    try:
        if what == "manual":
            trainer_of(strategy_of("fsdp2"), 1).fit(Manual(), loader())
        elif what == "precision":
            trainer_of(strategy_of("fsdp2"), 1, precision="bf16-true")
        elif what == "again":
            module = Module()
            trainer = trainer_of(strategy_of("fsdp2"), 1)
            trainer.fit(module, loader())
            trainer.fit(module, loader())
        else:
            fit("fsdp2", CASES["by value"])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def by_former_name(name: str) -> dict[str, Any]:
    """Under a name of Lightning 1.x, and Lightning's registry."""
    from lightning.pytorch.strategies import StrategyRegistry

    strategy = StrategyRegistry.get(name)
    torch.manual_seed(0)
    module = Module()
    trainer_of(strategy, 1).fit(module, loader())
    return {"losses": module.losses, "backend": strategy.backend}
