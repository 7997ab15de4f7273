"""Whether a step on parts is a step on the whole is found by trying, and nothing else is disturbed."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from fsshard.backends.fsdp1 import FSDP1Backend
from fsshard.backends.fsdp2 import FSDP2Backend
from fsshard.sharded.optimizer_probe import ProbedGroup, Untried, begins_with_closure, try_on_parts
from tests import optimizers as written

REAL = [(torch.Size(shape), False) for shape in ((300, 200), (200,), (64, 32, 3, 3), (7, 5), (1,), ())]
SHAPES = [*REAL, (torch.Size((16, 8, 4)), True)]


def neuraloperators() -> Any:
    return pytest.importorskip("neuralop.training").AdamW


def found(optimizer_class: Any, cut: Any = FSDP1Backend.cut_in_two, shapes: Any = SHAPES, **settings: Any) -> Any:
    return try_on_parts(optimizer_class, [ProbedGroup({}, shapes)], settings, cut)


@pytest.mark.parametrize(
    ("optimizer_class", "by_parameter", "by_number"),
    [
        (written.MyMuon, True, False),
        (written.MyLars, True, False),
        (written.Rowwise, True, False),
        (written.LargeOnly, True, False),
        (written.Late, True, False),
        (written.ClipsInside, False, False),
        (written.Sam, False, False),
        (written.MyLion, True, True),
        (written.InSingle, True, True),
        (written.SignAscent, True, True),
        (written.AscentFirst, True, True),
        (torch.optim.LBFGS, False, False),
    ],
)
def test_what_an_algorithm_needs(optimizer_class: Any, by_parameter: bool, by_number: bool) -> None:
    assert found(optimizer_class) == (by_parameter, by_number)


SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("Adadelta", {}),
    ("Adagrad", {"lr_decay": 0.1}),
    ("Adam", {"amsgrad": True, "weight_decay": 0.1}),
    ("Adam", {"foreach": True}),
    ("Adam", {"lr": 0.0}),
    ("AdamW", {"maximize": True}),
    ("Adamax", {}),
    ("ASGD", {}),
    ("NAdam", {"decoupled_weight_decay": True}),
    ("RAdam", {}),
    ("RMSprop", {"centered": True, "momentum": 0.9}),
    ("Rprop", {}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "lr": 0.1}),
    ("SGD", {"lr": torch.tensor(0.1)}),
]


AT_ONCE = ("Adagrad", "Adam", "NAdam", "RMSprop", "SGD")


@pytest.mark.parametrize(
    ("name", "settings"),
    [row if row[0] in AT_ONCE else pytest.param(*row, marks=pytest.mark.long) for row in SETTINGS],
    ids=lambda value: str(value)[:40],
)
def test_torchs_own_work_number_by_number(name: str, settings: dict[str, Any]) -> None:
    for cut in (FSDP1Backend.cut_in_two, FSDP2Backend.cut_in_two):
        assert found(getattr(torch.optim, name), cut, **settings) == (True, True)


def test_neuraloperators_works_number_by_number() -> None:
    assert found(neuraloperators(), lr=1e-3, weight_decay=0.1) == (True, True)


def test_fused_kernels() -> None:
    assert found(torch.optim.Adam, shapes=REAL, fused=True) == (True, True)


def test_adafactor_is_not_separable() -> None:
    assert found(torch.optim.Adafactor, shapes=REAL) == (True, False)


def test_rows_stay_whole_where_an_engine_cuts_between_them() -> None:
    """FSDP2 gives a rank whole rows of a real weight."""
    assert found(written.Rowwise, FSDP2Backend.cut_in_two, REAL) == (True, True)


def test_but_not_where_rows_lie_in_another_order() -> None:
    """A transposed weight is stored, and cut, by the columns that the user sees."""
    cut = functools.partial(FSDP2Backend.cut_in_two, in_order=False)
    assert found(written.Rowwise, cut, REAL) == (True, False)


def test_a_rate_of_zero_hides_nothing() -> None:
    """A warm-up begins with it."""
    assert not found(written.MyLars, lr=0.0).by_number
    assert not found(written.MyLars, lr=torch.zeros(())).by_number


def test_settings_of_each_group_count() -> None:
    class Mixed(written.Written):
        def direction(self, group: dict[str, Any], parameter: Any) -> torch.Tensor:
            grad: torch.Tensor = parameter.grad
            return grad / grad.norm() if group["whole"] else grad

    def tried(whole: bool) -> Any:
        groups = [ProbedGroup({"whole": False}, REAL), ProbedGroup({"whole": whole}, REAL[:1])]
        return try_on_parts(Mixed, groups, {}, FSDP2Backend.cut_in_two)

    assert tried(False) == (True, True)
    assert tried(True) == (True, False)


def test_random_numbers_are_noticed() -> None:
    assert found(written.Noisy) == (False, False)


def test_what_cannot_be_tried_says_why() -> None:
    with pytest.raises(Untried, match="no kernel for CPU tensors"):
        found(written.NeedsGpu)
    with pytest.raises(Untried, match="a Linear is among its settings"):
        found(written.MyLion, model=torch.nn.Linear(2, 2))


def test_nothing_is_disturbed() -> None:
    """Random numbers, a generator among the settings, the settings, and what surrounds the call."""

    class Own(written.Written):
        def direction(self, group: dict[str, Any], parameter: Any) -> torch.Tensor:
            group["seen"].append(1)
            torch.randn(3, generator=group["generator"])
            grad: torch.Tensor = parameter.grad
            return grad * (torch.rand(()) * 0 + 1)

    generator, seen = torch.Generator().manual_seed(5), [0]
    states = torch.get_rng_state(), generator.get_state()
    with torch.inference_mode():
        assert found(Own, generator=generator, seen=seen) == (True, True)
    assert seen == [0]
    assert torch.equal(states[0], torch.get_rng_state()) and torch.equal(states[1], generator.get_state())


@pytest.mark.parametrize(
    ("optimizer_class", "first"),
    [
        (torch.optim.SGD, True),
        (torch.optim.LBFGS, True),
        (written.MyLion, True),
        (written.SignAscent, True),
        (written.AscentFirst, False),
        (written.ClipsInside, False),
    ],
)
def test_who_begins_with_the_closure(optimizer_class: Any, first: bool) -> None:
    assert begins_with_closure(optimizer_class, [ProbedGroup({}, SHAPES)], {}) is first
