"""Memory that a whole state dict takes while it is put together, against its bound, per backend.

    python benchmarks/state_dict_memory.py [--world-size 2] [--width 256]

The bound for ``state_dict(rank0_only=True, offload_to_cpu=True)``: one copy of the model on rank 0, one unit on every
other rank. Bytes of tensors as torch hands them out: the table is the same at every run.
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
from fsshard.launching.pool import RankPool
from tests.memory import LiveBytes

BACKENDS = ("none", "ddp", "fsdp", "fsdp2", "fairscale")
SLACK = 512
"""Bytes of flags, by which the ranks make sure that they ask for the same."""


def build(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True) for _ in range(4)))


def peak(backend: str, width: int, rank0_only: bool) -> tuple[int, int, int]:
    """Most bytes at once, bytes of one copy, and of the largest unit; collective."""
    model = fsshard.wrap(build(width), backend=backend)
    with LiveBytes() as live:
        state = model.state_dict(rank0_only=rank0_only, offload_to_cpu=True)
    assert bool(state) == (not rank0_only or not dist.get_rank())
    return live.peak, model.plan.nbytes, max(unit.nbytes for unit in model.plan.units)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    options = parser.parse_args()
    print("| backend | kept on | rank 0, peak | one copy | peak / copy | other ranks, peak | largest unit |")
    print("|---|---|---|---|---|---|---|")
    kept = True
    with RankPool() as pool:
        for backend in BACKENDS:
            ranks = 1 if backend == "none" else options.world_size
            for rank0_only in (True, False):
                (first, copy, unit), *rest = pool.run(peak, ranks, backend, options.width, rank0_only)
                others = max((found for found, *_ in rest), default=0)
                if rank0_only:
                    kept &= first <= copy + SLACK and others <= unit
                where = "rank 0" if rank0_only else "all"
                row = f"| {first:,} | {copy:,} | {first / copy:.3f} | {others:,} | {unit:,} |"
                print(f"| {backend} | {where} {row}")
    print("within the bound" if kept else "BEYOND THE BOUND")
    return int(not kept)


if __name__ == "__main__":
    sys.exit(main())
