"""A backend that is no part of the package does everything that ours do, under its own name.

Tests fsshard/backends/base.py, fsshard/backends/facts.py, fsshard/backends/settings.py too.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import fsshard
from fsshard.backends import registry
from fsshard.errors import ConfigurationError, UnsupportedByBackend
from fsshard.launching import supervisor
from fsshard.parity import compare
from tests.parity import faults
from tests.portability import runs
from tests.simulation.recipes import Net
from tests.training_runs import Run, train

SIXTH = "tests.backends.a_sixth_backend"


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """It is known here, as in a script that imports it, and no longer when the test is over."""
    monkeypatch.setattr(registry, "_paths", dict(registry._paths))
    monkeypatch.setattr(registry, "_classes", dict(registry._classes))
    with mock.patch.dict(supervisor.handed):
        registry.register_backend(importlib.import_module(SIXTH).HandAveraged)
        yield


def test_it_trains_as_ddp_does(ranks: Any) -> None:
    ours, theirs = (
        ranks.run(train, 2, Run("mlp_complex", name, steps=3, clip=(1.0, 2.0))) for name in ("by_hand", "ddp")
    )
    for mine, other in zip(ours, theirs, strict=True):
        assert runs.unlike(vars(mine), vars(other)) == []


def test_parity_says_so(ranks: Any) -> None:
    report = compare(faults.mlp, backends=["by_hand", "fsdp2"], world_sizes=[2], steps=3, pool=ranks)
    assert [(cell.backend, cell.verdict) for cell in report] == [("by_hand", "exact"), ("fsdp2", "exact")]
    with pytest.raises(ConfigurationError, match="reference='by_hand'"):
        compare(faults.mlp, reference="by_hand", pool=ranks)


@pytest.mark.parametrize(("saver", "loader"), [("by_hand", "fsdp2"), ("fsdp2", "by_hand"), ("by_hand", "by_hand")])
def test_its_checkpoints_go_anywhere(ranks: Any, tmp_path: Path, saver: str, loader: str) -> None:
    ranks.run(runs.job_save, 2, str(tmp_path), saver, "adamw")
    assert ranks.run(runs.job_load, 2, str(tmp_path), f"{saver}-2-adamw", loader) == [[], []]


def test_it_is_estimated(forked: None) -> None:
    mine, ddp = fsshard.estimate(
        Net(), batch=torch.ones(4, 16), backend=["by_hand", "ddp"], world_size=4, optimizer=torch.optim.Adam
    )
    assert (mine.backend, mine.bounds) == ("by_hand", ddp.bounds)
    assert mine.sent == ddp.sent and mine.bounds.peak <= mine.peak <= ddp.peak


def explained(name: str) -> tuple[str, str]:
    model = fsshard.wrap(torch.nn.Linear(3, 3), backend=name)
    return model.backend.name, model.explain()


def test_a_launched_job_finds_it_by_name(forked: None) -> None:
    name, text = fsshard.launch(by_name, nprocs=2)
    assert name == "by_hand" and "backend 'by_hand' on 2 ranks" in text


def by_name(ctx: fsshard.Context) -> tuple[str, str]:
    return explained("by_hand")


def wrapped(**options: Any) -> None:
    fsshard.wrap(torch.nn.Linear(3, 3), backend="by_hand", **options)


def caught(ranks: Any, **options: Any) -> BaseException:
    (error,) = ranks.run_expecting_errors(wrapped, 1, **options)
    assert error is not None
    return error  # type: ignore[no-any-return]


def test_what_it_does_not_have_is_refused_in_its_name(ranks: Any) -> None:
    with pytest.raises(UnsupportedByBackend, match=r"FULL_SHARD.*by_hand"):
        raise caught(ranks, sharding_strategy="FULL_SHARD")
    with pytest.raises(ConfigurationError, match=r"shards=: expected .* an option of backend 'by_hand'"):
        raise caught(ranks, shards=3)


def test_the_documentation_shows_this_very_backend() -> None:
    root = Path(__file__).parents[2]
    page = (root / "docs" / "own-backend.md").read_text(encoding="utf-8")
    shown = page.partition("```python\n")[2].partition("```")[0]
    source = (root / "tests" / "backends" / "a_sixth_backend.py").read_text(encoding="utf-8")
    assert source.endswith(shown) and "class HandAveraged" in shown
