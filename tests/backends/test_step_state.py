"""The table of what a step may go through, and the errors of what it may not, without an engine."""

from __future__ import annotations

import weakref

import pytest
import torch

from fsshard.backends import backend_class, backend_names
from fsshard.backends.step_state import TRANSITIONS, WEIGHTS_ARE_FREED, PendingGraph, Stage, StepState
from fsshard.errors import ModelError, OptimizerError

LOUD = PendingGraph()
SILENT = PendingGraph()
SILENT.was_silent = True


def state(*, frees: bool = False) -> StepState:
    return StepState("an engine", WEIGHTS_ARE_FREED if frees else TRANSITIONS)


def backward(step: StepState, stage: Stage, passes: int = 1) -> None:
    """Move within backward passes of torch's own, each of which is a graph task of its own."""
    for _ in range(passes):
        x = torch.ones(1, requires_grad=True)
        y = x * 2
        y.register_hook(lambda _: step.move(stage))
        y.register_hook(lambda _: step.move(stage))  # of another output, in the same pass
        y.backward()


def forward(step: StepState) -> None:
    step.await_backward(LOUD)


def test_a_step_goes_through_its_stages() -> None:
    step = state()
    assert step.stage is Stage.IDLE
    forward(step)
    assert step.stage is Stage.PENDING and weakref.ref(LOUD) in step.pending
    backward(step, Stage.ACCUMULATED)
    assert step.stage is Stage.ACCUMULATED
    backward(step, Stage.SPENT, passes=2)
    assert step.stage is Stage.SPENT


def test_an_engine_that_frees_weights_has_one_pass_for_each_forward() -> None:
    step = state(frees=True)
    forward(step)
    backward(step, Stage.SPENT)
    with pytest.raises(ModelError, match="a second backward"):
        backward(step, Stage.SPENT)
    with pytest.raises(ModelError, match="'an engine' has freed the weights"):
        backward(step, Stage.DERIVED)
    backward(step, Stage.ACCUMULATED)  # which frees nothing
    forward(step)
    backward(step, Stage.SPENT)


def test_only_fsdp1_frees_them() -> None:
    frees = [name for name in backend_names() if backend_class(name).facts.transitions is WEIGHTS_ARE_FREED]
    assert frees == ["fsdp"]


def test_a_derivative_waits_through_another_forward() -> None:
    step = state()
    forward(step)
    backward(step, Stage.DERIVED)
    forward(step)
    assert step.stage is Stage.DERIVED
    backward(step, Stage.SPENT)
    assert step.stage is Stage.SPENT


def test_forward_and_backward_are_both_silent_or_both_not() -> None:
    step = state()
    with step.silenced():
        step.await_backward(SILENT)
        with step.silenced():
            step.begin_backward(SILENT, ())
    assert not step.is_silent and not step.pending
    with pytest.raises(ModelError, match="both be inside no_sync"):
        step.begin_backward(SILENT, ())


def test_gradients_are_local_by_parameter() -> None:
    step = state()
    with step.silenced():
        step.begin_backward(SILENT, ["a", "b", "c"])
    step.drop_gradients(["a"])
    step.check_reduced(["a"])
    with pytest.raises(OptimizerError, match="the gradients are local"):
        step.check_reduced(["a", "b"])
    step.begin_backward(LOUD, ())
    step.check_reduced(["a", "b", "c"])


def test_a_loop_that_was_left_early_is_not_complete() -> None:
    step = state()
    with step.leaves("model.leaves(8)"):
        with pytest.raises(OptimizerError, match="would drop gradients of this step"):
            step.drop_gradients(["a"])
        with pytest.raises(ModelError, match="a mean over one leaf of each rank"):
            step.refuse_means("a mean")
    step.check_complete("a step")
    with pytest.raises(KeyError), step.leaves("model.leaves(8)"):
        raise KeyError
    with pytest.raises(OptimizerError, match=r"a step within `for leaf in model.leaves\(8\)`, or behind a loop"):
        step.check_complete("a step")
    step.drop_gradients(["a"])
    step.check_complete("a step")
