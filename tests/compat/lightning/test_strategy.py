"""Lightning's Trainer over every engine, against Lightning's own DDP.

Tests compat/lightning/after_fit.py, compat/lightning/averaging.py, compat/lightning/manual.py,
compat/lightning/plugins.py and compat/trainers.py, too.
"""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning.pytorch")

from fsshard.errors import UnsupportedByBackend
from tests.compat.common import ENGINES, HALVES, begin_with, same_tensors
from tests.compat.lightning import trainings
from tests.compat.lightning.trainings import CASES
from tests.sets import often


def _same(ours: dict[str, Any], theirs: dict[str, Any], case: str) -> None:
    for what in ("losses", "validations", "scale"):
        assert ours.get(what) == theirs.get(what), (case, what)
    same_tensors(ours["state"], theirs["state"], case)


@pytest.fixture(scope="module")
def lightnings_own(ranks: Any) -> list[dict[str, Any]]:
    return ranks.run(trainings.every_case, 2, "lightning")  # type: ignore[no-any-return]


@pytest.mark.parametrize("engine", often(ENGINES, "fsdp2"))
def test_losses_validations_and_weights_are_those_of_lightnings_ddp(
    ranks: Any, lightnings_own: list[dict[str, Any]], engine: str
) -> None:
    for ours, theirs in zip(ranks.run(trainings.every_case, 2, engine), lightnings_own, strict=True):
        for case in CASES:
            if case != "clipped":  # the norm is summed in another way
                _same(ours[case], {**theirs[case], "state": theirs[case]["state"] if ours[case]["state"] else {}}, case)
                continue
            assert ours[case]["losses"] == pytest.approx(theirs[case]["losses"], rel=1e-6)


def test_a_checkpoint_goes_on_under_any_engine_and_under_lightnings_own(ranks: Any, tmp_path: Path) -> None:
    whole = ranks.run(trainings.resumed, 2, "lightning", str(tmp_path / "lightning"), 3, None)[0]
    ours = ranks.run(trainings.resumed, 2, "fsdp2", str(tmp_path / "fsdp2"), 3, None)[0]
    assert ours["losses"] == whole["losses"] and ours["tested"] == whole["tested"]
    written = torch.load(tmp_path / "fsdp2" / "epoch=1.ckpt", weights_only=False)
    assert written["state_dict"]["weight"].dtype == torch.complex64 and written["optimizer_states"]
    for engine, source in (("fsdp2", "fsdp2"), ("fairscale", "fsdp2"), ("fsdp", "lightning"), ("lightning", "fsdp2")):
        path = str(tmp_path / source / "epoch=1.ckpt")
        found = ranks.run(trainings.resumed, 2, engine, str(tmp_path / f"{engine}-from-{source}"), 3, path)[0]
        assert found["losses"] == whole["losses"][8:] and found["tested"] == whole["tested"], engine
        assert found["at_start"] == Fraction(1, 3)  # a callback has its state in on_fit_start, as under Lightning's DDP
        same_tensors(found["state"], whole["state"], engine)


def test_refused_on_every_rank(ranks: Any) -> None:
    words = {
        "precision": "ConfigurationError: precision plugin HalfPrecision",
        "devices": "ValueError: You set `devices=1` and `num_nodes=1` in Lightning, but the product",
        "averaged in parts": "ConfigurationError: callback EMAWeightAveraging replaces the weights of a checkpoint",
        "without": "ConfigurationError: configure_optimizers returned no optimizer, so fit() would change nothing",
        "wrapped": "ConfigurationError: fit() of a module that fsshard.wrap, or Fabric, has put under an engine",
        "states": "StateDictError: the checkpoint has states of 0 optimizers, and configure_optimizers gave 1",
        "scaler": "ConfigurationError: scaler OwnScaler(...)",
        "averaged at the end": "ConfigurationError: callback StochasticWeightAveraging averages whole real",
    }
    begin_with(ranks.run(trainings.refused, 2), words)


def test_a_file_written_after_fit_goes_on_and_another_module_is_tested_bare(ranks: Any, tmp_path: Path) -> None:
    theirs = ranks.run(trainings.after_fit, 2, "lightning", str(tmp_path / "lightning.ckpt"))
    assert len(theirs[0]["losses"]) == 4 and theirs[0]["tested"] != theirs[0]["own"]
    assert theirs[0]["copied"]
    for ours, other in zip(
        ranks.run(trainings.after_fit, 2, "fsdp2", str(tmp_path / "fsdp2.ckpt")), theirs, strict=True
    ):
        assert ours.pop("stepped").startswith("OptimizerError: AdamW belonged to an engine that fit() has ended")
        assert ours == {name: value for name, value in other.items() if name != "stepped"}


@pytest.mark.parametrize("parts", [False, True])
def test_a_search_for_the_rate_puts_the_weights_back(ranks: Any, parts: bool) -> None:
    for found in ranks.run(trainings.searched, 2, "fsdp2", {"save_distributed_checkpoint": parts}):
        assert found == {"start": True, "end": True, "trained": True}


def test_a_backbone_that_is_frozen_at_first(ranks: Any, tmp_path: Path) -> None:
    """Lightning's own DDP (2.6, torch 2.13) never reduces gradients of what was frozen as it began: ranks go apart."""
    (alone,) = ranks.run(trainings.finetuned, 1, "auto", str(tmp_path / "alone"))
    for engine, parts in (("ddp", False), ("fsdp2", False), ("fsdp2", True)):
        path, settings = str(tmp_path / f"{engine} {parts}"), {"save_distributed_checkpoint": parts}
        for mine in ranks.run(trainings.finetuned, 2, engine, path, **settings):
            for run, expected in zip(mine, alone, strict=True):
                assert run["groups"] == expected["groups"] and len(run["groups"]) == 2
                for name, value in expected["state"].items():
                    # Sums over eight samples in another order, in twelve steps.
                    torch.testing.assert_close(run["state"][name], value, rtol=1e-5, atol=1e-6)
    one, other = ranks.run(trainings.finetuned, 2, "lightning", str(tmp_path / "lightning"))
    name = "backbone.0.weight"
    assert not torch.equal(one[0]["state"][name], other[0]["state"][name])
    for engine, words in (("fsdp", "BackboneFinetuning"), ("fairscale", "add_param_group")):
        for error in ranks.run_expecting_errors(trainings.finetuned, 2, engine, str(tmp_path / engine)):
            assert isinstance(error, UnsupportedByBackend) and words in str(error)


@pytest.mark.long
def test_an_average_of_the_weights_goes_on_from_the_last_file(ranks: Any, tmp_path: Path) -> None:
    theirs = ranks.run(trainings.averaged, 2, "lightning", str(tmp_path / "lightning"))[0]
    assert theirs["last"]["losses"] == theirs["whole"]["losses"][8:] and theirs["last"]["losses"]
    for engine in ("fsdp2", "fsdp", "ddp", "fairscale"):
        ours = ranks.run(trainings.averaged, 2, engine, str(tmp_path / engine))[0]
        for name in ("whole", "half", "last"):
            _same(ours[name], theirs[name], f"{engine} {name}")
            assert ours[name]["calls"] == theirs[name]["calls"]
        assert ours["whole"]["sent"] == 0
        share = 0.7 if engine in ("fsdp2", "fsdp") else 1.0
        assert 0 < ours["whole"]["held"] <= share * theirs["whole"]["held"], engine


@pytest.mark.parametrize(
    ("size", "engine"), often([(1, "fsdp2"), (2, "fsdp2"), *((2, e) for e in ENGINES[:2])], (2, "fsdp2"))
)
def test_an_average_of_shards_is_whole_in_files_that_are_written_after_fit(
    ranks: Any, tmp_path: Path, size: int, engine: str
) -> None:
    """In one process an interrupted ``fit`` gives the module back, with two ranks it stays with its engine."""
    folders = [tmp_path / name for name in ("lightning", "ours")]
    for folder in folders:
        folder.mkdir()
    theirs, ours = (
        ranks.run(trainings.average_in_a_file, size, name, str(folder))[0]
        for name, folder in zip(("lightning", engine), folders, strict=True)
    )
    assert len(theirs) == 5 and theirs["goes on"]["losses"]
    for name, case in theirs.items():
        # Until it begins, each rank's average under Lightning's DDP (2.6) is of the weights that it made itself.
        skipped = {"tested"} if name == "late" and size > 1 else set()
        for what in {"tested", "losses", "validations"} - skipped:
            assert ours[name][what] == case[what], (name, what)
        same_tensors(ours[name]["files"], case["files"], name)
    # In one process, or once it is whole, Lightning's callback puts the average into any module.
    told = "EMAWeightAveraging: expected the module that fit() has trained, of which each rank averages its shards, got"
    advice = "another Module; pass that one, or use a Trainer without EMAWeightAveraging"
    assert ours["interrupted"]["refused"] == ("nothing" if size == 1 else f"ConfigurationError: {told} {advice}")


@pytest.mark.parametrize("engines", HALVES)
def test_two_optimizers_that_the_module_steps_itself(ranks: Any, engines: tuple[str, ...]) -> None:
    """A user's forward hook is called for each ``self(...)``, as on one device; Lightning's DDP, which runs
    ``training_step`` as a forward, calls it for that, too."""
    theirs = ranks.run(trainings.adversaries, 2, "lightning")
    assert len(theirs[0][""]["losses"]) == 8 and theirs[0][""]["losses"] != theirs[0]["scaled"]["losses"]
    assert theirs[0][""]["calls"] == (3 + 1) * 4
    words = {
        "past": "'generator' past the engine",
        "clip": "several optimizers",
        "steps": "while another one is toggled",
        "nosync": "leave sync_grad at True",
    }
    for engine in engines:
        for ours, other in zip(ranks.run(trainings.adversaries, 2, engine), theirs, strict=True):
            assert all(word in ours.pop(case) for case, word in words.items())
            if engine == "fsdp":
                assert "a loss is computed with 'generator.bias' outside" in ours.pop("own")
            for case, found in ours.items():
                judge = other["" if case == "recomputed" else case]
                assert found.pop("calls") == 3 * 4, (engine, case)
                judge = {"losses": judge["losses"], "state": judge["state"] if found["state"] else {}}
                if case == "clipped":  # as the error advises; the norm is summed in another way
                    torch.testing.assert_close(found, judge, rtol=1e-6, atol=1e-6)
                    assert judge["losses"] != other[""]["losses"]
                else:
                    _same(found, judge, f"{engine} {case}")


def test_a_checkpoint_in_parts_goes_on_elsewhere(ranks: Any, tmp_path: Path) -> None:
    whole = ranks.run(trainings.fit_told, 2, "fsdp2", 3)[0]
    first = ranks.run(trainings.divided, 2, "fsdp2", str(tmp_path / "parts"), None, 3)[0]
    path = str(tmp_path / "parts" / "epoch=1.ckpt")
    assert first["losses"] == whole["losses"] and Path(path).is_dir()
    assert "the checkpoint has weights only" in first["replaced"]
    for engine, world in (("fsdp2", 2), ("fairscale", 2), ("fsdp", 1)):
        last = world == 1  # other samples there: nothing but what was loaded
        source = str(tmp_path / "parts" / "epoch=2.ckpt") if last else path
        each = ranks.run(trainings.divided, world, engine, str(tmp_path / engine), source, 3, last)
        assert all("a whole checkpoint is a file" in one["replaced"] for one in each)
        found = each[0]
        assert found["at_start"] == 3
        assert found["losses"] == ([] if last else whole["losses"][8:]), engine
        same_tensors(found["state"], whole["state"], engine)
        assert ("which goes into a module in fit" in found["refused"]) is last


def test_a_module_made_on_the_meta_device_trains_as_one_made_at_once(ranks: Any) -> None:
    real, meta = (ranks.run(trainings.started, 2, *how) for how in (("lightning", "cpu"), ("fsdp2", "meta")))
    assert [each["losses"] for each in meta] == [each["losses"] for each in real] and len(real[0]["losses"]) == 4
    assert meta[0]["seen"] == {"meta"}


def test_names_of_lightnings_registry(ranks: Any) -> None:
    own, ours, former = (
        ranks.run(trainings.by_former_name, 2, name) for name in ("lightning", "fsshard_ddp", "ddp_sharded")
    )
    assert [each["losses"] for each in ours] == [each["losses"] for each in own]
    assert [each["losses"] for each in former] == [each["losses"] for each in own]
    assert former[0]["backend"] == "fairscale" and len(own[0]["losses"]) == 4


def test_the_process_that_started_ranks_gets_whole_weights_back(ranks: Any) -> None:
    first, second = ranks.run(trainings.handed_back, 2, "fsdp2")
    assert second["read"] is None and first["state"]
    same_tensors(first["read"], first["state"], "read")
    assert first["kind"] == second["kind"] == "AdamW"


@pytest.mark.parametrize("engines", HALVES)
def test_a_module_is_trained_and_tested_again_by_any_trainer(ranks: Any, engines: tuple[str, ...]) -> None:
    theirs = ranks.run(trainings.again, 2, "lightning")
    assert len(theirs[0]["losses"]) == 4 + 4 + 4 + 4 and all(same and kind for same, kind, _ in theirs[0]["plain"])
    for engine in engines:
        for ours, other in zip(ranks.run(trainings.again, 2, engine), theirs, strict=True):
            for what in ("losses", "tested", "plain", "rates", "modes"):
                assert ours[what] == other[what], (engine, what)
            for state, same in zip(ours["states"], other["states"], strict=True):
                same_tensors(state, same, engine)


def test_a_module_that_no_rank_can_hold_stays_in_parts_until_it_is_trained_again(ranks: Any) -> None:
    for told in ranks.run(trainings.left_in_parts, 2):
        room, files = told["no room"], told["own files"]
        assert room["parts"] and files["parts"] and not room["still"] and not files["still"]
        assert "0.0 GB are free; load a checkpoint into a new module" in room["refused"]
        assert room["tested"] == files["tested"] and room["tested"][0] == room["tested"][1]
        assert room["losses"] == files["losses"] and len(room["losses"]) == 8


@pytest.mark.parametrize("engines", HALVES)
def test_what_a_module_has_changed_in_itself_stays_after_a_failed_fit(ranks: Any, engines: tuple[str, ...]) -> None:
    theirs = ranks.run(trainings.changed, 2, "lightning")
    assert "later" in theirs[0]["state"] and "nan" in theirs[0]["tested"]
    for engine in engines:
        told = ranks.run(trainings.changed, 2, engine)
        for ours, other in zip(told, theirs, strict=True):
            for what in ("children", "losses", "tested"):
                assert ours[what] == other[what], (engine, what)
            assert list(ours["state"]) == list(other["state"])
        # Statistics of BatchNorm are averaged from rank 0's on every rank, from each rank's own under Lightning's DDP.
        same_tensors(told[0]["state"], theirs[0]["state"], engine)


@pytest.mark.parametrize(("domain", "data"), [(2, 1), pytest.param(2, 2, marks=pytest.mark.long)])
def test_ranks_that_share_samples_get_the_same_ones(ranks: Any, domain: int, data: int) -> None:
    pytest.importorskip("neuralop")
    size = domain * data
    for rank, told in enumerate(ranks.run(trainings.sampled, size, domain, data)):
        shared = {"num_replicas": data, "rank": rank % data}
        assert told["mesh"] == told["domain"] == shared
        assert told["plain"] == {"num_replicas": size, "rank": rank} and told["loader first"] == size
        assert "use_distributed_sampler=False" in told["refused"]
