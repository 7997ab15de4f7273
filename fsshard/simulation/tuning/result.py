"""The result of a search: what it has tried, which of it is best, and how that is shown."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed.device_mesh import init_device_mesh

from fsshard.parallel.meshes import role_of
from fsshard.pictures import check_picture, save_picture, style_axes
from fsshard.planning.text import aligned, counted, duration, size, unit_of
from fsshard.simulation.result import Estimate
from fsshard.simulation.simulation import Settings
from fsshard.simulation.tuning.search_space import Candidate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEAD = ["", "peak", "time", "sent", "of P", "collectives", "recomputed", "peak at", "plan"]


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A plan that was simulated."""

    candidate: Candidate
    name: str  # "auto", "one unit" and so on of those that are always tried, else ""
    recomputed: int  # number of blocks whose activations are computed again
    estimate: Estimate
    offloaded: int = 0  # number of blocks whose activations wait in host memory instead

    @property
    def peak(self) -> int:
        """Return the most bytes that a rank can need."""
        return self.estimate.interval[1]

    @property
    def collectives(self) -> int:
        """Return their number per step."""
        return sum(traffic.count for traffic in self.estimate.collectives)

    @property
    def sent_share(self) -> float:
        """Return the bytes that a rank sends per step, in units of the parameters' bytes."""
        return self.estimate.sent / self.estimate.parameters

    @property
    def cost(self) -> tuple[float, int, int]:
        """Return the price of needing less memory: predicted seconds, bytes sent, collectives."""
        return self.estimate.seconds, self.estimate.sent, self.collectives

    def beats(self, other: Tried) -> bool:
        """Return whether this plan is at least as good in everything, and better in something."""
        values = (self.peak, *self.cost)
        others = (other.peak, *other.cost)
        return values != others and all(a <= b for a, b in zip(values, others, strict=True))

    def row(self, name: str, winner: Tried) -> list[str]:
        """Return the cells of a table."""
        return [
            "*" if self is winner else "",
            size(self.peak),
            duration(self.estimate.seconds),
            size(self.estimate.sent),
            f"{self.sent_share:.2f}",
            str(self.collectives),
            self._blocks(),
            str(self.estimate.moment),
            f"{name}{self.candidate.code()}",
        ]

    def _blocks(self) -> str:
        if self.offloaded:
            return f"{self.offloaded} offloaded"
        return counted(self.recomputed, "block") if self.recomputed else "-"

    def as_dict(self) -> Settings:
        """Return what JSON shows."""
        return {
            "settings": self.candidate.code(),
            "name": self.name,
            "peak": self.peak,
            "seconds": self.estimate.seconds,
            "sent": self.estimate.sent,
            "collectives": self.collectives,
            "recomputed": self.recomputed,
            "offloaded": self.offloaded,
            "moment": asdict(self.estimate.moment),
        }


@dataclass(frozen=True, kw_only=True)
class TuneResult:
    """The result of :func:`fsshard.tune`: the plans that were simulated, and the best of them.

    Attributes:
        name: of what is trained.
        world_size: ranks of the job.
        memory: bytes that a rank may need, or None: the least was looked for.
        winner: the plan with the least predicted time of those that fit ``memory``; without a bound, the one with the
            least peak (give or take a thousandth). Of equals the one that sends least, in the fewest collectives.
        tried: all, in the order in which they were simulated.
        aliases: names of those that are always tried -> the plan that each turned out to be.
        failed: candidates that cannot be, and why.
    """

    name: str
    world_size: int
    memory: int | None
    winner: Tried
    tried: tuple[Tried, ...]
    aliases: Mapping[str, Tried]
    failed: Mapping[str, str]

    @property
    def frontier(self) -> tuple[Tried, ...]:
        """Return the Pareto frontier of memory, time, bytes and collectives; the smallest peak first."""
        unbeaten: dict[Any, Tried] = {}
        for one in self.tried:
            if not any(other.beats(one) for other in self.tried):
                # Of equals the first one is kept.
                unbeaten.setdefault((one.peak, one.cost), one)
        return tuple(unbeaten[key] for key in sorted(unbeaten))

    @property
    def settings(self) -> Settings:
        """Keyword arguments of :func:`fsshard.wrap` that give the winner.

        Where ranks are arranged otherwise than in one row, it makes the mesh, and is collective. Over dimensions that
        divide the model pass what the recipe's ``split`` returns, too: :attr:`mesh` has the sizes.
        """
        settings = {"backend": self.winner.candidate.backend, **self.winner.candidate.settings}
        if self.mesh is not None:
            names = tuple(self.mesh)
            whole = init_device_mesh(self.winner.estimate.device, tuple(self.mesh.values()), mesh_dim_names=names)
            data = tuple(name for name in names if role_of(name) != "model")
            settings["device_mesh"] = whole if data == names else whole[data]
        return settings

    @property
    def mesh(self) -> Mapping[str, int] | None:
        """Sizes by name of the winner's mesh; None: one row of data-parallel ranks."""
        return self.winner.candidate.mesh

    def code(self) -> str:
        """Return the winner as code to paste: ``model`` is the bare model before it, and wrapped after it."""
        candidate = self.winner.candidate
        lines = [*candidate.imports(), ""]
        if self.mesh is not None:
            names = tuple(self.mesh)
            arguments = f"{self.winner.estimate.device!r}, {tuple(self.mesh.values())}, mesh_dim_names={names}"
            lines.append(f"mesh = init_device_mesh({arguments})".replace("'", '"'))
            data = [name for name in names if role_of(name) != "model"]
            if len(data) < len(names):
                lines.append("# Divide the model over mesh first, as the recipe's split(model, mesh) does.")
                quoted = ", ".join(f'"{name}"' for name in data)
                lines.append(f"mesh = mesh[{quoted}]")
        lines += ["model = fsshard.wrap(", "    model,", f"{candidate.code(lines=True)})", ""]
        return "\n".join(lines)

    @property
    def _on_ranks(self) -> str:
        return f"{self.name} on {counted(self.world_size, 'rank')}"

    def table(self) -> str:
        """Return the frontier, the plans that are always tried, and the winner as code."""
        goal = "the least peak"
        if self.memory is not None:
            goal = f"the least time within {size(self.memory)}"
        estimate = self.winner.estimate
        rows = [HEAD]
        rows += [one.row("", self.winner) for one in self.frontier]
        of_frontier = len(rows)
        rows += [one.row(f"{name}: ", self.winner) for name, one in self.aliases.items()]
        lines = aligned(rows)
        failures = [f"not possible: {code}: {why}" for code, why in self.failed.items()]
        text = [
            f"{self._on_ranks}: {goal}; {len(self.tried)} plans simulated; P is "
            f"{size(estimate.parameters)}, that of all parameters; times by {estimate.machine!r}",
            "",
            "Pareto frontier of memory, time, traffic and number of collectives",
            *lines[:of_frontier],
            "",
            "always tried:",
            *lines[of_frontier:],
            *failures,
            "",
            "the winner (*):",
            "",
            self.code().rstrip(),
        ]
        return "\n".join(text)

    __str__ = table

    def to_json(self) -> str:
        """Return everything as JSON, sizes in bytes, times in seconds."""
        winner = self.winner.as_dict()
        winner["estimate"] = json.loads(self.winner.estimate.to_json())
        content = {
            "name": self.name,
            "world_size": self.world_size,
            "memory": self.memory,
            "winner": winner,
            "code": self.code(),
            "frontier": [one.as_dict() for one in self.frontier],
            "always tried": {name: one.as_dict() for name, one in self.aliases.items()},
            "tried": [one.as_dict() for one in self.tried],
            "failed": dict(self.failed),
        }
        return json.dumps(content, indent=1)

    def plot(self, path: str | Path) -> None:
        """Draw the peaks of all plans against time, traffic and collectives, and the frontier, to a picture.

        ``path`` ends in .png, .svg or .pdf; raises as :meth:`Estimate.plot` does.
        """
        path = check_picture(path)
        save_picture(figure(self), path)


# Peaks that differ by a thousandth are as good as equal, so that what they cost decides.
NEGLIGIBLE = 1.001


def best(tried: Sequence[Tried], memory: int | None) -> Tried | None:
    """Return the winner, of equals the first one tried; None if there is a bound and nothing fits."""
    if memory is None and tried:
        # Without a bound the cheapest of those with nearly the least peak, none above what is always tried.
        near = NEGLIGIBLE * min(one.peak for one in tried)
        # Those that are always tried are what a user would compare with.
        usual = [one.peak for one in tried if one.name]
        memory = int(min([near, *usual]))
    fitting = [one for one in tried if memory is not None and one.peak <= memory]
    return min(fitting, key=lambda one: (one.cost, one.peak), default=None)


# Markers of the plans that are always tried, in their order.
MARKERS = "sDv^<>PXdphH8"

# Name of an axis that peaks are drawn against -> its value for a plan.
AXES: dict[str, Callable[[Tried], float]] = {
    "predicted ms per step": lambda one: 1e3 * one.estimate.seconds,
    "sent by a rank per step, in units of the parameters' bytes": lambda one: one.sent_share,
    "collectives per step": lambda one: one.collectives,
}


def figure(result: TuneResult) -> Figure:
    """Draw peaks against time, traffic and collectives: a point per plan, the frontier, a mark for each usual plan."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15.0, 5.2), layout="constrained")
    unit, scale = unit_of(max(one.peak for one in result.tried))
    columns = figure.subplots(1, len(AXES), sharey=True)
    for axes, (label, value) in zip(columns, AXES.items(), strict=True):
        _draw(axes, result, value, scale)
        axes.set_xlabel(label)
    columns[0].set_ylabel(f"{unit} per rank at the peak")
    columns[-1].legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9)
    title = f"{result._on_ranks}: {len(result.tried)} plans, times by {result.winner.estimate.machine!r}"
    figure.suptitle(title, fontsize=11, x=0.02, ha="left", parse_math=False)
    return figure


def _draw(
    axes: Any,
    result: TuneResult,
    value: Callable[[Tried], float],
    scale: int,
) -> None:
    def draw(plans: Sequence[Tried], marker: str, **look: Any) -> None:
        if plans:
            axes.plot(list(map(value, plans)), [one.peak / scale for one in plans], marker, **look)

    kept = [one for one in result.tried if not one.recomputed]
    recomputed = [one for one in result.tried if one.recomputed]
    draw(kept, "o", color="#0072B2", label="nothing recomputed", markersize=6)
    draw(recomputed, "o", color="#E69F00", label="blocks recomputed", markersize=6)
    draw(
        result.frontier,
        "o",
        color="#555555",
        zorder=1,
        label="frontier",
        markersize=11,
        markerfacecolor="none",
    )
    draw([result.winner], "*", color="#D55E00", label="winner", markersize=14)
    if result.memory is not None:
        axes.axhline(result.memory / scale, color="black", linestyle=":", label="memory bound")
    names = defaultdict(list)  # a plan may have several
    for name, one in result.aliases.items():
        names[id(one)].append(name)
    for marker, names_of_plan in zip(cycle(MARKERS), names.values(), strict=False):
        plan = result.aliases[names_of_plan[0]]
        # The names are in the legend: beside the points they would collide.
        label = "\n".join(names_of_plan)
        draw([plan], marker, color="black", label=label, markersize=5, markerfacecolor="white")
    axes.margins(0.12)
    style_axes(axes, "both")
