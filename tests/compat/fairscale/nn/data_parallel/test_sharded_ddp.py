"""ShardedDataParallel: equal to DDP with the plain optimizer to the last bit on two ranks, where FairScale's is not.

The reference is DDP, and for what DDP's reducer does not do (several backwards of one forward) a reduction by hand
behind each backward, with DDP's arithmetic. The numbers in names are the rows of docs/fairscale.md.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.compat.fairscale.nn.data_parallel import sharded_ddp_checks as checks
from tests.compat.fairscale.nn.data_parallel import sharded_ddp_trainings as trainings

SAME = [[], []]
BUFFERS = [2**23, 0]


def same(ranks: Any, train: Any, *args: Any, reference: str = "ddp", **kw: Any) -> None:
    assert ranks.run(checks.compared, 2, train.__name__, reference, args, kw) == SAME


def raw_distance(ranks: Any, train: Any, *args: Any, reference: str = "ddp", size: int = 2, **kw: Any) -> float:
    return max(ranks.run(checks.raw_distance, size, train.__name__, reference, args, kw))


# ------------------------------------------------------------------------------------------------ zeroing (row 1)

WAYS = [
    "optimizer",
    "optimizer zeros",
    "wrapper",
    "wrapper zeros",
    "module",
    "module zeros",
    "by hand",
    "by hand zeros",
]


@pytest.mark.fairscale_row(1)
@pytest.mark.parametrize("how", WAYS)
def test_row_1_every_way_to_zero_gradients(ranks: Any, how: str) -> None:
    same(ranks, trainings.train_zeroing, how)


@pytest.mark.fairscale_row(1)
@pytest.mark.parametrize("how", ["optimizer", "module", "by hand"])
def test_row_1_raw_reduces_a_stale_bucket(ranks: Any, how: str) -> None:
    assert raw_distance(ranks, trainings.train_zeroing, how) > 1e-4


# ------------------------------------------------------------------------------------------------ accumulation (row 4)


@pytest.mark.covering
@pytest.mark.parametrize(
    "pattern",
    ["zss!", "znns!", "zsns!", "zsnsns!", "zns!ss!", "zsns!zs!", "zs!s!", "zns!ns!", "zssnns!"],
)
@pytest.mark.parametrize("how", ["optimizer", "wrapper zeros", "by hand"])
@pytest.mark.fairscale_row(4)
def test_row_4_accumulation(ranks: Any, pattern: str, how: str) -> None:
    """``s`` reduces, ``n`` is under no_sync, ``z`` zeroes, ``!`` steps."""
    same(ranks, trainings.train_accumulating, pattern, how, reference="hand")


@pytest.mark.fairscale_row(4)
def test_the_reference_by_hand_is_ddp(ranks: Any) -> None:
    for pattern in ("zss!", "znns!", "zsns!"):
        assert ranks.run(checks.compared, 2, "train_accumulating", "ddp", (pattern,), {"kind": "hand"}) == SAME


@pytest.mark.fairscale_row(4)
@pytest.mark.parametrize("size", BUFFERS)
def test_row_4_raw_averages_twice(ranks: Any, size: int) -> None:
    assert raw_distance(ranks, trainings.train_accumulating, "zss!", "wrapper zeros", reduce_buffer_size=size) > 1e-4


@pytest.mark.parametrize(
    "mode",
    [
        "two forwards, one backward",
        "two forwards, two backwards",
        "retain_graph",
        "not through the wrapper",
        "twice not through the wrapper",
        "gradient of the input first",
        "gradient of parameters in between",
    ],
)
def test_backward_passes(ranks: Any, mode: str) -> None:
    same(ranks, trainings.train_backwards, mode, reference="hand")


def test_accumulation_under_no_sync_alone_is_reduced_at_the_step(ranks: Any) -> None:
    """DDP's ranks would drift apart, FairScale's owner would step with its own gradient; here a warning says so."""
    assert ranks.run(checks.job_no_sync_alone, 2) == [(True, 1)] * 2


@pytest.mark.parametrize("change", ["replaced", "in place", "zeroed", "dropped"])
def test_a_part_on_top_of_a_mean_is_changed(ranks: Any, change: str) -> None:
    """A mean, a local part that came without a forward through the wrapper, and a change of the two.

    The owner adds twice its mean to its part: roundings of gradients below 4, times the learning rate of 0.1.
    """
    bound = 0.1 * 4 * 4 * 2.0**-24 + 2.0**-24
    assert max(ranks.run(checks.distance, 2, "train_changing_a_part", "hand", (change,), {})) <= bound


@pytest.mark.covering
@pytest.mark.parametrize("size", BUFFERS)
@pytest.mark.parametrize("pattern", ["zshsh!", "zscs!", "zshns!", "mshs!", "mshsms!", "zsh!s!", "zsnhs!"])
def test_gradients_replaced_between_backwards(ranks: Any, pattern: str, size: int) -> None:
    same(ranks, trainings.train_accumulating, pattern, reference="hand", reduce_buffer_size=size)


# ------------------------------------------------------------------------------------------------ reentrancy (row 2)


@pytest.mark.covering(2)
@pytest.mark.fairscale_row(2)
@pytest.mark.parametrize(
    "mode", ["blocks", "reentrant", "reentrant, tied", "reentrant, used again", "wrapper", "wrapper, reentrant"]
)
@pytest.mark.parametrize("size", [1, 2**23])
def test_row_2_checkpoints(ranks: Any, mode: str, size: int) -> None:
    """A bucket for each parameter, which leaves as soon as it can, and one for all."""
    same(ranks, trainings.train_checkpointed, mode, reference="hand", reduce_buffer_size=size)


@pytest.mark.fairscale_row(2)
def test_row_2_raw_ends_with_the_inner_backward(ranks: Any) -> None:
    """FairScale's end of backward comes while gradients of earlier blocks have not: what comes later is a race."""
    assert all(missing > 0 for missing in ranks.run(checks.job_raw_flush, 2))


# ------------------------------------------------------------------------------------------------ set-up (rows 5 to 8)


@pytest.mark.fairscale_row(5)
@pytest.mark.parametrize("mode", ["zeroed", "kept", "wrapped again"])
def test_row_5_gradients_from_before(ranks: Any, mode: str) -> None:
    same(ranks, trainings.train_after_leftovers, mode)


@pytest.mark.fairscale_row(5)
def test_row_5_raw_does_not_zero_them(ranks: Any) -> None:
    assert raw_distance(ranks, trainings.train_after_leftovers, "zeroed") > 1e-4


@pytest.mark.fairscale_row(6)
@pytest.mark.parametrize("mode", ["", "wrapped again"])
def test_row_6_add_param_group(ranks: Any, mode: str) -> None:
    same(ranks, trainings.train_added_group, mode)


@pytest.mark.fairscale_row(6)
def test_row_6_raw_steps_with_local_gradients(ranks: Any) -> None:
    assert raw_distance(ranks, trainings.train_added_group, "") > 1e-4


@pytest.mark.fairscale_row(8)
@pytest.mark.parametrize("size", BUFFERS)
def test_row_8_subgroup(ranks: Any, size: int) -> None:
    found = ranks.run(checks.compared, 3, "train_subgroup", "ddp", (), {"reduce_buffer_size": size})
    assert found == [[], [], []]


@pytest.mark.fairscale_row(8)
def test_row_8_raw_never_trains(ranks: Any) -> None:
    assert raw_distance(ranks, trainings.train_subgroup, size=3, reduce_buffer_size=0) > 1e-3


@pytest.mark.parametrize("mode", ["freeze", "thaw"])
def test_freezing_and_thawing(ranks: Any, mode: str) -> None:
    same(ranks, trainings.train_freezing, mode)


def test_thawing_a_layer_that_still_has_a_mean(ranks: Any) -> None:
    assert ranks.run(checks.job_thawed_with_a_mean, 2) == [[True] * 6] * 2


def test_two_optimizers_on_halves(ranks: Any) -> None:
    same(ranks, trainings.train_halves)


def test_parameters_in_no_optimizer_are_reduced_to_all(ranks: Any) -> None:
    same(ranks, trainings.train_partly_owned)


# ------------------------------------------------------------------------------------------------ use (row 19)


@pytest.mark.fairscale_row(19)
@pytest.mark.parametrize("how", ["optimizer", "by hand zeros"])
@pytest.mark.parametrize("when", ["never", "not on rank 1", "in turns", "ranks in turns"])
def test_row_19_parameters_used_by_some_ranks(ranks: Any, when: str, how: str) -> None:
    same(ranks, trainings.train_branching, when, how)


@pytest.mark.fairscale_row(19)
@pytest.mark.long
def test_row_19_raw_reduces_another_parameter_on_each_rank() -> None:
    assert checks.raw_unused_aborts()


# ------------------------------------------------------------------------------------------------ dtypes (rows 21, 27)


@pytest.mark.fairscale_row(21)
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("reference", ["ddp", "hand"])
def test_row_21_mixed_dtypes(ranks: Any, micro_batches: int, reference: str) -> None:
    same(ranks, trainings.train_mixed, micro_batches, reference=reference)


@pytest.mark.fairscale_row(21)
def test_row_21_raw_refuses(ranks: Any) -> None:
    assert all("Different types for the bucket" in text for text in ranks.run(checks.job_raw_mixed, 2))


@pytest.mark.fairscale_row(27)
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_row_27_sparse_gradients(ranks: Any, micro_batches: int) -> None:
    same(ranks, trainings.train_sparse, micro_batches)


@pytest.mark.fairscale_row(27)
def test_row_27_sparse_weight_with_a_dense_gradient(ranks: Any) -> None:
    same(ranks, trainings.train_tied_sparse, reference="hand")


@pytest.mark.fairscale_row(27)
def test_row_27_raw_has_no_sparse_reduction(ranks: Any) -> None:
    assert all("NotImplementedError" in text for text in ranks.run(checks.job_raw_sparse, 2))


@pytest.mark.parametrize("size", BUFFERS)
def test_float16_gradients_in_transit(ranks: Any, size: int) -> None:
    """To the last bit what FairScale computes without buckets; with them it ignores the setting."""
    assert ranks.run(checks.job_half, 2, size) == [(True, True)] * 2


# ------------------------------------------------------------------------------------------------ copies, compiling


@pytest.mark.fairscale_row(10)
@pytest.mark.long
def test_row_10_compiled(ranks: Any) -> None:
    (ours, inner, raw), other = ranks.run(checks.job_compiled, 2, timeout=240)
    assert (ours, inner, *other[:2]) == (0, 0, 0, 0)
    assert raw > 1e-4


@pytest.mark.fairscale_row(26)
def test_row_26_copies(ranks: Any) -> None:
    assert ranks.run(checks.job_copies, 2) == [("TypeError", "TypeError", True, True, True)] * 2


@pytest.mark.fairscale_row(33)
def test_row_33_gradients_on_other_ranks(ranks: Any) -> None:
    """FairScale leaves garbage with the ranks that do not own a parameter; here they have None."""
    for ours, freed, raw in ranks.run(checks.job_gradients, 2):
        assert ours == freed == {"owner": {"mean"}, "other": {"none"}}
        assert raw["owner"] == {"mean"} and raw["other"] & {"garbage"}


@pytest.mark.covering
@pytest.mark.fairscale_row(33)
@pytest.mark.parametrize("size", [0, 2**23])
@pytest.mark.parametrize("pattern", ["all", "bias left out"])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_row_33_torchs_own_clipping(ranks: Any, norm_type: float, pattern: str, size: int) -> None:
    expected = ranks.run(checks.job_torch_clip, 2, "ddp", norm_type, pattern)
    ours, raw = (
        ranks.run(checks.job_torch_clip, 2, kind, norm_type, pattern, reduce_buffer_size=size)
        for kind in ("ours", "real")
    )
    for here, there in zip(ours, expected, strict=True):
        assert not checks.unequal(here, there)
    if norm_type < 3:  # the largest gradient can be one that a rank owns
        assert any(checks.unequal(here[:1], there[:1]) for here, there in zip(raw, expected, strict=True))


def test_a_norm_alone_is_no_collective(ranks: Any) -> None:
    assert ranks.run(checks.job_norm_on_one_rank, 2) == [True, True]


def test_every_way_to_zero_in_one_training(ranks: Any) -> None:
    assert ranks.run(checks.job_zeroing_in_turns, 2) == [[True] * 6] * 2


# ------------------------------------------------------------------------------------------------ three ranks


@pytest.mark.parametrize("pattern", ["zs!", "znns!", "zss!"])
def test_three_ranks(ranks: Any, pattern: str) -> None:
    """Sums of three in another order: gradients below 1 differ by at most 2 roundings of 2**-24 each, at every of

    the 2 steps of momentum 0.9 and learning rate 0.1, doubled for what the parameters' own difference does next.
    """
    bound = 2 * (1 + 1.9) * 0.1 * 4 * 2.0**-24 + 4 * 2.0**-24
    assert max(ranks.run(checks.distance, 3, "train_accumulating", "hand", (pattern,), {})) <= bound


def test_three_ranks_where_sums_are_exact(ranks: Any) -> None:
    assert ranks.run(checks.job_exact_sums, 3) == [True] * 3


# ------------------------------------------------------------------------------------------------ buckets


@pytest.mark.parametrize("elements", [0, 1, 100, 2**23])
@pytest.mark.parametrize("pattern", ["s", "ns"])
def test_any_size_of_bucket(ranks: Any, elements: int, pattern: str) -> None:
    same(ranks, trainings.train_large, pattern, elements)


def test_buckets_leave_during_backward_in_one_order(ranks: Any) -> None:
    first, second = ranks.run(checks.job_launches, 2)
    assert first == second
    learned, later = first
    assert learned == ["end"] * len(learned)  # the first backward shows which gradients come in parts
    assert later[-1] == "end" and "backward" in later


def test_no_more_bytes_than_fairscale(ranks: Any) -> None:
    """What is handed to collectives, less what stays on the rank, and what the process writes to its sockets."""
    for ours, real in ranks.run(checks.job_bytes, 2):
        assert ours["payload"] <= real["payload"]
        assert ours["written"] <= real["written"]


# ------------------------------------------------------------------------------------------------ buffers, start


@pytest.mark.parametrize("eval_between", [False, True])
def test_buffers(ranks: Any, eval_between: bool) -> None:
    same(ranks, trainings.train_normalized, eval_between, reference="ddp")


def test_buffers_as_the_settings_say(ranks: Any) -> None:
    assert ranks.run(checks.job_buffers, 2) == [
        {"default": 0.0, "off": 0.0, "no_sync": 0.0, "by hand": 0.0},
        {"default": 0.0, "off": 1.0, "no_sync": 1.0, "by hand": 0.0},
    ]


def test_start(ranks: Any) -> None:
    """All parameters and buffers, whatever else is in the state dict; nothing where it is turned off."""
    assert ranks.run(checks.job_start, 2) == [(True, True), (True, False)]


# ------------------------------------------------------------------------------------------------ errors, ends


def test_an_error_in_backward_is_not_forgotten(ranks: Any) -> None:
    assert ranks.run(checks.job_error_in_backward, 2) == [("forward", "step", True)] * 2


def test_an_error_under_no_sync_is_of_one_rank_alone(ranks: Any) -> None:
    assert ranks.run(checks.job_error_under_no_sync, 2) == [[True] * 4] * 2


def test_no_sync_ends_with_an_error(ranks: Any) -> None:
    assert ranks.run(checks.job_no_sync_error, 2) == [(False, True)] * 2


def test_nothing_stays_alive(ranks: Any) -> None:
    assert ranks.run(checks.job_garbage, 2) == [(True, True)] * 2


def test_the_newer_wrapper_takes_over(ranks: Any) -> None:
    assert all("newer" in text for text in ranks.run(checks.job_taken_over, 2))


# ------------------------------------------------------------------------------------------------ the surface


def test_surface(ranks: Any) -> None:
    assert ranks.run(checks.job_surface, 1) == [[]]


def test_one_rank(ranks: Any) -> None:
    assert ranks.run(checks.job_alone, 1) == [[True] * 6]


def test_misuse(ranks: Any) -> None:
    assert ranks.run(checks.job_misuse, 1) == [[]]


def test_refused(ranks: Any) -> None:
    words = {"float16": "use reduce_fp16=False", "clip": "call the wrapper's own method"}
    words |= {"mismatch": "unlike rank 0 are [1]", "graph": "requires grad"}
    first, second = ranks.run(checks.job_refused, 2)
    assert "[0]" in first["group"] and "[0, 1]" in first.pop("group")
    for told in (first, second):
        assert list(told) == list(words) and all(text in told[name] for name, text in words.items()), told


def test_reduce(ranks: Any) -> None:
    assert ranks.run(checks.job_reduce, 2) == [([], True)] * 2


def test_refreshing(ranks: Any) -> None:
    """Once a change, whether it is warned of or not (FairScale without warnings: at every forward)."""
    assert ranks.run(checks.job_refreshing, 2) == [{"warned": (1, 1), "silent": (1, 0), "by hand": (1, 0)}] * 2


def test_one_rank_alone_freezes_and_evaluates(ranks: Any) -> None:
    assert ranks.run(checks.job_evaluated_alone, 2) == [[True] * 6] * 2


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("accumulate", [False, True])
def test_two_modules_of_one_optimizer_with_a_wrapper_each(ranks: Any, accumulate: bool, added: bool) -> None:
    same(ranks, trainings.train_modules_apart, accumulate, added)
