"""The table of trainings under two versions of torch: what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsshard.parity import Trace
from tests.parity import versions


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
