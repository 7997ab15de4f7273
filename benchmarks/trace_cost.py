"""The cost of ``fsshard trace``: steps of 20M parameters, recorded and not, with weights at every tenth step.

    python benchmarks/trace_cost.py [--engines ddp fsdp fsdp2] [--rounds 8] [--width 1820] [--batch 64]

In each round ten steps as they are, and ten of a training that is recorded, of which one writes all weights; the first
record, before the training, does not count. The ratio is the median over the rounds, of the clock and of the process's
CPU time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch import nn

import fsshard
from benchmarks.overhead import by_hand
from fsshard.parity.scripts.recorder import Recorder, Settings

EVERY = 10
LAYERS = 6
TARGET = 1.15


def seconds(step: Callable[[], None]) -> tuple[float, float]:
    """Seconds of ten steps: by the clock, and of CPU time."""
    dist.barrier()
    before = time.perf_counter(), time.process_time()
    for _ in range(EVERY):
        step()
    return time.perf_counter() - before[0], time.process_time() - before[1]


def measured(context: Any, engine: str, rounds: int, width: int, batch: int) -> tuple[int, list[tuple[float, ...]]]:
    """Number of parameters; per round the seconds of ten steps, without and recorded, by the clock and of CPU."""
    torch.manual_seed(0)
    bare = nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))
    count = sum(parameter.numel() for parameter in bare.parameters())
    model, optimizer = by_hand(bare, engine, tuple(map(str, range(LAYERS))), fast=False)
    x = torch.randn(batch, width)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    seconds(step)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            without = seconds(step)
            recorder = Recorder(Path(folder) / str(number), Settings(every=EVERY))
            recorder.start()
            step()  # the first record, and that of step 0
            recorded = seconds(step)
            recorder.stop()
            found.append((without[0], recorded[0], without[1], recorded[1]))
    return count, found


def main() -> int:
    """Print a table; 1 if a ratio misses the target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", default=["ddp", "fsdp", "fsdp2"])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--width", type=int, default=1820)
    parser.add_argument("--batch", type=int, default=64)
    given = parser.parse_args()
    print("| engine | parameters | step, ms | recorded / not, clock | recorded / not, CPU |\n|---|--:|--:|--:|--:|")
    worst = 0.0
    for engine in given.engines:
        arguments = (engine, given.rounds, given.width, given.batch)
        count, times = fsshard.launch(measured, 2, arguments, threads=1, timeout=600)
        clock, cpu = (statistics.median(one[k + 1] / one[k] for one in times) for k in (0, 2))
        step = 1e3 * statistics.median(one[0] for one in times) / EVERY
        print(f"| {engine} | {count:,} | {step:.0f} | {clock:.3f} | {cpu:.3f} |", flush=True)
        worst = max(worst, cpu)
    return int(worst > TARGET)


if __name__ == "__main__":
    sys.exit(main())
