"""A field that one process may not hold: a TFNO on Darcy flow, split over ranks by ``fsshard.parallel.shard_domain``.

    python examples/domain_fno.py                            # one process stops at the limit; 2 x 2 ranks train
    python examples/domain_fno.py --mesh 1 4 --backend ddp   # other shapes (data, domain), other engines
    python examples/domain_fno.py --picture domain.png       # the prediction, the borders of the slabs drawn in
    torchrun --nproc-per-node 4 examples/domain_fno.py --mesh 2 2

``--memory`` is the limit that every process gets beside what it has when training begins: on Linux by RLIMIT_DATA, on
CUDA by torch's own allocator. A data-parallel rank needs room for the activations of one sample at least; here a rank
has a slab of it. The fields are solved when the example starts (fsshard/demo/darcy.py has the equation).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that it runs as a script from anywhere

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fsshard
from fsshard.demo import common, darcy
from fsshard.parallel import shard_domain
from fsshard.pictures import draw_picture

MIB = 2**20
ENGINES = ("fsdp2", "fsdp", "ddp", "fairscale")


@dataclass
class Outcome:
    """The results of a run.

    Attributes:
        name: for the table.
        losses: of every step, over the whole batch.
        kept: bytes that one forward kept for its backward on this rank.
        held: bytes of parameters, gradients and optimizer state on this rank.
        sent: bytes of activations that this rank sent to others in a step.
        error: relative L2 on the test fields; None where it did not come so far.
        seam: by how much predictions differ from those of the same weights on whole fields, in one process.
        stopped: what the allocator said at the limit, or nothing.
        predictions: of the test fields.
    """

    name: str
    losses: list[float] = field(default_factory=list)
    kept: int = 0
    held: int = 0
    sent: int = 0
    error: float | None = None
    seam: float = 0.0
    stopped: str = ""
    predictions: Tensor | None = None


def solve(count: int, points: int, seed: int) -> tuple[Tensor, Tensor]:
    """Materials (0 and 1) and pressures (the largest is 1), (count, 1, points, points); the same on all ranks."""
    random = np.random.default_rng(seed)
    materials = np.stack([darcy.gaussian_random_field(points, random) > 0 for _ in range(count)])
    low, high = darcy.PERMEABILITY
    pressures = np.stack([darcy.solve_darcy(np.where(each, high, low)) for each in materials])
    x, y = (torch.from_numpy(each[:, None].astype(np.float32)) for each in (materials, pressures))
    return x, y / y.amax()


def build_model(args: argparse.Namespace) -> nn.Module:
    """A TFNO; the same weights at every call."""
    from neuralop.models import TFNO

    torch.manual_seed(0)
    return TFNO(  # type: ignore[no-any-return]
        n_modes=(args.modes, args.modes),
        in_channels=1,
        out_channels=1,
        hidden_channels=args.width,
        projection_channel_ratio=2,
        factorization="tucker",
        rank=0.42,
    )


# ------------------------------------------------------------------------------------------------ memory


@contextmanager
def memory_limit(device: torch.device, mebibytes: int) -> Iterator[None]:
    """Context manager: limit this process's memory to what it has and so much more; on CPUs under Linux only."""
    if device.type == "cuda":
        total, has = torch.cuda.mem_get_info(device)[1], torch.cuda.memory_allocated(device)
        torch.cuda.set_per_process_memory_fraction(min(1.0, (has + mebibytes * MIB) / total), device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, device)
        return
    if sys.platform != "linux":
        yield
        return
    import resource

    status = Path("/proc/self/status").read_text().split("VmData:")[1]
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (int(status.split()[0]) * 1024 + mebibytes * MIB, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


class Kept:
    """Counts what a forward keeps for its backward: every storage once, without what ``model`` has as parameters.

    Args:
        model: the model.
        outcome: where the largest number goes.
    """

    def __init__(self, model: nn.Module, outcome: Outcome | None = None) -> None:
        self._outcome = outcome
        self._own = {each.untyped_storage()._cdata for each in (*model.parameters(), *model.buffers())}
        self._seen: dict[int, int] = {}
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    @property
    def bytes(self) -> int:
        """So far."""
        return sum(self._seen.values())

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._own:
            self._seen[storage._cdata] = storage.nbytes()
            if self._outcome is not None:
                self._outcome.kept = max(self._outcome.kept, self.bytes)
        return tensor


# ------------------------------------------------------------------------------------------------ the trainings


def train(ctx: fsshard.Context, args: argparse.Namespace, groups: int, ranks: int) -> Outcome:
    """``groups`` groups of ``ranks`` ranks: each group has its own samples, each of its ranks a slab of them."""
    mesh = init_device_mesh(ctx.device.type, (groups, ranks), mesh_dim_names=("data", "domain"))
    data = fsshard.data_rank(mesh)
    outcome = Outcome(f"{groups} x {ranks}, {args.backend}" if ctx.world_size > 1 else "one process")
    x, y = solve(args.samples, args.points, seed=0)
    model = build_model(args).to(ctx.device)
    domain = shard_domain(model, mesh["domain"])
    model = fsshard.wrap(model, backend=args.backend if ctx.world_size > 1 else "none")
    optimizer = fsshard.build_optimizer(model, torch.optim.Adam, lr=args.lr)
    criterion = domain.LpLoss(d=2, p=2, reduction="mean")
    steps = args.epochs * (len(x) // args.batch)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    try:
        with memory_limit(ctx.device, args.memory), common.progress(ctx, outcome.name, steps) as advance:
            for step in range(steps):
                batch = picked(len(x), args.batch, step)[data.rank :: data.size]
                slab, truth = (domain.scatter(each[batch].to(ctx.device)) for each in (x, y))
                kept, sent = Kept(model.module, outcome), domain.bytes_sent
                with kept.hooks:
                    loss = criterion(model(slab), truth)
                loss.backward()
                optimizer.step()
                schedule.step()
                outcome.held = sum(common.held_bytes(model).values()) if step == 0 else outcome.held
                optimizer.zero_grad()
                outcome.sent = domain.bytes_sent - sent
                outcome.losses.append(common.mean_over_ranks(loss))
                advance(outcome.losses[-1])
    except (RuntimeError, MemoryError) as error:
        if ctx.world_size > 1 or not any(word in str(error) for word in ("memory", "bad_alloc", "primitive")):
            raise
        outcome.stopped = str(error).splitlines()[0].split("] . ")[-1].split("Default")[-1]
        return outcome
    judge(ctx, args, model, domain, outcome)
    return outcome


def picked(count: int, batch: int, step: int) -> Tensor:
    """The samples of a step, for all ranks."""
    epoch, place = divmod(step, count // batch)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(epoch))
    return order[place * batch : (place + 1) * batch]


@torch.no_grad()
def judge(ctx: fsshard.Context, args: argparse.Namespace, model: Any, domain: Any, outcome: Outcome) -> None:
    """Test error, and whether anything of the split shows: the same weights in the bare model, on whole fields."""
    x, y = solve(args.tests, args.points, seed=1)
    found = torch.cat([domain.gather(model(domain.scatter(each[None].to(ctx.device)))) for each in x]).cpu()
    outcome.predictions = found
    outcome.error = float(((found - y).flatten(1).norm(dim=1) / y.flatten(1).norm(dim=1)).mean())
    weights = model.state_dict()
    if not ctx.rank:
        alone = build_model(args)
        alone.load_state_dict(weights)
        outcome.seam = float((torch.cat([alone(each[None]) for each in x]) - found).abs().max())


# ------------------------------------------------------------------------------------------------ what is shown


def table(outcomes: Sequence[Outcome], args: argparse.Namespace) -> str:
    """A row per run."""
    lines = [
        f"{args.points} x {args.points} points, batch {args.batch}, limit {args.memory} MiB a process",
        f"{'':16}{'kept for backward':>18}{'weights etc.':>14}{'sent a step':>13}{'loss':>9}{'test L2':>9}{'seam':>9}",
    ]
    for each in outcomes:
        memory = f"{each.name:16}{each.kept / MIB:>14.1f} MiB{each.held / MIB:>10.1f} MiB{each.sent / MIB:>9.2f} MiB"
        if each.stopped:
            lines.append(f"{each.name:16}{each.kept / MIB:>14.1f} MiB, and stopped at the limit: {each.stopped[:60]}")
        else:
            lines.append(f"{memory}{each.losses[-1]:>9.4f}{each.error or 0:>9.2%}{each.seam:>9.1e}")
    return "\n".join(lines)


def picture(path: str, outcome: Outcome, args: argparse.Namespace, ranks: int) -> None:
    """Material, truth, prediction with the slabs' borders, error in per cent of the largest truth: a row per field."""
    assert outcome.predictions is not None
    predictions = outcome.predictions[:, 0].numpy()
    x, y = (each[:, 0].numpy() for each in solve(args.tests, args.points, seed=1))
    tops = y.max(axis=(1, 2), keepdims=True)
    truths, found = y / tops, predictions / tops
    errors = 100 * np.abs(found - truths)
    borders = np.cumsum([len(part) for part in np.array_split(np.arange(args.points), ranks)])[:-1] - 0.5

    def paint(figure: Any) -> None:
        grid = figure.subplots(len(x), 4, squeeze=False)
        for row, *fields in zip(grid, x, truths, found, errors, strict=True):
            row[0].imshow(fields[0], cmap="cividis", interpolation="nearest")
            for axes, each in zip(row[1:3], fields[1:3], strict=True):
                pressure = axes.imshow(each, cmap="viridis", vmin=0, vmax=1)
            error = row[3].imshow(fields[3], cmap="magma", vmin=0, vmax=errors.max())
            relative = np.linalg.norm(fields[2] - fields[1]) / np.linalg.norm(fields[1])
            row[3].set_xlabel(f"relative L2 error {relative:.1%}")
            for axes in row:
                axes.set(xticks=[], yticks=[])
                axes.spines[:].set_visible(False)
            for axes in row[2:]:
                for at in borders:
                    axes.axhline(at, color="white", linestyle=(0, (4, 4)), linewidth=1.2)
        for axes, title in zip(
            grid[0], ("material", "true pressure", f"predicted on {ranks} ranks", "error"), strict=True
        ):
            axes.set_title(title)
        figure.colorbar(pressure, ax=grid[:, 2], label="pressure / its maximum", shrink=0.7)
        figure.colorbar(error, ax=grid[:, 3], label="% of the maximum", shrink=0.7)

    draw_picture(path, (12, 2.8 * len(x)), paint)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", type=int, nargs=2, default=[2, 2], metavar=("DATA", "DOMAIN"))
    parser.add_argument("--backend", choices=ENGINES, default="fsdp2")
    parser.add_argument("--memory", type=int, default=250, help="MiB that a process may take for the training")
    parser.add_argument("--points", type=int, default=192, help="along each side of a field")
    parser.add_argument("--batch", type=int, default=2, help="samples a step, of all ranks")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--tests", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--modes", type=int, default=16)
    parser.add_argument("--lr", type=float, default=8e-3)
    parser.add_argument("--picture", help="where the picture goes")
    args = parser.parse_args(arguments)
    if args.batch % args.mesh[0]:
        parser.error(f"--batch {args.batch}: expected a multiple of the {args.mesh[0]} groups that have own samples")
    if args.mesh[1] > args.points:
        parser.error(f"--points {args.points}: fewer rows than the {args.mesh[1]} ranks that a field is split over")
    return args


def main(arguments: list[str] | None = None) -> None:
    """One process first, then the mesh; under torchrun or SLURM the mesh alone."""
    args = parse(arguments)
    launched = "RANK" in os.environ or "SLURM_STEP_ID" in os.environ
    groups, ranks = args.mesh
    outcomes = []
    if not launched:
        one = argparse.Namespace(**{**vars(args), "batch": 1})  # a sample, the least that it can train on
        outcomes.append(fsshard.launch(train, 1, (one, 1, 1)))
    outcomes.append(fsshard.launch(train, None if launched else groups * ranks, (args, groups, ranks)))
    if int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))) == 0:
        print(table(outcomes, args))
        if args.picture:
            picture(args.picture, outcomes[-1], args, ranks)


if __name__ == "__main__":
    main()
