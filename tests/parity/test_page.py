"""Parts of a page of recorded results, and the one of trainings under two versions of torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsshard.parity import Trace
from tests.parity import versions
from tests.parity.page import part_of, with_part


def test_a_part_is_replaced_and_the_rest_stays() -> None:
    page = with_part(with_part("# Title\n\nwritten by hand\n", "one", "1"), "two", "2")
    assert (part_of(page, "one"), part_of(page, "two"), part_of(page, "three")) == ("1", "2", None)
    changed = with_part(page, "one", "1\n\nand more\n")
    assert part_of(changed, "one") == "1\n\nand more"
    assert changed.replace("\n\nand more", "") == page
    assert page.startswith("# Title\n\nwritten by hand\n")


def test_recorded_and_compared(ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions.recipes, "__all__", ["mlp"])
    monkeypatch.setattr(versions, "STEPS", 1)
    versions.record_all(tmp_path, ranks)
    trace = Trace.load(tmp_path / "mlp.json")
    trace.environment["torch"] = "2.12.0"
    trace.ranks[1].steps[0].loss *= 1 + 2.0**-40
    trace.save(tmp_path / "mlp.json")
    text = versions.document(versions.compare_all(tmp_path, ranks))
    assert "Between the two: torch 2.12.0 -> " in text
    assert "| mlp | bound | bound | bound | bound | step 0, loss |" in text
