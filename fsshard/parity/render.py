"""Shows a parity report: as text, as a table in the terminal, as a picture.

rich and matplotlib are optional and imported where they are used; the text needs neither. All text is plain ASCII, so
it prints under every locale.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import fill, indent
from typing import TYPE_CHECKING, Any

from fsshard.errors import MissingExtra, ParityError
from fsshard.parity.plain import plain, read_as
from fsshard.parity.report import QUANTITIES, Cell, Difference, StepReport
from fsshard.pictures import check_picture, save_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.table import Table

ALWAYS_SHOWN = ("loss", "gradient", "weight", "state")
"""Columns of the table; the other quantities get one where something differs in them."""
WORDS = {"exact": "exact", "bound": "in bound", "different": "DIFFERENT", "refused": "refused", "failed": "FAILED"}
"""The table's words for verdicts."""
STYLES = {"exact": "green", "bound": "cyan", "different": "bold red", "refused": "yellow", "failed": "bold magenta"}
"""rich styles of the verdicts. The word is always there too: colour alone tells nobody anything."""
MEANINGS = {"exact": "equal to the last bit", "bound": "not equal, but within what rounding alone can do"}
MOST_NAMED = 4
"""Cells, or groups of cells that failed alike, that the last line names; it must stay one line."""


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
    cells: list[Cell] = field(default_factory=list)
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
        aligned = [_aligned(self)] if self.cells else []
        return "\n\n".join([head(self), *aligned, *details(self), summary(self)])

    def table(self) -> Table:
        """Return a rich table for the terminal, or raise MissingExtra if rich is not installed."""
        try:
            from rich import box
            from rich.markup import escape
            from rich.table import Table
            from rich.text import Text
        except ImportError as error:
            raise MissingExtra("rich", "cli", "a table in the terminal") from error
        made = Table(title=escape(head(self)), caption=_caption(self), box=box.SIMPLE_HEAD, pad_edge=False)
        made.title_justify = made.caption_justify = "left"
        made.padding = (0, 1, 0, 0)  # 80 columns hold it
        names, *lines = rows(self)
        for place, name in enumerate(names):
            # a number never breaks; its ulp may go to the next line
            width = max(7, len(name)) if 2 < place < len(names) - 1 else None
            made.add_column(
                name,
                justify="right" if name in ("ranks", "mesh", "seconds") else "left",
                no_wrap=place < 3,
                min_width=width,
            )
        for cell, line in zip(self.cells, lines, strict=True):
            entries = [Text(entry, style="dim" if entry in ("0", "-") else "") for entry in line]
            entries[2] = Text(line[2], style=STYLES.get(cell.verdict, ""))
            made.add_row(*entries)
        return made

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
        return report


# -------------------------------------------------------------------------------------------------------------- text


def number(value: float) -> str:
    """Write two digits; ``0`` for zero and ``nan`` for NaN."""
    return "0" if value == 0 else f"{value:.1e}"


def units(value: float) -> str:
    """Write units of the last place: whole numbers while they are short, ``<1`` below the first."""
    return "<1" if value < 1 else f"{value:.3g}" if value < 1000 else f"{value:.0e}"


def size(difference: Difference) -> str:
    """Write ``0``, or ``1.2e-07 3 ulp``, or ``see below`` where there was nothing to take the difference with."""
    if difference.verdict == "exact":
        return "0"
    if difference.max_abs == 0 and difference.note:
        return "see below"
    if difference.estimated:
        return f"~{number(difference.max_abs)}"
    # Numbers that are not finite have no distance in units of the last place.
    known = difference.max_abs > 0 and math.isfinite(difference.ulps) and math.isfinite(difference.max_abs)
    return number(difference.max_abs) + (f" {units(difference.ulps)} ulp" if known else "")


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'s' * (number != 1)}"


def _ranks(cell: Cell) -> str:
    return cell.mesh or _count(cell.world_size, "rank")


def head(report: ParityReport) -> str:
    """Return what was compared with what."""
    runs, steps = _count(len(report.cells), "run"), _count(report.steps, "step")
    return f"parity of {report.recipe or 'a recipe'}: {runs} of {steps} against {report.reference}"


def quantities(report: ParityReport) -> list[str]:
    """Return the columns: the usual quantities, and whichever else differs in some cell."""
    return [q for q in QUANTITIES if q in ALWAYS_SHOWN or any(c.worst(q).verdict != "exact" for c in report.cells)]


def rows(report: ParityReport) -> list[list[str]]:
    """Return the table: its head, then backend, ranks, verdict, a size per quantity and seconds of each cell."""
    shown, where = quantities(report), "mesh" if any(cell.mesh for cell in report.cells) else "ranks"
    lines = [["backend", where, "verdict", *shown, "seconds"]]
    for cell in report.cells:
        # a run without steps has no differences, which is not the same as differences of zero
        known = {quantity for step in cell.steps for quantity in step.differences}
        sizes = [size(cell.worst(quantity)) if quantity in known else "-" for quantity in shown]
        ranks, verdict = cell.mesh or str(cell.world_size), WORDS.get(cell.verdict, cell.verdict)
        lines.append([cell.backend, ranks, verdict, *sizes, f"{cell.seconds:.1f}"])
    return lines


def _aligned(report: ParityReport) -> str:
    lines = rows(report)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    right = {1, len(widths) - 1}
    padded = (
        "  ".join(c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
        for line in lines
    )
    return "\n".join([_caption(report), *(line.rstrip() for line in padded)])


def _caption(report: ParityReport) -> str:
    found = (d for cell in report for step in cell.steps for named in step.differences.values() for d in named.values())
    estimated = "; ~ is a root mean square, estimated from digests" if any(d.estimated for d in found) else ""
    return f"largest |difference| per quantity, in units of the last place (ulp) too{estimated}"


def details(report: ParityReport) -> list[str]:
    """Write a paragraph for what is not exact or reproducible, one for cells that failed alike; then the warnings."""
    told = [cell for cell in report.cells if cell.verdict != "exact" or cell.reproducible is False]
    changes = [f"since it was recorded:\n{indent(chr(10).join(report.changes), '  ')}"] if report.changes else []
    return [*changes, *map(_paragraph, _alike(told)), *(f"warning: {warning}" for warning in report.warnings)]


def _alike(cells: Iterable[Cell]) -> list[list[Cell]]:
    """Group cells that were refused or failed for one reason, as all are whose reference failed."""
    found: dict[Any, list[Cell]] = {}
    for cell in cells:
        reason = (cell.verdict, cell.world_size, cell.mesh, cell.reason, cell.traceback)
        found.setdefault(reason if cell.verdict in ("refused", "failed") else id(cell), []).append(cell)
    return list(found.values())


def _headline(cells: list[Cell]) -> str:
    """Write ``fsdp, fsdp2 at 2 ranks: failed``."""
    cell = cells[0]
    meaning = MEANINGS.get(cell.verdict, cell.verdict)
    if cell.verdict == "different" and cell.first_divergence is not None:
        meaning = f"different from step {cell.first_divergence.step} on"
    places = ", ".join(each.backend for each in cells)
    return f"{places} {'on' if cell.mesh else 'at'} {_ranks(cell)}: {meaning}"


def _paragraph(cells: list[Cell]) -> str:
    cell, lines = cells[0], [_headline(cells)]
    if cell.first_divergence is not None:
        lines.append(f"  first: {cell.first_divergence}")
    if cell.reproducible is False:
        lines.append("  not reproducible: a second run of the same backend gave different numbers")
    if cell.reason:
        word = "why" if cell.verdict in ("refused", "failed") else "hint"
        lines.append(f"  {word}: " + indent(cell.reason.strip(), "    ").lstrip())
    if cell.traceback.strip():
        lines.append(indent(cell.traceback.strip("\n"), "    "))
    return "\n".join(lines)


def summary(report: ParityReport) -> str:
    """Write the result in one line of words."""
    if not report.cells:
        return "nothing was compared"
    if report.ok:
        exact = [cell.verdict for cell in report.cells].count("exact")
        bound = len(report.cells) - exact
        said = [f"{exact} exact"] * (exact > 0) + [f"{bound} within the rounding bound"] * (bound > 0)
        warned = f"; {_count(len(report.warnings), 'warning')}" if report.warnings else ""
        return f"all agree: {', '.join(said)}{warned}"
    bad = _alike(cell for cell in report.cells if not cell.ok)
    # A fault first: that a backend was refused matters less.
    bad.sort(key=lambda cells: ("different", "failed", "refused").index(cells[0].verdict))
    named = "; ".join(_brief(cells) for cells in bad[:MOST_NAMED])
    more = f"; and {sum(map(len, bad[MOST_NAMED:]))} more" if len(bad) > MOST_NAMED else ""
    proven = "NOT the same training" if bad[0][0].verdict == "different" else "NOT shown to be the same training"
    return f"{proven}: {named}{more}"


def _brief(cells: list[Cell]) -> str:
    cell, said = cells[0], ""
    if cell.verdict != "different" and cell.reason:
        said = f" ({cell.reason.strip().partition(chr(10))[0]})"
    elif cell.verdict == "different" and (first := cell.first_divergence) is not None:
        said = f", {first.quantity}{f' of {first.name}' if first.name else ''}"
    return f"{_headline(cells)}{said}"


# ----------------------------------------------------------------------------------------------------------- picture

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Okabe and Ito's palette: told apart under the usual kinds of colour blindness."""
MARKERS = ("o", "s", "^", "D", "v", "P")
GREY, FAINT = "#4D4D4D", "#BFBFBF"
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
    sizes = list(dict.fromkeys(map(_ranks, report.cells))) or ["1 rank"]
    looks: Looks = {}
    names = list(dict.fromkeys(cell.backend for cell in report.cells))
    for i, name in enumerate(names):  # wide and below first, narrow and on top last, so that equal curves all show
        width = 6.5 - 5.3 / max(1, len(names) - 1) * i
        looks[name] = {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)], "linewidth": width}
        looks[name] |= {"markersize": 4 + 1.2 * width, "markeredgewidth": 0, "solid_capstyle": "round"}
    gaps = {name: [_gap(s, name) for cell in report.cells for s in cell.steps] for name in ("loss", "weight")}
    drawn = {name: values for name, values in gaps.items() if any(values)}
    panels = ["loss", *(f"{name} difference" for name in drawn)]
    made = Figure(figsize=(max(8.4, 1.4 + 5.2 * len(sizes)), 4.4 + 2.0 * len(drawn)), layout="constrained")
    ratios = {"height_ratios": [1.6, *[1] * len(drawn)]}
    grid = made.subplots(len(panels), len(sizes), sharex="col", sharey="row", squeeze=False, gridspec_kw=ratios)
    for column, ranks in enumerate(sizes):
        cells = [cell for cell in report.cells if _ranks(cell) == ranks]
        _draw_losses(grid[0, column], cells, looks, report.reference)
        for axes, (quantity, values) in zip(grid[1:, column], drawn.items(), strict=True):
            _draw_gaps(axes, cells, looks, quantity, values)
        for axes, panel in zip(grid[:, column], panels, strict=True):
            label = PANELS[panel]
            axes.set_label(f"{panel}, {ranks.partition(' ')[0]}")
            axes.set_ylabel(label if column == 0 else "")
            axes.grid(True, axis="y", color="#E6E6E6", linewidth=0.6)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
            axes.tick_params(color=GREY, labelsize=9)
        grid[0, column].xaxis.set_major_locator(MaxNLocator(integer=True))
        grid[0, column].set_title(ranks, fontsize=11, color=GREY)
        grid[-1, column].set_xlabel("step")
    result = fill(summary(report), width=max(90, 55 * len(sizes)))
    made.suptitle(f"{head(report)}\n{result}", fontsize=11, x=0.02, ha="left", parse_math=False)
    return made


def _gap(step: StepReport, quantity: str) -> float:
    return max((d.max_abs for d in step.differences.get(quantity, {}).values()), default=0.0)


def _draw_losses(axes: Axes, cells: list[Cell], looks: Looks, reference: str) -> None:
    longest = max((cell.steps for cell in cells), key=len, default=[])
    below: dict[str, Any] = {"color": FAINT, "linewidth": 11, "solid_capstyle": "round"}
    axes.plot([step.reference_loss for step in longest], **below, label=f"{reference} (reference)")
    for cell in cells:
        # Without steps there is a line in the legend and none in the picture; it must not look like a hidden one.
        look = looks[cell.backend] if cell.steps else {"linestyle": "none"}
        label = f"{cell.backend}: {WORDS.get(cell.verdict, cell.verdict)}"
        axes.plot([step.loss for step in cell.steps], **look, label=label, markevery=_every(cell))
    verdicts = {cell.verdict for cell in cells if cell.steps}
    title = NO_DIFFERENCE if verdicts == {"exact"} else None
    # Below the curves, where it hides none of them.
    place: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.12), "ncols": 3}
    axes.legend(**place, title=title, frameon=False, fontsize=9, title_fontsize=12, handletextpad=1.2)


def _draw_gaps(axes: Axes, cells: list[Cell], looks: Looks, quantity: str, everywhere: list[float]) -> None:
    """Draw differences on a logarithmic axis that is linear near zero; NaN and infinity have a place above.

    Equal curves lie on top of each other, as losses do. ``everywhere`` has the differences of all columns.
    """
    decades = [math.floor(math.log10(value)) for value in everywhere if 0 < value < math.inf] or [-8]  # all nan, inf
    low, high = 10.0 ** min(decades), 10.0 ** (max(decades) + 1)
    axes.set_yscale("symlog", linthresh=low, linscale=0.5)
    broken = not all(map(math.isfinite, everywhere))
    axes.set_ylim(-0.3 * low, 30 * high if broken else high)
    for cell in cells:
        look = looks[cell.backend]
        gaps = [value if math.isfinite(value) else 10 * high for value in (_gap(s, quantity) for s in cell.steps)]
        axes.plot(gaps, **look, markevery=_every(cell))
        if cell.verdict == "different" and cell.first_divergence is not None:
            axes.axvline(cell.first_divergence.step, color=look["color"], linewidth=0.8, linestyle=":", zorder=0)
    here = [_gap(step, quantity) for cell in cells for step in cell.steps]
    if here and not any(here):
        axes.text(0.5, 0.5, NO_DIFFERENCE, transform=axes.transAxes, ha="center", color=GREY, size=11)
    every = max(1, math.ceil((max(decades) + 1 - min(decades)) / 5))
    marks = {10.0**e: f"$10^{{{e}}}$" for e in range(min(decades), max(decades) + 1, every)}
    ticks = {0.0: "0", **marks, **({10 * high: "nan, inf"} if broken else {})}
    axes.set_yticks(list(ticks), list(ticks.values()))
    axes.minorticks_off()


def _every(cell: Cell) -> int:
    """Return the steps from one marker to the next; markers of long runs would hide the line."""
    return max(1, len(cell.steps) // 12)
