"""Bytes that FSDP2 sends over gloo in a step, as the kernel counts them, beside what no algorithm can go below.

    python benchmarks/wire_bytes.py [--nprocs 2] [--models gpt-short t5] [--steps 6]

Once with gloo's own all-gather and reduce-scatter, once with fsshard's (``fast_collectives``). The bound: each
unit is gathered for the forward and for the backward (the root once) and reduced once, (N - 1) / N of its bytes each
time. The counter is that of the loopback device, so it sees the whole machine: the least of several steps is printed.
Linux only.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

import fsshard
from benchmarks.overhead import JOBS, built, step_of


def sent() -> int:
    """Bytes that went through the loopback device so far."""
    (line,) = (row for row in Path("/proc/net/dev").read_text().splitlines() if row.strip().startswith("lo:"))
    return int(line.split()[9])


def work(ctx: fsshard.Context, args: argparse.Namespace) -> None:
    """Every model, with and without; printed by rank 0."""
    for name in args.models:
        for fast in (False, True):
            model = fsshard.wrap(built(JOBS[name]), backend="fsdp2", merge_below=0, fast_collectives=fast)
            step = step_of(JOBS[name], model, fsshard.build_optimizer(model, torch.optim.Adam, lr=1e-3))
            root = next(unit.nbytes for unit in model.plan.units if not unit.name)
            bound = (3 * model.plan.nbytes - root) * (ctx.world_size - 1) / ctx.world_size
            found = []
            for number in range(args.steps):
                dist.barrier()
                before = sent()
                dist.barrier()
                step(number)
                dist.barrier()
                found.append((sent() - before) / ctx.world_size)
            if ctx.rank == 0:
                what = "ours" if fast else "gloo's"
                print(
                    f"{name:<10} {what:<7} {bound / 2**20:>9.2f} {min(found) / 2**20:>9.2f} {min(found) / bound:>7.3f}"
                )


def main() -> None:
    """One job."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nprocs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--models", nargs="+", choices=list(JOBS), default=["gpt-short", "t5"])
    args = parser.parse_args()
    print(
        f"{'model':<10} {'':<7} {'bound MiB':>9} {'sent MiB':>9} {'ratio':>7}   per rank and step, {args.nprocs} ranks"
    )
    fsshard.launch(work, args.nprocs, (args,), threads=1, timeout=600)


if __name__ == "__main__":
    main()
