"""Parts of ``weather_vit.py`` that have nothing to do with engines: errors, learning rates, ranges, pictures."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsshard.demo.common import replace_file
from fsshard.pictures import COLOURS, GREY, draw_picture

__all__ = ["Ranges", "Shown", "learning_rate", "persistence", "picture", "profiler", "squared_error", "to_image"]

# Errors -----------------------------------------------------------------------------------------------------------


def squared_error(forecast: Tensor, truth: Tensor, row_weights: Tensor) -> Tensor:
    """Mean of the squared error of each channel over the grid, every row weighted by what it stands for.

    As in S. Rasp et al., *WeatherBench 2* (2024): the root of its mean over samples is the latitude-weighted RMSE.

    Args:
        forecast: ``(N, channels, rows, columns)``.
        truth: the same.
        row_weights: ``(rows, 1)``, with mean 1.

    Returns:
        ``(N, channels)``, float32.
    """
    return ((forecast.float() - truth).square() * row_weights).mean((2, 3))


def persistence(window: Tensor, row_weights: Tensor) -> Tensor:
    """Squared errors of the forecast that nothing changes, ``(N, leads, channels)``.

    Args:
        window: ``(N, 1 + leads, channels, rows, columns)``.
        row_weights: ``(rows, 1)``.
    """
    now, later = window[:, 0], window[:, 1:].unbind(1)
    return torch.stack([squared_error(now, truth, row_weights) for truth in later], 1)


# The learning rate ------------------------------------------------------------------------------------------------


def learning_rate(step: int, warmup: int, steps: int) -> float:
    """The factor at a step: up in a straight line while it warms up, then down along a cosine.

    Args:
        step: from 0.
        warmup: steps until it is 1.
        steps: of the whole training; there it is 0.
    """
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


# Where the time goes ----------------------------------------------------------------------------------------------


class Ranges:
    """Named parts of a step: seen by torch.profiler, on a GPU by Nsight Systems (NVTX), and timed by the clock.

    The clock is the host's: on a GPU it says what it took to ask for the work, not to do it.

    Attributes:
        seconds: by name, of all passes together.
        passes: how often.
        first: seconds of the first pass, in which kernels are compiled and memory is taken.
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = {}
        self.passes: dict[str, int] = {}
        self.first: dict[str, float] = {}
        self.on_gpu = device.type == "cuda"

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        with torch.profiler.record_function(name), torch.cuda.nvtx.range(name) if self.on_gpu else nullcontext():
            yield
        took = time.perf_counter() - start
        self.first.setdefault(name, took)
        self.seconds[name] = self.seconds.get(name, 0.0) + took
        self.passes[name] = self.passes.get(name, 0) + 1

    def each(self, name: str, batches: Iterable[Tensor]) -> Iterator[Tensor]:
        """The batches, with the wait for each in a range."""
        iterator = iter(batches)
        while True:
            with self(name):
                batch = next(iterator, None)
            if batch is None:
                return
            yield batch

    def milliseconds(self, name: str) -> float:
        """Return the mean time of a pass, the first one left out."""
        later = self.seconds.get(name, 0.0) - self.first.get(name, 0.0)
        return 1000 * later / max(1, self.passes.get(name, 0) - 1)


def profiler(folder: Path | None, name: str, device: torch.device) -> Any:
    """torch.profiler over steps 3 to 5, whose trace goes to ``folder``; where there is no folder, one of nothing.

    Open the file with https://ui.perfetto.dev or ``chrome://tracing``.
    """
    if folder is None:
        return nullcontext()
    folder.mkdir(parents=True, exist_ok=True)
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    return torch.profiler.profile(
        activities=kinds,
        schedule=torch.profiler.schedule(wait=1, warmup=1, active=3, repeat=1),
        on_trace_ready=lambda done: replace_file(
            folder / f"{name}.json", lambda temporary: done.export_chrome_trace(str(temporary))
        ),
    )


# Pictures ---------------------------------------------------------------------------------------------------------

Shown = tuple[Tensor, Tensor]
"""A truth and its forecast, by lead time: ``(leads, channels, rows, columns)`` each, in host memory."""


def to_image(fields: Tensor) -> Tensor:
    """``(rows, columns)`` in standard deviations to TensorBoard's grey levels, ``(1, rows, columns)``."""
    return ((fields.float() + 3) / 6).clamp(0, 1)[None]


def picture(
    file: Path, shown: Shown, channel: str, rmse: Mapping[str, Sequence[float]], persisted: Sequence[float]
) -> None:
    """Draw truth, forecast and error of one channel by lead time, and below the RMSE of all against persistence.

    Args:
        file: its suffix says the format. It appears in one piece.
        shown: the first channel of which is drawn.
        channel: its name.
        rmse: by name of the run, by lead time.
        persisted: that of the forecast that nothing changes.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    inches = (2.6 * len(persisted) + 1, 7.5)
    draw_picture(file, inches, lambda figure: paint(figure, shown, channel, rmse, persisted))


def paint(
    figure: Any, shown: Shown, channel: str, rmse: Mapping[str, Sequence[float]], persisted: Sequence[float]
) -> None:
    """Fill a figure; the arguments are those of :func:`picture`."""
    truth, forecast = (fields[:, 0].float() for fields in shown)
    leads = len(truth)
    fields, errors = figure.subfigures(2, 1, height_ratios=[3, 1.6])
    grid = fields.subplots(3, leads, squeeze=False)
    for row, (name, each) in zip(
        grid, {"truth": truth, "forecast": forecast, "error": forecast - truth}.items(), strict=True
    ):
        for axes, field in zip(row, each, strict=True):
            drawn = axes.imshow(field, vmin=-3, vmax=3, cmap="RdBu_r", interpolation="nearest")
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_visible(False)
        row[0].set_ylabel(f"{name}, {channel}")
    for lead, axes in enumerate(grid[0], 1):
        axes.set_title(f"{lead} step{'s' if lead > 1 else ''} ahead")
    fields.colorbar(drawn, ax=grid, label="standard deviations", shrink=0.6)
    _paint_errors(errors.subplots(), rmse, persisted)


def _paint_errors(axes: Any, rmse: Mapping[str, Sequence[float]], persisted: Sequence[float]) -> None:
    """Draw equal curves as nested bands, the first widest; each name stands at the end of its curve."""
    leads = range(1, len(persisted) + 1)
    axes.plot(leads, persisted, color=GREY, linestyle="--", marker="s", markersize=5)
    axes.annotate("persistence", (leads[-1], persisted[-1]), (10, -4), textcoords="offset points", color=GREY)
    for number, (name, errors) in enumerate(rmse.items()):
        width = 2.0 + 2.5 * (len(rmse) - 1 - number)
        axes.plot(leads, errors, color=COLOURS[number % len(COLOURS)], linewidth=width, marker="o", label=name)
    if len(rmse) > 1:
        axes.legend()
    else:
        axes.annotate("the model", (leads[-1], errors[-1]), (10, -4), textcoords="offset points", color=COLOURS[0])
    axes.set(xlabel="steps ahead", ylabel="RMSE", ylim=(0, None), xticks=leads, xlim=(0.9, leads[-1] + 0.4))
