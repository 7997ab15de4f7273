"""The golden runs that are written are those that are there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsshard.parity import Trace, golden
from tools.golden import write_all


def test_the_losses_of_a_recipe_are_written_anew(ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(golden, "RECIPES", {"convnet": golden.convnet})
    monkeypatch.setattr(golden, "STEPS", 2)
    write_all(tmp_path, ranks)
    (file,) = tmp_path.glob("torch-*/*.json")
    written, kept = Trace.load(file), golden.file_of("convnet")
    assert file.relative_to(tmp_path) == kept.relative_to(golden.FOLDER)
    assert written.losses == pytest.approx(Trace.load(kept).losses[:2], rel=1e-5)  # of another processor, maybe
    assert (written.detail, written.world_size, written.commit) == ("losses", 2, "")
