"""Whether a step on parts is a step on the whole is found by trying, and nothing else is disturbed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fsshard.sharded.optimizer_probe import ProbedGroup, Untried, begins_with_closure, try_on_parts
from tests import optimizers as written

REAL = [(torch.Size(shape), False) for shape in ((300, 200), (200,), (64, 32, 3, 3), (7, 5), (1,), ())]
SHAPES = [*REAL, (torch.Size((16, 8, 4)), True)]


def neuraloperators() -> Any:
    return pytest.importorskip("neuralop.training").AdamW


def found(optimizer_class: Any, shapes: Any = SHAPES, **settings: Any) -> str:
    return try_on_parts(optimizer_class, [ProbedGroup({}, shapes)], settings)


@pytest.mark.parametrize(
    ("needs", "optimizer_class"),
    [
        *[("parameters", each) for each in (written.MyMuon, written.MyLars, written.Rowwise, written.LargeOnly)],
        *[("everything", each) for each in (written.ClipsInside, written.Sam, torch.optim.LBFGS, written.Noisy)],
        *[("numbers", each) for each in (written.MyLion, written.InSingle, written.SignAscent, written.AscentFirst)],
    ],
)
def test_what_an_algorithm_needs(optimizer_class: Any, needs: str) -> None:
    assert found(optimizer_class) == needs


SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("Adagrad", {"lr_decay": 0.1}),
    ("Adam", {"amsgrad": True, "weight_decay": 0.1}),
    ("Adam", {"lr": 0.0}),
    ("NAdam", {"decoupled_weight_decay": True}),
    ("RMSprop", {"centered": True, "momentum": 0.9}),
    ("Rprop", {}),
    ("SGD", {"lr": torch.tensor(0.1)}),
]


@pytest.mark.parametrize(("name", "settings"), SETTINGS, ids=lambda value: str(value)[:40])
def test_torchs_own_work_number_by_number(name: str, settings: dict[str, Any]) -> None:
    assert found(getattr(torch.optim, name), **settings) == "numbers"


def test_neuraloperators_works_number_by_number() -> None:
    assert found(neuraloperators(), lr=1e-3, weight_decay=0.1) == "numbers"


def test_a_rate_of_zero_hides_nothing() -> None:
    """A warm-up begins with it."""
    assert found(written.MyLars, lr=0.0) == found(written.MyLars, lr=torch.zeros(())) == "parameters"


def test_settings_of_each_group_count() -> None:
    class Mixed(written.Written):
        def direction(self, group: dict[str, Any], parameter: Any) -> torch.Tensor:
            grad: torch.Tensor = parameter.grad
            return grad / grad.norm() if group["whole"] else grad

    def tried(whole: bool) -> Any:
        groups = [ProbedGroup({"whole": False}, REAL), ProbedGroup({"whole": whole}, REAL[:1])]
        return try_on_parts(Mixed, groups, {})

    assert (tried(False), tried(True)) == ("numbers", "parameters")


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
        assert found(Own, generator=generator, seen=seen) == "numbers"
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
