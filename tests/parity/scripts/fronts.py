"""One training of 4 steps told five times: by hand, and to trainers of other libraries, which never hear of the others.

python fronts.py by-hand | lightning | transformers | accelerate | ours
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

SETTINGS = {"lr": 1e-2, "weight_decay": 0.0}


class Net(nn.Module):
    """Takes targets too, as Hugging Face's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        y = self.last(torch.tanh(self.first(x)))
        return y if labels is None else {"loss": nn.functional.mse_loss(y, labels), "logits": y}


class Sums(Dataset[dict[str, Tensor]]):
    """Numbers and their sum."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = torch.randn(6, generator=torch.Generator().manual_seed(index))
        return {"x": x, "labels": x.sum(0, keepdim=True)}


def loop(model: Any, optimizer: Any, loader: Any, backward: Any = Tensor.backward) -> None:
    """Train in the usual order."""
    for batch in loader:
        loss = nn.functional.mse_loss(model(batch["x"]), batch["labels"])
        optimizer.zero_grad()
        backward(loss)
        optimizer.step()


def by_hand(model: Net, loader: Any) -> None:
    loop(model, torch.optim.AdamW(model.parameters(), **SETTINGS), loader)


def ours(model: Net, loader: Any) -> None:
    import fsshard

    wrapped = fsshard.wrap(model, backend="fsdp2")
    loop(wrapped, fsshard.build_optimizer(wrapped, torch.optim.AdamW, **SETTINGS), loader)


def accelerate(model: Net, loader: Any) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), **SETTINGS), loader)
    loop(*prepared, accelerator.backward)


def lightning(model: Net, loader: Any) -> None:
    from lightning.pytorch import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def training_step(self, batch: dict[str, Tensor], number: int) -> Tensor:
            return nn.functional.mse_loss(self.net(batch["x"]), batch["labels"])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.net.parameters(), **SETTINGS)

    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    Trainer(max_epochs=1, accelerator="cpu", devices=1, **quiet).fit(Module(), loader)


def transformers(model: Net, loader: Any) -> None:
    from transformers import Trainer, TrainingArguments

    class InOrder(Trainer):
        def get_train_dataloader(self) -> Any:
            return loader

    with tempfile.TemporaryDirectory() as folder:
        quiet = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "remove_unused_columns": False}
        rate = {
            "optim": "adamw_torch",
            "learning_rate": SETTINGS["lr"],
            "lr_scheduler_type": "constant",
            "max_grad_norm": 0.0,
        }
        arguments = TrainingArguments(folder, num_train_epochs=1, use_cpu=True, **rate, **quiet)
        InOrder(model, arguments, train_dataset=loader.dataset).train()


if __name__ == "__main__":
    torch.manual_seed(0)
    globals()[sys.argv[1].replace("-", "_")](Net(), DataLoader(Sums(), batch_size=4))
