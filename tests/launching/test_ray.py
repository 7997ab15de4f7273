"""wrap(), init() and launch() in the workers of Ray Train's TorchTrainer, where ray is installed."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests import by_hand
from tests.launching.launched import ROOT, environment
from tests.launching.ray_training import BACKENDS, RANKS, STEPS, bare, loss

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed: pip install 'ray[train]'")


@needs_ray
def test_workers_of_ray_train_as_averaged_replicas_do(tmp_path: Path) -> None:
    """To the last bit: each rank's losses and weights, under each backend, and by launch() too."""
    command = [sys.executable, "-m", "tests.launching.ray_training", str(tmp_path)]
    own = environment(
        RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0"
    )  # else it writes a token to the home folder
    ended = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    model, settings = bare()
    losses = by_hand.train(model, torch.optim.AdamW(model.parameters(), **settings), loss, steps=STEPS, ranks=RANKS)
    weights = model.state_dict()
    for rank in range(RANKS):
        runs = torch.load(tmp_path / f"rank{rank}.pt")
        assert [*runs] == [*(f"init {backend}" for backend in BACKENDS), "launch fsdp2"]
        for name, (found, state) in runs.items():
            assert found == losses[rank], name
            assert state.keys() == weights.keys() and all(torch.equal(state[key], weights[key]) for key in weights), (
                name
            )
