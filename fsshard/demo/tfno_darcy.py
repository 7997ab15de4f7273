"""Train a Tucker-factorised TFNO (complex64 weights) on Darcy flow; the engine is one word.

fsshard demo --backends fairscale,fsdp2 --world-size 2 --plot darcy.png
torchrun --nproc-per-node 2 -m fsshard demo --backends fsdp2 --trainer neuralop
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

import fsshard
from fsshard.demo import darcy
from fsshard.demo.common import held_bytes, largest_difference, mean_over_ranks, progress
from fsshard.pictures import draw_picture
from fsshard.planning.text import size

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEARNING_RATE = 8e-3  # with WEIGHT_DECAY, the tutorial's Adam
WEIGHT_DECAY = 1e-4
SHOWN = 2  # test samples in the picture


@dataclass(frozen=True, kw_only=True)
class Demo:
    """The settings of a demo: those of ``fsshard demo --help``."""

    backends: list[str]
    world_size: int  # ranks to start; not under torchrun
    trainer: str  # "plain" or "neuralop"
    epochs: int
    batch_size: int  # of all ranks together
    clip: float
    n_train: int
    n_test: int
    data: str  # "solved" here, or neuraloperator's "official" files
    data_dir: Path | None
    save_dir: Path | None
    picture: str | None
    timeout: float

    def load(self) -> darcy.DarcyData:
        """Return the data: solved here and cached, or neuraloperator's own files."""
        folder = self.data_dir
        if folder is None and self.data == "official":
            folder = darcy.official_files()
        return darcy.load(folder, n_train=self.n_train, n_test=self.n_test)


@dataclass
class Outcome:
    """The result of a run, the same on every rank."""

    backend: str
    losses: list[float] = field(default_factory=list)
    errors: dict[int, float] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)
    predictions: Tensor | None = None


def build_model() -> torch.nn.Module:
    """Build the tutorial's TFNO, with the same weights at every call."""
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


def decode(y: Tensor, data: darcy.DarcyData) -> Tensor:
    """Return predictions in physical units: models give them in the training set's mean and standard deviation."""
    deviation = data.train_y.std().to(y.device)
    return y * deviation + data.train_y.mean().to(y.device)


Training = tuple[fsshard.ShardedModule, Any, Any]
"""Model, optimizer and scheduler."""


def set_up(ctx: fsshard.Context, demo: Demo, backend: str) -> Training:
    """Return the model under an engine, its optimizer and its scheduler: the only line that knows the engine."""
    model = fsshard.wrap(build_model().to(ctx.device), backend=backend)
    optimizer = fsshard.build_optimizer(model, torch.optim.Adam, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=demo.epochs)
    return model, optimizer, scheduler


def train_plain(
    ctx: fsshard.Context,
    demo: Demo,
    backend: str,
    data: darcy.DarcyData,
) -> Outcome:
    """Train in a plain loop, which knows no engine."""
    outcome = Outcome(backend)
    h1, _ = losses()
    model, optimizer, scheduler = set_up(ctx, demo, backend)
    samples = len(data.train_x)
    steps = samples // demo.batch_size
    with progress(ctx, f"{backend}, {ctx.world_size} ranks", demo.epochs * steps) as advance:
        for epoch in range(demo.epochs):
            order = torch.randperm(samples, generator=torch.Generator().manual_seed(epoch))
            for step in range(steps):
                first = step * demo.batch_size
                of_all_ranks = order[first : first + demo.batch_size]
                batch = of_all_ranks[ctx.rank :: ctx.world_size]
                x = data.train_x[batch].to(ctx.device)
                y = data.train_y[batch].to(ctx.device)
                loss = h1(decode(model(x), data), y)
                loss.backward()
                model.clip_grad_norm_(demo.clip)
                outcome.losses.append(mean_over_ranks(loss))
                # The optimizer makes its state in the first step, so memory is read in the second.
                if not outcome.held and len(outcome.losses) > 1:
                    outcome.held = held_bytes(model)
                optimizer.step()
                optimizer.zero_grad()
                advance(outcome.losses[-1])
            scheduler.step()
    evaluate(ctx, model, data, outcome)
    return outcome


@torch.no_grad()
def evaluate(
    ctx: fsshard.Context,
    model: torch.nn.Module,
    data: darcy.DarcyData,
    outcome: Outcome,
) -> None:
    """Keep the relative L2 error on each test set, and predictions for the picture."""
    model.eval()
    _, l2 = losses()
    for resolution, (x, y) in data.tests.items():
        predicted = decode(model(x.to(ctx.device)), data).cpu()
        outcome.errors[resolution] = float(l2(predicted, y))
        outcome.predictions = predicted[:SHOWN]
    model.train()


def train_neuralop(
    ctx: fsshard.Context,
    demo: Demo,
    backend: str,
    data: darcy.DarcyData,
) -> Outcome:
    """Train with neuraloperator's own Trainer, through the adapter."""
    from neuralop.data.transforms.data_processors import DefaultDataProcessor
    from neuralop.data.transforms.normalizers import UnitGaussianNormalizer
    from torch.utils.data import DataLoader, DistributedSampler

    from fsshard.compat.neuralop import Trainer

    outcome = Outcome(backend)
    h1, l2 = losses("sum")
    model, optimizer, scheduler = set_up(ctx, demo, backend)
    train_set = _samples(data.train_x, data.train_y)
    sampler: Any = DistributedSampler(train_set, ctx.world_size, ctx.rank, seed=0)
    loader: Any = DataLoader(train_set, demo.batch_size // ctx.world_size, sampler=sampler)
    tests = {}
    for resolution, (x, y) in data.tests.items():
        tests[resolution] = DataLoader(_samples(x, y), 50)
    normalizer = UnitGaussianNormalizer(dim=[0, 2, 3])
    normalizer.fit(data.train_y)
    trainer = Trainer(
        model=model,
        n_epochs=demo.epochs,
        device=ctx.device,
        data_processor=DefaultDataProcessor(out_normalizer=normalizer),
        use_distributed=True,
        verbose=ctx.rank == 0,
    )
    saving = {}
    if demo.save_dir:
        saving = {"save_every": 1, "save_dir": demo.save_dir}
    metrics = trainer.train(
        train_loader=loader,
        test_loaders=tests,
        optimizer=optimizer,
        scheduler=scheduler,
        training_loss=h1,
        eval_losses={"l2": l2},
        regularizer=None,
        **saving,
    )
    outcome.losses.append(float(metrics["train_err"]))
    outcome.held = held_bytes(model)
    evaluate(ctx, model, data, outcome)
    return outcome


def _samples(inputs: Tensor, outputs: Tensor) -> Any:
    return [{"x": x, "y": y} for x, y in zip(inputs, outputs, strict=True)]


def job(ctx: fsshard.Context, demo: Demo) -> list[Outcome]:
    """Train under each backend; every rank runs it."""
    if ctx.rank == 0:
        # One process solves, and the others find the cache.
        demo.load()
    dist.barrier()
    data = demo.load()
    train = train_neuralop if demo.trainer == "neuralop" else train_plain
    outcomes = [train(ctx, demo, backend, data) for backend in demo.backends]
    if ctx.rank == 0:
        report(demo, ctx.world_size, data, outcomes)
    return outcomes


def report(
    demo: Demo,
    world_size: int,
    data: darcy.DarcyData,
    outcomes: list[Outcome],
) -> None:
    """Print the table, and draw the picture."""
    from rich.console import Console
    from rich.table import Table

    training = f"{demo.epochs} epochs of {demo.n_train} samples, {world_size} ranks"
    table = Table(title=f"TFNO on Darcy flow, {training}")
    for column in ("backend", "error 16", "error 32", "params", "grads", "optimizer", "total"):
        table.add_column(column, justify="left" if column == "backend" else "right")
    for outcome in outcomes:
        # A training of one step has not been looked at.
        sizes = ["-"] * 4
        if outcome.held:
            kinds = [outcome.held[kind] for kind in ("parameters", "gradients", "optimizer state")]
            sizes = list(map(size, [*kinds, sum(kinds)]))
        errors = [f"{100 * outcome.errors[resolution]:.2f} %" for resolution in (16, 32)]
        table.add_row(outcome.backend, *errors, *sizes)
    console = Console()
    console.print(table)
    console.print(
        "Errors: relative L2 on the test set at 16x16 and 32x32. Memory: held by rank 0 between backward and step."
    )
    for other in outcomes[1:]:
        # neuraloperator's Trainer gives the last epoch's loss only.
        gap = largest_difference(outcomes[0].losses, other.losses)
        backends = f"{outcomes[0].backend} - {other.backend}"
        console.print(f"largest difference in loss, {backends}: {gap}", highlight=False)
    if demo.picture:
        x, y = data.tests[32]
        predictions = {}
        for outcome in outcomes:
            if outcome.predictions is not None:
                predictions[outcome.backend] = outcome.predictions[:, 0]
        picture(demo.picture, x[:SHOWN, 0], y[:SHOWN, 0], predictions)
        console.print(f"wrote {demo.picture}", highlight=False)


def picture(path: str, x: Tensor, y: Tensor, predictions: dict[str, Tensor]) -> None:
    """Draw a row per sample: the input, the truth, each prediction with its relative error, and their difference."""
    found = torch.stack([*predictions.values()])
    # One picture has the largest difference between engines at each point; with one engine, its error.
    title, gaps = "difference", found.amax(0) - found.amin(0)
    if len(predictions) == 1:
        title, gaps = "|error|", (found[0] - y).abs().nan_to_num()
    columns = {"input": x, "truth": y, **predictions, title: gaps}

    def paint(figure: Figure) -> None:
        grid = figure.subplots(len(y), len(columns), squeeze=False)
        for column, (name, panels) in enumerate(columns.items()):
            colours, top = ("cividis", 1.0) if panels is x else ("viridis", float(y.max()))
            for row, panel in enumerate(panels):
                axes = grid[row, column]
                axes.imshow(panel, cmap=colours, vmin=0.0, vmax=top)
                axes.set(xticks=[], yticks=[])
                axes.spines[:].set_visible(False)
                if name in predictions:
                    error = (panel - y[row]).norm() / y[row].norm()
                    axes.set_xlabel(f"error {float(error):.1%}")
                elif panels is gaps:
                    largest = float(panel.max())
                    axes.set_xlabel(f"at most {largest:.1e}" if largest else "exactly 0")
            grid[0, column].set_title(name)
        figure.colorbar(grid[0, 1].images[0], ax=grid[:, 1:], shrink=0.8, aspect=30, label="pressure")

    draw_picture(path, (2.1 * len(columns) + 0.9, 2.35 * len(y)), paint)


def run(demo: Demo) -> None:
    """Start the ranks here, or join those that torchrun or SLURM started."""
    launched = "RANK" in os.environ or "SLURM_STEP_ID" in os.environ
    if not launched:
        demo.load()
    fsshard.launch(job, None if launched else demo.world_size, (demo,), timeout=demo.timeout)
