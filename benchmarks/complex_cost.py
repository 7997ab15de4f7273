"""What flattened complex weights cost beside native ones under DDP: step time, in turns, in one run.

    python benchmarks/complex_cost.py [--nprocs 2] [--rounds 60] [--models tfno tfno48 fno]

Both sides are torch's own DDP and Adam over the same neural operator, the same weights and the same batches: once with
complex parameters as the model makes them, once after ``fsshard.tensorfy``, which stores them as pairs of reals and
shows the model complex views. No wrapper of fsshard's is in the way: what is measured is the flattening. A ratio is the
median over rounds of flattened / native, with its 95% interval. Losses are compared at the end.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch import nn

import fsshard
from benchmarks.overhead import JOBS, Job, built, operator, step_of
from benchmarks.pairs import WARM_UP, Step, measure

TARGET = 1.01
MODELS: dict[str, Job] = {"tfno": JOBS["tfno"], "tfno48": JOBS["tfno48"], "fno": operator("FNO", 32, 32)}


def side(job: Job, *, flat: bool) -> tuple[nn.Module, Step]:
    """A model under DDP, and its step."""
    network = built(job)
    if flat:
        fsshard.tensorfy(network)
    wrapped = nn.parallel.DistributedDataParallel(network) if dist.get_world_size() > 1 else network
    return wrapped, step_of(job, wrapped, torch.optim.Adam(wrapped.parameters(), lr=1e-3))


def work(ctx: fsshard.Context, args: argparse.Namespace) -> bool:
    """Every model, printed by rank 0; whether all targets hold."""
    kept = True
    for name in args.models:
        job = MODELS[name]
        (native, native_step), (flat, flat_step) = side(job, flat=False), side(job, flat=True)
        before, after = measure([native_step, flat_step], args.rounds)
        losses = [job.loss(network, torch.Generator().manual_seed(1)).item() for network in (native, flat)]
        wall, cpu = after.over(before)
        kept &= cpu.median <= TARGET
        count = sum(parameter.numel() * 2 for parameter in native.parameters() if parameter.is_complex())
        share = count / sum(parameter.numel() for parameter in flat.parameters())
        if ctx.rank == 0:
            cells = [name, f"{share:.0%}", *(f"{times.milliseconds()[0]:.1f}" for times in (before, after))]
            equal = "equal" if losses[0] == losses[1] else f"differ by {abs(losses[1] / losses[0] - 1):.0e}"
            cells += [str(wall), str(cpu), f"{equal} after {args.rounds + WARM_UP} steps"]
            print("| " + " | ".join(cells) + " |", flush=True)
    return kept


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nprocs", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    args = parser.parse_args()
    head = ["model", "complex", "native ms", "flattened ms", "ratio by the clock", "ratio of CPU time", "losses"]
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    kept = fsshard.launch(work, args.nprocs, (args,), threads=1, timeout=600)
    print(f"\nCPU time, target {TARGET:g}: {'kept' if kept else 'MISSED'}")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
