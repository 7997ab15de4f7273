"""Train a Tucker-factorised TFNO (complex64 weights) on Darcy flow; the engine is one word.

    fsshard demo --backend fairscale --nprocs 2
    fsshard demo --backend fairscale fsdp2 --nprocs 2 --picture darcy.png
    torchrun --nproc-per-node 2 -m fsshard demo --backend fsdp2 --trainer neuralop

With several backends the same training runs under each, and the table at the end shows the largest difference between
their losses. The data are solved on this machine once and cached; ``--data official`` takes neuraloperator's own.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fsshard
from fsshard.demo import darcy
from fsshard.demo.common import held_bytes, largest_difference, mean_over_ranks, progress
from fsshard.demo.official import official_files

LEARNING_RATE, WEIGHT_DECAY = 8e-3, 1e-4  # the tutorial's Adam
SHOWN = 3  # test samples in the picture
Layout = argparse.RawDescriptionHelpFormatter
DATA_HELP = "solved here, or neuraloperator's own files, which pip fetches the first time (4 MB)"


@dataclass
class Outcome:
    """The result of a run, the same on every rank."""

    backend: str
    losses: list[float] = field(default_factory=list)
    errors: dict[int, float] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)
    predictions: Tensor | None = None


def build_model() -> torch.nn.Module:
    """The tutorial's TFNO; the same weights at every call."""
    from neuralop.models import TFNO

    torch.manual_seed(0)
    return TFNO(  # type: ignore[no-any-return]
        n_modes=(16, 16),
        in_channels=1,
        out_channels=1,
        hidden_channels=32,
        projection_channel_ratio=2,
        factorization="tucker",
        rank=0.42,
    )


def losses(reduction: str = "mean") -> tuple[Any, Any]:
    """Relative H1 to train with and relative L2 to judge by, over the batch; without periodic boundaries."""
    from neuralop import H1Loss, LpLoss

    h1 = H1Loss(d=2, reduction=reduction, periodic_in_x=False, periodic_in_y=False)
    return h1, LpLoss(d=2, p=2, reduction=reduction)


class Normaliser:
    """y in units of the training set's mean and standard deviation."""

    def __init__(self, y: Tensor) -> None:
        self.mean, self.std = y.mean(), y.std()

    def decode(self, y: Tensor) -> Tensor:
        """Back to physical units."""
        return y * self.std.to(y.device) + self.mean.to(y.device)


def train_plain(ctx: fsshard.Context, args: argparse.Namespace, backend: str, data: darcy.DarcyData) -> Outcome:
    """The plain loop: the only line that knows the engine is the one with ``backend=backend``."""
    outcome, normaliser, (h1, _) = Outcome(backend), Normaliser(data.train_y), losses()
    model = fsshard.wrap(build_model().to(ctx.device), backend=backend)
    optimizer = fsshard.build_optimizer(model, torch.optim.Adam, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)
    steps = len(data.train_x) // args.batch_size
    with progress(ctx, f"{backend}, {ctx.world_size} ranks", args.epochs * steps) as advance:
        for epoch in range(args.epochs):
            order = torch.randperm(len(data.train_x), generator=torch.Generator().manual_seed(epoch))
            for step in range(steps):
                batch = order[step * args.batch_size : (step + 1) * args.batch_size][ctx.rank :: ctx.world_size]
                x, y = data.train_x[batch].to(ctx.device), data.train_y[batch].to(ctx.device)
                loss = h1(normaliser.decode(model(x)), y)
                loss.backward()
                model.clip_grad_norm_(args.clip)
                outcome.losses.append(mean_over_ranks(loss))
                if not outcome.held and len(outcome.losses) > 1:
                    outcome.held = held_bytes(model)
                optimizer.step()
                optimizer.zero_grad()
                advance(outcome.losses[-1])
            scheduler.step()
    evaluate(ctx, model, normaliser, data, outcome)
    return outcome


@torch.no_grad()
def evaluate(
    ctx: fsshard.Context, model: torch.nn.Module, normaliser: Normaliser, data: darcy.DarcyData, outcome: Outcome
) -> None:
    """Relative L2 error on each test set, and predictions for the picture."""
    model.eval()
    _, l2 = losses()
    for resolution, (x, y) in data.tests.items():
        predicted = normaliser.decode(model(x.to(ctx.device))).cpu()
        outcome.errors[resolution] = float(l2(predicted, y))
        outcome.predictions = predicted[:SHOWN]
    model.train()


def train_neuralop(ctx: fsshard.Context, args: argparse.Namespace, backend: str, data: darcy.DarcyData) -> Outcome:
    """neuraloperator's own Trainer, through the adapter."""
    from torch.utils.data import DataLoader, DistributedSampler

    from fsshard.compat.neuralop import Trainer

    outcome, normaliser, (h1, l2) = Outcome(backend), Normaliser(data.train_y), losses("sum")
    model = fsshard.wrap(build_model().to(ctx.device), backend=backend)
    optimizer = fsshard.build_optimizer(model, torch.optim.Adam, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)
    train_set = [{"x": x, "y": y} for x, y in zip(data.train_x, data.train_y, strict=True)]
    sampler: Any = DistributedSampler(train_set, ctx.world_size, ctx.rank, seed=0)  # type: ignore[arg-type]
    loader: Any = DataLoader(train_set, args.batch_size // ctx.world_size, sampler=sampler)  # type: ignore[arg-type]
    tests: dict[int, Any] = {
        r: DataLoader([{"x": a, "y": b} for a, b in zip(x, y, strict=True)], 50)  # type: ignore[arg-type]
        for r, (x, y) in data.tests.items()
    }
    trainer = Trainer(
        model=model,
        n_epochs=args.epochs,
        device=ctx.device,
        data_processor=data_processor(data.train_y),
        use_distributed=True,
        verbose=ctx.rank == 0,
    )
    metrics = trainer.train(
        train_loader=loader,
        test_loaders=tests,
        optimizer=optimizer,
        scheduler=scheduler,
        training_loss=h1,
        eval_losses={"l2": l2},
        regularizer=None,
        **({"save_every": 1, "save_dir": args.save_dir} if args.save_dir else {}),
    )
    outcome.losses.append(float(metrics["train_err"]))
    outcome.held = held_bytes(model)
    evaluate(ctx, model, normaliser, data, outcome)
    return outcome


def data_processor(y: Tensor) -> Any:
    """neuraloperator's own: y normalised while training, predictions decoded while evaluating."""
    from neuralop.data.transforms.data_processors import DefaultDataProcessor
    from neuralop.data.transforms.normalizers import UnitGaussianNormalizer

    normaliser = UnitGaussianNormalizer(dim=[0, 2, 3])
    normaliser.fit(y)
    return DefaultDataProcessor(out_normalizer=normaliser)


def job(ctx: fsshard.Context, args: argparse.Namespace) -> list[Outcome]:
    """Return what every rank runs."""
    if ctx.rank == 0:
        load_data(args)  # so that one process solves and the others find the cache
    dist.barrier()
    data = load_data(args)
    run = train_neuralop if args.trainer == "neuralop" else train_plain
    outcomes = [run(ctx, args, backend, data) for backend in args.backend]
    if ctx.rank == 0:
        report(args, data, outcomes)
    return outcomes


def load_data(args: argparse.Namespace) -> darcy.DarcyData:
    """Solved here and cached, or the official files."""
    folder = official_files() if args.data == "official" and args.data_dir is None else args.data_dir
    return darcy.load(folder, n_train=args.n_train, n_test=args.n_test)


def report(args: argparse.Namespace, data: darcy.DarcyData, outcomes: list[Outcome]) -> None:
    """The table, and the picture."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"TFNO on Darcy flow, {args.epochs} epochs of {args.n_train} samples, {args.world} ranks")
    for column in ("backend", "error 16", "error 32", "params", "grads", "optimizer", "total"):
        table.add_column(column, justify="left" if column == "backend" else "right")
    for outcome in outcomes:
        held = [outcome.held.get(key) for key in ("parameters", "gradients", "optimizer state")]  # from the 2nd step on
        sizes = ["-" if size is None else f"{size / 1e6:.3f} MB" for size in held]
        errors = [f"{100 * outcome.errors[resolution]:.2f} %" for resolution in (16, 32)]
        table.add_row(
            outcome.backend, *errors, *sizes, f"{sum(outcome.held.values()) / 1e6:.3f} MB" if outcome.held else "-"
        )
    console = Console()
    console.print(table)
    console.print(
        "Errors: relative L2 on the test set at 16x16 and 32x32. Bytes: held by rank 0 between backward and step."
    )
    for other in outcomes[1:]:
        # neuraloperator's Trainer gives the last epoch's loss only.
        gap = largest_difference(outcomes[0].losses, other.losses)
        console.print(f"largest difference in loss, {outcomes[0].backend} - {other.backend}: {gap}", highlight=False)
    if args.picture:
        x, y = data.tests[32]
        shown = {outcome.backend: outcome.predictions for outcome in outcomes if outcome.predictions is not None}
        darcy.picture(args.picture, x[:SHOWN], y[:SHOWN], shown)
        console.print(f"wrote {args.picture}", highlight=False)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser("fsshard demo", description=__doc__, formatter_class=Layout)
    parser.add_argument("--backend", nargs="+", default=["fsdp2"], help="fairscale, fsdp, fsdp2, ddp, none; or several")
    parser.add_argument("--nprocs", type=int, default=2, help="ranks to start (ignored under torchrun)")
    parser.add_argument("--trainer", choices=["plain", "neuralop"], default="plain")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32, help="of all ranks together")
    parser.add_argument("--clip", type=float, default=1.0, help="largest gradient norm (plain loop)")
    parser.add_argument("--n-train", type=int, default=1000)
    parser.add_argument("--n-test", type=int, default=50)
    parser.add_argument("--data", choices=["solved", "official"], default="solved", help=DATA_HELP)
    parser.add_argument("--data-dir", type=Path, help="folder with neuraloperator's darcy_*.pt, instead of --data")
    parser.add_argument("--save-dir", type=Path, help="checkpoints (neuralop trainer)")
    parser.add_argument("--picture", type=Path, help="PNG of inputs, truth and predictions")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds a collective may take")
    args = parser.parse_args(arguments)
    for name in ("nprocs", "epochs", "batch_size", "n_train", "n_test"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least 1")
    if args.batch_size % args.nprocs:
        parser.error(f"--batch-size {args.batch_size} must be a multiple of --nprocs {args.nprocs}")
    args.world = int(os.environ.get("WORLD_SIZE", args.nprocs))
    return args


def main(arguments: list[str] | None = None) -> None:
    """Start the ranks here, or join those that torchrun or SLURM started."""
    args = parse(arguments)
    launched = "RANK" in os.environ or "SLURM_STEP_ID" in os.environ
    if not launched:
        load_data(args)
    fsshard.launch(job, None if launched else args.nprocs, (args,), timeout=args.timeout)
