"""A part of the parity matrix, one test per row, and the matrix's own machinery."""

from __future__ import annotations

import itertools
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from fsshard.errors import MissingExtra, RecipeError
from fsshard.parity import Cell, Difference, Divergence, ParityReport, Recipe
from tests.models import take_step
from tests.parity import matrix
from tests.parity.matrix import MODELS, OPTIMIZERS, VARIANTS, WORLD_SIZES, Combination
from tests.sets import often

ROWS = matrix.covering()

DISTRIBUTED = ("fairscale", "fsdp", "fsdp2", "ddp")
BY_ONE_PROCESS_LATER = ("fno", "tfno_cp", "tfno_tt", "uno", "sfno", "gino", "vit", "t5")
"""Models whose rows of every commit leave out ``none``, whose bounds take dozens of evaluations, as on many ranks."""


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=() if row in matrix.often() else pytest.mark.long) for row in ROWS], ids=str
)
def test_backends_agree(ranks: Any, row: Combination) -> None:
    """Every backend against ddp: equal to the last bit where sums have one order only, else within rounding."""
    later = row.model in BY_ONE_PROCESS_LATER or row.world_size > 2
    backends = DISTRIBUTED if row in matrix.often() and later else matrix.BACKENDS
    found = {result.backend: result for result in matrix.run(row, ranks, steps=2, backends=backends)}
    assert sorted(found) == sorted(backends)
    if all(result.verdict == "refused" for result in found.values()):
        pytest.skip(found["ddp"].detail)  # a package is missing
    for result in found.values():
        assert result.verdict in allowed(row, result.backend), f"{result}: {result.verdict}: {result.detail}"
    refused = {result.backend: result.detail for result in found.values() if result.verdict == "refused"}
    assert all(matrix.expected_refusal(row, backend) in detail for backend, detail in refused.items())


def allowed(row: Combination, backend: str) -> tuple[str, ...]:
    """The verdicts that a backend may get."""
    if backend == "ddp":
        return ("exact",)
    if row.world_size == 1 and (row.variant, backend) != ("send", "fsdp"):
        return ("exact",)
    if matrix.expected_refusal(row, backend):
        return ("refused",)
    # One process takes the ranks' batches by leaves, but joins those of several accumulated micro-batches, and what a
    # recipe joins by itself.
    return ("bound",) if backend == "none" and row.variant in ("accumulate", "join") else ("exact",)


# ------------------------------------------------------------------------------------------------ covering pairs


def test_the_rows_cover_every_pair_and_a_few_at_every_commit_every_value() -> None:
    rows = [*ROWS]
    assert uncovered(rows, (MODELS, WORLD_SIZES, tuple(VARIANTS), tuple(OPTIMIZERS))) == set()
    assert len(rows) == len(MODELS) * len(VARIANTS)  # two factors alone need as many, so fewer cannot do
    assert len(matrix.everything()) == 14 * 4 * 15 * 12
    at_once = matrix.often()
    assert at_once <= set(ROWS) and len(at_once) <= len(ROWS) // 6
    assert {row.world_size for row in at_once} == {1, 2}
    on_two = [row for row in at_once if row.world_size == 2]
    assert {row.model for row in on_two} == set(MODELS) and {row.variant for row in on_two} == set(VARIANTS)
    assert {row.optimizer for row in on_two} == set(OPTIMIZERS)


def uncovered(rows: list[tuple[Any, ...]], factors: tuple[Any, ...]) -> set[Any]:
    """Pairs of values, with the places of their factors, that no row has."""
    places = list(itertools.combinations(range(len(factors)), 2))
    wanted = {(i, j, a, b) for i, j in places for a in factors[i] for b in factors[j]}
    return wanted - {(i, j, row[i], row[j]) for i, j in places for row in rows}


# ------------------------------------------------------------------------------------------------ recipes


def base(model: str, variant: str = "plain", optimizer: str = "Adam") -> Recipe:
    try:
        return matrix.recipe_for(model, variant, optimizer)
    except MissingExtra as error:
        pytest.skip(str(error))


def built(recipe: Recipe) -> torch.nn.Module:
    torch.manual_seed(recipe.seed)
    return recipe.build()


@pytest.mark.parametrize("model", often(MODELS, "mlp", "tfno"))
def test_clipping_bites(model: str) -> None:
    """The largest norm allowed is below the gradients' at the start and after the steps of a test."""
    recipe = base(model, "clip", "SGD")
    assert recipe.clipping is not None
    module = built(recipe)
    optimizer = recipe.optimizer(module.parameters(), **recipe.hyper)
    for number in range(3):
        recipe.loss(module, recipe.batches(0, 1, number)).backward()
        assert torch.nn.utils.clip_grad_norm_(module.parameters(), *recipe.clipping) > 2 * recipe.clipping[0]
        take_step(optimizer)


# ------------------------------------------------------------------------------------------------ the command


ROW = Combination("mlp", 2, "plain", "SGD")


@pytest.fixture
def verdicts(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Verdicts by backend, in place of real comparisons of three combinations; a backend that is not in it is exact."""
    found = {}

    def compare(source: Any, *, backends: Any, world_sizes: Any, steps: int, **_: Any) -> ParityReport:
        first = Divergence(step=1, quantity="gradient", name="w", rank=0, difference=Difference(verdict="different"))
        cells = [Cell(backend=b, world_size=world_sizes[0], verdict=found.get(b, "exact")) for b in backends]
        cells = [replace(cell, first_divergence=None if cell.ok else first) for cell in cells]
        return ParityReport(recipe=source().name, reference="ddp", steps=steps, cells=cells)

    monkeypatch.setattr("fsshard.parity.compare", compare)
    monkeypatch.setattr(matrix, "covering", lambda: [Combination("mlp", size, "plain", "SGD") for size in WORLD_SIZES])
    return found


def test_all_agree(verdicts: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "table.md"
    assert matrix.main(["--table", str(table)]) == 0
    text = table.read_text()
    assert "python -m tests.parity.matrix --table" in text and f"torch {metadata.version('torch')}" in text
    assert "| mlp   | fairscale | 1 exact | 1 exact | 1 exact | 1 exact |" in text
    assert "| SGD       | 4 exact   | 4 exact | 4 exact | 4 exact | 4 exact |" in text
    assert "Faults" not in text and "By variant" in capsys.readouterr().out


@pytest.mark.parametrize("verdict", ["different", "failed"])
def test_a_fault_is_named_and_fails(verdicts: dict[str, str], verdict: str, capsys: pytest.CaptureFixture[str]) -> None:
    verdicts["fsdp2"] = verdict
    assert matrix.main([]) == 1
    assert f"mlp-2-plain-SGD under fsdp2: {verdict}: step 1, gradient of w" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("error", "verdict"),
    [(MissingExtra("p", "e", "this"), "refused"), (RecipeError("the recipe is not deterministic"), "failed")],
)
def test_a_combination_that_cannot_run_is_listed(
    monkeypatch: pytest.MonkeyPatch, error: Exception, verdict: str
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("fsshard.parity.compare", refuse)
    found = matrix.run(ROW, None, steps=2)
    assert [result.backend for result in found] == list(matrix.BACKENDS)
    assert {result.verdict for result in found} == {verdict}
    assert all(str(error) in result.detail for result in found)
