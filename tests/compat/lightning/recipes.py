"""LightningModules as recipes, and the same trained by Lightning's Trainer. What ranks run, too."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fsshard.compat.lightning import from_lightning
from fsshard.compat.lightning.plugins import Launched
from fsshard.parity import Recipe
from fsshard.parity.training import Job, Training

STEPS = 6


class Module(lightning.LightningModule):
    """A complex weight, two groups of parameters, a schedule that steps per epoch; remembers its losses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.weight = nn.Parameter(torch.randn(8, 4, dtype=torch.complex64))
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return (self.first(x).to(self.weight.dtype) @ self.weight).abs().sum(1)

    def training_step(self, batch: Any, number: int) -> dict[str, Tensor]:
        loss = (self(batch[0]) - batch[1]).square().mean() * (1 + number)
        self.losses.append(loss.item())
        self.log("loss", loss)
        return {"loss": loss}

    def configure_optimizers(self) -> Any:
        groups = [{"params": [self.weight], "lr": 2e-2}, {"params": self.first.parameters()}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)
        schedules = [torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=1)]
        schedules.append(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
        return [optimizer], [torch.optim.lr_scheduler.SequentialLR(optimizer, schedules, [1])]


class Data(lightning.LightningDataModule):
    """24 samples, shuffled: three batches per epoch and rank, of two ranks."""

    def setup(self, stage: str) -> None:
        numbers = torch.Generator().manual_seed(1)
        self.samples = TensorDataset(torch.randn(24, 6, generator=numbers), torch.randn(24, generator=numbers))

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.samples, 4, shuffle=True)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[0] * 2, batch[1]


recipe = from_lightning(Module, Data())


class Manual(Module):
    """Takes its steps itself."""

    automatic_optimization = False  # type: ignore[assignment]


def loss_alone() -> Recipe:
    """Return all that a recipe can say of it."""
    return Recipe(build=Manual, batches=recipe.batches, loss=_loss, optimizer=torch.optim.SGD, hyper={"lr": 0.1})


def _loss(model: Any, batch: Any) -> Tensor:
    (x, y), _ = batch  # with its number
    return (model(x) - y).square().mean()


class Hooked(Module):
    """Changes gradients where a recipe would not."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            parameter.grad.mul_(0.5)  # type: ignore[union-attr]


class Several(Module):
    """Two optimizers."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([self.weight], lr=0.1), torch.optim.SGD(self.first.parameters(), lr=0.1)


class Plateau(Module):
    """A schedule that watches a metric."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "loss"}}


def by_lightning() -> tuple[list[float], list[float]]:
    """This rank's losses and the learning rates at the end, by Lightning's Trainer over its own DDP."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    torch.manual_seed(0)
    module = Module()
    quiet: dict[str, Any] = dict.fromkeys(
        ("enable_progress_bar", "enable_model_summary", "logger", "enable_checkpointing"), False
    )
    strategy = DDPStrategy(cluster_environment=Launched())
    trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=2, **quiet)
    trainer.fit(module, Data())
    return module.losses, [group["lr"] for group in trainer.optimizers[0].param_groups]


def by_recipe(source: str, engine: str, steps: int) -> tuple[list[float], list[float]]:
    """Likewise, by the loop that ``compare`` runs, over an engine."""
    training = Training(Job(source=source, engine=engine, steps=steps, world_size=2, folder=""))
    losses = []
    for step in range(steps):
        losses.append(training.losses(training.batches(step)))
        training.finish()
    return losses, [group["lr"] for group in training.engine.optimizer.param_groups]
