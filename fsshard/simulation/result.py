"""The result of an estimate, and how it is shown: as text, as JSON and as a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from fsshard.backends.registry import REFERENCE
from fsshard.pictures import check_picture, save_picture
from fsshard.planning.bounds import Bounds
from fsshard.planning.text import aligned, ratio, size
from fsshard.simulation.collectives import Traffic
from fsshard.simulation.tracking import KINDS, Moment

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Estimate", "blank_figure", "figure", "overview", "plot", "style_axes", "unit_of"]

# Okabe and Ito's, which people with any colour vision tell apart.
COLOURS = {
    "parameters": "#0072B2",
    "buffers": "#999999",
    "optimizer state": "#56B4E9",
    "gradients": "#D55E00",
    "gathered units": "#009E73",
    "inputs": "#BBBBBB",
    "activations": "#E69F00",
    "temporaries": "#CC79A7",
}
SCALES = (("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10))


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The result of :func:`fsshard.estimate`: memory and traffic of one training step, of the rank that needs most.

    All sizes are in bytes.

    Attributes:
        name: of what is trained.
        backend: the backend.
        world_size: ranks of the job.
        mesh: shape of the mesh of ranks that share the work: (ranks,), or (replicas, shards); of all dimensions where
            the model is divided over others.
        device: the device type that it is for.
        rank: the rank that was simulated.
        optimizer: its class, and which implementation of it was assumed.
        parameters: bytes of one whole copy of the parameters.
        units: sharding units.
        peak: the most bytes alive at once.
        interval: (least, most) that the peak can be, where timing decides; else twice the peak.
        by_kind: how the peak divides: parameters, buffers, optimizer state, gradients, gathered units, inputs,
            activations, temporaries.
        highest: per kind the most bytes alive at once, whenever that was.
        phases: the peaks of forward, backward and step.
        moment: when the peak is: phase, module, operator.
        collectives: number and payload per step by kind.
        bounds: what no implementation of the engine can go below; see :mod:`fsshard.planning.bounds`.
        notes: what was assumed.
    """

    name: str
    backend: str
    world_size: int
    mesh: tuple[int, ...]
    device: str
    rank: int
    optimizer: str
    parameters: int
    units: int
    peak: int
    interval: tuple[int, int]
    by_kind: Mapping[str, int]
    highest: Mapping[str, int]
    phases: Mapping[str, int]
    moment: Moment
    collectives: tuple[Traffic, ...]
    bounds: Bounds
    notes: tuple[str, ...] = ()

    @property
    def sent(self) -> int:
        """Bytes that a rank has to send per step, on average over the ranks."""
        return sum(traffic.sent for traffic in self.collectives)

    def __str__(self) -> str:
        return self.table()

    def table(self) -> str:
        """Return everything as text: memory by kind, collectives, bounds and the ratios to them."""
        ranks = f"{self.world_size} rank{'s' if self.world_size > 1 else ''}"
        mesh = f", mesh {' x '.join(map(str, self.mesh))}" if self.mesh != (self.world_size,) else ""
        least, most = self.interval
        peak = size(least) if least == most else f"{size(least)} to {size(most)}"
        units = f"{self.units} unit{'s' if self.units > 1 else ''}"
        lines = [
            f"{self.name}, backend {self.backend!r} on {ranks}{mesh}, for {self.device}: rank {self.rank} needs {peak}",
            f"at {self.moment}; {self.optimizer}, parameters {size(self.parameters)} in {units}",
            "",
            *aligned([["memory", "at the peak", "highest", "bound", "ratio"], *self._memory_rows()]),
        ]
        if self.collectives:
            lines += ["", *aligned([["per step", "number", "payload", "bound", "ratio"], *self._traffic_rows()])]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def _memory_rows(self) -> list[list[str]]:
        rows = [
            [kind, size(nbytes), size(self.highest[kind]), *_beside(self.highest[kind], self.bounds.by_kind.get(kind))]
            for kind, nbytes in self.by_kind.items()
            if self.highest[kind] or self.bounds.by_kind.get(kind)
        ]
        return [*rows, ["peak", size(self.peak), size(self.peak), *_beside(self.peak, self.bounds.peak)]]

    def _traffic_rows(self) -> list[list[str]]:
        rows = [
            [one.kind, str(one.count), size(one.nbytes), *_beside(one.nbytes, self.bounds.payloads.get(one.kind))]
            for one in self.collectives
        ]
        count = sum(one.count for one in self.collectives)
        return [*rows, ["sent by a rank", str(count), size(self.sent), *_beside(self.sent, self.bounds.sent)]]

    def to_json(self) -> str:
        """Return everything as JSON, sizes in bytes."""
        return json.dumps({**asdict(self), "sent": self.sent}, indent=1)

    def plot(self, path: str | Path) -> None:
        """Draw the peak by kind to a .png, .svg or .pdf.

        Raises:
            ConfigurationError: the suffix names no kind of picture, or no file can be written there.
            MissingExtra: matplotlib is not installed.
        """
        plot([self], path)


def _beside(value: int, bound: int | None) -> list[str]:
    """Return a bound and the ratio to it as two cells of a table."""
    return ["-", "-"] if bound is None else [size(bound), ratio(value, bound)]


def overview(estimates: Sequence[Estimate]) -> str:
    """Return several estimates as a table, a line for each; ratios to DDP where it is among them at that world size."""
    references = {e.world_size: e.peak for e in estimates if e.backend == REFERENCE}
    head = ["backend", "ranks", "peak", f"of {REFERENCE}", "bound", "ratio"]
    head += ["collectives", "sent", "bound", "ratio", "peak at"]
    rows = [
        [
            e.backend,
            str(e.world_size),
            size(e.peak) + ("" if e.interval == (e.peak, e.peak) else f" to {size(e.interval[1])}"),
            ratio(e.peak, references.get(e.world_size, 0)),
            *_beside(e.peak, e.bounds.peak),
            str(sum(traffic.count for traffic in e.collectives)),
            size(e.sent),
            *_beside(e.sent, e.bounds.sent),
            str(e.moment),
        ]
        for e in estimates
    ]
    return "\n".join(aligned([head, *rows]))


def plot(estimates: Sequence[Estimate], path: str | Path, at: int | None = None) -> None:
    """Write :func:`figure` to a .png, .svg or .pdf.

    Raises:
        ConfigurationError: the suffix names no kind of picture, or no file can be written there.
        MissingExtra: matplotlib is not installed.
    """
    path = check_picture(path)
    save_picture(figure(estimates, at), path)


def figure(estimates: Sequence[Estimate], at: int | None = None) -> Figure:
    """Draw stacked memory at the peak: a bar per backend, and below them areas over world sizes, if there are several.

    Args:
        estimates: of one training; one for each backend and world size.
        at: world size of the bars; by default the first one.
    """
    sizes = sorted({e.world_size for e in estimates})
    at = estimates[0].world_size if at is None else at
    backends = list(dict.fromkeys(e.backend for e in estimates))
    rows = 2 if len(sizes) > 1 else 1
    made = blank_figure(max(7.0, 1.2 + 3.4 * len(backends)), 1.0 + 4.2 * rows)
    parts: list[Any] = [made] if rows == 1 else list(cast(Any, made.subfigures(rows, 1)))
    bars, shown = parts[0].subplots(), [e for e in estimates if e.world_size == at]
    unit, scale = unit_of(max(e.peak for e in shown))
    _bars(bars, shown, scale)
    bars.set_title(f"{at} rank{'s' if at > 1 else ''}", fontsize=11)
    bars.set_ylabel(f"{unit} per rank at the peak")
    if rows == 2:
        grid = parts[1].subplots(1, len(backends), sharey=True, squeeze=False)[0]
        unit, scale = unit_of(max(e.peak for e in estimates))
        for axes, backend in zip(grid, backends, strict=True):
            _areas(axes, [e for e in estimates if e.backend == backend], scale)
        grid[0].set_ylabel(f"{unit} per rank at the peak")
    handles, labels = bars.get_legend_handles_labels()
    bars.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9)
    over = "; marked numbers of ranks are simulated, between them are straight lines" if rows == 2 else ""
    made.suptitle(f"{estimates[0].name}{over}", fontsize=11, x=0.02, ha="left", parse_math=False)
    return made


def blank_figure(width: float, height: float) -> Figure:
    """Return an empty figure of so many inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def unit_of(highest: int) -> tuple[str, float]:
    """Return the unit in which the largest of several sizes is shown, and its bytes."""
    return next((pair for pair in SCALES if highest >= pair[1]), ("B", 1.0))


def _areas(axes: Axes, estimates: Sequence[Estimate], scale: float) -> None:
    ordered = sorted(estimates, key=lambda e: e.world_size)
    sizes = [e.world_size for e in ordered]
    layers = [[e.by_kind[kind] / scale for e in ordered] for kind in KINDS]
    axes.stackplot(sizes, *layers, labels=KINDS, colors=[COLOURS[kind] for kind in KINDS], linewidth=0)
    axes.plot(sizes, [e.peak / scale for e in ordered], color="black", marker="o", markersize=3, linewidth=0.8)
    axes.plot(sizes, [e.bounds.peak / scale for e in ordered], color="black", linestyle=":", label="lower bound")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes], rotation=60, fontsize=8)
    axes.minorticks_off()
    axes.set_title(ordered[0].backend, fontsize=11)
    axes.set_xlabel("ranks")
    style_axes(axes)
    axes.tick_params(labelsize=9)


def _bars(axes: Axes, estimates: Sequence[Estimate], scale: float) -> None:
    names = [e.backend for e in estimates]
    places = range(len(names))
    bottom = [0.0] * len(names)
    for kind in (kind for kind in KINDS if any(e.by_kind[kind] for e in estimates)):
        heights = [e.by_kind[kind] / scale for e in estimates]
        axes.bar(places, heights, bottom=bottom, color=COLOURS[kind], label=kind, width=0.62)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    for place, e in zip(places, estimates, strict=True):
        low = e.bounds.peak / scale
        label = "lower bound" if place == 0 else None
        axes.plot([place - 0.38, place + 0.38], [low, low], color="black", linestyle=":", label=label)
    axes.set_xticks(list(places), names)
    style_axes(axes)
    axes.tick_params(labelsize=9)


def style_axes(axes: Axes, grid: Any = "y") -> None:
    """Draw a light grid behind, along one axis or ``"both"``, and no frame above and to the right."""
    axes.grid(True, axis=grid, color="#E6E6E6", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
