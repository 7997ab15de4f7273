"""The runner of other libraries' tests, without those."""

from __future__ import annotations

import importlib.util

import pytest

from tests.compat.judges import run
from tests.compat.judges.run import FRONTS, LIGHTNING, Front


def test_without_a_checkout_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for front in FRONTS:
        monkeypatch.delenv(front.variable, raising=False)
    assert run.main(()) == 0
    for front, line in zip(FRONTS, capsys.readouterr().out.splitlines(), strict=True):
        assert line.startswith(f"skipped: {front.variable} names no checkout of {front.library}'s")


@pytest.mark.parametrize("front", FRONTS, ids=lambda front: front.library)
def test_what_is_left_out_is_a_part_of_what_runs(front: Front) -> None:
    assert importlib.util.find_spec(front.plugin) is not None
    tests = [test for paths, _ in front.runs for test in paths]
    assert all(why and any(path.startswith(test) for test in tests) for path, why in front.left_out.items())


def test_a_test_judges_that_passes_with_their_own_and_makes_an_engine_or_fails() -> None:
    passed, failed = (
        {"outcome": "passed", "used": True, "why": ""},
        {"outcome": "failed", "used": True, "why": "Bad: x"},
    )
    unused = {**passed, "used": False}
    theirs = {"a": passed, "b": passed, "c": failed, "d": unused, "e": passed, "f": passed, "g": passed}
    ours = {"a": passed, "b": failed, "c": passed, "d": {**failed, "used": False}, "f": unused}
    ours["g"] = {**unused, "outcome": "skipped"}
    lines = run.table(LIGHTNING, theirs, ours, "fsdp2")
    assert lines == ["Lightning, `fsdp2`: 1 of 3 pass", "", "| why not | tests |", "|---|---|", "| Bad: x | 2 |"]
