"""Shows a parity report: as text and as a picture.

matplotlib is optional and imported where it is used. All text is plain ASCII, so it prints under every locale.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import fill, indent
from typing import TYPE_CHECKING, Any

from fsshard.errors import MissingExtra, ParityError
from fsshard.parity.plain import WrongField, plain, read_as
from fsshard.parity.report import QUANTITIES, Cell, Difference, worst_of
from fsshard.pictures import COLOURS, FAINT, GREY, check_picture, save_picture, style_axes
from fsshard.planning.text import aligned, counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Cells = list[Cell]

# Columns of the table; the other quantities get one where something differs in them.
ALWAYS_SHOWN = ("loss", "gradient", "weight", "state")
# The table's words for verdicts.
WORDS = {"exact": "exact", "bound": "in bound", "different": "DIFFERENT", "refused": "refused", "failed": "FAILED"}
MEANINGS = {"exact": "equal to the last bit", "bound": "not equal, but within what rounding alone can do"}
# Cells, or groups of cells that failed alike, that the last line names; it must stay one line.
MOST_NAMED = 4


@dataclass(kw_only=True)
class ParityReport:
    """The result of :func:`fsshard.parity.compare`, and ways to show it.

    Attributes:
        recipe: its name.
        reference: the backend that all were compared with.
        steps: optimizer steps per run.
        cells: one per world size and backend, in the order asked for.
        warnings: why agreement proves little for this recipe: its loss is NaN or infinite, all ranks get the same
            batches, or no weight changes.
        changes: how the environment differs from that of the recorded training, where one is compared with.
    """

    recipe: str
    reference: str
    steps: int
    cells: Cells = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Return whether every backend agrees with the reference at every world size."""
        return bool(self.cells) and all(cell.ok for cell in self.cells)

    def __getitem__(self, key: tuple[str, int | str]) -> Cell:
        """Return ``report["fsdp2", 2]``, or ``report["fsdp2", "data=2,tp=2"]``: by backend and world size or mesh."""
        for cell in self.cells:
            if cell.backend == key[0] and key[1] in (cell.world_size, cell.mesh or None):
                return cell
        raise KeyError(key)

    def __iter__(self) -> Iterator[Cell]:
        return iter(self.cells)

    def raise_if_different(self) -> None:
        """Raise :class:`~fsshard.errors.ParityError`, with this report as its text, unless :attr:`ok`."""
        if not self.ok:
            raise ParityError(str(self))

    def __str__(self) -> str:
        paragraphs = [head(self)]
        if self.cells:
            paragraphs.append(_aligned(self))
        paragraphs += details(self)
        paragraphs.append(summary(self))
        return "\n\n".join(paragraphs)

    def plot(self, path: str | Path) -> None:
        """Write a picture: loss curves, and below how far loss and weights are from the reference's at each step.

        Args:
            path: its suffix tells the kind: ``.png``, ``.svg`` or ``.pdf``.

        Raises:
            ConfigurationError: another suffix, or no such folder.
            MissingExtra: matplotlib is not installed.
        """
        path = check_picture(path)
        save_picture(figure(self), path)

    def to_json(self) -> str:
        """Write the whole report; :meth:`from_json` reads it back.

        JSON has no infinity and no NaN; they are written as the strings ``"inf"``, ``"-inf"`` and ``"nan"``.
        """
        return json.dumps(plain(self, str), indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> ParityReport:
        """Read what :meth:`to_json` wrote, or raise ConfigurationError with the field that is something else."""
        report: ParityReport = read_as(cls, json.loads(text))
        for number, cell in enumerate(report.cells):
            if cell.verdict not in WORDS:
                expected = f"expected one of {', '.join(WORDS)}, got {cell.verdict!r}"
                raise WrongField(f"cells[{number}].verdict", expected)
        return report


# -------------------------------------------------------------------------------------------------------------- text


def number(value: float) -> str:
    """Write two digits; ``0`` for zero and ``nan`` for NaN."""
    return "0" if value == 0 else f"{value:.1e}"


def units(value: float) -> str:
    """Write units of the last place: whole numbers while they are short, ``<1`` below the first."""
    if value < 1:
        return "<1"
    return f"{value:.3g}" if value < 1000 else f"{value:.0e}"


def size(difference: Difference) -> str:
    """Write ``0``, or ``1.2e-07 3 ulp``, or ``see below`` where there was nothing to take the difference with."""
    if difference.verdict == "exact":
        return "0"
    if difference.max_abs == 0 and difference.note:
        return "see below"
    if difference.estimated:
        return f"~{number(difference.max_abs)}"
    text = number(difference.max_abs)
    # Numbers that are not finite have no distance in units of the last place.
    if 0 < difference.max_abs < math.inf and math.isfinite(difference.ulps):
        text += f" {units(difference.ulps)} ulp"
    return text


def _ranks(cell: Cell) -> str:
    return cell.mesh or counted(cell.world_size, "rank")


def head(report: ParityReport) -> str:
    """Return what was compared with what."""
    runs = counted(len(report.cells), "run")
    steps = counted(report.steps, "step")
    return f"parity of {report.recipe or 'a recipe'}: {runs} of {steps} against {report.reference}"


def quantities(report: ParityReport) -> list[str]:
    """Return the columns: the usual quantities, and whichever else differs in some cell."""
    columns = []
    for quantity in QUANTITIES:
        verdicts = [cell.worst(quantity).verdict for cell in report.cells]
        if quantity in ALWAYS_SHOWN or worst_of(verdicts) != "exact":
            columns.append(quantity)
    return columns


def rows(report: ParityReport) -> list[list[str]]:
    """Return the table: its head, then backend, ranks, verdict, a size per quantity and seconds of each cell."""
    columns = quantities(report)
    where = "mesh" if any(cell.mesh for cell in report.cells) else "ranks"
    lines = [["backend", where, "verdict", *columns, "seconds"]]
    for cell in report.cells:
        ranks = cell.mesh or str(cell.world_size)
        line = [cell.backend, ranks, WORDS[cell.verdict]]
        for quantity in columns:
            # A run without steps has no differences, which is not the same as differences of zero.
            compared = any(quantity in step.differences for step in cell.steps)
            line.append(size(cell.worst(quantity)) if compared else "-")
        line.append(f"{cell.seconds:.1f}")
        lines.append(line)
    return lines


def _aligned(report: ParityReport) -> str:
    lines = rows(report)
    rule = ["-" * max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, rule)
    sides = "<>".ljust(len(rule) - 1, "<") + ">"
    table = "\n".join(aligned(lines, sides))
    caption = "largest |difference| per quantity, in units of the last place (ulp) too"
    if "~" in table:
        caption += "; ~ is a root mean square, estimated from digests"
    return f"{caption}\n{table}"


def details(report: ParityReport) -> list[str]:
    """Write a paragraph for what is not exact or reproducible, one for cells that failed alike; then the warnings."""
    paragraphs = []
    if report.changes:
        changes = indent("\n".join(report.changes), "  ")
        paragraphs.append(f"since it was recorded:\n{changes}")
    cells = [cell for cell in report.cells if cell.verdict != "exact" or cell.reproducible is False]
    paragraphs += map(_paragraph, _alike(cells))
    paragraphs += [f"warning: {warning}" for warning in report.warnings]
    return paragraphs


def _alike(cells: Iterable[Cell]) -> list[Cells]:
    """Group cells that were refused or failed for one reason, as all are whose reference failed."""
    groups = defaultdict(list)
    for cell in cells:
        key: Any = id(cell)
        if cell.verdict in ("refused", "failed"):
            key = (cell.verdict, cell.world_size, cell.mesh, cell.reason, cell.traceback)
        # A key of its own keeps a cell by itself.
        groups[key].append(cell)
    return list(groups.values())


def _headline(cells: Cells) -> str:
    """Write ``fsdp, fsdp2 at 2 ranks: failed``."""
    cell = cells[0]
    meaning = MEANINGS.get(cell.verdict, cell.verdict)
    if cell.verdict == "different" and cell.first_divergence is not None:
        meaning = f"different from step {cell.first_divergence.step} on"
    backends = ", ".join(each.backend for each in cells)
    preposition = "on" if cell.mesh else "at"
    return f"{backends} {preposition} {_ranks(cell)}: {meaning}"


def _paragraph(cells: Cells) -> str:
    cell = cells[0]
    lines = [_headline(cells)]
    if cell.first_divergence is not None:
        lines.append(f"  first: {cell.first_divergence}")
    if cell.reproducible is False:
        lines.append("  not reproducible: a second run of the same backend gave different numbers")
    if cell.reason:
        word = "why" if cell.verdict in ("refused", "failed") else "hint"
        reason = indent(cell.reason.strip(), "    ").lstrip()
        lines.append(f"  {word}: {reason}")
    if cell.traceback.strip():
        lines.append(indent(cell.traceback.strip("\n"), "    "))
    return "\n".join(lines)


def summary(report: ParityReport) -> str:
    """Write the result in one line of words."""
    if not report.cells:
        return "nothing was compared"
    if report.ok:
        return _agreement(report)
    groups = _alike(cell for cell in report.cells if not cell.ok)
    # A fault first: that a backend was refused matters less.
    groups.sort(key=lambda cells: ("different", "failed", "refused").index(cells[0].verdict))
    texts = list(map(_brief, groups[:MOST_NAMED]))
    unnamed = sum(map(len, groups[MOST_NAMED:]))
    if unnamed:
        texts.append(f"and {unnamed} more")
    result = "NOT shown to be the same training"
    if groups[0][0].verdict == "different":
        result = "NOT the same training"
    return f"{result}: {'; '.join(texts)}"


def _agreement(report: ParityReport) -> str:
    exact = [cell.verdict for cell in report.cells].count("exact")
    bound = len(report.cells) - exact
    counts = []
    if exact:
        counts.append(f"{exact} exact")
    if bound:
        counts.append(f"{bound} within the rounding bound")
    text = f"all agree: {', '.join(counts)}"
    if report.warnings:
        text += f"; {counted(len(report.warnings), 'warning')}"
    return text


def _brief(cells: Cells) -> str:
    cell = cells[0]
    text = _headline(cells)
    first = cell.first_divergence
    if cell.verdict != "different":
        reason = cell.reason.strip().partition("\n")[0]
        return f"{text} ({reason})" if cell.reason else text
    if first is None:
        return text
    text += f", {first.quantity}"
    return f"{text} of {first.name}" if first.name else text


# ----------------------------------------------------------------------------------------------------------- picture

MARKERS = ("o", "s", "^", "D", "v", "P")
NO_DIFFERENCE = "difference: exactly 0"
Looks = dict[str, dict[str, Any]]
PANELS = {
    "loss": "loss",
    "loss difference": "|loss $-$ reference|",
    "weight difference": "largest |weight $-$ reference|",
}


def figure(report: ParityReport) -> Figure:
    """Draw a column per world size or mesh: the losses on top of each other, below how far loss and weights are off.

    A row in which every difference is 0 is left out, and the losses say so. Axes carry the labels
    ``"<panel>, <ranks>"`` with panel ``loss``, ``loss difference`` or ``weight difference``, and the mesh in place of
    the ranks where there is one.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise MissingExtra("matplotlib", "plot", "a picture of a parity report") from error
    columns = defaultdict(list)
    for cell in report.cells:
        columns[_ranks(cell)].append(cell)
    if not columns:
        columns["1 rank"] = []
    looks = _looks(report.cells)
    gaps = {}
    for quantity in ("loss", "weight"):
        values = []
        for cell in report.cells:
            values += _gaps(cell, quantity)
        if any(values):
            gaps[quantity] = values
    panels = ["loss", *(f"{name} difference" for name in gaps)]
    width = max(8.4, 1.4 + 5.2 * len(columns))
    figure = Figure(figsize=(width, 4.4 + 2.0 * len(gaps)), layout="constrained")
    ratios = {"height_ratios": [1.6, *[1] * len(gaps)]}
    grid = figure.subplots(
        len(panels),
        len(columns),
        sharex="col",
        sharey="row",
        squeeze=False,
        gridspec_kw=ratios,
    )
    for column, (ranks, cells) in enumerate(columns.items()):
        top = grid[0, column]
        _draw_losses(top, cells, looks, report.reference)
        for row, quantity in enumerate(gaps, 1):
            _draw_gaps(grid[row, column], cells, looks, quantity, gaps[quantity])
        short = ranks.partition(" ")[0]
        for row, panel in enumerate(panels):
            axes = grid[row, column]
            axes.set_label(f"{panel}, {short}")
            axes.set_ylabel(PANELS[panel] if column == 0 else "")
            style_axes(axes)
            axes.tick_params(color=GREY, labelsize=9)
        top.xaxis.set_major_locator(MaxNLocator(integer=True))
        top.set_title(ranks, fontsize=11, color=GREY)
        grid[-1, column].set_xlabel("step")
    characters = max(90, 55 * len(columns))
    result = fill(summary(report), characters)
    figure.suptitle(f"{head(report)}\n{result}", fontsize=11, x=0.02, ha="left", parse_math=False)
    return figure


def _looks(cells: Cells) -> Looks:
    """Return how the lines of each backend are drawn."""
    names = list(dict.fromkeys(cell.backend for cell in cells))
    looks = {}
    for index, name in enumerate(names):
        # Wide and below first, narrow and on top last, so that equal curves all show.
        width = 6.5 - 5.3 / max(1, len(names) - 1) * index
        looks[name] = {
            "color": COLOURS[index % len(COLOURS)],
            "marker": MARKERS[index % len(MARKERS)],
            "linewidth": width,
            "markersize": 4 + 1.2 * width,
            "markeredgewidth": 0,
            "solid_capstyle": "round",
        }
    return looks


def _gaps(cell: Cell, quantity: str) -> list[float]:
    """Return the largest difference of each step."""
    gaps = []
    for step in cell.steps:
        differences = step.differences.get(quantity, {})
        gaps.append(max((each.max_abs for each in differences.values()), default=0.0))
    return gaps


def _draw_losses(axes: Axes, cells: Cells, looks: Looks, reference: str) -> None:
    longest = max((cell.steps for cell in cells), key=len, default=[])
    axes.plot(
        [step.reference_loss for step in longest],
        color=FAINT,
        linewidth=11,
        solid_capstyle="round",
        label=f"{reference} (reference)",
    )
    for cell in cells:
        # Without steps there is a line in the legend and none in the picture; it must not look like a hidden one.
        look = looks[cell.backend] if cell.steps else {"linestyle": "none"}
        losses = [step.loss for step in cell.steps]
        label = f"{cell.backend}: {WORDS[cell.verdict]}"
        axes.plot(losses, **look, label=label, markevery=_every(cell))
    verdicts = {cell.verdict for cell in cells if cell.steps}
    axes.legend(
        title=NO_DIFFERENCE if verdicts == {"exact"} else None,
        # Below the curves, where it hides none of them.
        loc="upper center",
        bbox_to_anchor=(0.5, -0.12),
        ncols=3,
        frameon=False,
        fontsize=9,
        title_fontsize=12,
        handletextpad=1.2,
    )


def _draw_gaps(
    axes: Axes,
    cells: Cells,
    looks: Looks,
    quantity: str,
    everywhere: list[float],
) -> None:
    """Draw differences on a logarithmic axis that is linear near zero; NaN and infinity have a place above.

    Equal curves lie on top of each other, as losses do. ``everywhere`` has the differences of all columns.
    """
    # If all of them are NaN or infinite, the axis needs some range.
    finite = [value for value in everywhere if 0 < value < math.inf] or [1e-8]
    lowest = math.floor(math.log10(min(finite)))
    top = math.floor(math.log10(max(finite))) + 1
    low = 10.0**lowest
    high = 10.0**top
    not_finite = 10 * high
    axes.set_yscale("symlog", linthresh=low, linscale=0.5)
    broken = not all(map(math.isfinite, everywhere))
    axes.set_ylim(-0.3 * low, 30 * high if broken else high)
    here = []
    for cell in cells:
        look = looks[cell.backend]
        gaps = _gaps(cell, quantity)
        here += gaps
        heights = [gap if math.isfinite(gap) else not_finite for gap in gaps]
        axes.plot(heights, **look, markevery=_every(cell))
        if cell.verdict == "different" and cell.first_divergence is not None:
            step = cell.first_divergence.step
            axes.axvline(step, color=look["color"], linewidth=0.8, linestyle=":", zorder=0)
    if here and not any(here):
        axes.text(0.5, 0.5, NO_DIFFERENCE, transform=axes.transAxes, ha="center", color=GREY, size=11)
    ticks = {0.0: "0"}
    every = max(1, math.ceil((top - lowest) / 5))
    for exponent in range(lowest, top, every):
        ticks[10.0**exponent] = f"$10^{{{exponent}}}$"
    if broken:
        ticks[not_finite] = "nan, inf"
    axes.set_yticks(list(ticks), list(ticks.values()))
    axes.minorticks_off()


def _every(cell: Cell) -> int:
    """Return the steps from one marker to the next; markers of long runs would hide the line."""
    return max(1, len(cell.steps) // 12)
