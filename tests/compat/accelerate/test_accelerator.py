"""Loops by Accelerate under every engine, against Accelerate's own DDP.

Tests compat/accelerate/arguments.py, compat/accelerate/files.py and compat/accelerate/preparing.py, too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")

import accelerate
from accelerate.utils import DistributedDataParallelKwargs, DistributedType, FullyShardedDataParallelPlugin

from fsshard.compat.accelerate.arguments import ENVIRONMENT, INSTEAD, check_arguments
from fsshard.errors import ConfigurationError
from tests.compat.accelerate import trainings
from tests.compat.accelerate.trainings import CASES, OWN, RESUMED
from tests.compat.common import ENGINES, begin_with, same_tensors
from tests.on_ranks import on_ranks
from tests.sets import often

ROUNDED = {"by norm", "each synchronised"}
"""Cases that differ in last digits. Accelerate's norm is summed in float32, ours in float64 and rounded. DDP averages
the sum of micro-batches, whose first ones it has averaged before; the others average each of them and add."""
BOUND = 1e-6
"""A few of float32's roundings, 6e-8 each, on the way to a loss, by steps that are linear in the gradients."""


def _same(ours: dict[str, Any], theirs: dict[str, Any], what: object) -> None:
    for name in ("losses", "rates", "count"):
        assert ours[name] == theirs[name], (what, name)
    for mine, other in zip(ours["seen"], theirs["seen"], strict=True):
        assert torch.equal(mine, other), what
    same_tensors(ours["state"], theirs["state"], what)


@pytest.fixture(scope="module")
def their_own(ranks: Any) -> list[dict[str, Any]]:
    return ranks.run(trainings.every_case, 2, OWN)  # type: ignore[no-any-return]


@pytest.mark.parametrize("engine", often(ENGINES, "fsdp2"))
def test_losses_evaluations_and_weights_are_those_of_their_ddp(
    ranks: Any, their_own: list[dict[str, Any]], engine: str
) -> None:
    for ours, theirs in zip(ranks.run(trainings.every_case, 2, engine), their_own, strict=True):
        for case in CASES:
            if case not in ROUNDED:
                _same(ours[case], theirs[case], case)
                continue
            assert ours[case]["losses"] == pytest.approx(theirs[case]["losses"], rel=BOUND), case


def test_a_state_goes_on_under_another_engine_and_under_their_own(ranks: Any, tmp_path: Path) -> None:
    for rank, found in enumerate(ranks.run(trainings.resumed, 2, str(tmp_path))):
        theirs, files = found["whole"][OWN], found["files"][OWN]
        rest = {**theirs, **{name: theirs[name][5:] for name in ("losses", "rates")}, "seen": theirs["seen"][1:]}
        for engine in RESUMED:
            _same(found["whole"][engine], theirs, engine)
            _same(found["between"][engine], rest, (engine, rank))
            _same(found["within"][engine], found["within"][OWN], (engine, rank))
            mine = found["files"][engine]
            assert mine["names"] == files["names"], engine
            assert mine["optimizer"]["param_groups"] == files["optimizer"]["param_groups"]
            for number, state in files["optimizer"]["state"].items():
                same_tensors(mine["optimizer"]["state"][number], state, (engine, number))
            same_tensors(mine["model"], files["model"], engine)


def test_several_models_with_an_optimizer_each(ranks: Any, tmp_path: Path) -> None:
    theirs = ranks.run(trainings.several, 2, OWN, str(tmp_path / OWN))[0]  # their ranks differ in running means
    expected = theirs.pop("states")
    for engine in ("fsdp2", "fsdp"):
        mine = ranks.run(trainings.several, 2, engine, str(tmp_path / engine))[0]
        for ours, own in zip(mine.pop("states"), expected, strict=True):
            same_tensors(ours, own, engine)
        assert mine == theirs


REFUSED = {
    "of two": "ConfigurationError: prepare(): the SGD has parameters of several models",
    "of none": "ConfigurationError: prepare(): the SGD has parameters of 0 prepared models and others",
    "shared": "ConfigurationError: prepare(): parameter ",
    "unknown": "UnknownBackend: backend: expected none, ddp, ",
    "fp16": "ConfigurationError: fp16: Accelerate silently computes in float32 on 'cpu'",
    "wrapped": "AlreadyWrapped: ",
    "second": "AlreadyWrapped: ",
    "batches": "ConfigurationError: even_batches=False: the ranks get 3, 2 batches",
    "local": "OptimizerError: the gradients are local: every backward since the last step ran under no_sync()",
    "local to ddp": "OptimizerError: the gradients are local",
    "complex": "ConfigurationError: clipping by value: parameter 'weight' is complex",
    "alone": "CheckpointError: all 2 ranks must call accelerator.get_state_dict()",
    "inner": "FsshardError: state_dict() of Model",
    "empty": "CheckpointError: ",
    "other": "StateDictError: ",
}


def test_refused_on_every_rank(ranks: Any, tmp_path: Path) -> None:
    answers = ranks.run(trainings.refused, 2, str(tmp_path))
    begin_with(answers, REFUSED)
    assert all("_original_forward" in told["compiled"] for told in answers)


def test_an_argument_that_no_engine_can_honour(monkeypatch: pytest.MonkeyPatch) -> None:
    fine = {"backend": "ddp"}
    assert check_arguments((False,), {"cpu": True}, fine) == {"device_placement": False, "cpu": True}
    for name in INSTEAD:
        with pytest.raises(ConfigurationError, match=rf"Accelerator\({name}=\.\.\.\): "):
            check_arguments((), {name: object()}, fine)
    for name in ENVIRONMENT:
        with monkeypatch.context() as set_:
            set_.setenv(name, "true")
            with pytest.raises(ConfigurationError, match=f"{name}=true is set"):
                check_arguments((), {}, fine)
    monkeypatch.setattr(accelerate, "Accelerator", type("Ours", (), {"__init__": lambda self, *args, **given: None}))
    assert check_arguments((False,), {}, fine) == {"device_placement": False}  # where ours stands in its place
    for arguments, settings, words in (
        ({}, "fsdp2", "a dict of arguments of fsshard.wrap"),
        ({}, {"optimizer": 1}, "a dict of arguments of fsshard.wrap"),
        ({"mixed_precision": "fp8"}, fine, "fp8"),
        ({"mixed_precision": "bf16"}, {"mixed_precision": "bf16"}, "choose one"),
        ({"kwargs_handlers": [type("TERecipeKwargs", (), {})()]}, fine, "TERecipeKwargs"),
        ({"kwargs_handlers": [DistributedDataParallelKwargs(static_graph=True)]}, fine, '"static_graph"'),
        (
            {"kwargs_handlers": [DistributedDataParallelKwargs(broadcast_buffers=False)]},
            {"broadcast_buffers": False},
            "choose one",
        ),
    ):
        with pytest.raises(ConfigurationError, match=words):
            check_arguments((), arguments, settings)  # type: ignore[arg-type]


@on_ranks()
def test_what_the_readme_says_of_accelerate() -> None:
    """Its engines, and that it shards nothing on a CPU; its DDP trains the complex weights of the trainings above."""
    assert {"MULTI_GPU", "FSDP", "DEEPSPEED"} <= {*DistributedType.__members__}
    own = trainings.accelerator_of(OWN, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    assert type(own.prepare(torch.nn.Linear(2, 2))).__name__ == "DistributedDataParallel"
