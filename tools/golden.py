"""Writes the library's golden runs anew, for the minor version of torch that is installed.

python -m tools.golden
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch

from fsshard.launching.pool import RankPool
from fsshard.parity import golden, record


def write_all(folder: Path = golden.FOLDER, pool: RankPool | None = None) -> None:
    """Record each golden recipe on two ranks, and keep its losses below a folder."""
    place = folder / "torch-{}.{}".format(*torch.__version__.split(".")[:2])
    place.mkdir(exist_ok=True)
    with contextlib.nullcontext(pool) if pool is not None else contextlib.closing(RankPool()) as ranks:
        for name, recipe in golden.RECIPES.items():
            trace = record(recipe, steps=golden.STEPS, world_size=golden.WORLD_SIZE, detail="losses", pool=ranks)
            trace.commit = ""  # the file would be another after every commit
            trace.save(place / f"{name}.json")


if __name__ == "__main__":
    write_all()
