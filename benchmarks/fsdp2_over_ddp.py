"""Measures sharding where it is not needed: FSDP2 beside DDP on small models, in turns, in one run.

    python benchmarks/fsdp2_over_ddp.py [--nprocs 2] [--rounds 30] [--models tfno t5]

Small steps are all overhead, and FSDP2's is in three places: its optimizer, which works on DTensors tensor by tensor
unless ``foreach`` is on; gloo's reduce-scatter, which is an all-reduce inside; and one round of collectives per unit.
``fsshard.wrap`` mends all three; ``merge_below=0`` leaves small units apart.
``reshard_after_forward=False`` saves one more round at the price of memory. Losses are compared at the end: only raw
DDP's may differ, in the last bits, where a tensor enters several units (docs/how-it-works.md). A ratio is the median
over rounds of this row's time by raw DDP's, with its 95% interval.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import fsshard
from benchmarks.overhead import JOBS, Job, built, raw, step_of
from benchmarks.pairs import measure

OURS: dict[str, dict[str, Any]] = {
    "fsshard ddp": {"backend": "ddp"},
    "fsshard fsdp2": {"backend": "fsdp2"},
    "the same, merge_below=0": {"backend": "fsdp2", "merge_below": 0},
    "the same, reshard_after_forward=False": {"backend": "fsdp2", "reshard_after_forward": False},
}
"""Rows -> settings of ``fsshard.wrap``."""


def sides_of(job: Job) -> dict[str, tuple[Any, Any]]:
    """Models and optimizers by row, raw DDP first."""
    found = {"raw ddp": raw(job, "ddp", fast=True), "raw fully_shard": raw(job, "fsdp2", fast=True)}
    for name, settings in OURS.items():
        wrapped = fsshard.wrap(built(job), **settings)
        found[name] = wrapped, fsshard.build_optimizer(wrapped, torch.optim.Adam, lr=1e-3)
    return found


def work(ctx: fsshard.Context, args: argparse.Namespace) -> None:
    """Every model, printed by rank 0."""
    for name in args.models:
        job = JOBS[name]
        sides = sides_of(job)
        times = measure([step_of(job, *side) for side in sides.values()], args.rounds * job.often)
        torch.manual_seed(0)
        losses = []
        for network, _ in sides.values():
            with torch.random.fork_rng(devices=[]):  # T5 has dropout
                losses.append(job.loss(network, torch.Generator().manual_seed(1)).item())
        if ctx.rank:
            continue
        for label, found, loss in zip(sides, times, losses, strict=True):
            wall, cpu = found.over(times[0])
            difference = loss - losses[0]
            print(
                f"| {name} | {label} | {found.milliseconds()[0]:.1f} | {wall} | {cpu} | {difference:.1g} |", flush=True
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nprocs", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--models", nargs="+", choices=list(JOBS), default=["tfno", "t5"])
    args = parser.parse_args()
    head = ["model", "engine", "ms", "of raw ddp, by the clock", "of CPU time", "loss less raw ddp's"]
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    fsshard.launch(work, args.nprocs, (args,), threads=1, timeout=600)
    return 0


if __name__ == "__main__":
    sys.exit(main())
