"""PEFT's adapters under every front and engine, against Hugging Face's own DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")
pytest.importorskip("peft")
pytest.importorskip("transformers")

from tests.compat import adapters
from tests.compat.accelerate.trainings import OWN
from tests.compat.common import ENGINES, same_tensors
from tests.sets import often


@pytest.mark.parametrize(
    ("kind", "engines"),
    [
        ("gpt2", ("fsdp2",)),
        pytest.param("gpt2", ("fsdp", "ddp", "fairscale"), marks=pytest.mark.long),
        pytest.param("t5", ENGINES, marks=pytest.mark.long),
    ],
)
def test_by_transformers_trained_saved_resumed_the_best_and_merged(
    ranks: Any, kind: str, engines: tuple[str, ...], tmp_path: Path
) -> None:
    theirs, *ours = (
        ranks.run(adapters.by_trainer, 2, engine, kind, str(tmp_path / engine))[0] for engine in ("hf", *engines)
    )
    for engine, found in zip(engines, ours, strict=True):
        for mine, other in zip(found.pop("history"), theirs["history"], strict=True):
            assert mine | {"grad_norm": 0} == other | {"grad_norm": 0}, engine
            assert mine.get("grad_norm", 0) == pytest.approx(other.get("grad_norm", 0), rel=1e-6), engine
        for name, tensors in found.items():
            same_tensors(tensors, theirs[name], (engine, name))
        same_tensors(found["best"], found["checkpoint-2"], engine)
        assert any(not torch.equal(value, found["last"][name]) for name, value in found["best"].items())


@pytest.mark.parametrize("engine", often(ENGINES, "fsdp2", "fsdp"))
def test_by_accelerate(ranks: Any, engine: str, tmp_path: Path) -> None:
    ours, theirs = (ranks.run(adapters.by_accelerator, 2, each, str(tmp_path / each))[0] for each in (engine, OWN))
    same_tensors(ours, theirs, engine)
