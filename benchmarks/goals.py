"""What a step, a wrap, a save and a load should cost at most, and what the sections of docs/benchmarks.md say of it.

``benchmarks/run_all.py`` writes the table on top of the page. Figures are read from the sections as they are shown, so
that a table which is made after one benchmark ran again has the others' as they were measured.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks import page

__all__ = ["GOALS", "NAME", "Goal", "numbers", "section"]

NAME = "goals"
"""The section's mark, as of the others."""

INTRODUCTION = (
    "Ratios: less is better. A goal is where we think the limit lies, or what a peer takes. The row's section, further "
    "down, has the command, the intervals and the CPU. Below the table: where the rest goes of what was missed."
)

Figures = Callable[[str], Sequence[float]]


def numbers(text: str, *begin: str) -> list[float]:
    """Return the numbers of a table's row, but for intervals in brackets.

    Args:
        text: a section of the page, with tables in Markdown or fixed width.
        begin: the words that the row begins with.

    Raises:
        LookupError: no row begins so.
    """
    for line in text.splitlines():
        words = re.sub(r"\[.*?\]|\|", " ", line).split()
        if tuple(words[: len(begin)]) == begin:
            return [float(word) for word in words[len(begin) :] if re.fullmatch(r"[-+]?\d+(\.\d+)?", word)]
    raise LookupError(f"no row begins with {' '.join(begin)!r}")


def at(index: int, *rows: str) -> Figures:
    """Return what reads one number of each row; a row is named by the words that it begins with."""
    return lambda text: [numbers(text, *row.split())[index] for row in rows]


def pick(row: str, *indices: int) -> Figures:
    """Return what reads several numbers of a row."""
    return lambda text: [numbers(text, *row.split())[index] for index in indices]


def growth(few: str, many: str) -> Figures:
    """Return what reads how many times as long all stages take for more parameters, of times per parameter."""

    def read(text: str) -> list[float]:
        pairs = zip(numbers(text, few)[:4], numbers(text, many)[:4], strict=True)
        return [int(many) / int(few) * after / before for before, after in pairs]

    return read


@dataclass(frozen=True, kw_only=True)
class Goal:
    """One row of the table.

    Attributes:
        what: what is measured, and what it is divided by; a name for each figure.
        benchmark: the section that has the figures.
        figures: reads them from it.
        at_most: as many bounds, in the same order.
        rest: where the rest goes, from a profile, and why it stays.
    """

    what: str
    benchmark: str
    figures: Figures
    at_most: tuple[float, ...]
    rest: str = ""


FRONTS = ("fabric", "trainer", "accelerate", "hf")

GOALS: tuple[Goal, ...] = (
    Goal(
        what="Step of the small TFNO, fsdp2 / raw: by the clock, CPU time",
        benchmark="speed",
        figures=pick("tfno fsdp2", 2, 5),
        at_most=(0.36, 0.45),
        rest=(
            "`alone / raw` in the section is the same training with nothing sharded or sent. What is above it is "
            "two collectives over gloo with the copies around them: with two ranks on two cores nothing can run "
            "beside them."
        ),
    ),
    Goal(
        what="Step of gpt-short, fsdp2 / raw: by the clock, CPU time",
        benchmark="speed",
        figures=pick("gpt-short fsdp2", 2, 5),
        at_most=(0.66, 0.72),
        rest="as for the TFNO.",
    ),
    Goal(
        what="Step of gpt-short, ddp / raw",
        benchmark="speed",
        figures=pick("gpt-short ddp", 2),
        at_most=(0.91,),
        rest=(
            "training alone takes what `alone / raw` says; the rest is the one sum over ranks, most of which DDP "
            "itself overlaps with the backward."
        ),
    ),
    Goal(
        what="CPU time of a step of the small TFNO, ddp / Accelerate, Fabric",
        benchmark="peers",
        figures=at(3, "tfno ddp Accelerate", "tfno ddp Fabric"),
        at_most=(0.95, 0.95),
        rest=(
            "both run DDP and torch's Adam, whose loop over parameters is most of what is not the model; we save "
            "one copy of each gradient and no more."
        ),
    ),
    Goal(
        what="CPU time of a step of gpt-short, ddp / Accelerate, Fabric",
        benchmark="peers",
        figures=at(3, "gpt-short ddp Accelerate", "gpt-short ddp Fabric"),
        at_most=(0.90, 0.90),
        rest="as for the TFNO: the model's own operators are most of it on either side.",
    ),
    Goal(
        what="Step over fairscale / the front's own DDP: Fabric, Lightning, Accelerate, Hugging Face",
        benchmark="fronts",
        figures=at(2, *(f"{front} fairscale" for front in FRONTS)),
        at_most=(1.05,) * 4,
        rest=(
            "the bytes are DDP's, but half of them are weights that come back after the step, when no backward is "
            "left to overlap with."
        ),
    ),
    Goal(
        what="Step over fsdp2 / the front's own DDP: the same",
        benchmark="fronts",
        figures=at(2, *(f"{front} fsdp2" for front in FRONTS)),
        at_most=(1.00,) * 4,
        rest=(
            "weights are gathered before the forward, when nothing else is there to do, and gradients are packed "
            "by ranks."
        ),
    ),
    Goal(
        what="Fixed cost of a step, CPU time / raw: ddp, fsdp2, fsdp, fairscale",
        benchmark="fixed",
        figures=at(5, "fixed ddp", "fixed fsdp2", "fixed fsdp", "fixed fairscale"),
        at_most=(0.95, 0.50, 1.05, 1.05),
        rest=(
            "by the section's profile the loop of torch's Adam over the parameters and autograd's engine, on both "
            "sides. `foreach=True` takes less of it, and one more copy of the weights in memory, which we leave "
            "to the user."
        ),
    ),
    Goal(
        what="Wrap of 1,000 units, CPU time / by hand: ddp, fsdp, fsdp2, fairscale",
        benchmark="start",
        figures=at(2, "ddp 1000", "fsdp 1000", "fsdp2 1000", "fairscale 1000"),
        at_most=(1.50,) * 4,
        rest=(
            "DDP by hand gets a model without units; with us each is planned, named and checked, so that any "
            "engine can take the same plan. The section says how much of it each takes."
        ),
    ),
    Goal(
        what="3,000 parameters / 1,000, CPU time: plan, wrap, save, load",
        benchmark="start",
        figures=growth("1000", "3000"),
        at_most=(3.30,) * 4,
        rest=(
            "the plan walks all modules several times, and 1,000 of them probably stay in the processor's cache. From "
            "3,000 to 10,000 parameters each takes as long: nothing is quadratic."
        ),
    ),
    Goal(
        what="10,000 parameters / 1,000, CPU time: the same",
        benchmark="start",
        figures=growth("1000", "10000"),
        at_most=(11.0,) * 4,
        rest="as above.",
    ),
    Goal(
        what="Load of 10,000 parameters, CPU time / `torch.load` of the same state",
        benchmark="start",
        figures=pick("10000", -1),
        at_most=(5.00,),
    ),
    Goal(
        what="Save / DCP's, load / DCP's, load on half the ranks / DCP's",
        benchmark="checkpoint",
        figures=pick("fsshard", 1, 3, 5),
        at_most=(0.60, 0.40, 0.35),
        rest=(
            "a save passes over all bytes twice, for the checksum and for the file, and does nothing else of "
            "weight; a load reads into memory of its own, so that one that fails has changed nothing, and then "
            "copies."
        ),
    ),
    Goal(
        what="Training held up by an asynchronous save / a blocking one",
        benchmark="checkpoint",
        figures=pick("async blocks / blocking", 0),
        at_most=(0.12,),
        rest=(
            "one copy of the state into fresh memory, whose pages the system clears first. Memory that is kept "
            "from save to save would need half, and hold a second state for good: not built."
        ),
    ),
    Goal(
        what="Peak of the tutorial's TFNO, tuned, 4 ranks / ddp's (simulated)",
        benchmark="tutorial-memory",
        figures=pick("fsdp2, tuned", 1),
        at_most=(0.22,),
        rest=(
            "the bound is 0.21: a unit and its gradient are there twice for a moment, while gradients are packed "
            "by ranks."
        ),
    ),
    Goal(
        what="Step on 1 x 2 ranks (data x domain) / 2 x 1: fsdp2, ddp",
        benchmark="domain",
        figures=at(2, "fsdp2", "ddp"),
        at_most=(1.10, 1.10),
        rest=(
            "the transform's exchange waits for the slabs of all ranks before the local dimensions go on. An exchange "
            "in parts is not built."
        ),
    ),
    Goal(
        what="Import and first wrap / import of torch, CPU time",
        benchmark="start",
        figures=pick("on", -1),
        at_most=(1.08,),
        rest="modules of torch that the engine needs and `import torch` leaves out, and the plan's own.",
    ),
)


def row(goal: Goal, text: str, title: str) -> str:
    """Return a goal's row of the table.

    Args:
        goal: whose.
        text: the section that has its figures.
        title: the section's.
    """
    try:
        found = goal.figures(text)
    except (LookupError, ValueError):  # not there yet, or stopped before it was printed
        shown, verdict = "", "not measured"
    else:
        shown = ", ".join(f"{figure:.2f}" for figure in found)
        missed = sum(round(figure, 2) > bound for figure, bound in zip(found, goal.at_most, strict=True))
        verdict = "met" if not missed else "missed" if missed == len(found) else f"{missed} of {len(found)} missed"
    bounds = ", ".join(f"{bound:.2f}" for bound in (goal.at_most if len({*goal.at_most}) > 1 else goal.at_most[:1]))
    slug = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower())
    return f"| {goal.what} | {bounds} | {shown} | {verdict} | [{title}](#{slug}) |"


def section(sections: Mapping[str, str], titles: Mapping[str, str]) -> str:
    """Return the table, and below it where the rest goes of what was missed; nothing if no benchmark has a goal.

    Args:
        sections: text of each section that the page has, by the benchmark's name.
        titles: those of all benchmarks.
    """
    goals = [goal for goal in GOALS if goal.benchmark in titles]
    if not goals:
        return ""
    rows = [row(goal, sections.get(goal.benchmark, ""), titles[goal.benchmark]) for goal in goals]
    table = ["| measured | at most | found | verdict | section |", "|---|---|---|---|---|", *rows]
    rest = [
        f"* {goal.what.partition(':')[0]}: {goal.rest}"
        for goal, told in zip(goals, rows, strict=True)
        if goal.rest and " missed |" in told
    ]
    return page.section(NAME, "Goals", [INTRODUCTION, "\n".join(table), "\n".join(rest)], "")
