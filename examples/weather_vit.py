"""Train a vision transformer to forecast weather-like fields; the engine is one word, the mesh three numbers.

    python examples/weather_vit.py --backend fsdp2 --nprocs 2 --picture weather.png
    python examples/weather_vit.py --precision bf16 --fused --compile unit --workers 2 --prefetch 4 --profile traces
    python examples/weather_vit.py --nprocs 4 --tp 2 --cp 2
    python examples/weather_vit.py --compare --nprocs 2
    torchrun --nproc-per-node 4 examples/weather_vit.py --data-dir path/to/era5 --precision bf16 --tp 2

The fields are rotating shallow water, which the example solves for in half a minute and keeps (``shallow_water.py``),
or ERA5 in the layout of NERSC's files (``weather_data.py``). The model (``vit.py``) learns to forecast one step ahead;
it is judged by the RMSE of one to four steps, for which it is fed its own forecasts, against persistence: the forecast
that nothing changes. The lessons are those of NERSC's tutorial *Deep Learning at Scale*: each is a flag, and a row of
the table at the end.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import math
import os
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that it runs as a script from anywhere

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.data import Subset

import fsshard
from examples import weather as parts
from examples.mesh_layers import sharded_parameters, split_sequence, split_tensors
from examples.vit import Block, ViT
from examples.weather_data import Prefetcher, Weather, era5_weather, make_loader, shallow_water_weather
from fsshard.demo.common import Stopwatch, held_bytes, largest_difference, mean_over_ranks, progress

BACKENDS = ("fairscale", "fsdp", "fsdp2", "ddp", "none")

Split = tuple[int, int, int]
"""Sizes of the mesh: data ranks, ranks that share a sequence, ranks that share weights."""


@dataclass
class Outcome:
    """The results of a run: the same on every rank, but for ``held`` and ``seen``.

    Attributes:
        backend: the engine.
        split: sizes of the mesh.
        losses: of the global batch, per step.
        validation: RMSE one step ahead, per epoch.
        rmse: by lead time, at the end.
        persisted: that of persistence.
        seconds: of all training steps together.
        windows: per step, on all ranks together.
        held: bytes that this rank holds between backward and step.
        seen: what this rank has seen of each flag, for the table.
        shown: a truth and its forecast for the picture.
    """

    backend: str
    split: Split = (1, 1, 1)
    losses: list[float] = field(default_factory=list)
    validation: list[float] = field(default_factory=list)
    rmse: list[float] = field(default_factory=list)
    persisted: list[float] = field(default_factory=list)
    seconds: float = 0.0
    windows: int = 0
    held: dict[str, int] = field(default_factory=dict)
    seen: dict[str, str] = field(default_factory=dict)
    shown: parts.Shown | None = None

    @property
    def name(self) -> str:
        """For titles."""
        return self.backend if self.split[1:] == (1, 1) else f"{self.backend} {written(self.split)}"


def written(split: Split) -> str:
    """Sizes of a mesh as people write them."""
    return " x ".join(map(str, split))


def build_model(args: argparse.Namespace, weather: Weather) -> ViT:
    """The same weights at every call."""
    torch.manual_seed(args.seed)
    return ViT(len(weather.channels), weather.shape, args.patch, args.width, args.depth, args.heads)


def split_model(args: argparse.Namespace, weather: Weather, mesh: DeviceMesh) -> tuple[ViT, dict[str, Any]]:
    """Return this rank's part of the model, and what ``fsshard.wrap`` has to be told about it."""
    model, settings = build_model(args, weather), {"device_mesh": mesh["data"]}
    if mesh["tp"].size() > 1:
        split_tensors(model, mesh["tp"])
        settings["sharded"] = sharded_parameters(mesh["tp"])
    if mesh["cp"].size() > 1:
        split_sequence(model, mesh["cp"])
        settings["replicated"] = {".": mesh["cp"]}  # all parameters; their gradients are added up
    return model, settings


class Trainer:
    """One model under one engine. The only line that knows the engine is the one with ``backend=backend``."""

    def __init__(
        self, ctx: fsshard.Context, args: argparse.Namespace, backend: str, split: Split, weather: Weather
    ) -> None:
        self.ctx, self.args, self.outcome = ctx, args, Outcome(backend, split, windows=args.batch_size)
        mesh = init_device_mesh(ctx.device.type, split, mesh_dim_names=("data", "cp", "tp"))
        self.row_weights = weather.row_weights.to(ctx.device)
        self.ranges = parts.Ranges(ctx.device)
        self.loaders = make_loaders(ctx, args, weather, mesh)
        self.steps = min(args.steps or sys.maxsize, args.epochs * len(self.loaders[0]))
        model, settings = split_model(args, weather, mesh)
        self.model = fsshard.wrap(
            model.to(ctx.device),
            backend=backend,
            # One unit is one graph, and parameters that are gathered at once; a unit each lets blocks come and go.
            auto_wrap_policy=None if args.compile == "whole" else {Block},
            mixed_precision=args.precision,
            compile=compilation(args),
            **settings,
        )
        # A larger batch has a gradient with less noise: its steps may be longer, by the root of how much larger it is.
        scale = math.sqrt(args.batch_size / args.base_batch) if args.lr_scaling == "sqrt" else 1.0
        self.peak_lr = args.lr * scale
        self.optimizer = fsshard.build_optimizer(
            self.model, torch.optim.AdamW, lr=self.peak_lr, weight_decay=args.weight_decay, fused=args.fused
        )
        warmup = min(args.warmup, self.steps // 4)  # a short run has to come to something, too
        factor = functools.partial(parts.learning_rate, warmup=warmup, steps=self.steps)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, factor)
        # float16 has too few small numbers for gradients; the scaler skips a step that overflows, on all ranks alike.
        self.scaler: Any = fsshard.GradScaler(self.model) if args.precision == "fp16" else None
        self.skipped = 0

    def train_epoch(self, epoch: int, profiler: Any, report: Any) -> None:
        """One pass over this data rank's part of the training set, or as many steps as are left."""
        self.model.train()
        loader: Any = self.loaders[0]
        loader.sampler.set_epoch(epoch)
        for window in self.ranges.each("data", Prefetcher(loader, self.ctx.device)):
            with self.ranges("forward"), self.model.autocast():
                forecast = self.model(window[:, 0])
                loss = parts.squared_error(forecast, window[:, 1], self.row_weights).mean()
            self.step(loss)
            self.outcome.losses.append(mean_over_ranks(loss))
            report(self.outcome.losses[-1])
            if profiler is not None:
                profiler.step()
            if len(self.outcome.losses) == self.steps:
                return

    def step(self, loss: Tensor) -> None:
        """Backward, clip, update."""
        with self.ranges("backward"):
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        with self.ranges("optimizer"):
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            norm = self.model.clip_grad_norm_(self.args.clip)
            if not self.outcome.held and self.outcome.losses:  # from the second step on the optimizer has its state
                self.outcome.held = held_bytes(self.model)
            if self.scaler is None:
                self.optimizer.step()
            else:
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.skipped += not math.isfinite(float(norm))
            self.optimizer.zero_grad()
            self.scheduler.step()

    @torch.no_grad()
    def rollout(self, window: Tensor, leads: int) -> list[Tensor]:
        """Forecasts of ``leads`` steps, each from the one before; ``(N, channels, rows, columns)`` each."""
        forecasts, state = [], window[:, 0]
        for _ in range(leads):
            with self.model.autocast():
                state = self.model(state).float()
            forecasts.append(state)
        return forecasts

    def validate(self, leads: int) -> tuple[list[float], list[float]]:
        """RMSE by lead time over the validation set, of the model and of persistence; the same on every rank."""
        self.model.eval()
        total = torch.zeros(2, leads, dtype=torch.float64, device=self.ctx.device)
        count = torch.zeros((), dtype=torch.float64, device=self.ctx.device)
        for window in Prefetcher(self.loaders[1], self.ctx.device):
            window = window[:, : 1 + leads]
            truths = window[:, 1:].unbind(1)
            for lead, forecast in enumerate(self.rollout(window, leads)):
                total[0, lead] += parts.squared_error(forecast, truths[lead], self.row_weights).mean(1).double().sum()
            total[1] += parts.persistence(window, self.row_weights).mean(2).double().sum(0)
            count += len(window)
        dist.all_reduce(total)  # ranks that share a model have seen the same windows: they count as often in both
        dist.all_reduce(count)
        model, persisted = (total / count).sqrt().tolist()
        return model, persisted

    def example(self, leads: int) -> parts.Shown:
        """The first window of the validation set, and what the model makes of it. Every rank takes part."""
        self.model.eval()
        dataset: Any = self.loaders[1].dataset
        window = dataset[0][None].to(self.ctx.device)
        return window[0, 1:].cpu(), torch.cat(self.rollout(window, leads)).cpu()


def compilation(args: argparse.Namespace) -> Any:
    """Return ``wrap``'s ``compile=``: each unit by itself, its kernels recorded as a CUDA graph if so wanted."""
    if args.compile == "off":
        return False
    return {"backend": args.compile_backend} | ({"mode": "reduce-overhead"} if args.cuda_graphs else {})


def make_loaders(ctx: fsshard.Context, args: argparse.Namespace, weather: Weather, mesh: DeviceMesh) -> tuple[Any, Any]:
    """This data rank's part of the training set, in another order every epoch, and of the validation set."""
    place = fsshard.data_rank(mesh)  # ranks that share a model see the same windows
    options: dict[str, Any] = {"workers": args.workers, "prefetch": args.prefetch, "pin": args.pin_memory}
    # The same windows whatever the mesh: as many as can be shared out among all ranks.
    windows = len(weather.validation) // ctx.world_size * ctx.world_size
    judged = Subset(weather.validation, range(windows))
    return (
        make_loader(weather.train, batch=args.batch_size // place[1], place=place, shuffle=args.seed, **options),
        make_loader(judged, batch=min(32, windows // place[1]), place=place, shuffle=None, **options),
    )


def train(ctx: fsshard.Context, args: argparse.Namespace, backend: str, split: Split, weather: Weather) -> Outcome:
    """All epochs under one engine."""
    trainer = Trainer(ctx, args, backend, split, weather)
    outcome = trainer.outcome
    title, folder = f"{outcome.name}, {ctx.world_size} ranks", outcome.name.replace(" x ", "x").replace(" ", "-")
    with (
        progress(ctx, title, trainer.steps) as advance,
        tensorboard(ctx, args, folder) as writer,
        parts.profiler(args.profile, f"{folder}-rank{ctx.rank}", ctx.device) as profiler,
    ):

        def report(loss: float) -> None:
            advance(loss)
            writer.add_scalar("loss/train", loss, len(outcome.losses))

        for epoch in range(args.epochs):
            with Stopwatch(ctx.device) as watch:
                trainer.train_epoch(epoch, profiler, report)
            outcome.seconds += watch.seconds
            outcome.validation.append(trainer.validate(1)[0][0])
            write_epoch(ctx, trainer, writer, weather)
            if len(outcome.losses) == trainer.steps:
                break
    outcome.rmse, outcome.persisted = trainer.validate(args.leads)
    outcome.shown = trainer.example(args.leads)
    outcome.seen = what_was_seen(ctx, args, trainer)
    return outcome


def write_epoch(ctx: fsshard.Context, trainer: Trainer, writer: Any, weather: Weather) -> None:
    """RMSE, learning rate, memory of each rank and fields as images. Every rank takes part."""
    if not trainer.args.tensorboard:
        return
    step = len(trainer.outcome.losses)
    writer.add_scalar("rmse/1_step", trainer.outcome.validation[-1], step)
    writer.add_scalar("lr", trainer.scheduler.get_last_lr()[0], step)
    trainer.model.memory_report(all_ranks=True).write(writer, step)
    truth, forecast = trainer.example(1)
    for number, channel in enumerate(weather.channels[:3]):
        for kind, fields in (("truth", truth), ("forecast", forecast), ("error", forecast - truth)):
            writer.add_image(f"{channel}/{kind}", parts.to_image(fields[0, number]), step)


def tensorboard(ctx: fsshard.Context, args: argparse.Namespace, folder: str) -> AbstractContextManager[Any]:
    """A context that gives a writer: TensorBoard's on rank 0 where asked, else one of nothing."""
    if ctx.rank or not args.tensorboard:
        nothing = SimpleNamespace(add_scalar=lambda *_: None, add_image=lambda *_: None)
        return nullcontext(nothing)
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(args.tensorboard / folder))  # type: ignore[no-any-return, unused-ignore]


# The tables -------------------------------------------------------------------------------------------------------


def what_was_seen(ctx: fsshard.Context, args: argparse.Namespace, trainer: Trainer) -> dict[str, str]:
    """For each flag what this rank has seen of it. Milliseconds are the host's, means over all steps."""
    outcome, ranges = trainer.outcome, trainer.ranges
    rate = len(outcome.losses) * outcome.windows / outcome.seconds
    scale = "" if trainer.scaler is None else f", loss scale {trainer.scaler.get_scale():g}, {trainer.skipped} skipped"
    on_host = ("forward", "backward", "optimizer")
    both = ranges.milliseconds("forward") + ranges.milliseconds("backward")
    return {
        "data": f"{rate:.0f} windows/s, {sum(outcome.held.values()) / 1e6:.2f} MB",
        "precision": f"forward and backward {both:.1f} ms{scale}",
        "compile": f"first forward {ranges.first['forward']:.1f} s",
        "fused": f"clip and step {ranges.milliseconds('optimizer'):.1f} ms",
        "cuda_graphs": "" if args.cuda_graphs else "needs a GPU" * (ctx.device.type != "cuda"),
        "workers": f"wait {ranges.milliseconds('data'):.1f} ms",
        "lr": f"peak {trainer.peak_lr:.2g}",
        "rmse": f"{outcome.validation[0]:.3f} -> {outcome.validation[-1]:.3f}",
        "tensorboard": "loss, RMSE, rate, memory, fields" if args.tensorboard else "",
        "profile": " ".join(f"{name} {ranges.seconds.get(name, 0) / outcome.seconds:.0%}" for name in on_host),
    }


def flag_rows(args: argparse.Namespace, weather: Weather, split: Split) -> dict[str, str]:
    """For each row of the table the flags that it is about, as they were set."""
    uniform = bool((weather.row_weights == 1).all())
    pinned = "on" if args.pin_memory else "off"
    return {
        "data": "--data {} --cp {} --tp {}".format(*split),
        "precision": f"--precision {args.precision}",
        "compile": f"--compile {args.compile}",
        "fused": f"--fused {'on' if args.fused else 'off'}",
        "cuda_graphs": f"--cuda-graphs {'on' if args.cuda_graphs else 'off'}",
        "workers": f"--workers {args.workers} --prefetch {args.prefetch} --pin-memory {pinned}",
        "lr": f"--lr-scaling {args.lr_scaling} --warmup {args.warmup}",
        "rmse": f"RMSE weights: {'uniform (a plane)' if uniform else 'cos(latitude)'}",
        "tensorboard": f"--tensorboard {args.tensorboard or 'off'}",
        "profile": f"--profile {args.profile or 'off'}",
    }


def report(args: argparse.Namespace, weather: Weather, outcomes: list[Outcome], world: int) -> None:
    """Skill, flags, differences, the picture."""
    from rich.console import Console

    console = Console(highlight=False)
    console.print(skill_table(args, weather, outcomes, world))
    console.print("RMSE in standard deviations, over all channels, by steps ahead.")
    if args.compare:
        console.print(loss_table(outcomes))
        console.print("Mesh: data ranks x ranks that share a sequence (cp) x ranks that share weights (tp).")
    else:
        console.print(flag_table(args, weather, outcomes))
        console.print(
            "Of rank 0: MB held between backward and step; times of a step by the host's clock, the first step's apart."
        )
        for other in outcomes[1:]:
            gap = largest_difference(outcomes[0].losses, other.losses)
            console.print(f"largest difference in loss, {outcomes[0].name} - {other.name}: {gap!r}")
    if args.picture and outcomes[0].shown is not None:
        rmse = {outcome.name: outcome.rmse for outcome in outcomes}
        parts.picture(args.picture, outcomes[0].shown, weather.channels[0], rmse, outcomes[0].persisted)
        console.print(f"wrote {args.picture}")


def skill_table(args: argparse.Namespace, weather: Weather, outcomes: list[Outcome], world: int) -> Any:
    """A row for each run, a column for each lead time, persistence below."""
    from rich.table import Table

    steps = len(outcomes[0].losses)
    table = Table(title=f"ViT on {weather.name}, {steps} steps of {args.batch_size} windows, {world} ranks")
    columns = ("forecast", "first loss", "last loss", *(f"RMSE {lead + 1}" for lead in range(args.leads)), "s")
    for column in columns:
        table.add_column(column, justify="left" if column == "forecast" else "right", no_wrap=True)
    for outcome in outcomes:
        ends = [f"{outcome.losses[0]:.5f}", f"{outcome.losses[-1]:.5f}"]
        table.add_row(outcome.name, *ends, *(f"{x:.3f}" for x in outcome.rmse), f"{outcome.seconds:.0f}")
    table.add_row("persistence", "", "", *(f"{x:.3f}" for x in outcomes[0].persisted), "")
    return table


def loss_table(outcomes: list[Outcome]) -> Any:
    """A row for each run: losses at some steps, and how far they are from the first run's at any step."""
    from rich.table import Table

    steps = len(outcomes[0].losses)
    shown = sorted({1, 2, (steps + 1) // 2, steps} & set(range(1, steps + 1)))
    table = Table(title="Losses of every engine and split")
    for column in ("mesh", "backend", *(f"step {step}" for step in shown), "largest difference"):
        table.add_column(column, justify="left" if column in ("mesh", "backend") else "right", no_wrap=True)
    for outcome in outcomes:
        losses = [f"{outcome.losses[step - 1]:.7f}" for step in shown]
        gap = largest_difference(outcomes[0].losses, outcome.losses)
        table.add_row(written(outcome.split), outcome.backend, *losses, f"{gap:.1e}" if gap else "0")
    return table


def flag_table(args: argparse.Namespace, weather: Weather, outcomes: list[Outcome]) -> Any:
    """A row for each lesson: its flags, and what each run has seen of it."""
    from rich.table import Table

    table = Table(title="What was set, and what came of it")
    table.add_column("set")
    for outcome in outcomes:
        table.add_column(outcome.name)
    for key, flags in flag_rows(args, weather, outcomes[0].split).items():
        table.add_row(flags, *(outcome.seen.get(key, "") for outcome in outcomes))
    return table


# The job ----------------------------------------------------------------------------------------------------------


def job(ctx: fsshard.Context, args: argparse.Namespace) -> None:
    """Train on one rank; every rank calls it."""
    if ctx.local_rank == 0:
        load_data(args)  # so that one process of each machine solves and the others find the cache
    dist.barrier()
    weather = load_data(args)
    outcomes = train_all(ctx, args, weather)
    if ctx.rank == 0:
        report(args, weather, outcomes, ctx.world_size)


def train_all(ctx: fsshard.Context, args: argparse.Namespace, weather: Weather) -> list[Outcome]:
    """The same training under each engine in turn.

    Raises:
        ConfigurationError: a flag has no meaning here; on every rank, before anything has begun.
    """
    check_device(args, ctx.device.type)
    check_sizes(args, weather, ctx.world_size)
    splits = all_splits(args, weather, ctx.world_size) if args.compare else [chosen_split(args, ctx.world_size)]
    return [train(ctx, args, backend, split, weather) for split in splits for backend in args.backend]


def chosen_split(args: argparse.Namespace, world: int) -> Split:
    """The mesh that was asked for; the data ranks are what is left, if they are not given.

    Raises:
        ConfigurationError: it is not of as many ranks as there are, or the batch cannot be shared out.
    """
    data = args.data or max(1, world // (args.cp * args.tp))
    if data * args.cp * args.tp != world:
        raise fsshard.ConfigurationError(f"--data {data} x --cp {args.cp} x --tp {args.tp} are not the {world} ranks")
    if args.batch_size % data:
        raise fsshard.ConfigurationError(f"--batch-size {args.batch_size} must be a multiple of the {data} data ranks")
    if "none" in args.backend and world > 1:
        raise fsshard.ConfigurationError(f"--backend none is for one process, not for {world} ranks")
    return data, args.cp, args.tp


def all_splits(args: argparse.Namespace, weather: Weather, world: int) -> list[Split]:
    """Every mesh that these ranks can make for this model and batch, most data ranks first."""
    sizes = [size for size in range(1, world + 1) if world % size == 0]
    tokens = weather.shape[0] * weather.shape[1] // args.patch**2
    meshes = [(world // (cp * tp), cp, tp) for cp in sizes for tp in sizes if world % (cp * tp) == 0]
    fitting = [(d, c, t) for d, c, t in meshes if not (args.batch_size % d or tokens % c or args.heads % t)]
    return sorted(fitting, reverse=True)


def load_data(args: argparse.Namespace) -> Weather:
    """Load the data that the command line asks for."""
    if args.data_dir:
        return era5_weather(args.data_dir, leads=args.leads, patch=args.patch)
    return shallow_water_weather(
        leads=args.leads,
        n_train=args.n_train,
        n_validation=args.n_validation,
        n_steps=args.n_steps,
        shape=tuple(args.shape),
        seed=args.seed,
    )


def check_device(args: argparse.Namespace, device: str) -> None:
    """Raise for a flag that needs a GPU where there is none: torch would ignore it, or say so in the middle."""
    if device == "cuda":
        return
    for flag, instead in (("cuda_graphs", "--compile unit alone"), ("pin_memory", "--workers and --prefetch alone")):
        if getattr(args, flag):
            raise fsshard.ConfigurationError(
                f"--{flag.replace('_', '-')} needs a CUDA device, and this training runs on {device!r}; use {instead}"
            )


def check_sizes(args: argparse.Namespace, weather: Weather, world: int) -> None:
    """Raise for sizes that do not fit the data or the ranks."""
    rows, columns = weather.shape
    if rows % args.patch or columns % args.patch:
        raise fsshard.ConfigurationError(f"--patch {args.patch} does not divide fields of {rows} x {columns}")
    if args.batch_size > len(weather.train):
        raise fsshard.ConfigurationError(
            f"--batch-size {args.batch_size} is more than all {len(weather.train)} windows to train on"
        )
    if len(weather.validation) < world:
        raise fsshard.ConfigurationError(f"{len(weather.validation)} windows to judge by are too few for {world} ranks")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--backend", nargs="+", choices=BACKENDS, help="one engine, or several to compare; fsdp2")
    add("--nprocs", type=int, default=2, help="ranks to start (ignored under torchrun and SLURM)")
    add("--data", type=int, help="ranks that see different windows; what --cp and --tp leave")
    add("--cp", type=int, default=1, help="ranks that share the tokens of a window (context parallelism)")
    add("--tp", type=int, default=1, help="ranks that share the weights of a block (tensor parallelism)")
    add("--compare", action="store_true", help="train for 20 steps (--steps) under every engine on every mesh")
    add("--data-dir", type=Path, help="ERA5: train/*.h5, valid/*.h5, stats/global_means.npy, stats/global_stds.npy")
    add("--n-train", type=int, default=40, help="runs of shallow water to train on")
    add("--n-validation", type=int, default=4, help="runs of shallow water to judge by")
    add("--n-steps", type=int, default=64, help="snapshots of a run")
    add("--shape", type=int, nargs=2, default=[32, 64], help="rows and columns of shallow water")
    add("--leads", type=int, default=4, help="how many steps ahead it is judged by")
    add("--epochs", type=int, default=10)
    add("--steps", type=int, help="stop after so many steps")
    add("--batch-size", type=int, default=32, help="of all ranks together")
    add("--lr", type=float, default=1.5e-3, help="at its peak, for a batch of --base-batch")
    add("--lr-scaling", choices=["sqrt", "none"], default="sqrt", help="by the root of batch size / --base-batch")
    add("--base-batch", type=int, default=16)
    add("--warmup", type=int, default=50, help="steps in which the learning rate rises")
    add("--weight-decay", type=float, default=1e-2)
    add("--clip", type=float, default=1.0, help="largest gradient norm")
    add("--precision", choices=["fp32", "bf16", "fp16"], default="fp32")
    add("--fused", action="store_true", help="the optimizer's step as one kernel")
    add(
        "--compile",
        choices=["off", "unit", "whole"],
        default="off",
        help="torch.compile: each block, or all in one unit",
    )
    add("--compile-backend", default="inductor", help="aot_eager where there is no C++ compiler")
    add("--cuda-graphs", action="store_true", help="replay compiled kernels, with --compile; not under fsdp")
    add("--workers", type=int, default=0, help="processes per rank that read beside the training")
    add("--prefetch", type=int, default=2, help="batches that each worker reads ahead")
    add("--pin-memory", action="store_true", help="batches in page-locked memory, copied beside the computation")
    add("--patch", type=int, default=4, help="rows and columns of a token")
    add("--width", type=int, default=64, help="numbers per token; a multiple of --heads")
    add("--depth", type=int, default=4, help="blocks")
    add("--heads", type=int, default=4)
    add("--seed", type=int, default=0)
    add("--tensorboard", type=Path, help="folder for TensorBoard: loss, RMSE, fields, memory of each rank")
    add("--profile", type=Path, help="folder for the trace of three steps, one file per rank")
    add("--picture", type=Path, help="PNG of truth, forecast, error, and RMSE by lead time")
    add("--timeout", type=float, default=120.0, help="seconds a collective may take")
    args = parser.parse_args(arguments)
    check_arguments(parser, args)
    args.backend = args.backend or (list(BACKENDS[:4]) if args.compare else ["fsdp2"])
    args.steps = args.steps or (20 if args.compare else None)
    return args


def check_arguments(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End with a message for what no machine and no data could make right."""
    positive = (
        "batch_size",
        "base_batch",
        "epochs",
        "leads",
        "width",
        "depth",
        "heads",
        "patch",
        "nprocs",
        "prefetch",
        "cp",
        "tp",
    )
    for name in positive:
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least 1")
    if args.compare and (args.cp, args.tp, args.data) != (1, 1, None):
        parser.error("--compare trains on every mesh; leave out --data, --cp and --tp")
    if args.width % args.heads:
        parser.error(f"--width {args.width} must be a multiple of --heads {args.heads}")
    if args.cuda_graphs and args.compile == "off":
        parser.error("--cuda-graphs records what --compile unit compiles; add that")


def check_extras(args: argparse.Namespace) -> None:
    """Say at once, before any rank has started, that a package is missing."""
    wanted = {"scipy": "solving shallow water", "rich": "the progress bar"}
    wanted |= {"tensorboard": f"--tensorboard {args.tensorboard}"} if args.tensorboard else {}
    wanted |= {"h5py": f"--data-dir {args.data_dir}"} if args.data_dir else {}
    wanted |= {"matplotlib": f"--picture {args.picture}"} if args.picture else {}
    for package, purpose in wanted.items():
        if importlib.util.find_spec(package) is None:
            raise fsshard.MissingExtra(package, "weather", purpose)


def main(arguments: list[str] | None = None) -> None:
    """Start the ranks here, or join those that torchrun or SLURM started."""
    args = parse(arguments)
    check_extras(args)
    check_device(args, "cuda" if torch.cuda.is_available() else "cpu")
    launched = "RANK" in os.environ or "SLURM_STEP_ID" in os.environ
    if not launched:
        chosen_split(args, args.nprocs)
        check_sizes(args, load_data(args), args.nprocs)
    fsshard.launch(job, None if launched else args.nprocs, (args,), timeout=args.timeout)


if __name__ == "__main__":
    main()
