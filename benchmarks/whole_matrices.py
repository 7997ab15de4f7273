"""Muon over whole matrices beside torch's Muon on DTensors and beside AdamW, in one run.

    python benchmarks/whole_matrices.py [--nprocs 2] [--width 512] [--rounds 9]

Eight square matrices under FSDP2, each a unit. Collectives, bytes sent and CPU time are those of the optimizer's step,
the peak is that of a whole training step, and the ratio of times a median over rounds. The exit code is 1 if a bound is
missed: two collectives per bucket of 32 MiB; 2 (W - 1) / W times the bytes of the weights, all W ranks together, and
5 %; 0.5 of the CPU time of torch's Muon on DTensors; the peak of AdamW and the two buckets under way.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import fsshard
from benchmarks.pairs import measure
from fsshard.sharded.optimizer_whole import BUCKET_BYTES
from fsshard.simulation.tracking import Tracker

LAYERS = 8
Side = tuple[Any, Any]


def built(width: int) -> nn.Module:
    """The same matrices at every call."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))


def raw(width: int) -> Side:
    """torch's FSDP2 and Muon, whose every product goes through DTensor."""
    network = built(width)
    for layer in network:
        fully_shard(layer)
    fully_shard(network)
    return network, torch.optim.Muon(network.parameters(), lr=1e-3)


def ours(width: int, optimizer: Any, **settings: Any) -> Side:
    """Through fsshard."""
    model = fsshard.wrap(built(width), backend="fsdp2", auto_wrap_policy={nn.Linear}, merge_below=0)
    return model, fsshard.build_optimizer(model, optimizer, lr=1e-3, **settings)


def work(ctx: fsshard.Context, width: int, rounds: int) -> list[dict[str, float]]:
    """Measure each side on this rank: collectives, bytes, peak in bytes, CPU time over the first side's."""
    makers: list[Callable[[], Side]] = [
        lambda: raw(width),
        lambda: ours(width, torch.optim.Muon, whole=True),
        lambda: ours(width, torch.optim.AdamW),
    ]
    batch = torch.randn(16, width, generator=torch.Generator().manual_seed(ctx.rank))
    sides, found = [], list[dict[str, float]]()
    for make in makers:
        with Tracker() as tracker:
            model, optimizer = make()
            for _ in range(3):
                tracker.reset()
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            peak = tracker.usage().peak
        model(batch).square().mean().backward()
        with Tracker() as tracker:
            optimizer.step()
        traffic = tracker.usage().collectives
        found.append({"collectives": sum(t.count for t in traffic), "peak": peak})
        # What a rank sends on average, of all ranks together.
        found[-1]["bytes"] = ctx.world_size * sum(t.sent for t in traffic)
        sides.append(lambda number, step=optimizer.step: step())
    times = measure(sides, rounds)
    for side, timed in zip(found, times, strict=True):
        side["cpu"], side["of raw"] = timed.milliseconds()[1], timed.over(times[0])[1].median
    return found


def main() -> int:
    """One table, and the bounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nprocs", type=int, default=2)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    found = fsshard.launch(work, args.nprocs, (args.width, args.rounds), threads=1, timeout=600)
    weights = LAYERS * 4 * args.width**2
    print(f"{'':<24} {'collectives':>11} {'bytes / weights':>15} {'CPU ms':>8} {'/ raw':>6} {'peak / AdamW':>12}")
    for name, side in zip(("torch's Muon on DTensors", "Muon, whole=True", "AdamW"), found, strict=True):
        print(
            f"{name:<24} {side['collectives']:>11.0f} {side['bytes'] / weights:>15.3f} {side['cpu']:>8.1f} "
            f"{side['of raw']:>6.2f} {side['peak'] / found[2]['peak']:>12.3f}"
        )
    owners, under_way = found[1], min(weights, 2 * BUCKET_BYTES)
    kept = {
        "collectives": owners["collectives"] <= 2 * -(-weights // BUCKET_BYTES),
        "bytes": owners["bytes"] <= 1.05 * 2 * (args.nprocs - 1) / args.nprocs * weights,
        "CPU time": owners["of raw"] <= 0.5,
        "peak": owners["peak"] <= found[2]["peak"] + under_way,
    }
    missed = ", ".join(name for name, holds in kept.items() if not holds)
    print(f"bounds missed: {missed}" if missed else "all bounds are kept")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
