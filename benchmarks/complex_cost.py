"""Measures flattened complex weights beside native ones under DDP: step time, in turns, in one run.

    python benchmarks/complex_cost.py [--nprocs 2] [--rounds 40] [--starts 4] [--models tfno tfno48 fno]

Both sides are torch's own DDP and Adam over the same neural operator, the same weights and the same batches: once with
complex parameters as the model makes them, once after ``fsshard.tensorfy``, which stores them as pairs of reals and
shows the model complex views. No wrapper of fsshard's is in the way: what is measured is the flattening. A ratio is the
median over rounds of flattened / native, with its 95% interval. Where memory happens to lie moves all steps of a
process by more than the target leaves, so the ranks are started several times, in which either side is made first, and
all rounds count as one sample. Losses are compared at the end.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch import nn

import fsshard
from benchmarks.overhead import JOBS, Job, built, operator, step_of
from benchmarks.pairs import WARM_UP, Step, Times, measure, pooled

TARGET = 1.01
MODELS: dict[str, Job] = {"tfno": JOBS["tfno"], "tfno48": JOBS["tfno48"], "fno": operator("FNO", 32, 32)}


def side(job: Job, *, flat: bool) -> tuple[nn.Module, Step]:
    """A model under DDP, and its step."""
    network = built(job)
    if flat:
        fsshard.tensorfy(network)
    wrapped = nn.parallel.DistributedDataParallel(network) if dist.get_world_size() > 1 else network
    return wrapped, step_of(job, wrapped, torch.optim.Adam(wrapped.parameters(), lr=1e-3))


@dataclass(frozen=True)
class Seen:
    """Measurements of a model by one start of the ranks: times and losses of both sides, and how much is complex."""

    native: Times
    flat: Times
    losses: tuple[float, float]
    share: float


def work(ctx: fsshard.Context, name: str, rounds: int, flat_first: bool) -> Seen:
    """A model, natively and flattened."""
    job = MODELS[name]
    built = {flat: side(job, flat=flat) for flat in sorted((False, True), reverse=flat_first)}
    (native, native_step), (flat, flat_step) = built[False], built[True]
    before, after = measure([native_step, flat_step], rounds)
    losses = [job.loss(network, torch.Generator().manual_seed(1)).item() for network in (native, flat)]
    count = sum(parameter.numel() * 2 for parameter in native.parameters() if parameter.is_complex())
    share = count / sum(parameter.numel() for parameter in flat.parameters())
    return Seen(before, after, (losses[0], losses[1]), share)


def report(name: str, seen: list[Seen], rounds: int) -> bool:
    """Print a row from all starts; whether the target holds."""
    native, flat = pooled([one.native for one in seen]), pooled([one.flat for one in seen])
    wall, cpu = flat.over(native)
    cells = [name, f"{seen[0].share:.0%}", *(f"{times.milliseconds()[0]:.1f}" for times in (native, flat))]
    furthest = max(abs(after / before - 1) for before, after in (one.losses for one in seen))
    equal = f"differ by {furthest:.0e}" if furthest else "equal"
    cells += [str(wall), str(cpu), f"{equal} after {rounds + WARM_UP} steps"]
    print("| " + " | ".join(cells) + " |", flush=True)
    return cpu.median <= TARGET


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nprocs", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--starts", type=int, default=4)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    args = parser.parse_args()
    head = ["model", "complex", "native ms", "flattened ms", "ratio by the clock", "ratio of CPU time", "losses"]
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    kept = True
    for name in args.models:
        seen: list[Seen] = []
        for start in range(args.starts):
            given = (name, args.rounds, bool(start % 2))
            seen.append(fsshard.launch(work, args.nprocs, given, threads=1, timeout=600))
        kept &= report(name, seen, args.rounds)
    print(f"\nCPU time, target {TARGET:g}: {'kept' if kept else 'MISSED'}")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
