"""The comparison finds what it must find: each planted fault, at its step, in its quantity, by name and rank.

Tests fsshard/parity/checking.py and fsshard/parity/comparing.py too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from fsshard.errors import RecipeError
from fsshard.parity import Recipe, compare
from fsshard.parity.report import Cell
from tests.forked import ForkedPool
from tests.parity import faults
from tests.parity.matrix import recipe_for


def cell(ranks: Any, recipe: Callable[[], Recipe], engine: Any, steps: int = 4, **options: Any) -> Cell:
    """The verdict on one engine at two ranks."""
    return compare(recipe, backends=[engine], world_sizes=[2], steps=steps, pool=ranks, **options).cells[0]


@pytest.mark.parametrize(
    ("recipe", "engine", "step", "quantity", "name", "rank"),
    [
        pytest.param(faults.mlp, faults.RawFairScale, 1, "weight", "0.weight", None, id="stale FairScale buckets"),
        pytest.param(faults.mlp, faults.Summed, 0, "gradient", "0.weight", None, id="summed, not averaged"),
        pytest.param(faults.dropout, faults.OtherNumbers, 0, "random state", "", 1, id="other random numbers"),
        pytest.param(faults.mlp, faults.OtherWeights, 0, "initial weight", "2.weight", 1, id="other seed"),
        pytest.param(faults.tied, faults.Untied, 0, "initial weight", "second.w", None, id="untied"),
        pytest.param(faults.clipped, faults.LocalClip, 0, "norm", "", None, id="clipping on the local shard"),
        pytest.param(
            faults.dropout, faults.ForgetfulCheckpointing, 0, "gradient", "0.weight", None, id="dropout recomputed"
        ),
        pytest.param(faults.fp32_unit, faults.LowFp32Unit, 0, "loss", "", None, id="fp32 unit in bfloat16"),
        pytest.param(faults.mlp, faults.StaleOptimizer, 0, "weight", "0.weight", None, id="stale parameters"),
        pytest.param(
            faults.batchnorm,
            {"backend": "fsdp2", "broadcast_buffers": False},
            1,
            "buffer",
            "1.running_mean",
            1,
            id="buffer not broadcast",
        ),
        pytest.param(faults.adam_mlp, faults.SkippedStep, 2, "weight", "0.weight", 1, id="skipped step"),
        pytest.param(faults.adam_mlp, faults.SkippedShard, 2, "weight", "0.weight", 1, id="skipped step of a shard"),
    ],
)
def test_fault_is_found(
    ranks: Any, recipe: Callable[[], Recipe], engine: Any, step: int, quantity: str, name: str, rank: int | None
) -> None:
    found = cell(ranks, recipe, engine, steps=step + 1)
    assert found.verdict == "different" and found.reproducible
    first = found.first_divergence
    assert first is not None
    assert (first.step, first.quantity, first.name) == (step, quantity, name), str(first)
    assert rank is None or first.rank == rank
    assert f"step {step}, {quantity}" in str(first)
    assert engine is not faults.LowFp32Unit or "'1'" in first.difference.note, "the module is named"


@pytest.mark.parametrize(
    ("model", "variant", "engine", "places"),
    [
        # Whether the loss shows a last bit, or its rounding hides it, differs between CPUs.
        ("mlp", "ema", faults.OtherAverage, [(1, "loss"), (1, "gradient")]),  # its first update takes the weights
        ("mlp", "term_gradients", faults.OtherNorms, [(0, "loss"), (0, "gradient")]),
        pytest.param("t5", "plain", faults.OtherWords, [(0, "loss")], marks=pytest.mark.long),
    ],
)
def test_a_fault_in_what_a_loss_asks_is_found(ranks: Any, model: str, variant: str, engine: Any, places: Any) -> None:
    pytest.importorskip("transformers" if model == "t5" else "torch")
    found = cell(ranks, functools.partial(recipe_for, model, variant, "Adam"), engine, steps=places[0][0] + 1)
    first = found.first_divergence
    assert found.verdict == "different" and first is not None
    assert (first.step, first.quantity) in places, str(first)


def test_on_two_ranks_no_difference_is_too_small(ranks: Any) -> None:
    ladder = [faults.Off, faults.OffBy5, faults.OffBy6, faults.OneUnitOff]
    for found in compare(faults.mlp, backends=ladder, world_sizes=[2], steps=1, pool=ranks):
        first = found.first_divergence
        assert found.verdict == "different" and first is not None, found.backend
        assert (first.quantity, first.name) == ("gradient", "4.bias")
        assert first.difference.bound < 1e-40  # underflow's alone
        assert first.difference.ulps == 1 or found.backend != "one unit off"


@pytest.mark.parametrize("size", [4, pytest.param(8, marks=pytest.mark.long)])
def test_on_more_ranks_a_last_bit_of_one_is_found(ranks: Any, size: int) -> None:
    """Of rank 3 of 4, and of rank 6 of 8: gradients are added up in one order, so nothing is put down to rounding."""
    engines = [faults.NextNumbers, "fsdp2", "fairscale"]
    wrong, *right = compare(faults.mlp, backends=engines, world_sizes=[size], steps=1, pool=ranks)
    assert wrong.verdict == "different" and wrong.reproducible
    assert wrong.first_divergence is not None and wrong.first_divergence.quantity == "gradient"
    assert wrong.first_divergence.difference.bound == 0
    assert [found.verdict for found in right] == ["exact", "exact"]


def test_the_same_engines_without_their_faults_are_exact(ranks: Any) -> None:
    """So what the others find is the fault, not the way in which the engine is connected."""
    assert cell(ranks, faults.mlp, faults.CarefulFairScale).verdict == "exact"
    assert cell(ranks, faults.mlp, faults.RawDDP).verdict == "exact"
    assert cell(ranks, faults.dropout, "fsdp2").verdict == "exact"


def test_a_recipe_that_is_not_deterministic_is_told_so(ranks: Any) -> None:
    with pytest.raises(RecipeError, match=r"not deterministic.*initial weight of 2\.bias"):
        cell(ranks, faults.restless, "fsdp2")
    with pytest.raises(RecipeError, match=r"gave rank . another batch"):
        cell(ranks, faults.restless_batches, "fsdp2")
    with pytest.raises(
        RecipeError, match=r"first at step 0, loss, .*of all parameters first at step 0, gradient of 0\."
    ):
        cell(ranks, faults.restless_loss, "fsdp2")


def test_batches_that_depend_on_the_engine_are_told_so(ranks: Any) -> None:
    for recipe in (faults.partial, faults.wider):  # of the latter the model takes none: they are compared before
        with pytest.raises(RecipeError, match=r"gave rank . another batch \(number 0\)"):
            cell(ranks, recipe, "fsdp2")


def test_a_rank_that_raises_has_a_cell_with_its_traceback(ranks: Any) -> None:
    report = compare(faults.mlp, backends=[faults.Raises, "fsdp2"], world_sizes=[2], steps=3, pool=ranks)
    failed, fine = report.cells
    assert failed.verdict == "failed"
    assert "rank 1" in failed.reason
    assert 'raise ZeroDivisionError("planted")' in failed.traceback
    assert fine.verdict == "exact"
    assert not report.ok


@pytest.mark.long
def test_a_hang_names_the_rank_and_the_collective() -> None:
    with ForkedPool() as pool:
        found = cell(pool, faults.mlp, faults.Hangs, timeout=6)
        assert found.verdict == "failed"
        assert "all_gather" in found.reason
        assert "rank 0" in found.reason
        assert cell(pool, faults.mlp, "fsdp2").verdict == "exact"  # the pool lives on
