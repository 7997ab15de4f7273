"""Golden runs come out again under every backend, and a change of the training is told.

Tests fsshard/parity/golden/__main__.py too.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from fsshard.errors import ConfigurationError, RecipeError
from fsshard.parity import Recipe
from fsshard.parity.golden import FOLDER, RECIPES, check, check_file, write_file
from fsshard.parity.golden.recipes import fill, spectral, uniform
from tests.training_runs import DISTRIBUTED


@pytest.mark.parametrize("backend", DISTRIBUTED)
def test_golden_runs_come_out_again(ranks: Any, backend: str) -> None:
    """Bit for bit on the kind of processor they were made on, within rounding elsewhere."""
    seen: list[str] = []
    results = check(backend, pool=ranks, progress=lambda done, total, text: seen.append(text))
    assert [result.name for result in results] == list(RECIPES)
    assert [result.text for result in results if not result.ok] == []
    assert len(seen) == len(RECIPES) + 1


def test_every_backend_gives_the_same_golden_losses(ranks: Any, tmp_path: Path) -> None:
    write_file(spectral, tmp_path / "golden.txt", backend="fsdp2", pool=ranks)
    for backend in DISTRIBUTED:
        assert check_file(spectral, tmp_path / "golden.txt", backend=backend, pool=ranks).equal


def slower() -> Recipe:
    return dataclasses.replace(spectral(), hyper={"lr": 2.0**-8 * (1 - 2.0**-10)})


def test_a_changed_training_is_different(ranks: Any) -> None:
    """A learning rate 0.1 percent lower shows, and the step is named; the first loss is still equal."""
    found = check_file(slower, FOLDER / "spectral.txt", pool=ranks)
    assert (found.verdict, found.equal, found.ok) == ("different", False, False)
    assert "expected" in found.text


def test_one_ulp_is_within_rounding(ranks: Any, tmp_path: Path) -> None:
    lines = (FOLDER / "spectral.txt").read_text().splitlines()
    lines[5] = repr(float(lines[5]) * (1 + 2.0**-23))
    (tmp_path / "off.txt").write_text("\n".join(lines))
    found = check_file(spectral, tmp_path / "off.txt", pool=ranks)
    assert (found.verdict, found.equal, found.ok) == ("within rounding", False, True)
    assert "step 2" in found.text


@pytest.mark.parametrize("text", ["", "# world_size = 2\n0.5\n", "# world_size = 2\n# made on = x\nno number\n"])
def test_a_file_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "bad.txt").write_text(text)
    if text:
        with pytest.raises(RecipeError, match="holds no golden run"):
            check_file(spectral, tmp_path / "bad.txt")
    with pytest.raises(RecipeError, match="holds no golden run"):
        check_file(spectral, tmp_path / "absent.txt")


def test_one_process_is_no_golden_run(ranks: Any) -> None:
    with pytest.raises(ConfigurationError, match="joined batch"):
        check("none", pool=ranks)


def test_the_rule_is_the_same_everywhere() -> None:
    """Pinned: integer arithmetic and powers of two leave no room for another machine."""
    values = uniform("weight", 10_000)
    assert values[:3].tolist() == PINNED
    assert float(values.min()) >= -1.0
    assert float(values.max()) < 1.0
    assert abs(float(values.mean())) < 0.03
    assert abs(float(values.square().mean()) - 1 / 3) < 0.02
    assert abs(float((values[1:] * values[:-1]).mean())) < 0.02
    assert not torch.equal(uniform("other", 100), values[:100])


PINNED = [-0.20022809505462646, -0.14828360080718994, -0.7197030782699585]


def test_fill_covers_complex_weights() -> None:
    model = fill(spectral().build())
    weight = dict(model.named_parameters())["1.weight"]
    assert weight.is_complex()
    assert bool((weight.real != weight.imag).any())
    assert not torch.equal(weight, dict(model.named_parameters())["2.weight"])
