"""Checkpoints that the code of then has written: each loads, and to what it was saved from.

Tests tools/old_checkpoints.py too, which has written them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fsshard
from tools.old_checkpoints import CASES, build, digests

pytestmark = pytest.mark.usefixtures("alone")

OLD = Path(__file__).with_name("old")
DIGESTS: dict[str, dict[str, Any]] = {
    version: json.loads((OLD / version / "digests.json").read_text()) for version in ("format-2",)
}
SAVED = [(version, name) for version, cases in DIGESTS.items() for name in cases]


@pytest.mark.parametrize(("version", "name"), SAVED)
def test_what_was_saved_then_loads(version: str, name: str) -> None:
    _, ranks, kind, optimizer_name = CASES[name]
    path = OLD / version / name
    model, optimizer = build(kind, optimizer_name, "none")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3)
    before = digests(model, optimizer)
    loaded = fsshard.load(path, model, optimizer, scheduler, verify=True)
    assert digests(model, optimizer) == DIGESTS[version][name] != before
    assert loaded.state["step"] == 2 and loaded.origin["world_size"] == ranks
    mine = [loaded.state["mine"]] if ranks == 1 else loaded.per_rank["mine"]
    assert mine == [[rank, torch.tensor(0.5)] for rank in range(ranks)]
