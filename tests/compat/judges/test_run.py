"""The runner of other libraries' tests, without those."""

from __future__ import annotations

import pytest

from tests.compat.judges import run


def test_without_a_checkout_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv(run.VARIABLE, raising=False)
    assert run.main(run.TESTS) == 0
    assert capsys.readouterr().out.startswith(f"skipped: {run.VARIABLE} names no checkout")


def test_what_is_left_out_is_a_part_of_what_runs_and_every_reason_can_be_found() -> None:
    assert all(why and any(path.startswith(test) for test in run.TESTS) for path, why in run.LEFT_OUT.items())
    words = [words for words, _ in run.REASONS]
    assert all(run.reason(f"Error: so {each}.") == why for each, why in run.REASONS) and len(set(words)) == len(words)
    assert run.reason("\nNewError: of ours\n | more") == "NewError: of ours"


def test_a_test_judges_that_passes_with_their_own_and_makes_a_strategy() -> None:
    passed, failed = (
        {"outcome": "passed", "used": True, "why": ""},
        {"outcome": "failed", "used": True, "why": "Bad: x"},
    )
    theirs = {"a": passed, "b": passed, "c": failed, "d": {**passed, "used": False}, "e": passed}
    lines = run.table(theirs, {"a": passed, "b": failed, "c": passed, "d": failed}, "fsdp2")
    assert lines == ["`fsdp2`: 1 of 2 pass", "", "| why not | tests |", "|---|---|", "| Bad: x | 1 |"]
