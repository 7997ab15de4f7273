"""Writes the table of docs/benchmarks.md, for users, from what ``benchmarks/run_all.py`` has measured.

    python -m benchmarks.summary

The figures are those of docs/maintainers/benchmarks.md, which has intervals, profiles and goals.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.goals import at, pick
from benchmarks.page import sections_of

ROOT = Path(__file__).resolve().parent.parent
MEASURED = ROOT / "docs" / "maintainers" / "benchmarks.md"
PAGE = ROOT / "docs" / "benchmarks.md"
BEGIN, END = "<!-- written by benchmarks/summary.py -->", "<!-- end of the table -->"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of the table.

    Attributes:
        what: what is measured; a name for each figure.
        beside: what it is divided by.
        benchmark: the section that has the figures.
        figures: reads them from it.
    """

    what: str
    beside: str
    benchmark: str
    figures: Callable[[str], Sequence[float]]


FRONTS = ("fabric", "trainer", "accelerate", "hf")

ROWS = (
    Row(
        what="step of a TFNO: `fsdp2`, `fsdp`, `ddp`",
        beside="the same engine by hand, speed-ups off",
        benchmark="overhead",
        figures=at(2, "tfno48 fsdp2", "tfno48 fsdp", "tfno48 ddp"),
    ),
    Row(
        what="step of a T5: `fsdp2`, `fsdp`, `ddp`",
        beside="the same engine by hand, speed-ups off",
        benchmark="overhead",
        figures=at(2, "t5 fsdp2", "t5 fsdp", "t5 ddp"),
    ),
    Row(
        what="step under `fsdp2`: small TFNO, short GPT, GPT",
        beside="raw FSDP2 over gloo",
        benchmark="speed",
        figures=at(2, "tfno fsdp2", "gpt-short fsdp2", "gpt fsdp2"),
    ),
    Row(
        what="step under `ddp`: small TFNO, short GPT, GPT",
        beside="raw DDP",
        benchmark="speed",
        figures=at(2, "tfno ddp", "gpt-short ddp", "gpt ddp"),
    ),
    Row(
        what="step under `ddp`, CPU time: small TFNO, short GPT",
        beside="Accelerate",
        benchmark="peers",
        figures=at(3, "tfno ddp Accelerate", "gpt-short ddp Accelerate"),
    ),
    Row(
        what="step under `ddp`, CPU time: small TFNO, short GPT",
        beside="Fabric",
        benchmark="peers",
        figures=at(3, "tfno ddp Fabric", "gpt-short ddp Fabric"),
    ),
    Row(
        what="step under `fsdp2`, CPU time: short GPT",
        beside="Fabric's FSDP2",
        benchmark="peers",
        figures=at(3, "gpt-short fsdp2 Fabric"),
    ),
    Row(
        what="step through Fabric, Lightning, Accelerate, Hugging Face: `fsdp2`",
        beside="the library's own DDP",
        benchmark="fronts",
        figures=at(2, *(f"{front} fsdp2" for front in FRONTS)),
    ),
    Row(
        what="the same: `ddp`",
        beside="the library's own DDP",
        benchmark="fronts",
        figures=at(2, *(f"{front} ddp" for front in FRONTS)),
    ),
    Row(
        what="step of a script under `fsshard.compat`: MLP, T5, TFNO",
        beside="FairScale 0.4.13",
        benchmark="fairscale",
        figures=at(2, "mlp time, ms/step", "t5 time, ms/step", "tfno time, ms/step"),
    ),
    Row(
        what="step of Muon over whole matrices, CPU time",
        beside="torch's Muon on DTensors",
        benchmark="whole-matrices",
        figures=at(3, "Muon, whole=True"),
    ),
    Row(
        what="save, load, load on half the ranks",
        beside="torch.distributed.checkpoint",
        benchmark="checkpoint",
        figures=pick("fsshard", 1, 3, 5),
    ),
    Row(
        what="training held up by a save in the background",
        beside="a save that blocks",
        benchmark="checkpoint",
        figures=pick("async blocks / blocking", 0),
    ),
    Row(
        what="wrap of 1,000 layers, each a unit, CPU time: `fsdp2`, `fsdp`, `ddp`",
        beside="the engine by hand; DDP has no units",
        benchmark="start",
        figures=at(2, "fsdp2 1000", "fsdp 1000", "ddp 1000"),
    ),
    Row(
        what="import and first wrap, CPU time",
        beside="import of torch",
        benchmark="start",
        figures=pick("on", -1),
    ),
    Row(
        what="peak memory of a 1.75 GiB TFNO on 4 ranks (simulated): `fsdp2`, the plan of `fsshard tune`",
        beside="DDP",
        benchmark="tutorial-memory",
        figures=at(1, "fsdp2", "fsdp2, tuned"),
    ),
    Row(
        what="activations that a rank keeps when 4 ranks split a field, times 4: FNO in 2-D, in 3-D",
        beside="the bare model on one process",
        benchmark="domain",
        figures=at(2, "FNO, 2-D 4", "FNO, 3-D 4"),
    ),
)


def plain(section: str) -> str:
    """Return a section with Markdown's bars in the place of drawn ones, and without intervals in parentheses."""
    return re.sub(r"\(\d\S* to \S*\)", "", section.replace("│", "|"))


def table(sections: Mapping[str, str]) -> str:
    """Return the table of all rows."""
    lines = ["| what | beside | ratio | command |", "|---|---|---|---|"]
    for row in ROWS:
        section = sections[row.benchmark]
        figures = " ".join(f"{figure:.2f}" for figure in row.figures(plain(section)))
        command = re.search(r"^`python (benchmarks/\w+\.py)", section, re.MULTILINE)
        assert command is not None
        lines.append(f"| {row.what} | {row.beside} | {figures} | `{command[1]}` |")
    return "\n".join(lines)


def with_table(page: str, made: str) -> str:
    """Return the page's text with another table."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{made}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    _, measured = sections_of(MEASURED.read_text(encoding="utf-8"))
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), table(measured)), encoding="utf-8")
