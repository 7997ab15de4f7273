"""benchmarks/goals.py: figures are read from sections as they are shown, and the table says what was missed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import goals, page
from benchmarks.run_all import BENCHMARKS, ROOT

TITLES = {benchmark.name: benchmark.title for benchmark in BENCHMARKS}
FIXED_WIDTH = (
    "tfno       fsdp2           64.9      25.7   0.423 [0.389, 0.447]        49.7      23.7   0.493 [0.471, 0.517]"
)
MARKDOWN = "| tfno | ddp | Fabric | 23.4 | 23.0 | 0.943 [0.885, 0.993] | 0.991 [0.937, 1.008] |"


def test_numbers_of_a_row_without_its_intervals() -> None:
    text = f"| tfno | ddp | Accelerate | 1 |\n{FIXED_WIDTH}\n{MARKDOWN}\nsave / DCP   0.631   (target: 0.7)"
    assert goals.numbers(text, "tfno", "fsdp2") == [64.9, 25.7, 0.423, 49.7, 23.7, 0.493]
    assert goals.numbers(text, "tfno", "ddp", "Fabric") == [23.4, 23.0, 0.943, 0.991]
    assert goals.numbers(text, "save", "/", "DCP") == [0.631]
    with pytest.raises(LookupError, match="no row begins with 'gpt'"):
        goals.numbers(text, "gpt")


def test_growth_is_of_whole_times() -> None:
    assert goals.growth("1000", "3000")("| 1000 | 10 | 20 | 30 | 40 |\n| 3000 | 10 | 40 | 30 | 20 |") == [3, 6, 3, 1.5]


@pytest.mark.parametrize(
    ("at_most", "verdict"), [((0.43, 0.50), "met"), ((0.41, 0.50), "1 of 2 missed"), ((0.36, 0.45), "missed")]
)
def test_verdicts(at_most: tuple[float, ...], verdict: str) -> None:
    goal = replace(goals.GOALS[0], at_most=at_most)
    assert f"| 0.42, 0.49 | {verdict} | [Some title](#some-title) |" in goals.row(goal, FIXED_WIDTH, "Some title")


def test_what_was_missed_is_explained_and_what_was_not_measured_is_told() -> None:
    first = goals.GOALS[0]
    text = goals.section({first.benchmark: FIXED_WIDTH}, TITLES)
    assert text.startswith("<!-- benchmark: goals -->") and text.count("| not measured |") == len(goals.GOALS) - 1
    assert first.rest and text.count("\n* ") == 1 and first.rest in text
    assert goals.section({}, {"other": "Other"}) == ""


@pytest.mark.parametrize("goal", goals.GOALS, ids=lambda goal: goal.what)
def test_the_page_has_every_figure(goal: goals.Goal) -> None:
    _, sections = page.sections_of((ROOT / "docs" / "maintainers" / "benchmarks.md").read_text())
    text = sections[goal.benchmark]
    assert len(goal.figures(text)) == len(goal.at_most)
    told = goals.row(goal, text, TITLES[goal.benchmark])
    assert told in sections[goals.NAME]
    assert goal.rest or "| met |" in told, "say where the rest goes"
