"""Times parity tests on the session's one pool of ranks against a pool of its own for each.

    python benchmarks/parity_pool.py [--tests 20] [--steps 2] [--world-size 2]

Both sides run the same comparisons of the same tiny recipe under two backends, in turns, in one run. The first
comparison of the pool's side pays for the start of its processes.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor, nn

from fsshard.launching.pool import RankPool
from fsshard.parity import Recipe, compare

BACKENDS = ("fsdp2", "ddp")
TARGET = 5.0


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def batches(rank: int, world_size: int, number: int) -> Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(100 * number + rank))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def recipe() -> Recipe:
    return Recipe(build=build, batches=batches, loss=loss)


def seconds(pool: RankPool, steps: int, world_size: int) -> float:
    """One parity test."""
    start = time.perf_counter()
    report = compare(recipe, backends=BACKENDS, world_sizes=[world_size], steps=steps, pool=pool)
    report.raise_if_different()
    return time.perf_counter() - start


def spawned(steps: int, world_size: int) -> float:
    """One parity test with a spawn of its own; what its processes take to end counts too."""
    start = time.perf_counter()
    with RankPool() as pool:
        seconds(pool, steps, world_size)
    return time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", type=int, default=20)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--world-size", type=int, default=2)
    options = parser.parse_args()
    pooled_times, spawned_times = [], []
    with RankPool() as pool:
        for number in range(options.tests):
            pooled_times.append(seconds(pool, options.steps, options.world_size))
            spawned_times.append(spawned(options.steps, options.world_size))
            line = f"{number + 1:3}/{options.tests}   pool {pooled_times[-1]:6.2f} s   own {spawned_times[-1]:6.2f} s"
            print(line, file=sys.stderr, flush=True)
    pooled_total, spawned_total = sum(pooled_times), sum(spawned_times)
    print(f"{options.tests} parity tests: {', '.join(BACKENDS)}; {options.steps} steps; {options.world_size} ranks")
    print(f"  one pool for all:      {pooled_total:7.1f} s   (the first, with the start: {pooled_times[0]:.1f} s)")
    print(f"  a pool of its own:     {spawned_total:7.1f} s")
    print(f"  ratio:                 {spawned_total / pooled_total:7.1f}     (target: {TARGET:g})")
    return 0 if spawned_total >= TARGET * pooled_total else 1


if __name__ == "__main__":
    sys.exit(main())
