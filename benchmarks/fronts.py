"""Steps through other people's front doors: each over fsshard, beside the same front over its own DDP.

    python benchmarks/fronts.py [--rounds 30] [--width 512]

Two ranks, a residual perceptron. ``fabric``: loops over Lightning Fabric, ``backward``, ``clip_gradients``, a step.
``trainer``: Lightning's Trainer, of which each pair of fits gives the ratio of their batches' medians. Both sides in
turns, so that a busy machine is busy for both; medians of the ratios. With ``ddp`` it is what the front costs; the
other engines send more, or other things, than DDP.
"""

from __future__ import annotations

import argparse
import functools
import logging
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import lightning
import torch
from lightning.fabric.strategies import DDPStrategy as FabricDDP
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fsshard
from benchmarks.pairs import WARM_UP, Ratio, Step, interval, measure
from fsshard.compat.lightning import FabricStrategy, Strategy
from fsshard.compat.lightning.environment import Launched

ENGINES = ("ddp", "fsdp2", "fairscale")
BATCHES, SIZE = 25, 32


class Model(lightning.LightningModule):
    """Residual perceptrons."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        loss: Tensor = self(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def fabric_step(strategy: Any, width: int) -> Step:
    """One step of a loop over Fabric."""
    fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    bare = Model(width)
    model, optimizer = fabric.setup(bare, bare.configure_optimizers())
    x = torch.randn(SIZE, width, generator=torch.Generator().manual_seed(1))

    def step(_: int) -> None:
        optimizer.zero_grad()
        fabric.backward(model(x).square().mean())
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()

    return step


class Clock(Callback):
    """Seconds of each batch, its step included."""

    def __init__(self) -> None:
        self.batches: list[float] = []
        self._start = 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        """Begin."""
        self._start = time.perf_counter()

    def on_train_batch_end(self, *_: Any) -> None:
        """End."""
        self.batches.append(time.perf_counter() - self._start)


def trainer_seconds(strategy: Any, width: int) -> float:
    """A batch's median in one fit of the Trainer, the first ones left out."""
    data = torch.randn(2 * BATCHES * SIZE, width, generator=torch.Generator().manual_seed(1))
    loader: Any = DataLoader(TensorDataset(data), SIZE)
    quiet: Any = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "logger", "enable_checkpointing"), False)
    clock = Clock()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=1,
        gradient_clip_val=1.0,
        callbacks=[clock],
        **quiet,
    )
    trainer.fit(Model(width), loader)
    return statistics.median(clock.batches[WARM_UP:])


def work(ctx: fsshard.Context, args: argparse.Namespace) -> None:
    """Both fronts, each engine in turn with Lightning's own."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    for engine in ENGINES:
        own = fabric_step(FabricDDP(cluster_environment=Launched()), args.width)
        theirs, ours = measure([own, fabric_step(FabricStrategy(engine), args.width)], args.rounds)
        show(ctx, "fabric", engine, theirs.milliseconds()[0], ours.milliseconds()[0], ours.over(theirs)[0])
        pairs = []
        for number in range(max(args.rounds // 3, 3)):
            sides = [lambda: DDPStrategy(cluster_environment=Launched()), functools.partial(Strategy, engine)]
            order = (0, 1) if number % 2 else (1, 0)
            seconds = {side: trainer_seconds(sides[side](), args.width) for side in order}
            pairs.append((seconds[0], seconds[1]))
        theirs_ms, ours_ms = (1e3 * statistics.median(each) for each in zip(*pairs, strict=True))
        show(ctx, "trainer", engine, theirs_ms, ours_ms, interval([ours / theirs for theirs, ours in pairs]))


def show(ctx: fsshard.Context, front: str, engine: str, theirs: float, ours: float, ratio: Ratio) -> None:
    """A row."""
    if not ctx.rank:
        print(f"| {front} | {engine} | {theirs:.1f} | {ours:.1f} | {ratio} |", flush=True)


def main() -> None:
    """One job of two ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--width", type=int, default=512)
    args = parser.parse_args()
    print(
        "| front | engine | its own DDP, ms | fsshard, ms | fsshard / its own DDP |\n|---|---|---|---|---|", flush=True
    )
    fsshard.launch(work, 2, (args,), timeout=300)


if __name__ == "__main__":
    main()
