"""The result of an estimate, and how it is shown: as text, as JSON and as a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsshard.backends.registry import REFERENCE
from fsshard.pictures import check_picture, save_picture
from fsshard.planning.bounds import Bounds
from fsshard.planning.text import aligned, duration, ratio, size, unit_of
from fsshard.simulation.collectives import Traffic
from fsshard.simulation.tracking import KINDS, Moment
from fsshard.simulation.work import Work

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


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
        peak: the most bytes alive at the same time.
        interval: (least, most) that the peak can be, where timing decides; else twice the peak.
        by_kind: how the peak divides: parameters, buffers, optimizer state, gradients, gathered units, inputs,
            activations, temporaries.
        highest: per kind the most bytes alive at the same time, whenever that was.
        phases: the peaks of forward, backward and step.
        moment: when the peak is: phase, module, operator.
        collectives: number and payload per step by kind.
        work: what the rank computes per step.
        machine: whose constants the seconds are by, see :mod:`fsshard.simulation.machine`.
        terms: seconds of the step by term: flops, written, operators, sent, collectives, and offloaded: copies
            of activations, and of shards under ``cpu_offload``.
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
    work: Work
    machine: str
    terms: Mapping[str, float]
    bounds: Bounds
    notes: tuple[str, ...] = ()

    @property
    def sent(self) -> int:
        """Bytes that a rank has to send per step, on average over the ranks."""
        return sum(traffic.sent for traffic in self.collectives)

    @property
    def seconds(self) -> float:
        """Predicted seconds of a step: the sum of its terms, as if nothing overlapped."""
        return sum(self.terms.values())

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
            bounds = self.bounds.payloads
            rows = [
                [c.kind, str(c.count), size(c.nbytes), *_beside(c.nbytes, bounds.get(c.kind))] for c in self.collectives
            ]
            count = sum(one.count for one in self.collectives)
            rows.append(["sent by a rank", str(count), size(self.sent), *_beside(self.sent, self.bounds.sent)])
            lines += ["", *aligned([["per step", "number", "payload", "bound", "ratio"], *rows])]
        lines += ["", *aligned([[f"time by {self.machine!r}", "amount", "time", "share"], *self._time_rows()])]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    __str__ = table

    def _memory_rows(self) -> list[list[str]]:
        rows = [
            [kind, size(nbytes), size(self.highest[kind]), *_beside(self.highest[kind], self.bounds.by_kind.get(kind))]
            for kind, nbytes in self.by_kind.items()
            if self.highest[kind] or self.bounds.by_kind.get(kind)
        ]
        return [*rows, ["peak", size(self.peak), size(self.peak), *_beside(self.peak, self.bounds.peak)]]

    def _time_rows(self) -> list[list[str]]:
        count = sum(traffic.count for traffic in self.collectives)
        amounts = {"flops": f"{sum(self.work.flops.values()):.3g}", "written": size(self.work.written)}
        amounts |= {"operators": str(self.work.operators), "sent": size(self.sent), "collectives": str(count)}
        amounts["offloaded"] = size(self.work.offloaded + self.work.shards)
        total = self.seconds or 1.0
        rows = [[name, amounts[name], duration(t), f"{t / total:.0%}"] for name, t in self.terms.items()]
        return [*rows, ["a step", "", duration(self.seconds), ""]]

    def to_json(self) -> str:
        """Return everything as JSON, sizes in bytes, times in seconds."""
        return json.dumps({**asdict(self), "sent": self.sent, "seconds": self.seconds}, indent=1)

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
    head += ["collectives", "sent", "bound", "ratio", "time", "peak at"]
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
            duration(e.seconds),
            str(e.moment),
        ]
        for e in estimates
    ]
    return "\n".join(aligned([head, *rows]))


def plot(estimates: Sequence[Estimate], path: str | Path, at: int | None = None) -> None:
    """Write :func:`figure` to a .png, .svg or .pdf; raises as :meth:`Estimate.plot` does."""
    path = check_picture(path)
    save_picture(figure(estimates, at), path)


def figure(estimates: Sequence[Estimate], at: int | None = None) -> Figure:
    """Draw memory at the peak by kind, a bar per backend; below it the peaks over world sizes, if there are several.

    Args:
        estimates: of one training; one for each backend and world size.
        at: world size of the bars; by default the first one.
    """
    from matplotlib.figure import Figure

    sizes = sorted({e.world_size for e in estimates})
    at = estimates[0].world_size if at is None else at
    shown = [e for e in estimates if e.world_size == at]
    rows = 2 if len(sizes) > 1 else 1
    made = Figure(figsize=(max(7.0, 1.2 + 3.4 * len(shown)), 1.0 + 4.2 * rows), layout="constrained")
    bars, *below = made.subplots(rows, squeeze=False)[:, 0]
    unit, scale = unit_of(max(e.peak for e in shown))  # the same above and below
    names, bottom = [e.backend for e in shown], [0.0] * len(shown)
    for number, kind in enumerate(KINDS):
        heights = [e.by_kind[kind] / scale for e in shown]
        bars.bar(names, heights, bottom=bottom, color=f"C{number}", label=kind, width=0.62)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    left, right = ([number + side for number in range(len(shown))] for side in (-0.31, 0.31))
    bars.hlines([e.bounds.peak / scale for e in shown], left, right, color="k", label="lower bound")
    bars.set_title(f"{at} rank{'s' if at > 1 else ''}", fontsize=11)
    bars.set_ylabel(f"{unit} per rank at the peak")
    for axes in below:
        for number, name in enumerate(names):
            line = sorted((e.world_size, e.peak / scale, e.bounds.peak / scale) for e in estimates if e.backend == name)
            ranks, peaks, bounds = zip(*line, strict=True)
            axes.plot(ranks, peaks, "o-", color=f"C{number}", markersize=4, label=name)
            axes.plot(ranks, bounds, ":", color=f"C{number}", label=f"{name}, lower bound")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_xticks(sizes, [str(size) for size in sizes], fontsize=8)
        axes.set_xlabel("ranks" + _of_padding(estimates))
        axes.set_ylabel(f"{unit} per rank at the peak")
    for axes in (bars, *below):
        style_axes(axes)
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9)
    made.suptitle(estimates[0].name, fontsize=11, x=0.02, ha="left", parse_math=False)
    return made


def _of_padding(estimates: Sequence[Estimate]) -> str:
    """Return why peaks rise with the ranks, if they do, as the second line of an axis' label."""
    # An engine holds a gathered unit at most twice, as it arrives and as it is used, and a shard: the rest is padding.
    padded = [e.world_size for e in estimates if e.highest["gathered units"] > 3 * e.parameters]
    return f"\nfrom {min(padded)} on gathered units are mostly padding: shards have a minimum size" if padded else ""


def style_axes(axes: Axes, grid: Any = "y") -> None:
    """Draw a light grid behind, along one axis or ``"both"``, and no frame above and to the right."""
    axes.grid(True, axis=grid, color="#E6E6E6", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
