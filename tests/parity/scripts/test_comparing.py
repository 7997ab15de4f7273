"""Verdicts, names and causes of made-up records; those of real trainings are in test_recorder.py.

Tests fsshard/parity/scripts/causes.py, fsshard/parity/scripts/step_causes.py and fsshard/parity/scripts/names.py too.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fsshard.errors import ConfigurationError
from fsshard.parity.scripts.comparing import compare_scripts
from fsshard.parity.scripts.names import matched_names
from fsshard.parity.scripts.recorder import check_new
from fsshard.parity.scripts.store import (
    Model,
    Record,
    Samples,
    append,
    digest_alone,
    note_end,
    tensor_file,
    write_tensor,
)
from fsshard.parity.sketch import Sketch, sketch
from tests.parity.scripts.test_store import HEADER

ONE, TWO, ZERO = (sketch(torch.full((3,), value)) for value in (1.0, 2.0, 0.0))
GIVEN = Samples(digest="a", rows=2, total="0f", computed="float32")
MODEL = Model(engine="Net", weights={"w": ZERO})
STEP = Record(
    models=[],
    step=0,
    losses=[0.5],
    samples=[GIVEN],
    groups=[{"lr": 0.1}],
    random="b",
    skipped=False,
    gradients={"w": (4.0, 3)},
    sketches={"weight": {"w": ONE}, "buffer": {"count": ONE}},
)


def script(
    folder: Path, steps: int = 3, models: Sequence[Model] = (MODEL,), size: int = 1, first: int = 0, **late: Any
) -> Path:
    """Write a record whose last step has ``late`` in place of what is usual."""
    for rank in range(size):
        file = folder / f"rank{rank}.jsonl"
        append(file, dataclasses.replace(HEADER, rank=rank, world_size=size))
        for number in range(first, steps):
            change = {"gradients": {"w": (4.0 + number, 3)}}  # which are not clipped
            change |= {"models": [*models]} if number == first else {}
            append(file, dataclasses.replace(STEP, step=number, **(change | (late if number == steps - 1 else {}))))
    return folder


def starting(weight: Sketch, engine: str = "Net") -> list[Model]:
    """Return a model with another weight at the start."""
    return [dataclasses.replace(MODEL, engine=engine, weights={"w": weight})]


OTHER = {"sketches": {"weight": {"w": TWO}, "buffer": {"count": ONE}}}


@pytest.mark.parametrize(
    ("late", "cause"),
    [
        ({"groups": [{"lr": 0.2}]}, "step 2: lr of group 0 0.1 -> 0.2"),
        ({"groups": [{"lr": 0.1}] * 2}, "step 2: groups of parameters 1 -> 2"),
        ({"skipped": True}, "step 2: the step was made -> left out by the scaler"),
        ({"losses": [0.25, 0.25]}, "step 2: backward passes 1 -> 2"),
        ({"losses": [0.75]}, "step 2: loss 0.5 -> 0.75"),
        ({"gradients": {"w": (24.0, 3)}}, "step 2: all gradients are 2 times as large"),
        ({"random": "c"}, "step 2: other random numbers have been drawn"),
        ({"samples": [GIVEN, GIVEN]}, "step 2: the ranks were given 4 samples, by the old script 2"),
        ({"samples": [dataclasses.replace(GIVEN, computed="bfloat16")]}, "step 2: models put out float32 -> bfloat16"),
    ],
)
def test_what_differed_before_the_weights_is_told(tmp_path: Path, late: dict[str, Any], cause: str) -> None:
    old, new = script(tmp_path / "old"), script(tmp_path / "new", **{**OTHER, **late})
    found = compare_scripts(old, new)
    assert found.sentence.startswith("NOT the same training: old and new on 1 rank part at step 2, weight of w, rank 0")
    assert len(found.causes) == 1 and found.causes[0].startswith(cause)
    assert json.loads(found.to_json())["causes"] == found.causes


def test_other_samples_have_another_loss(tmp_path: Path) -> None:
    """A forward that takes other arguments, as Lightning's does, which has the targets, is given the same samples."""
    samples = [dataclasses.replace(GIVEN, digest="c", total="0e")]
    old, new = script(tmp_path / "old"), script(tmp_path / "new", **OTHER, samples=samples, losses=[0.75])
    cause = "step 2: rank 0 was given other samples (another sampler, seed or preparation of data?)"
    assert compare_scripts(old, new).causes == [cause, "step 2: loss 0.5 -> 0.75"]
    assert compare_scripts(old, script(tmp_path / "more", **OTHER, samples=samples)).causes == []


def test_a_mean_of_means_is_told_from_a_mean_over_all(tmp_path: Path) -> None:
    """Of 7 and 3 tokens: 1.4 and 0.6 times the means of two micro-batches."""
    means, weighted = {**OTHER, "losses": [0.5, 0.25]}, {**OTHER, "losses": [0.7, 0.15]}
    plain = script(tmp_path / "plain", losses=[0.5, 0.25])
    causes = compare_scripts(plain, script(tmp_path / "weighted", **weighted)).causes
    words = "script alone weighs the losses of ranks or micro-batches, by 1.4, 0.6, which is 1 on average"
    assert causes[0].startswith(f"step 2: the new {words}") and "a mean of means" in causes[0]
    causes = compare_scripts(script(tmp_path / "all", losses=[0.7, 0.15]), script(tmp_path / "m", **means)).causes
    assert causes[0].startswith(f"step 2: the old {words}")
    # Other losses, or of other samples, say nothing of weights.
    others = [
        {"losses": [0.7, 0.2]},
        {"losses": [0.50001, 0.249995]},
        {"losses": [1.0, 0.5]},
        {"losses": [float("nan"), 0.15]},
        {"losses": [0.7, 0.15], "samples": [dataclasses.replace(GIVEN, digest="c", total="0e")]},
    ]
    for number, late in enumerate(others):
        causes = compare_scripts(plain, script(tmp_path / str(number), **{**OTHER, **late})).causes
        assert not any("weighs the losses" in cause for cause in causes), causes


def test_what_differs_while_the_weights_do_not(tmp_path: Path) -> None:
    """Random numbers alone change nothing that is recorded."""
    found = compare_scripts(script(tmp_path / "old"), script(tmp_path / "new", losses=[5.0], random="c"))
    assert (found.verdict, found.causes) == ("different", ["step 2: loss 0.5 -> 5.0"])
    assert found.sentence == "NOT shown to be the same training: step 2: loss 0.5 -> 5.0; 3 steps agree."
    assert str(found).splitlines()[1] == "also different: step 2: loss 0.5 -> 5.0"
    assert compare_scripts(tmp_path / "old", script(tmp_path / "drawn", random="c")).verdict == "exact"


def test_buffers_are_weights_too(tmp_path: Path) -> None:
    sketches = {"weight": {"w": ONE}, "buffer": {"count": TWO}}
    found = compare_scripts(script(tmp_path / "old"), script(tmp_path / "new", sketches=sketches))
    assert "part at step 2, buffer of count" in found.sentence
    sketches = {"weight": {"w": ONE}, "buffer": {"cache": TWO}}
    found = compare_scripts(script(tmp_path / "a"), script(tmp_path / "b", sketches=sketches))
    assert "step 2: buffers of the old script alone: count; buffers of the new script alone: cache" in found.sentence


def test_other_weights_at_the_start(tmp_path: Path) -> None:
    found = compare_scripts(script(tmp_path / "old"), script(tmp_path / "new", models=starting(ONE, "Other")))
    assert "part at step 0, initial weight of w" in found.sentence
    assert found.causes == ["1 of 1 initial weights differ (another seed?): w"]


def test_as_many_steps_that_are_others(tmp_path: Path) -> None:
    old, new = script(tmp_path / "old"), script(tmp_path / "new", steps=4, first=1)
    assert "old has recorded 3 steps (0 to 2), new 3 steps (1 to 3)" in compare_scripts(old, new).sentence


def test_a_record_that_ended_shows_nothing_of_what_came_after(tmp_path: Path) -> None:
    old, new = script(tmp_path / "old"), script(tmp_path / "new")
    note_end(new, "it failed")
    found = compare_scripts(old, new)
    assert not found.ok and "the record of new ended while it went on (it failed); 3 steps agree." in found.sentence
    with pytest.raises(ConfigurationError, match="holds a record already"):
        check_new(new)


def test_weights_that_no_step_has_changed_show_nothing(tmp_path: Path) -> None:
    """As those of an optimizer that was built before an engine has replaced the parameters."""
    found = compare_scripts(*(script(tmp_path / name, models=starting(ONE)) for name in ("old", "new")))
    assert not found.ok and "no step has changed a weight: does the optimizer have" in found.sentence


def test_steps_after_the_last_weights_are_not_claimed(tmp_path: Path) -> None:
    sides = [script(tmp_path / name, sketches={}) for name in ("old", "new")]
    found = compare_scripts(*sides)
    assert found.sentence.endswith("1 parameters in 2 of 3 steps; nothing is shown of weights after step 1.")
    found = compare_scripts(sides[0], script(tmp_path / "rate", sketches={}, groups=[{"lr": 0.2}]))
    assert found.sentence == "NOT shown to be the same training: step 2: lr of group 0 0.1 -> 0.2; 2 steps agree."


def test_on_other_numbers_of_ranks_replicas_must_be_equal(tmp_path: Path) -> None:
    old, new = script(tmp_path / "old", size=2), script(tmp_path / "new", size=4)
    assert compare_scripts(old, new).ok
    file = new / "rank3.jsonl"
    file.write_text(file.read_text().replace(ONE.digest, TWO.digest))
    assert "ranks 0 and 3 of new hold different weights" in compare_scripts(old, new).sentence


def test_ranks_that_are_apart_in_both_scripts(tmp_path: Path) -> None:
    """They are named where nothing else explains the difference of the two."""
    for name, late in (("old", {}), ("new", OTHER), ("rate", {**OTHER, "groups": [{"lr": 0.2}]})):
        file = script(tmp_path / name, size=2, **late) / "rank1.jsonl"
        file.write_text(file.read_text().replace(ONE.digest, ZERO.digest))
    told = "hold different weights: are gradients not averaged? w"
    causes = compare_scripts(tmp_path / "old", tmp_path / "new").causes
    assert causes == [f"step 0: ranks 0 and 1 of old {told}", f"step 0: ranks 0 and 1 of new {told}"]
    assert compare_scripts(tmp_path / "old", tmp_path / "rate").causes == ["step 2: lr of group 0 0.1 -> 0.2"]


def test_replicas_that_differ_are_compared_by_their_digests(tmp_path: Path) -> None:
    """With repeated runs too, which bound what is rounded."""
    sides = {}
    for name, digest in (("old", "a"), ("new", "b"), *((str(draw), "a") for draw in range(4))):
        sides[name] = script(tmp_path / name, size=2)
        file = sides[name] / "rank1.jsonl"
        file.unlink()
        append(file, dataclasses.replace(HEADER, rank=1, world_size=2))
        for number in range(3):
            sketches = {"weight": {"w": digest_alone(digest)}, "buffer": {}}
            append(file, dataclasses.replace(STEP, step=number, models=[] if number else [MODEL], sketches=sketches))
    found = compare_scripts(sides["old"], sides["new"], repeats=[sides[str(draw)] for draw in range(4)])
    assert "part at step 0, weight of w, rank 1" in found.sentence and "the bits are others" in found.sentence


def test_repeats_that_were_recorded_otherwise(tmp_path: Path) -> None:
    old, new = script(tmp_path / "old"), script(tmp_path / "new", **OTHER)
    repeats = [script(tmp_path / str(draw), steps=2) for draw in range(4)]
    told = r"0 is no repeat of \S*old, which has other ranks.*as many ranks, with the same --steps, --every and --state"
    with pytest.raises(ConfigurationError, match=told):
        compare_scripts(old, new, repeats=repeats)


def test_how_to_bound_what_may_be_rounding_is_told(tmp_path: Path) -> None:
    """Unless something else differs, or nothing may round."""
    near = {"sketches": {"weight": {"w": sketch(torch.full((3,), 1 + 2.0**-20))}, "buffer": {"count": ONE}}}
    old, new = script(tmp_path / "old"), script(tmp_path / "new", **near)
    found = compare_scripts(old, new)
    assert found.verdict == "different" and found.hint == str(found).splitlines()[-1]
    assert (
        "may be rounding alone" in found.hint
        and "record the old script again with fsshard trace --repeat 8; its" in found.hint
    )
    assert not compare_scripts(old, new, exactly=True).hint and not compare_scripts(old, old).hint
    assert not compare_scripts(old, script(tmp_path / "rate", **near, groups=[{"lr": 0.2}])).hint


def test_records_without_weights_prove_nothing(tmp_path: Path) -> None:
    old, new = script(tmp_path / "old", steps=1), script(tmp_path / "new", steps=1, sketches={})
    with pytest.raises(ConfigurationError, match="no step in common at which weights are recorded; record both with"):
        compare_scripts(old, new)


def test_ranks_that_are_given_the_same_samples_in_other_parts(tmp_path: Path) -> None:
    """Two ranks with two samples each, four with one: the sums of the samples' digests are equal."""
    halves = [dataclasses.replace(GIVEN, digest=str(k), rows=1, total=total) for k, total in enumerate(("0a", "05"))]
    old = script(tmp_path / "old", size=2, samples=halves)
    new = script(tmp_path / "new", size=4, samples=[dataclasses.replace(GIVEN, rows=1, total="0f")], **OTHER)
    found = compare_scripts(old, new)
    assert "on 2 and 4 ranks" in found.sentence
    assert found.causes == ["step 0: the ranks were given 8 samples, by the old script 4"]


@pytest.mark.parametrize(("both", "ok"), [(True, False), (False, True)])
def test_states_that_both_have_are_weights_too(tmp_path: Path, both: bool, ok: bool) -> None:
    sides = [{"weight": {"w": ONE}, "buffer": {}, "state": {"w: step": one} if both or one is TWO else {}}
             for one in (ONE, TWO)]  # fmt: skip
    old, new = (script(tmp_path / str(number), sketches=one) for number, one in enumerate(sides))
    found = compare_scripts(old, new)
    assert found.ok == ok and ("part at step 2, state of w: step" in found.sentence) != ok


@pytest.mark.parametrize("same_start", [True, False])
def test_models_that_are_called_in_another_order(tmp_path: Path, same_start: bool) -> None:
    """By the bits of what has the same name, or the shapes, if all is other; their buffers and states move along."""
    wide = sketch(torch.zeros(5))
    models = [MODEL, dataclasses.replace(MODEL, weights={"w": ONE if same_start else wide, "v": ZERO})]
    late = {"gradients": {}}
    names = [["w", "model1.w", "model1.v"], ["model1.w", "w", "v"]]
    kinds = [("weight", ""), ("buffer", "b"), ("state", ": step")]
    values = [ONE, TWO, TWO]
    sides = [{kind: {f"{n}{end}": one for n, one in zip(side, values, strict=True)} for kind, end in kinds}
             for side in names]  # fmt: skip
    old = script(tmp_path / "old", 1, models, sketches=sides[0], **late)
    new = script(tmp_path / "new", 1, models[::-1], sketches=sides[1], **late)
    found = compare_scripts(old, new)
    assert found.verdict == "exact", str(found)
    assert found.renamed == {"w": "model1.w", "model1.w": "w", "model1.v": "v"}


def test_a_model_that_one_script_has_more(tmp_path: Path) -> None:
    more = [dataclasses.replace(MODEL, weights={"w": TWO}), MODEL]
    sketches = {"weight": {"w": TWO, "model1.w": ONE}, "buffer": {}}
    found = compare_scripts(script(tmp_path / "old", 1), script(tmp_path / "new", 1, more, sketches=sketches))
    assert found.causes[0] == "parameters of the new script alone: model1.w" and "model1.w" in found.sentence


def test_names_that_only_moved() -> None:
    old = {"a": (ZERO, ONE), "b": (ZERO, TWO), "kept": (ONE, ONE)}
    new = {"net.b": (ZERO, TWO), "kept": (TWO, TWO), "net.a": (ZERO, ONE)}
    assert matched_names(old, new) == {"a": "net.a", "b": "net.b", "kept": "kept"}


def test_names_that_all_moved_are_few_lines(tmp_path: Path) -> None:
    found = compare_scripts(script(tmp_path / "old"), script(tmp_path / "new"))
    found.renamed = {str(number): f"net.{number}" for number in range(100)}
    assert str(found).splitlines()[1:-1] == [*(f"renamed: {k} is net.{k} now" for k in range(4)), "renamed: 96 more"]


def test_tensors_of_a_moved_name_are_found(tmp_path: Path) -> None:
    moved = [dataclasses.replace(MODEL, weights={"v": ZERO})]
    new = script(tmp_path / "new", models=moved, gradients={}, sketches={"weight": {"v": TWO}, "buffer": {}})
    for name, value in (("old", 1.0), ("new", 2.0)):
        file = tensor_file(tmp_path / name, 2, "w" if name == "old" else "v")
        write_tensor(file, torch.full((3,), value))
    assert "weight of w, rank 0 at [0]: expected 1, got 2" in compare_scripts(script(tmp_path / "old"), new).sentence


def test_towers_that_swapped_names_with_their_weights() -> None:
    """Biases of zeros go with the weights beside them."""
    old = {"a.weight": (ONE, ONE), "a.bias": (ZERO, ONE), "b.weight": (TWO, TWO), "b.bias": (ZERO, TWO)}
    new = {"a.weight": (TWO, TWO), "a.bias": (ZERO, TWO), "b.weight": (ONE, ONE), "b.bias": (ZERO, ONE)}
    swapped = {"a.weight": "b.weight", "a.bias": "b.bias", "b.weight": "a.weight", "b.bias": "a.bias"}
    assert matched_names(old, new) == swapped


def test_equal_ones_are_matched_in_order_where_later_ones_differ() -> None:
    other = sketch(torch.full((3,), 7.0))
    assert matched_names({"a": (ZERO, ONE), "b": (ZERO, TWO)}, {"c": (ZERO, ONE), "d": (ZERO, other)}) == {
        "a": "c",
        "b": "d",
    }


def test_without_equal_bits_one_shape_is_enough_and_two_are_not() -> None:
    wide = sketch(torch.ones(5))
    assert matched_names({"a": (ONE, ONE), "w": (wide, wide)}, {"b": (TWO, TWO)}) == {"a": "b"}
    assert matched_names({"a": (ONE, ONE), "b": (ZERO, ZERO)}, {"c": (TWO, TWO), "d": (TWO, TWO)}) == {}


def test_steps_that_one_rank_has_alone(tmp_path: Path) -> None:
    """They are compared with the same ones of the other script, and must be there."""
    for name, steps, late in (("old", 4, ONE), ("same", 4, ONE), ("other", 4, TWO), ("more", 5, ONE)):
        file = script(tmp_path / name, size=2) / "rank1.jsonl"
        for number in range(3, steps):
            append(file, dataclasses.replace(STEP, step=number, sketches={**STEP.sketches, "weight": {"w": late}}))
    old, same, other, more = (tmp_path / name for name in ("old", "same", "other", "more"))
    assert compare_scripts(old, same).ok
    told = "in the steps that rank 1 has alone: step 3, weight of w"
    assert told in compare_scripts(old, other).sentence
    assert "rank 1 has recorded 4 steps of old, 5 of more" in compare_scripts(old, more).sentence
