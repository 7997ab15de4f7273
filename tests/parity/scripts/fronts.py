"""One training of 4 steps told by engines and trainers that never hear of the others, on two ranks.

torchrun --nproc-per-node 2 fronts.py by-hand | fsdp1 | accelerate | fabric | lightning | transformers | ours
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

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
        return 32

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = torch.randn(6, generator=torch.Generator().manual_seed(index))
        return {"x": x, "labels": x.sum(0, keepdim=True)}


def samples() -> DataLoader[dict[str, Tensor]]:
    """Return this rank's loader, without whose help a library would make another one."""
    return DataLoader(Sums(), batch_size=4, sampler=DistributedSampler(Sums(), shuffle=False))


def loop(model: Any, optimizer: Any, backward: Any = Tensor.backward) -> None:
    """Train in the usual order."""
    for batch in samples():
        loss = nn.functional.mse_loss(model(batch["x"]), batch["labels"])
        optimizer.zero_grad()
        backward(loss)
        optimizer.step()


def by_hand(model: Net) -> None:
    """Average the gradients of bare replicas."""

    def backward(loss: Tensor) -> None:
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()  # type: ignore[operator]

    dist.init_process_group("gloo")
    loop(model, torch.optim.AdamW(model.parameters(), **SETTINGS), backward)


def ours(model: Net) -> None:
    import fsshard

    dist.init_process_group("gloo")
    wrapped = fsshard.wrap(model, backend="fsdp2")
    loop(wrapped, fsshard.build_optimizer(wrapped, torch.optim.AdamW, **SETTINGS))


def fsdp1(model: Net) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    dist.init_process_group("gloo")
    sharded = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    loop(sharded, torch.optim.AdamW(sharded.parameters(), **SETTINGS))


def accelerate(model: Net) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), **SETTINGS))
    loop(*prepared, accelerator.backward)


def fabric(model: Net) -> None:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    prepared = fabric.setup(model, torch.optim.AdamW(model.parameters(), **SETTINGS))
    loop(*prepared, fabric.backward)


def lightning(model: Net) -> None:
    from lightning.pytorch import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def training_step(self, batch: dict[str, Tensor], number: int) -> Tensor:
            return nn.functional.mse_loss(self.net(batch["x"]), batch["labels"])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.net.parameters(), **SETTINGS)

        def train_dataloader(self) -> Any:
            return samples()

    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    on = {"accelerator": "cpu", "devices": 2, "strategy": "ddp", "use_distributed_sampler": False}
    Trainer(max_epochs=1, **on, **quiet).fit(Module())


def transformers(model: Net) -> None:
    from transformers import Trainer, TrainingArguments

    class InOrder(Trainer):
        def get_train_dataloader(self) -> Any:
            return samples()

    with tempfile.TemporaryDirectory() as folder:
        quiet = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "remove_unused_columns": False}
        rate = {
            "optim": "adamw_torch",
            "learning_rate": SETTINGS["lr"],
            "lr_scheduler_type": "constant",
            "max_grad_norm": 0.0,
        }
        arguments = TrainingArguments(folder, num_train_epochs=1, use_cpu=True, **rate, **quiet)
        InOrder(model, arguments, train_dataset=Sums()).train()


if __name__ == "__main__":
    torch.manual_seed(0)
    globals()[sys.argv[1].replace("-", "_")](Net())
    if dist.is_initialized():
        dist.destroy_process_group()
