"""Helpers of the demo and the examples: the cache's place, whole files, the bytes that a rank holds, means, gauges."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fsshard.pictures import replace_file as replace_file

if TYPE_CHECKING:
    import torch

    import fsshard


def cache_dir(name: str) -> Path:
    """Return ``$XDG_CACHE_HOME/fsshard/name`` or ``~/.cache/fsshard/name``; below ``%LOCALAPPDATA%`` on Windows."""
    variable = "LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME"
    base = Path(os.environ.get(variable, ""))
    if not base.is_absolute():
        # XDG: a relative path is to be ignored.
        base = Path.home() / ".cache"
    return base / "fsshard" / name


def held_bytes(model: fsshard.ShardedModule) -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer state that this rank holds now."""
    kinds = model.memory_report().ranks[0].by_kind
    return {kind: kinds[kind] for kind in ("parameters", "gradients", "optimizer state")}


def mean_over_ranks(loss: torch.Tensor) -> float:
    """Return the global batch's loss; float64, so that the order of ranks does not show."""
    import torch.distributed as dist

    total = loss.detach().double()
    dist.all_reduce(total)
    return float(total / dist.get_world_size())


def largest_difference(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the largest difference between two runs' losses, over all steps."""
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


@contextmanager
def progress(ctx: fsshard.Context, title: str, total: int) -> Iterator[Callable[[float], None]]:
    """Yield ``advance(loss)``: a bar on rank 0, nothing elsewhere."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"),
    )
    with Progress(*columns, disable=ctx.rank > 0) as bar:
        task = bar.add_task(title, total=total, loss=float("nan"))
        yield lambda loss: bar.update(task, advance=1, loss=loss)


class Stopwatch:
    """Seconds that a block took: the device's own, between two events, where there is CUDA; else the clock's."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self.seconds = 0.0
        self.events: list[torch.cuda.Event] = []
        if device.type == "cuda":
            self.events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def __enter__(self) -> Stopwatch:
        if self.events:
            self.events[0].record()
        self.start = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self.start
        if self.events:
            first, last = self.events
            last.record()
            last.synchronize()
            self.seconds = first.elapsed_time(last) / 1000
