"""Steps through other people's front doors: each over fsshard, beside the same front over its own DDP.

    python benchmarks/fronts.py [--rounds 30] [--width 512] [--front accelerate ...] [--engine ddp ...] [--profile N]

Two ranks, a residual perceptron. ``fabric``, ``accelerate``: loops over Lightning Fabric and Accelerate, ``backward``,
clipping, a step. ``trainer``, ``hf``: the Trainers of Lightning and Hugging Face, of which each pair of fits gives the
ratio of their batches' medians. Both sides in turns, so that a busy machine is busy for both; medians of the ratios.
With ``ddp`` it is what the front costs; the other engines send more, or other things, than DDP.
"""

from __future__ import annotations

import argparse
import functools
import logging
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import accelerate
import lightning
import torch
import transformers
from lightning.fabric.strategies import DDPStrategy as FabricDDP
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fsshard
from benchmarks.pairs import WARM_UP, Ratio, Step, interval, measure, profiled
from fsshard.compat.accelerate import Accelerator
from fsshard.compat.lightning import FabricStrategy, Strategy
from fsshard.compat.lightning.plugins import Launched
from fsshard.compat.transformers import Trainer

ENGINES = ("ddp", "fsdp2", "fairscale")
FRONTS = ("fabric", "trainer", "accelerate", "hf")
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


def accelerate_step(accelerator: Any, width: int) -> Step:
    """One step of a loop over Accelerate."""
    bare = Model(width)
    model, optimizer = accelerator.prepare(bare, bare.configure_optimizers())
    x = torch.randn(SIZE, width, generator=torch.Generator().manual_seed(1))

    def step(_: int) -> None:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).square().mean())
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

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


class HuggingFaceModel(nn.Module):
    """The same, as Hugging Face's Trainer calls it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = Model(width)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.inner(x).square().mean()}


class HuggingFaceClock(transformers.TrainerCallback):
    """Seconds of each step."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self._start = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Begin."""
        self._start = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """End."""
        self.steps.append(time.perf_counter() - self._start)


def hf_seconds(engine: str | None, width: int) -> float:
    """A step's median in one training by Hugging Face's Trainer, over its own DDP or over ours."""
    numbers = torch.Generator().manual_seed(1)
    data: Any = [{"x": torch.randn(width, generator=numbers)} for _ in range(2 * BATCHES * SIZE)]
    clock = HuggingFaceClock()
    with tempfile.TemporaryDirectory() as folder:
        args = transformers.TrainingArguments(
            folder,
            num_train_epochs=1,
            per_device_train_batch_size=SIZE,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            logging_strategy="no",
            optim="adamw_torch",
            dataloader_pin_memory=False,
        )
        given: dict[str, Any] = {"train_dataset": data, "callbacks": [clock]}
        model = HuggingFaceModel(width)
        if engine is None:
            made: Any = transformers.Trainer(model, args, **given)
        else:
            made = Trainer(model, args, fsshard={"backend": engine}, **given)
        made.remove_callback(transformers.PrinterCallback)
        made.train()
    return statistics.median(clock.steps[WARM_UP:])


def loops(front: str, engine: str, width: int) -> list[Step]:
    """A step over the front's own DDP, and one over ours."""
    if front == "fabric":
        sides = [FabricDDP(cluster_environment=Launched()), FabricStrategy(engine)]
        return [fabric_step(side, width) for side in sides]
    own = accelerate.Accelerator(cpu=True)
    return [accelerate_step(each, width) for each in (own, Accelerator(fsshard={"backend": engine}))]


def fits(front: str, engine: str, width: int) -> list[Callable[[], float]]:
    """Likewise, for the seconds of a step of a Trainer."""
    if front == "hf":
        return [functools.partial(hf_seconds, each, width) for each in (None, engine)]
    return [
        lambda: trainer_seconds(DDPStrategy(cluster_environment=Launched()), width),
        lambda: trainer_seconds(Strategy(engine), width),
    ]


def work(ctx: fsshard.Context, args: argparse.Namespace) -> None:
    """The fronts, each engine in turn with the front's own."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning|accelerate")
    transformers.utils.logging.set_verbosity_error()
    profiles: list[str] = []
    for front in args.front:
        for engine in args.engine:
            if front in ("fabric", "accelerate"):
                sides = loops(front, engine, args.width)
                theirs, ours = measure(sides, args.rounds)
                if args.profile:
                    profiles += ["", f"{front}, its own DDP and {engine}: ms of a step under cProfile"]
                    profiles += profiled(sides, args.rounds, args.profile)
                show(ctx, front, engine, theirs.milliseconds()[0], ours.milliseconds()[0], ours.over(theirs)[0])
                continue
            pairs, trainings = [], fits(front, engine, args.width)
            for number in range(max(args.rounds // 3, 3)):
                seconds = {side: trainings[side]() for side in ((0, 1) if number % 2 else (1, 0))}
                pairs.append((seconds[0], seconds[1]))
            theirs_ms, ours_ms = (1e3 * statistics.median(each) for each in zip(*pairs, strict=True))
            show(ctx, front, engine, theirs_ms, ours_ms, interval([ours / theirs for theirs, ours in pairs]))
    if not ctx.rank and profiles:
        print("\n".join(profiles), flush=True)


def show(ctx: fsshard.Context, front: str, engine: str, theirs: float, ours: float, ratio: Ratio) -> None:
    """A row."""
    if not ctx.rank:
        print(f"| {front} | {engine} | {theirs:.1f} | {ours:.1f} | {ratio} |", flush=True)


def main() -> None:
    """One job of two ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--front", nargs="+", choices=FRONTS, default=FRONTS)
    parser.add_argument("--engine", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument(
        "--profile", type=int, default=0, metavar="N", help="list N functions that take more time with ours"
    )
    args = parser.parse_args()
    print(
        "| front | engine | its own DDP, ms | fsshard, ms | fsshard / its own DDP |\n|---|---|---|---|---|", flush=True
    )
    fsshard.launch(work, 2, (args,), timeout=300)


if __name__ == "__main__":
    main()
