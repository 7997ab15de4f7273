"""Measures a field that is split over ranks: activations kept, bytes sent, the time of a step.

    python benchmarks/domain.py [--rounds 20] [--only memory time simulated] [--profile N]

``memory``: bytes that autograd keeps on a rank and bytes that it sends, P = 2 and 4 ranks a field, beside the bare
model in one process and the formula ``4 L B C (H/P) K 8 (P-1)/P`` (L layers, C channels, H rows, K kept modes of the
dimensions that are not split, complex64, forward and backward): both are counts, the same at every run. ``time``: a
step of a TFNO on 1 x 2 ranks (data x domain) and on 2 x 1, the same samples in total, in turns. ``simulated``: a dense
3-D FNO on 16 ranks, on tensors without memory.
"""

from __future__ import annotations

import argparse
import math
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fsshard
from benchmarks.pairs import Step, measure, profiled
from examples.domain_fno import Kept
from fsshard.parallel import shard_domain
from fsshard.simulation.fakes import fake_ranks

GIB, RANKS = 2**30, 16
MEMORY_TARGET, SENT_TARGET, TIME_TARGET = 1.05, 1.05, 1.25


def fno(modes: tuple[int, ...], width: int, **more: Any) -> nn.Module:
    """neuraloperator's FNO with four layers, the same weights at every call."""
    from neuralop.models import FNO

    torch.manual_seed(0)
    return FNO(n_modes=modes, in_channels=1, out_channels=1, hidden_channels=width, projection_channel_ratio=2, **more)  # type: ignore[no-any-return]


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[int, ...], int]] = {
    "FNO, 2-D": (lambda: fno((16, 16), 16), (128, 128), (16, 16), 16),
    "FNO, 3-D": (lambda: fno((8, 8, 8), 8), (32, 32, 32), (8, 8, 8), 8),
    "TFNO, 2-D, Tucker": (
        lambda: fno((16, 16), 16, factorization="tucker", rank=0.42, implementation="factorized"),
        (128, 128),
        (16, 16),
        16,
    ),
}
"""Name -> model, points, modes, width."""


def kept_by(model: nn.Module, x: Tensor) -> tuple[int, Tensor]:
    """Bytes that a forward keeps, and its output."""
    kept = Kept(model)
    with kept.hooks:
        output = model(x)
    return kept.bytes, output


def sent_by_formula(points: tuple[int, ...], modes: tuple[int, ...], width: int, batch: int, ranks: int) -> float:
    """Bytes that a rank sends in a step of four layers."""
    local = math.prod(modes[1:-1]) * (modes[-1] // 2 + 1)
    return 4 * 4 * batch * width * points[0] / ranks * local * 8 * (ranks - 1) / ranks


def memory(ctx: fsshard.Context) -> None:
    """Counts on four ranks."""
    for name, (build, points, modes, width) in MODELS.items():
        x = torch.randn(2, 1, *points, generator=torch.Generator().manual_seed(1))
        alone, _ = kept_by(build(), x)
        for ranks in (2, 4):
            mesh = init_device_mesh("cpu", (ctx.world_size // ranks, ranks), mesh_dim_names=("data", "domain"))
            model = build()
            domain = shard_domain(model, mesh["domain"])
            kept, output = kept_by(model, domain.scatter(x))
            domain.mse_loss(output, torch.zeros_like(output)).backward()
            most, total = torch.tensor(kept), torch.tensor(domain.bytes_sent)
            dist.all_reduce(most, op=dist.ReduceOp.MAX)
            dist.all_reduce(total)  # ranks have unequal shares of 9 modes; the formula is their mean
            mean = total.item() / ctx.world_size
            share, sent = most.item() / alone * ranks, mean / sent_by_formula(points, modes, width, len(x), ranks)
            if not ctx.rank:
                print(f"| {name} | {ranks} | {alone} | {most} | {share:.3f} | {mean:.0f} | {sent:.3f} |", flush=True)
            if share > MEMORY_TARGET or sent > SENT_TARGET:
                raise SystemExit(f"{name}, {ranks} ranks: over {MEMORY_TARGET} or {SENT_TARGET}")


def stepping(mesh: Any, backend: str) -> Step:
    """A training step on four samples in total."""
    model = fno((16, 16), 32, factorization="tucker", rank=0.42)
    domain = shard_domain(model, mesh["domain"])
    model = fsshard.wrap(model, backend=backend)
    optimizer = fsshard.build_optimizer(model, torch.optim.Adam, lr=1e-3)
    data = fsshard.data_rank(mesh)
    x = torch.randn(4, 1, 128, 128, generator=torch.Generator().manual_seed(1)).chunk(data.size)[data.rank]
    slab, truth = domain.scatter(x), domain.scatter(x.square())
    criterion = domain.LpLoss(d=2, p=2)

    def step(_: int) -> None:
        optimizer.zero_grad()
        criterion(model(slab), truth).backward()
        optimizer.step()

    return step


def times(ctx: fsshard.Context, rounds: int, shown: int) -> None:
    """Two ranks: a field each, or each field on both; profiles of as many rows as are to be shown."""
    meshes = [init_device_mesh("cpu", shape, mesh_dim_names=("data", "domain")) for shape in ((2, 1), (1, 2))]
    for backend in ("fsdp2", "ddp"):
        sides = [stepping(mesh, backend) for mesh in meshes]
        apart, split = measure(sides, rounds)
        wall, cpu = split.over(apart)
        if not ctx.rank:
            print(
                f"| {backend} | {apart.milliseconds()[0]:.0f} | {split.milliseconds()[0]:.0f} | {wall} | {cpu} |",
                flush=True,
            )
        profile = profiled(sides, rounds, shown) if shown else []
        if not ctx.rank and profile:
            title = f"{backend} on 2 x 1 and 1 x 2: ms of a step under cProfile"
            print("\n".join(["", title, *profile, ""]), flush=True)
        if wall.lower > TIME_TARGET:
            raise SystemExit(f"{backend}: {wall}, over {TIME_TARGET}")


def simulated() -> None:
    """One of 16 ranks, on tensors without memory: a dense 3-D operator, and what ZeRO alone leaves on a rank."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    row = "| {} | {:.1f} | {:.2f} | {:.2f} | {:.2f} |"
    with fake_ranks(0, RANKS):
        names = ("data", "domain")  # meshes outside of the mode: torch reads their ranks from memory
        meshes = {n: init_device_mesh("cpu", (RANKS // n, n), mesh_dim_names=names)["domain"] for n in (4, RANKS)}
        with FakeTensorMode(allow_non_fake_inputs=True):
            model, x = fno((32, 32, 32), 64), torch.randn(1, 1, 256, 256, 256)
            weights = sum(each.nbytes for each in model.parameters())
            state, sent = 4 * weights / RANKS / GIB, 3 * weights * (RANKS - 1) / RANKS / GIB
            print(row.format("ZeRO-3 alone, a field per rank", kept_by(model, x)[0] / GIB, state, sent, 0), flush=True)
            for ranks, mesh in meshes.items():
                model = fno((32, 32, 32), 64)
                domain = shard_domain(model, mesh)
                kept, output = kept_by(model, domain.scatter(x))
                domain.mse_loss(output, torch.zeros_like(output)).backward()
                name = f"{RANKS // ranks} x {ranks} (data x domain)"
                print(row.format(name, kept / GIB, state, sent, domain.bytes_sent / GIB), flush=True)


def main() -> None:
    """The tables, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument(
        "--only", nargs="+", choices=("memory", "time", "simulated"), default=["memory", "time", "simulated"]
    )
    parser.add_argument(
        "--profile", type=int, default=0, metavar="N", help="list N functions that take more time with ours"
    )
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*returned a view tensor")  # of FSDP2 (torch 2.13): nobody writes to it
    if "memory" in args.only:
        print("| model | ranks a field | kept alone, B | by a rank, B | times P | sent by a rank, B | sent / formula |")
        print("|---|---|---|---|---|---|---|", flush=True)
        fsshard.launch(memory, 4, timeout=120)
    if "time" in args.only:
        print("\n| TFNO, 128 x 128 | 2 x 1, ms | 1 x 2, ms | 1 x 2 / 2 x 1, by the clock | by CPU time |")
        print("|---|---|---|---|---|", flush=True)
        fsshard.launch(times, 2, (args.rounds, args.profile), timeout=120)
    if "simulated" in args.only:
        print(f"\n| FNO, width 64, 32^3 modes, 256^3, a rank of {RANKS} | kept, GiB | weights, gradients, Adam, GiB | "
              "weights sent a step, GiB | activations sent a step, GiB |")  # fmt: skip
        print("|---|---|---|---|---|", flush=True)
        simulated()


if __name__ == "__main__":
    main()
