"""Samples per second and memory that a published tutorial has logged on GPUs, beside what is predicted without one.

    python benchmarks/tutorial_vit.py

The rows are those of NERSC's *Deep Learning at Scale* whose training loop waits for nothing but the GPUs: its vision
transformer (360 x 720 points, 20 fields, patches of 8 x 8, 12 blocks, 16 samples a rank) on A100s, four of them a node.
Predictions are by peak rates of data sheets, and of a model with fused attention: the order is what they are for. The
tutorial has no log of the last row: tensor-parallel ranks in different nodes.
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

import fsshard
from examples.mesh_recipes import split_vit, squared_error
from examples.vit import ViT
from fsshard.parity import Recipe
from fsshard.simulation.machine import MACHINES
from fsshard.simulation.result import Estimate

SHAPE = (360, 720)
CHANNELS = 20
PERLMUTTER = replace(MACHINES["a100"], per_node=4)
"""Four GPUs a node, each with a network card of 25 GB/s."""


@dataclass(frozen=True)
class Row:
    """A training of the tutorial.

    Attributes:
        name: what it is.
        width: numbers per token.
        precision: as for ``wrap``.
        settings: of ``estimate``.
        samples: per second, as logged; None: there is no log.
        memory: GB in use after the first forward of the second epoch, as logged.
    """

    name: str
    width: int
    precision: str | None
    settings: dict[str, Any] = field(default_factory=dict)
    samples: float | None = None
    memory: float | None = None


ALONE = {"backend": "none", "world_size": 1}
ROWS = (
    Row("width 384, float32, 1 GPU", 384, None, ALONE, 13.2),
    Row("width 384, float16, 1 GPU", 384, "fp16", ALONE, 53.3),
    Row("width 1024, float16, data 4", 1024, "fp16", {"backend": "ddp", "world_size": 4}, 93.1, 44.9),
    Row(
        "width 1024, float16, data 4 x tp 4",
        1024,
        "fp16",
        {"backend": "ddp", "mesh": {"data": 4, "tp": 4}},
        125.1,
        33.2,
    ),
    Row("the same, tp ranks in different nodes", 1024, "fp16", {"backend": "ddp", "mesh": {"tp": 4, "data": 4}}),
)


def fields(rank: int, world_size: int, number: int) -> tuple[Tensor, Tensor]:
    """Return zeros of the shape of a rank's batch: what they are means nothing to a simulation."""
    before = torch.zeros(16, CHANNELS, *SHAPE)
    return before, before


def forecast(row: Row) -> Estimate:
    """Return the estimate of a row."""
    recipe = Recipe(
        build=partial(ViT, channels=CHANNELS, shape=SHAPE, patch=8, width=row.width, depth=12, heads=8),
        batches=fields,
        loss=squared_error,
        optimizer=torch.optim.Adam,
        precision=row.precision,
        split=split_vit,
    )
    return fsshard.estimate(recipe, device="cuda", machine=PERLMUTTER, **row.settings)


def main() -> int:
    warnings.filterwarnings("ignore")
    head = ["training", "samples/s, logged", "predicted", "GB, logged", "predicted", "MFU, predicted"]
    print(f"| {' | '.join(head)} |\n{'|---' * len(head)}|")
    found = []
    for row in ROWS:
        one = forecast(row)
        found.append(one)
        logged = ["-" if each is None else f"{each:.1f}" for each in (row.samples, row.memory)]
        cells = [row.name, logged[0], f"{one.samples_per_second:.1f}", logged[1], f"{one.peak / 1e9:.1f}"]
        print(f"| {' | '.join(cells)} | {one.utilisation:.0%} |", flush=True)
    plain, half, data, split, apart = found
    right = (
        plain.samples_per_second < half.samples_per_second
        and data.samples_per_second < split.samples_per_second
        and data.peak > split.peak
        and apart.samples_per_second < split.samples_per_second
    )
    print(
        f"\nthe order that was logged, in speed and in memory, and neighbours share tensors: {'yes' if right else 'NO'}"
    )
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
