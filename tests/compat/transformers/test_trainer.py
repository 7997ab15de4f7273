"""Hugging Face's Trainer over every engine, against Hugging Face's own DDP.

Tests compat/trainers.py, compat/transformers/arguments.py and compat/transformers/checkpoints.py, too.
"""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from fsshard.compat.transformers.arguments import INSTEAD, OVERRIDDEN, check_arguments, check_launcher, check_library
from fsshard.errors import ConfigurationError
from tests.compat.common import ENGINES, HALVES, same_tensors
from tests.compat.transformers import trainings
from tests.compat.transformers.trainings import CASES
from tests.sets import often

NORM = 1e-6
"""Hugging Face's norm is summed in float32, ours in float64 and rounded: the last digits of what is printed."""


def _without_norms(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in each.items() if name != "grad_norm"} for each in history]


def _norms(history: list[dict[str, Any]]) -> list[float]:
    return [each["grad_norm"] for each in history if "grad_norm" in each]


def _same(ours: dict[str, Any], theirs: dict[str, Any], case: str) -> None:
    assert _without_norms(ours["history"]) == _without_norms(theirs["history"]), case
    if case != "scaled":  # Hugging Face's own shows those of scaled gradients where fp16 is not asked for
        assert _norms(ours["history"]) == pytest.approx(_norms(theirs["history"]), rel=NORM), case
    for kind in ("state", "last"):
        same_tensors(ours.get(kind, {}), theirs.get(kind, {}), (case, kind))


@pytest.fixture(scope="module")
def their_own(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = str(tmp_path_factory.mktemp("hf"))
    return ranks.run(trainings.every_case, 2, "hf", folder)  # type: ignore[no-any-return]


@pytest.mark.parametrize("engine", often(ENGINES, "fsdp2"))
def test_losses_evaluations_words_and_weights_are_those_of_their_ddp(
    ranks: Any, their_own: list[dict[str, Any]], engine: str, tmp_path: Path
) -> None:
    for ours, theirs in zip(ranks.run(trainings.every_case, 2, engine, str(tmp_path)), their_own, strict=True):
        for case in CASES:
            if case != "clipped":
                _same(ours[case], theirs[case], case)
                continue
            for mine, other in zip(ours[case]["history"], theirs[case]["history"], strict=True):
                assert mine == pytest.approx(other, rel=NORM)


def test_a_checkpoint_goes_on_under_another_engine_and_the_best_one_comes_back(ranks: Any, tmp_path: Path) -> None:
    found = ranks.run(trainings.resumed, 2, str(tmp_path))[0]
    theirs = found.pop("hf")
    numbered = theirs["optimizer"]["state"]
    for run, ours in found.items():
        if " from " in run:  # the mean loss of the steps that a call has taken
            ours["history"][-1]["train_loss"] = theirs["history"][-1]["train_loss"]
        _same(ours, theirs, run)
        assert list(ours["optimizer"]["state"]) == list(numbered), run
        for number, state in numbered.items():
            same_tensors(ours["optimizer"]["state"][number], state, (run, number))
    assert any(not torch.equal(value, theirs["last"][name]) for name, value in theirs["state"].items())


def test_a_checkpoint_in_parts_goes_on_under_another_engine(ranks: Any, tmp_path: Path) -> None:
    found = ranks.run(trainings.in_parts, 2, str(tmp_path))[0]
    found["from"]["history"][-1]["train_loss"] = found["whole"]["history"][-1]["train_loss"]
    assert "fsshard" in found["whole"]["files"] and "model.safetensors" not in found["whole"]["files"]
    for name in ("whole", "from"):
        _same(found[name], found["plain"], name)


def test_a_checkpoint_replaces_that_of_an_earlier_run_of_either_kind(ranks: Any, tmp_path: Path) -> None:
    for found in ranks.run(trainings.written_over, 2, str(tmp_path)):
        assert found["whole"]["same"] and found["parts"]["same"]
        assert not {"fsshard", "fsshard.previous"} & set(found["whole"]["files"])
        assert not {"model.safetensors", "optimizer.pt"} & set(found["parts"]["files"])
        assert found["mixed"].startswith("CheckpointError: ") and "two runs have written there" in found["mixed"]


def test_a_subclass_with_its_own_optimizer_trained_twice(ranks: Any, tmp_path: Path) -> None:
    theirs = ranks.run(trainings.around, 2, "hf", str(tmp_path))
    for engine in ("fsdp2", "fsdp"):
        for mine, other in zip(ranks.run(trainings.around, 2, engine, str(tmp_path)), theirs, strict=True):
            _same(mine, other, engine)
            assert np.array_equal(mine["predicted"], other["predicted"])
            refused = mine["refused"]
            assert refused["clip"].startswith("ConfigurationError: accelerator.clip_grad_norm_ sees this rank's")
            assert refused["save"].startswith("FsshardError: save_pretrained() of ")
            assert refused["inner"] and refused["whole"]


@pytest.mark.parametrize("engines", HALVES)
def test_a_model_is_given_to_another_trainer(ranks: Any, engines: tuple[str, ...], tmp_path: Path) -> None:
    """As scripts do that go on in a new Trainer, or evaluate by one: the model comes back from its engine."""
    theirs = ranks.run(trainings.by_two_trainers, 2, "hf", str(tmp_path / "hf"))
    for engine in engines:
        ours = ranks.run(trainings.by_two_trainers, 2, engine, str(tmp_path / engine))
        for mine, other in zip(ours, theirs, strict=True):
            _same(mine, other, engine)
            assert mine["evaluated"] == other["evaluated"]
            assert mine["plain"] and mine["bare"]
            assert mine["former"].startswith("ConfigurationError: train(): this Trainer's model has been given to")
            assert mine["unsaved"].startswith(
                "ConfigurationError: save_model(): another Trainer is training this model"
            )
            assert mine["busy"].startswith("ConfigurationError: the model is being trained by another Trainer")
            assert not mine["kept"], "engine and optimizer of the former Trainer"


@pytest.mark.parametrize("engine", [*often(ENGINES, "fsdp2"), "hf"])
def test_a_step_is_over_the_mean_of_all_tokens(ranks: Any, engine: str, tmp_path: Path) -> None:
    """Of all ranks and micro-batches, which have unequal numbers of labels, as on one process by torch alone."""
    expected = trainings.counted_by_hand()
    for found in ranks.run(trainings.averaged_over_tokens, 2, engine, str(tmp_path)):
        for case, weights in expected.items():
            names = [name.removeprefix("module.") for name in found[case]]
            assert {*weights} == {*names}
            for name, value in zip(names, found[case].values(), strict=True):
                torch.testing.assert_close(value, weights[name], rtol=1e-5, atol=1e-5, msg=f"{case}: {name}")


def test_an_average_of_the_weights_in_a_callback(ranks: Any, tmp_path: Path) -> None:
    theirs = ranks.run(trainings.averaged, 2, "hf", str(tmp_path))
    for engine in ("fsdp2", "fsdp"):
        for mine, other in zip(ranks.run(trainings.averaged, 2, engine, str(tmp_path)), theirs, strict=True):
            assert mine["loss"] == other["loss"]
            same_tensors(mine["state"], other["state"], engine)
            copied, bare = mine["refused"]
            assert "deepcopy" in copied, copied
            assert "pass what fsshard.wrap returned (Hugging Face's Trainer has it as model_wrapped), or use" in bare


def test_evaluated_before_it_is_trained(ranks: Any, tmp_path: Path) -> None:
    """Hugging Face's own (transformers 5.23, accelerate 1.15) then trains without DDP: every rank goes its own way."""
    theirs = ranks.run(trainings.evaluated_first, 2, "hf", str(tmp_path))
    ours = ranks.run(trainings.evaluated_first, 2, "fsdp2", str(tmp_path))
    assert [each["before"] for each in ours] == [each["before"] for each in theirs]
    assert ours[0]["norms"] == ours[1]["norms"] and len(ours[0]["norms"]) == 4


def _arguments(**changed: Any) -> Any:
    plain = {"n_gpu": 0, "bf16": False, "activation_checkpointing": False}
    return types.SimpleNamespace(**(plain | changed))


def test_an_argument_that_no_engine_can_honour() -> None:
    for name in INSTEAD:
        with pytest.raises(ConfigurationError, match=rf"TrainingArguments\({name}=1\): "):
            check_arguments(_arguments(**{name: 1}), types.SimpleNamespace(), {"backend": "ddp"})


def test_what_does_not_go_together() -> None:
    check_arguments(_arguments(), types.SimpleNamespace(), {"backend": "ddp"})
    refused = (
        ({}, {}, "fsdp2", "a dict of arguments of fsshard.wrap"),
        ({"n_gpu": 2}, {}, {}, "2 GPUs and one process"),
        ({"bf16": True}, {}, {"mixed_precision": "bf16"}, "choose one"),
        ({"activation_checkpointing": True}, {}, {"activation_checkpointing": True}, "choose one"),
        ({}, {"tp_size": 2}, {}, "tp_size 2"),
        ({}, {"hf_device_map": {"a": 0, "b": 1}}, {}, "on 2 devices"),
    )
    for args, model, settings, words in refused:
        with pytest.raises(ConfigurationError, match=words):
            check_arguments(_arguments(**args), types.SimpleNamespace(**model), settings)


@pytest.mark.parametrize("name", ["is_fsdp_enabled", "is_deepspeed_enabled"])
def test_another_engine_of_accelerates_configuration(name: str) -> None:
    accelerator = types.SimpleNamespace(mixed_precision="no", scaler=None, device=torch.device("cpu"))
    plain = {"is_fsdp_enabled": False, "is_deepspeed_enabled": False, "accelerator": accelerator}
    check_launcher(types.SimpleNamespace(**plain))
    with pytest.raises(ConfigurationError, match="accelerate's configuration has"):
        check_launcher(types.SimpleNamespace(**{**plain, name: True}))
    accelerator.mixed_precision = "fp16"
    with pytest.raises(ConfigurationError, match="fp16: Accelerate silently computes in float32 on 'cpu'"):
        check_launcher(types.SimpleNamespace(**plain))
    accelerator.scaler = torch.amp.GradScaler("cpu")  # as on a GPU
    check_launcher(types.SimpleNamespace(**plain))
    accelerator.scaler = object()
    with pytest.raises(ConfigurationError, match=r"scaler object\(...\)"):
        check_launcher(types.SimpleNamespace(**plain))


def test_a_trainer_of_another_version() -> None:
    check_library()
    other = type("Trainer", (), {name: check_library for name in OVERRIDDEN if name != "_prepare_for_training"})
    with pytest.raises(ConfigurationError, match="its Trainer has no _prepare_for_training"):
        check_library(other)
