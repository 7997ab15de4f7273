"""The result of an estimate, and how it is shown: as text, as JSON and as a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fsshard.backends.registry import REFERENCE
from fsshard.pictures import check_picture, save_picture, style_axes
from fsshard.planning.bounds import Bounds
from fsshard.planning.text import aligned, counted, duration, ratio, size, unit_of
from fsshard.simulation.tracking import KINDS, Usage

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class Estimate(Usage):
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
        saved: the most bytes of activations that a forward left to its backward.
        moment: when the peak is: phase, module, operator.
        collectives: number and payload per step by kind.
        work: what the rank computes per step.
        machine: whose constants the seconds are by, see :mod:`fsshard.simulation.machine`.
        terms: seconds of the step by term: flops, written, operators, sent, collectives, and offloaded: copies
            of activations, and of shards under ``cpu_offload``.
        samples: of all ranks in a step: the lengths of the first dimension of batches' first tensors.
        best_seconds: seconds that the model's own floating-point operations take at the machine's peak rate.
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
    interval: tuple[int, int]
    machine: str
    terms: Mapping[str, float]
    samples: int
    best_seconds: float
    bounds: Bounds
    notes: tuple[str, ...] = ()

    @property
    def sent(self) -> int:
        """Bytes that a rank has to send per step, on average over the ranks."""
        return sum(traffic.sent for traffic in self.collectives)

    @property
    def seconds(self) -> float:
        """Predicted seconds of a step: the sum of its terms, without what is hidden behind others."""
        return sum(self.terms.values()) - self.hidden

    @property
    def hidden(self) -> float:
        """Seconds in which a GPU computes and sends at the same time; on the CPU both take the processor's time."""
        if self.device == "cpu" or not self._calls:
            return 0.0
        terms = self.terms
        computing = terms["flops"] + terms["written"] + terms["operators"]
        sending = terms["sent"] + terms["collectives"]
        # A pipeline of as many equal pieces as there are collectives: the first piece has nothing to hide behind.
        return min(computing, sending) * (1 - 1 / self._calls)

    @property
    def samples_per_second(self) -> float:
        """Samples per second of the whole job."""
        return self.samples / self.seconds

    @property
    def utilisation(self) -> float:
        """Model FLOPs utilisation (MFU): the share of the step that the model's own operations need at peak rate.

        These are those of the forward three times, as in PaLM (arXiv:2204.02311): what is recomputed does not count.
        """
        return self.best_seconds / self.seconds

    def table(self) -> str:
        """Return everything as text: memory by kind, collectives, bounds and the ratios to them."""
        ranks = counted(self.world_size, "rank")
        if self.mesh != (self.world_size,):
            mesh = " x ".join(map(str, self.mesh))
            ranks += f", mesh {mesh}"
        least, most = self.interval
        peak = size(least)
        if least != most:
            peak += f" to {size(most)}"
        parameters = f"parameters {size(self.parameters)} in {counted(self.units, 'unit')}"
        job = f"backend {self.backend!r} on {ranks}, for {self.device}"
        lines = [
            f"{self.name}, {job}: rank {self.rank} needs {peak}",
            f"at {self.moment}; {self.optimizer}, {parameters}",
            "",
        ]
        lines += aligned(self._memory_rows())
        if self.collectives:
            lines.append("")
            lines += aligned(self._traffic_rows())
        lines.append("")
        lines += aligned(self._time_rows())
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)

    __str__ = table

    def _memory_rows(self) -> list[list[str]]:
        rows = [["memory", "at the peak", "highest", "bound", "ratio"]]
        for kind, nbytes in self.by_kind.items():
            highest = self.highest[kind]
            bound = self.bounds.by_kind.get(kind)
            if highest or bound:
                rows.append([kind, size(nbytes), *_beside(highest, bound)])
        peak = _beside(self.peak, self.bounds.peak)
        rows.append(["peak", size(self.peak), *peak])
        return rows

    def _traffic_rows(self) -> list[list[str]]:
        rows = [["per step", "number", "payload", "bound", "ratio"]]
        for traffic in self.collectives:
            payload = _beside(traffic.nbytes, self.bounds.payloads.get(traffic.kind))
            rows.append([traffic.kind, str(traffic.count), *payload])
        sent = _beside(self.sent, self.bounds.sent)
        rows.append(["sent by a rank", str(self._calls), *sent])
        return rows

    @property
    def _calls(self) -> int:
        counts = [traffic.count for traffic in self.collectives]
        return sum(counts)

    def _time_rows(self) -> list[list[str]]:
        work = self.work
        amounts = {
            "flops": f"{sum(work.flops.values()):.3g}",
            "written": size(work.written),
            "operators": str(work.operators),
            "sent": size(self.sent),
            "collectives": str(self._calls),
            "offloaded": size(work.offloaded + work.shards),
        }
        rows = [[f"time by {self.machine!r}", "amount", "time", "share"]]
        total = self.seconds or 1.0
        for name, seconds in self.terms.items():
            share = seconds / total
            rows.append([name, amounts[name], duration(seconds), f"{share:.0%}"])
        if self.hidden:
            rows.append(["hidden", "", f"-{duration(self.hidden)}", f"-{self.hidden / total:.0%}"])
        rows.append(["a step", "", duration(self.seconds), ""])
        # A plan has no forward.
        if self.best_seconds:
            rows.append(["samples/s, MFU", f"{self.samples_per_second:.4g}", "", f"{self.utilisation:.1%}"])
        return rows

    def to_json(self) -> str:
        """Return everything as JSON, sizes in bytes, times in seconds."""
        values = asdict(self)
        values["sent"] = self.sent
        values["seconds"] = self.seconds
        values["samples_per_second"] = self.samples_per_second
        values["utilisation"] = self.utilisation
        for traffic in values["collectives"]:
            by_ranks = []
            for members, share in traffic.pop("by_group").items():
                by_ranks.append({"ranks": len(members), "calls": share.calls, "sent": share.sent})
            traffic["by_ranks"] = by_ranks
        return json.dumps(values, indent=1)

    def plot(self, path: str | Path) -> None:
        """Draw the peak by kind to a .png, .svg or .pdf.

        Raises:
            ConfigurationError: the suffix names no kind of picture, or no file can be written there.
            MissingExtra: matplotlib is not installed.
        """
        plot([self], path)


Estimates = Sequence[Estimate]
_ranks_of = attrgetter("world_size")


def _beside(nbytes: int, bound: int | None) -> list[str]:
    """Return a size, its bound and the ratio to it as three cells of a table."""
    if bound is None:
        return [size(nbytes), "-", "-"]
    return [size(nbytes), size(bound), ratio(nbytes, bound)]


def overview(estimates: Estimates) -> str:
    """Return several estimates as a table, a line for each.

    Peaks have their ratio to DDP's, where it is among them at that world size; samples per second that to as many times
    those of the backend's fewest ranks as there are more ranks: its scaling efficiency, of batches of one size a rank.
    """
    references = {}
    fewest: dict[str, Estimate] = {}
    for estimate in sorted(estimates, key=_ranks_of):
        if estimate.backend == REFERENCE:
            references[estimate.world_size] = estimate.peak
        fewest.setdefault(estimate.backend, estimate)
    head = ["backend", "ranks", "peak", f"of {REFERENCE}", "bound", "ratio"]
    head += ["collectives", "sent", "bound", "ratio", "time", "samples/s", "scales", "MFU", "peak at"]
    rows = [head]
    for estimate in estimates:
        # Where timing decides, the peak is between two numbers.
        peak, *beside = _beside(estimate.peak, estimate.bounds.peak)
        efficiency = fewest[estimate.backend].seconds / estimate.seconds
        if estimate.interval != (estimate.peak, estimate.peak):
            peak += f" to {size(estimate.interval[1])}"
        row = [
            estimate.backend,
            str(estimate.world_size),
            peak,
            ratio(estimate.peak, references.get(estimate.world_size, 0)),
            *beside,
            str(estimate._calls),
            *_beside(estimate.sent, estimate.bounds.sent),
            duration(estimate.seconds),
            f"{estimate.samples_per_second:.4g}",
            f"{efficiency:.2f}",
            f"{estimate.utilisation:.1%}",
            str(estimate.moment),
        ]
        rows.append(row)
    return "\n".join(aligned(rows))


def plot(
    estimates: Estimates,
    path: str | Path,
    at: int | None = None,
) -> None:
    """Write :func:`figure` to a .png, .svg or .pdf; raises as :meth:`Estimate.plot` does."""
    path = check_picture(path)
    save_picture(figure(estimates, at), path)


def figure(estimates: Estimates, at: int | None = None) -> Figure:
    """Draw memory at the peak by kind, a bar per backend; below, if there are several world sizes, peaks and speed.

    Args:
        estimates: of one training; one for each backend and world size.
        at: world size of the bars; by default the first one.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    sizes = sorted({estimate.world_size for estimate in estimates})
    if at is None:
        at = estimates[0].world_size
    shown = [estimate for estimate in estimates if estimate.world_size == at]
    largest = max(estimate.peak for estimate in shown)
    # The unit is the same above and below.
    unit, scale = unit_of(largest)
    rows = 3 if len(sizes) > 1 else 1
    width = max(7.0, 1.2 + 3.4 * len(shown))
    height = 1.0 + 4.2 * rows
    figure = Figure(figsize=(width, height), layout="constrained")
    grid = figure.subplots(rows, squeeze=False)
    bars, *below = grid[:, 0]
    _draw_bars(bars, shown, scale)
    bars.set_title(counted(at, "rank"), fontsize=11)
    if below:
        peaks, speeds = below
        for number, one in enumerate(shown):
            own = [each for each in estimates if each.backend == one.backend]
            own.sort(key=_ranks_of)
            color = f"C{number}"
            heights = [each.peak / scale for each in own]
            bounds = [each.bounds.peak / scale for each in own]
            _draw_lines(peaks, own, color, heights, "lower bound", bounds)
            # What it would be if nothing was sent more.
            alone = own[0].samples_per_second / own[0].samples
            perfect = [alone * each.samples for each in own]
            reached = [each.samples_per_second for each in own]
            _draw_lines(speeds, own, color, reached, "perfect scaling", perfect)
        peaks.set_xlabel("ranks" + _of_padding(estimates))
        speeds.set_xlabel(f"ranks, each with a batch of one size; by {estimates[0].machine!r}")
    for axes in below:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter("{x:g}")
        labels = list(map(str, sizes))
        axes.set_xticks(sizes, labels, fontsize=8)
    for axes in (bars, *below):
        style_axes(axes)
        axes.set_ylabel(f"{unit} per rank at the peak")
        # Beside the axes, where it hides nothing.
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9)
    if below:
        speeds.set_ylabel("samples/s of the job, predicted")
        speeds.yaxis.set_major_formatter(EngFormatter(sep=""))
    figure.suptitle(estimates[0].name, fontsize=11, x=0.02, ha="left", parse_math=False)
    return figure


def _draw_bars(axes: Axes, estimates: Estimates, scale: int) -> None:
    names = [estimate.backend for estimate in estimates]
    bottom = [0.0] * len(names)
    for number, kind in enumerate(KINDS):
        heights = [estimate.by_kind[kind] / scale for estimate in estimates]
        axes.bar(
            names,
            heights,
            bottom=bottom,
            color=f"C{number}",
            label=kind,
            width=0.62,
        )
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    bounds = [estimate.bounds.peak / scale for estimate in estimates]
    places = np.arange(len(names))
    axes.hlines(bounds, places - 0.31, places + 0.31, color="k", label="lower bound")


def _draw_lines(
    axes: Axes,
    estimates: Estimates,
    color: str,
    values: list[float],
    beside: str,
    others: list[float],
) -> None:
    """Draw what one backend has over world sizes, and with dots what stands ``beside`` it."""
    name = estimates[0].backend
    ranks = list(map(_ranks_of, estimates))
    axes.plot(ranks, values, "o-", color=color, markersize=4, label=name)
    axes.plot(ranks, others, ":", color=color, label=f"{name}, {beside}")


def _of_padding(estimates: Estimates) -> str:
    """Return why peaks rise with the ranks, if they do, as the second line of an axis' label."""
    # An engine holds a gathered unit at most twice, as it arrives and as it is used, and a shard: the rest is padding.
    padded = [each.world_size for each in estimates if each.highest["gathered units"] > 3 * each.parameters]
    if not padded:
        return ""
    return f"\nfrom {min(padded)} on gathered units are mostly padding: shards have a minimum size"
