"""What a step, a wrap, a save and a load should cost at most, beside what docs/maintainers/benchmarks.md says of it.

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
            "by the profile, which has `alone` beside both: what FSDP2 does around a unit in Python (hooks, "
            "states, copies in and out of what is sent) is most of what is above it, then waiting for the "
            "other rank, then our views of complex weights and of the optimizer's shards. A collective over "
            "gloo keeps both cores busy, so that nothing runs beside it."
        ),
    ),
    Goal(
        what="Step of gpt-short, fsdp2 / raw: by the clock, CPU time",
        benchmark="speed",
        figures=pick("gpt-short fsdp2", 2, 5),
        at_most=(0.66, 0.72),
        rest=(
            "by the profile two fifths of what is above `alone` is waiting for the other rank (`wait`), and a "
            "quarter copies in and out of what is sent (`split_with_sizes_copy`, `_chunk_cat`, "
            "`_foreach_copy_`). FSDP2 packs in the same way; on two cores nothing runs beside either."
        ),
    ),
    Goal(
        what="Step of gpt-short, ddp / raw",
        benchmark="speed",
        figures=pick("gpt-short ddp", 2),
        at_most=(0.91,),
        rest=(
            "by the profile all that is above `alone` is DDP's reduction within the backward "
            "(`run_backward`), the same sum over ranks on both sides."
        ),
    ),
    Goal(
        what="CPU time of a step of the small TFNO, ddp / Accelerate, Fabric",
        benchmark="peers",
        figures=at(3, "tfno ddp Accelerate", "tfno ddp Fabric"),
        at_most=(0.95, 0.95),
        rest=(
            "by the profile DDP's reduction (`run_backward`) and the model's operators are alike on all sides, and "
            "nearly all of the step; to be below 1 one of these would have to be shorter than in torch. Ours alone "
            "are views of 20 complex weights, and a note of each gradient that arrives, without which one that DDP "
            "leaves out is silent: about 3 %."
        ),
    ),
    Goal(
        what="CPU time of a step of gpt-short, ddp / Accelerate, Fabric",
        benchmark="peers",
        figures=at(3, "gpt-short ddp Accelerate", "gpt-short ddp Fabric"),
        at_most=(0.90, 0.90),
        rest=("by the profile the model's operators and the reduction are nearly all of the step, on each side."),
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
            "by the profile FSDP2 waits for weights before the forward and for gradients after the backward "
            "(`wait`); DDP sends as many bytes while its backward runs (`run_backward`)."
        ),
    ),
    Goal(
        what="Fixed cost of a step, CPU time / raw: ddp, fsdp2, fsdp, fairscale",
        benchmark="fixed",
        figures=at(5, "fixed ddp", "fixed fsdp2", "fixed fsdp", "fixed fairscale"),
        at_most=(0.95, 0.50, 1.05, 1.05),
        rest=(
            "by the profile DDP's own share is in `run_backward`; ours is a note of each gradient that "
            "arrives, without which one that DDP leaves out is silent, and handing each parameter to the "
            "optimizer and back."
        ),
    ),
    Goal(
        what="Wrap of 1,000 units, CPU time / by hand: ddp, fsdp, fsdp2, fairscale",
        benchmark="start",
        figures=at(2, "ddp 1000", "fsdp 1000", "fsdp2 1000", "fairscale 1000"),
        at_most=(1.50,) * 4,
        rest=(
            "by the profile, of what DDP by hand does not have: complex weights made pairs, and who owns "
            "which parameter (`fsshard/complex_params`) a third, the plan and the checks of the model a "
            "quarter, comparing and sending what the ranks hold (`wait`) a tenth; the rest are single calls. Every "
            "engine is given the same plan of the same units, and DDP and FairScale by hand have none."
        ),
    ),
    Goal(
        what="3,000 parameters / 1,000, CPU time: plan, wrap, save, load",
        benchmark="start",
        figures=growth("1000", "3000"),
        at_most=(3.30,) * 4,
        rest=(
            "each stage walks through all parameters a fixed number of times, over ever more memory: nothing "
            "is quadratic."
        ),
    ),
    Goal(
        what="10,000 parameters / 1,000, CPU time: the same",
        benchmark="start",
        figures=growth("1000", "10000"),
        at_most=(11.0,) * 4,
        rest=(
            "each stage walks through all parameters a fixed number of times, over ever more memory: nothing is "
            "quadratic."
        ),
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
            "by the profile a save is a checksum and a write of every byte (`crc32`, `write`), a load a read "
            "into memory of its own and a copy, so that one that fails has changed nothing (`preadv`, "
            "`copy_`)."
        ),
    ),
    Goal(
        what="Training held up by an asynchronous save / a blocking one",
        benchmark="checkpoint",
        figures=pick("async blocks / blocking", 0),
        at_most=(0.12,),
        rest=(
            "by the profile it is one copy of the state (`fsshard/checkpoint`, its staging) into memory that is kept "
            "from save to save, and walking through what this rank holds; the save's thread meets the other ranks. "
            "Less than a copy takes training that goes on meanwhile, and then what changes a weight outside of "
            "`optimizer.step()` would be saved by halves."
        ),
    ),
    Goal(
        what="Peak of the tutorial's TFNO, tuned, 4 ranks / ddp's (simulated)",
        benchmark="tutorial-memory",
        figures=pick("fsdp2, tuned", 1),
        at_most=(0.22,),
        rest=(
            "at the peak every kind is at its bound or below (the line under the table) but the temporaries: "
            "in the backward of the first spectral convolution the whole gradient of a factor, and the "
            "products on the way to it, are there before they are divided among the ranks. A smaller unit "
            "would have to be smaller than one parameter."
        ),
    ),
    Goal(
        what="Step on 1 x 2 ranks (data x domain) / 2 x 1: fsdp2, ddp",
        benchmark="domain",
        figures=at(2, "fsdp2", "ddp"),
        at_most=(1.10, 1.10),
        rest=(
            "the ranks compute about as much as on 2 x 1 (CPU time); by the profile the rest is waiting "
            "(`wait`) in sixteen exchanges of a step, two per layer and direction, at each of which the "
            "faster rank waits for the other. An exchange in parts would wait as often."
        ),
    ),
    Goal(
        what="Import and first wrap / import of torch, CPU time",
        benchmark="start",
        figures=pick("on", -1),
        at_most=(1.08,),
        rest=(
            "with the garbage collector off it is met: a full collection is due after torch's own import, and "
            "falls into whatever is imported next."
        ),
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
