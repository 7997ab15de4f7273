"""Jobs for test_neuralop.py: one training of a small TFNO, and everything it computed."""

from __future__ import annotations

import contextlib
import io
import warnings
from dataclasses import dataclass, field
from typing import Any

import neuralop
import torch
import torch.distributed as dist
import torch.nn.functional as F
from neuralop.data.transforms.data_processors import MGPatchingDataProcessor
from neuralop.losses import H1Loss, LpLoss, WeightedSumLoss
from neuralop.models import FNO, TFNO
from neuralop.training.incremental import IncrementalFNOTrainer as TheirIncremental
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

import fsshard
from fsshard.compat.neuralop import IncrementalFNOTrainer, Trainer
from tests.compat.common import refusals

BATCH = 8
N_TRAIN, N_SINGLE, N_PAIRS, N_WHOLE = 20, 5, 7, 6


@dataclass(frozen=True)
class Fit:
    """One training."""

    backend: str  # or "plain": neuralop's own Trainer on one process, without fsshard
    epochs: int = 2
    loss: str = "sum"  # or "mean", "weighted" (a sum of neuralop's losses), "silent" (does not say)
    plateau: bool = False  # ReduceLROnPlateau in place of a cosine
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW
    trainer: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    uneven: bool = False  # the first rank gets 5 of the 8 samples of each global batch, the second 3


@dataclass
class Outcome:
    """Everything that a training computed."""

    epochs: list[tuple[float, float]]
    evaluations: list[dict[str, float]]
    metrics: dict[str, Any]
    rates: list[float]
    weights: dict[str, Tensor]
    best: float
    printed: str


class Pairs(Dataset[dict[str, Tensor]]):
    """Random fields and something smooth to learn from them."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(count, 1, 16, 16, generator=generator)
        self.y = F.avg_pool2d(self.x, 3, 1, 1) + 0.1 * self.x

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "y": self.y[index]}


class Silent:
    """A sum over the batch that does not say so."""

    def __call__(self, out: Tensor, y: Tensor, **_: Any) -> Tensor:
        return (out - y).square().mean(dim=(1, 2, 3)).sum()


def recording(kind: Any) -> Any:
    """A Trainer that keeps what each epoch reported."""

    class Recorder(kind):  # type: ignore[misc]
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            self.epochs: list[tuple[float, float]] = []
            self.evaluations: list[dict[str, float]] = []

        def train_one_epoch(self, epoch: int, train_loader: Any, training_loss: Any) -> Any:
            if isinstance(train_loader.sampler, DistributedSampler) and not isinstance(self, Trainer):
                train_loader.sampler.set_epoch(epoch)
            found = super().train_one_epoch(epoch, train_loader, training_loss)
            self.epochs.append((float(found[0]), float(found[1])))
            return found

        def evaluate_all(self, *args: Any, **kwargs: Any) -> Any:
            found = super().evaluate_all(*args, **kwargs)
            self.evaluations.append({key: float(value) for key, value in found.items()})
            return found

    return Recorder


def model() -> TFNO:
    """A small TFNO; its constructor arguments hold a function."""
    torch.manual_seed(0)
    return TFNO(
        n_modes=(8, 8),
        in_channels=1,
        out_channels=1,
        hidden_channels=12,
        projection_channel_ratio=2,
        n_layers=2,
        factorization="tucker",
        rank=0.42,
        non_linearity=F.gelu,
    )


def loader(count: int, seed: int, batch: int, rank: int, world: int, *, divided: bool, shuffle: bool = False) -> Any:
    """Samples in the order of ``DistributedSampler``: the ranks' k-th batches are the k-th batch of one process."""
    data = Pairs(count, seed)
    if not divided:
        return DataLoader(data, batch_size=batch)
    return DataLoader(
        data, batch_size=max(1, batch // world), sampler=DistributedSampler(data, world, rank, shuffle=shuffle)
    )


def train_loader(uneven: bool, rank: int, world: int) -> Any:
    """Global batches of eight, shuffled by epoch; or two of them, in two unequal parts."""
    if not uneven:
        return loader(N_TRAIN, 0, BATCH, rank, world, divided=True, shuffle=True)
    part = slice(0, 8) if world == 1 else (slice(0, 5), slice(5, 8))[rank]
    return DataLoader(Pairs(N_TRAIN, 0), batch_sampler=[list(range(k, k + 8))[part] for k in (0, 8)])


def losses(kind: str) -> Any:
    """The training loss."""
    if kind == "weighted":
        return WeightedSumLoss([LpLoss(d=2), H1Loss(d=2)], [0.7, 0.3])
    return Silent() if kind == "silent" else LpLoss(d=2, reduction=kind)


def fit(job: Fit) -> Outcome:
    """Train. Collective, but for ``"plain"``."""
    plain = job.backend == "plain"
    rank, world = (0, 1) if plain else (dist.get_rank(), dist.get_world_size())
    network = model() if plain else fsshard.wrap(model(), backend=job.backend)
    optimizer = (
        job.optimizer(network.parameters(), lr=8e-3)  # type: ignore[call-arg]
        if plain
        else fsshard.build_optimizer(network, job.optimizer, lr=8e-3)
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)
    if job.plateau:
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.9)
    trainer = recording(neuralop.Trainer if plain else Trainer)(
        model=network, n_epochs=job.epochs, verbose=True, **({"device": "cpu"} if plain else {}), **job.trainer
    )
    tests = {
        "single": loader(N_SINGLE, 1, 2, rank, world, divided=True),
        "pairs": loader(N_PAIRS, 2, 4, rank, world, divided=True),
        "whole": loader(N_WHOLE, 3, 4, rank, world, divided=False),
    }
    printed = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(printed):
        warnings.simplefilter("ignore")  # "unexpected keyword arguments: ['x']"
        metrics = trainer.train(
            train_loader(job.uneven, rank, world),
            tests,
            optimizer,
            scheduler,
            training_loss=losses(job.loss),
            eval_losses={"l2": LpLoss(d=2), "h1": H1Loss(d=2)},
            **job.train,
        )
    rates = [group["lr"] for group in optimizer.param_groups]
    weights = {key: value for key, value in network.state_dict().items() if key != "_metadata"}
    metrics = {k: float(v) for k, v in metrics.items() if v is not None and k != "epoch_train_time"}
    best = getattr(trainer, "_best", 0.0)
    return Outcome(trainer.epochs, trainer.evaluations, metrics, rates, weights, best, printed.getvalue())


def fits(jobs: list[Fit]) -> list[Outcome]:
    """One after another."""
    return [fit(job) for job in jobs]


def refused(folder: str) -> dict[str, str]:
    """Map each thing that is refused to the error's type and text."""
    network = fsshard.wrap(model(), backend="ddp")
    own = fsshard.build_optimizer(network, torch.optim.AdamW, lr=1e-3)
    other = torch.optim.AdamW(model().parameters())
    patched = type("Processor", (), {"patcher": type("Patcher", (), {"use_distributed": True})()})()
    growing = IncrementalFNOTrainer
    rank, world = dist.get_rank(), dist.get_world_size()
    alone = DataLoader(Pairs(N_TRAIN + BATCH * rank, 0), batch_size=BATCH)
    divided = loader(N_TRAIN, 0, BATCH, rank, world, divided=True)

    def train(optimizer: Any = own, driven: Any = own, loss: str = "sum", data: Any = divided, **options: Any) -> Any:
        scheduler = torch.optim.lr_scheduler.ConstantLR(driven)
        given = {"training_loss": losses(loss), **options}
        return lambda: Trainer(model=network, n_epochs=1).train(data, {}, optimizer, scheduler, **given)

    return refusals(
        {
            "model": lambda: Trainer(model=model(), n_epochs=1),  # type: ignore[arg-type]
            "reduction": lambda: Trainer(model=network, n_epochs=1, global_loss_reduction="product"),  # type: ignore[arg-type]
            "optimizer": train(optimizer=other),
            "scheduler": train(driven=other),
            "loss": train(loss="silent"),
            "lengths": train(data=alone),
            "folder": train(resume_from_dir=folder),
            "patches": lambda: Trainer(model=network, n_epochs=1, data_processor=patched),
            "rules": lambda: growing(model=network, n_epochs=1),
            "kind": lambda: growing(
                model=fsshard.wrap(torch.nn.Linear(2, 2), backend="ddp"), n_epochs=1, incremental_grad=True
            ),
            "resumed": lambda: growing(model=network, n_epochs=1, incremental_grad=True).train(resume_from_dir="here"),
        }
    )


RULES: dict[str, dict[str, Any]] = {
    "gap": {"incremental_loss_gap": True, "incremental_loss_eps": 1e3},
    "grad": {
        "incremental_grad": True,
        "incremental_buffer": 3,
        "incremental_grad_eps": 1.0,
        "incremental_grad_max_iter": 1,
    },
}


def special(backend: str, what: str) -> tuple[list[tuple[float, float]], dict[str, Tensor], list[int]]:
    """Epochs, weights and modes of a small FNO whose modes grow ("gap", "grad"), or whose samples are in patches."""
    plain = backend == "plain"
    rank, world = (0, 1) if plain else (dist.get_rank(), dist.get_world_size())
    torch.manual_seed(0)
    channels = 2 if what == "patches" else 1
    bare = FNO(n_modes=(4, 4), max_n_modes=(8, 8), in_channels=channels, out_channels=1, hidden_channels=4, n_layers=2)
    network = bare if plain else fsshard.wrap(bare, backend=backend)
    build = fsshard.build_optimizer
    optimizer = torch.optim.SGD(bare.parameters(), lr=1e-3) if plain else build(network, torch.optim.SGD, lr=1e-3)
    given = {"model": network, "n_epochs": 3, **({"device": "cpu"} if plain else {})}
    kind = neuralop.Trainer if plain else Trainer
    if what == "patches":
        given["data_processor"] = MGPatchingDataProcessor(network, 1, 0.25, True)
    else:
        kind = TheirIncremental if plain else IncrementalFNOTrainer
        given |= RULES[what]
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        trainer = recording(kind)(**given)
        trainer.train(train_loader(False, rank, world), {}, optimizer, scheduler, training_loss=losses("sum"))
    weights = {key: value for key, value in network.state_dict().items() if isinstance(value, Tensor)}
    return trainer.epochs, weights, list(network.fno_blocks.convs[0].n_modes)


def specials(backends: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Map each case to :func:`special` of each backend."""
    return {what: {backend: special(backend, what) for backend in backends} for what in (*RULES, "patches")}
