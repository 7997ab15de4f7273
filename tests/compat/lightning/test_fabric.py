"""Loops over Lightning Fabric under every engine, against Fabric's own DDP.

Tests compat/trainers.py, too.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning.pytorch")

import lightning
from lightning.fabric.strategies import STRATEGY_REGISTRY

from tests.compat.common import ENGINES, begin_with, same_tensors
from tests.compat.lightning import fabric_trainings as trainings
from tests.sets import often


@pytest.fixture(scope="module")
def fabrics_own(ranks: Any) -> list[dict[str, Any]]:
    return ranks.run(trainings.every_case, 2, "lightning")  # type: ignore[no-any-return]


@pytest.mark.parametrize("engine", often(ENGINES, "fsdp2", "fsdp"))
def test_losses_and_weights_are_those_of_fabrics_ddp(
    ranks: Any, fabrics_own: list[dict[str, Any]], engine: str
) -> None:
    for ours, theirs in zip(ranks.run(trainings.every_case, 2, engine), fabrics_own, strict=True):
        for case in trainings.CASES:
            if case == "by norm":  # which Lightning sums in float32, and we in float64
                assert ours[case]["losses"] == pytest.approx(theirs[case]["losses"], rel=1e-6)
                continue
            assert ours[case]["losses"] == theirs[case]["losses"], case
            same_tensors(ours[case]["state"], theirs[case]["state"] if ours[case]["state"] else {}, case)


def test_a_file_goes_on_under_any_engine_and_under_fabrics_own(ranks: Any, tmp_path: Path) -> None:
    whole = ranks.run(trainings.run, 2, "lightning")[0]
    for saver, loader in (("fsdp2", "fairscale"), ("lightning", "fsdp"), ("fsdp2", "lightning")):
        path = str(tmp_path / f"{saver}-{loader}.ckpt")
        ranks.run(_part, 2, saver, path, None, 3)
        found = ranks.run(_part, 2, loader, None, path, 3)[0]
        assert found["losses"] == whole["losses"][3:]
        same_tensors(found["state"], whole["state"], (saver, loader))


def _part(engine: str, save: str | None, load: str | None, at: int) -> dict[str, Any]:
    return trainings.run(engine, save=save, load=load, steps=range(at) if load is None else range(at, 6))


def test_refused_on_every_rank(ranks: Any) -> None:
    words = {
        "precision": "ConfigurationError: precision plugin HalfPrecision",
        "directory": f"CheckpointError: {tempfile.gettempdir()} is a directory",
    }
    begin_with(ranks.run(trainings.refused, 2), words)


def test_what_the_readme_says_of_fabric() -> None:
    """Its engines, and that it does not shard on a CPU; its DDP trains the complex weights of the trainings above."""
    assert {"ddp", "fsdp", "deepspeed"} <= {*STRATEGY_REGISTRY.available_strategies()}
    with pytest.raises(ValueError, match="FSDP is only available on GPU"):
        lightning.Fabric(strategy="fsdp", accelerator="cpu", devices=2)
