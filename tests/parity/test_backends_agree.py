"""Swapping the engine changes nothing: bit for bit on two ranks, and within rounding of one process."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from tests.jobs import DISTRIBUTED, Run, Trace, compare, loss_of, train, zoo

MODELS = ("tfno_tucker", "tfno_cp", "tfno_tt", "fno_dense", "fno", "uno", "mlp_complex", "t5")
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulate": {"micro_batches": 3},
    "clip": {"clip": (0.05, 2.0)},
    "groups": {"groups": True},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("case", MODELS)
def test_bit_equal_on_two_ranks(ranks: Any, case: str, variant: str) -> None:
    """Losses, gradients, weights and optimizer state of five Adam steps: every backend against ddp."""
    runs = [Run(case, backend, **VARIANTS[variant]) for backend in DISTRIBUTED]
    for rank, found in enumerate(ranks.run(compare, 2, runs)):
        assert found == [], f"rank {rank}"


@pytest.mark.parametrize(
    ("optimizer", "hyper"),
    [
        ("neuralop.AdamW", {"weight_decay": 0.01}),
        ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
        ("Adam", {"weight_decay": 0.01, "amsgrad": True}),
        ("AdamW", {"foreach": True}),
        ("Adadelta", {"weight_decay": 0.01}),
        ("Adagrad", {}),
        ("RMSprop", {"centered": True, "momentum": 0.9}),
        ("NAdam", {}),
        ("RAdam", {}),
    ],
)
def test_optimizers_keep_their_meaning(ranks: Any, optimizer: str, hyper: dict[str, Any]) -> None:
    """Optimizers that are not the same on real pairs are complex under every engine, cut wherever it cuts."""
    runs = [Run("tfno_tucker", backend, optimizer=optimizer, hyper=hyper) for backend in DISTRIBUTED]
    assert ranks.run(compare, 2, runs) == [[], []]


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
def test_clipping_is_the_same_number_everywhere(ranks: Any, norm_type: float) -> None:
    runs = [Run("mlp_complex", backend, clip=(0.01, norm_type)) for backend in DISTRIBUTED]
    assert ranks.run(compare, 2, runs) == [[], []]


@pytest.mark.parametrize("case", ["tfno_tucker", "t5"])
@pytest.mark.parametrize("world_size", [3, 4])
def test_more_ranks_agree_within_rounding(ranks: Any, case: str, world_size: int) -> None:
    """At three and more ranks engines add gradients in different orders, so the last bits may differ.

    One all-reduce adds N = ``world_size`` numbers; two orders of that sum differ by at most ``2 (N - 1) u`` times the
    sum of their moduli, u = 2^-24, and the division by N rounds once more. SGD hands that on to the weights linearly,
    so after one step they differ by no more than that times the learning rate, with the sum of moduli bounded by N
    times the largest modulus of any rank's own gradient, plus one rounding of the weight itself.
    """
    runs = [Run(case, backend, steps=1, optimizer="SGD", lr=0.1) for backend in DISTRIBUTED]
    for found in ranks.run(_worst_excess, world_size, runs):
        assert found <= 1.0


def _worst_excess(runs: list[Run]) -> float:
    """The largest difference in weights over its bound."""
    import torch.distributed as dist

    unit, world = 2.0**-24, dist.get_world_size()
    traces = [train(run) for run in runs]
    native = zoo()[runs[0].case].build()
    loss_of(runs[0], native, 0).backward()
    largest = {name: p.grad.abs().max() for name, p in native.named_parameters() if p.grad is not None}
    for value in largest.values():
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
    worst = 0.0
    for trace in traces[1:]:
        for name, reference in traces[0].weights.items():
            if not isinstance(reference, Tensor) or name not in largest:
                continue
            difference = float((reference - trace.weights[name]).abs().max())
            summed = (2 * (world - 1) + 1) * unit * runs[0].lr * world * float(largest[name])
            bound = summed + 2 * unit * float(reference.abs().max())
            worst = max(worst, difference / bound)
    return worst


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
@pytest.mark.parametrize("case", MODELS)
def test_two_ranks_equal_one_process_on_the_joined_batch(ranks: Any, case: str, optimizer: str, variant: str) -> None:
    """``ddp`` on two ranks against ``none`` on both batches at once.

    The two add the same terms in another order. How much order matters is measured with the engine out of the game: the
    joined batch with its halves exchanged has the same terms too, and the largest change that this makes to a tensor is
    the spread of its rounding errors. Two ranks are another draw of the same errors, so their largest change may exceed
    that one only as the largest of a few thousand draws exceeds the largest of a few: by less than 16 (a factor of two
    would do for two equal samples; small tensors have few draws, and one unit in the last place per step as a floor).
    """
    same: dict[str, Any] = {"optimizer": optimizer, "lr": 1e-2, **VARIANTS[variant]}
    both = ranks.run(train, 2, Run(case, "ddp", **same))[0]
    single = ranks.run(train, 1, Run(case, "none", joined=2, **same))[0]
    swapped = ranks.run(train, 1, Run(case, "none", joined=2, order=(1, 0), **same))[0]
    assert both.losses == pytest.approx(single.losses, rel=16 * _loss_spread(single, swapped))
    for name, spread in _weight_spread(single, swapped).items():
        difference = float((both.weights[name] - single.weights[name]).abs().max())
        assert difference <= 16 * spread, name


def _loss_spread(one: Trace, other: Trace) -> float:
    steps = [abs(a - b) / abs(a) for a, b in zip(one.losses, other.losses, strict=True)]
    return max(2.0**-23, *steps)


def _weight_spread(one: Trace, other: Trace) -> dict[str, float]:
    tensors = {name: value for name, value in one.weights.items() if isinstance(value, Tensor)}
    ulp = {name: len(one.losses) * 2.0**-24 * float(value.abs().max()) for name, value in tensors.items()}
    return {n: max(ulp[n], float((v - other.weights[n]).abs().max())) for n, v in tensors.items()}


def test_the_bound_is_sharp_enough(ranks: Any) -> None:
    """A gradient summed instead of averaged breaks the bound above by orders of magnitude."""
    single = ranks.run(train, 1, Run("mlp_complex", "none", optimizer="SGD", lr=1e-2, joined=2))[0]
    swapped = ranks.run(train, 1, Run("mlp_complex", "none", optimizer="SGD", lr=1e-2, joined=2, order=(1, 0)))[0]
    wrong = ranks.run(train, 2, Run("mlp_complex", "ddp", optimizer="SGD", lr=2e-2))[0]
    spread = _weight_spread(single, swapped)
    excess = [float((wrong.weights[n] - single.weights[n]).abs().max()) / (16 * s) for n, s in spread.items()]
    assert max(excess) > 100
