"""fsshard.compat.neuralop against neuralop's own Trainer on one process.

Tests compat/neuralop/trainer.py and compat/neuralop/training_state.py, too.
"""

from __future__ import annotations

import itertools
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

pytest.importorskip("neuralop")
pytest.importorskip("fairscale")

import neuralop
from neuralop.losses import H1Loss, LpLoss, WeightedSumLoss
from neuralop.losses.data_losses import MSELoss
from neuralop.models import TFNO
from neuralop.training.training_state import load_training_state

from fsshard.compat.neuralop.batches import EvaluationLoader, loss_reduction, undivided
from fsshard.launching.pool import RankPool
from tests.compat.common import HALVES, begin_with, same_tensors
from tests.compat.neuralop_trainings import Fit, Outcome, Pairs, Silent, fit, fits, model, refused, special, specials

BACKENDS = ("ddp", "fsdp", "fsdp2", "fairscale")
EPOCHS = 2


def close(one: Outcome, other: Outcome, weights: float = 1e-5, rtol: float = 1e-5) -> None:
    """Metrics of every epoch, and the weights at the end."""
    for mine, theirs in zip(one.epochs, other.epochs, strict=True):
        assert mine == pytest.approx(theirs, rel=rtol)
    for mine, theirs in zip(one.evaluations, other.evaluations, strict=True):
        assert mine == pytest.approx(theirs, rel=rtol)
    assert one.metrics == pytest.approx(other.metrics, rel=rtol)
    assert one.rates == other.rates
    assert list(one.weights) == list(other.weights)
    for name, value in one.weights.items():
        torch.testing.assert_close(value, other.weights[name], rtol=0, atol=weights, msg=lambda m, n=name: f"{n}: {m}")


@pytest.fixture(scope="module")
def serial() -> Outcome:
    """neuralop's Trainer, one process, all samples of each global batch, no fsshard."""
    return fit(Fit("plain", epochs=EPOCHS))


@pytest.fixture(scope="module")
def uninterrupted(ranks: RankPool) -> list[list[Outcome]]:
    """By rank and backend."""
    return ranks.run(fits, 2, [Fit(backend, epochs=EPOCHS) for backend in BACKENDS])


@pytest.fixture(scope="module")
def saved(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """A folder that two FairScale ranks filled after half of the epochs, and what they had by then."""
    folder = tmp_path_factory.mktemp("saved")
    options = {"save_every": 1, "save_dir": str(folder)}
    return folder, ranks.run(fit, 2, Fit("fairscale", epochs=EPOCHS // 2, train=options))[0]


# ------------------------------------------------------------------------------------------------ training


def test_two_ranks_make_the_updates_of_one_process(serial: Outcome, uninterrupted: list[list[Outcome]]) -> None:
    first = uninterrupted[0][0]
    for outcome in uninterrupted[0]:
        same_tensors(outcome.weights, first.weights, "weights")
        close(outcome, serial)
    assert any(value.is_complex() for value in first.weights.values())


def test_every_rank_reports_the_metrics_of_all_and_rank_0_prints_them(uninterrupted: list[list[Outcome]]) -> None:
    for one, other in zip(*uninterrupted, strict=True):
        assert (one.epochs, one.evaluations, one.metrics) == (other.epochs, other.evaluations, other.metrics)
        assert "train_err" in one.printed and not other.printed


@pytest.mark.parametrize("engines", HALVES)
def test_modes_grow_and_samples_are_patched_as_on_one_process(ranks: RankPool, engines: tuple[str, ...]) -> None:
    for what, found in ranks.run(specials, 2, engines)[0].items():
        epochs, weights, modes = special("plain", what)
        first = found[engines[0]]
        assert modes == ([4, 3] if what == "patches" else modes) and (what == "patches" or modes[0] > 4)
        for backend, (ours, state, reached) in found.items():
            assert reached == modes and ours == first[0], (what, backend)
            same_tensors(state, first[1], (what, backend))
            for mine, theirs in zip(ours, epochs, strict=True):
                assert mine == pytest.approx(theirs, rel=1e-5), (what, backend)
            for name, value in weights.items():
                torch.testing.assert_close(state[name], value, rtol=0, atol=1e-5)


CASES = {
    "mean": Fit("plain", loss="mean"),
    "weighted sum": Fit("plain", loss="weighted"),
    "told": Fit("plain", loss="silent"),
    "unequal parts, sum": Fit("plain", uneven=True),
    "unequal parts, mean": Fit("plain", loss="mean", uneven=True),
    "ReduceLROnPlateau": Fit("plain", plateau=True, epochs=3),
    "neuralop's AdamW": Fit("plain", optimizer=neuralop.training.AdamW),
}


OFTEN = ("told", "unequal parts, sum")


@pytest.mark.parametrize(
    "case", [case if case in OFTEN else pytest.param(case, marks=pytest.mark.long) for case in CASES]
)
def test_losses_schedulers_and_optimizers(case: str, ranks: RankPool) -> None:
    told = {"global_loss_reduction": "sum"} if case == "told" else {}
    jobs = [replace(CASES[case], backend=backend, trainer=told) for backend in ("fsdp2", "fairscale")]
    one, other = ranks.run(fits, 2, jobs)[0]
    same_tensors(one.weights, other.weights, case)
    # Adam divides small gradients by themselves, so a rounding difference can become one of the size of the rate.
    close(one, fit(CASES[case]), weights=1e-4)


@pytest.mark.long
def test_mixed_precision_is_alike_under_every_backend(ranks: RankPool) -> None:
    mixed = {"mixed_precision": True, "use_distributed": True}
    first, *others = ranks.run(fits, 2, [Fit(backend, trainer=mixed) for backend in BACKENDS])[0]
    for outcome in others:
        same_tensors(outcome.weights, first.weights, "mixed")
    # bfloat16 sums over a batch of eight and over two of four round differently
    close(first, fit(Fit("plain", trainer={"mixed_precision": True})), weights=5e-3, rtol=1e-3)


# ------------------------------------------------------------------------------------------------ checkpoints


def test_one_process_reads_the_checkpoint_without_fsshard(saved: tuple[Path, Outcome]) -> None:
    folder, outcome = saved
    names = ["manifest.pt", "model_metadata.pkl", "model_state_dict.pt", "optimizer.pt", "scheduler.pt"]
    assert sorted(path.name for path in folder.iterdir()) == names
    whole = TFNO.from_checkpoint(folder, "model")
    state = whole.state_dict()
    assert state.pop("_metadata")["non_linearity"] is F.gelu
    same_tensors(dict(state), outcome.weights, "whole")
    live = model()
    live.load_state_dict(dict(outcome.weights))
    x = torch.randn(2, 1, 16, 16)
    assert torch.equal(whole(x), live(x))


@pytest.mark.long
def test_training_goes_on_under_any_backend(
    ranks: RankPool, saved: tuple[Path, Outcome], uninterrupted: list[list[Outcome]]
) -> None:
    options = {"resume_from_dir": str(saved[0])}
    jobs = [Fit(backend, epochs=EPOCHS, train=options) for backend in ("fsdp2", "fsdp", "ddp", "fairscale")]
    for outcome in ranks.run(fits, 2, jobs)[0]:
        assert outcome.epochs == uninterrupted[0][0].epochs[EPOCHS // 2 :]
        assert outcome.evaluations == uninterrupted[0][0].evaluations[EPOCHS // 2 :]
        same_tensors(outcome.weights, uninterrupted[0][0].weights, "resumed")


def rest_of(outcome: Outcome) -> Outcome:
    return replace(outcome, epochs=outcome.epochs[EPOCHS // 2 :], evaluations=outcome.evaluations[EPOCHS // 2 :])


def test_training_goes_on_on_one_process(ranks: RankPool, saved: tuple[Path, Outcome], serial: Outcome) -> None:
    job = Fit("none", epochs=EPOCHS, train={"resume_from_dir": str(saved[0])})
    (outcome,) = ranks.run(fit, 1, job)
    close(outcome, rest_of(serial))


def test_a_checkpoint_of_neuralop_itself_is_taken(ranks: RankPool, tmp_path: Path, serial: Outcome) -> None:
    fit(Fit("plain", epochs=EPOCHS // 2, train={"save_every": 1, "save_dir": str(tmp_path)}))
    job = Fit("fsdp", epochs=EPOCHS, train={"resume_from_dir": str(tmp_path)})
    close(ranks.run(fit, 2, job)[0], rest_of(serial))


def test_neuralop_itself_takes_the_checkpoint(saved: tuple[Path, Outcome]) -> None:
    live = model()
    optimizer = torch.optim.AdamW(live.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)
    # The parent reads its own metadata with weights_only=True and would stop at F.gelu (neuraloperator 2.0.0).
    with torch.serialization.safe_globals([(F.gelu, "torch._C._nn.gelu")]):  # type: ignore[misc]
        *_, epoch = load_training_state(saved[0], "model", live, optimizer, scheduler)
    assert epoch == EPOCHS // 2 - 1
    assert scheduler.last_epoch == EPOCHS // 2
    written = torch.load(saved[0] / "optimizer.pt", weights_only=True)
    assert written["param_groups"][0]["params"] == [name for name, _ in live.named_parameters()]
    assert written["state"]["fno_blocks.convs.0.weight.core"]["exp_avg"].is_complex()
    for name, parameter in live.named_parameters():
        assert torch.equal(optimizer.state[parameter]["exp_avg"], written["state"][name]["exp_avg"])


def test_the_best_value_survives_a_resume(ranks: RankPool, tmp_path: Path) -> None:
    options = {"save_best": "pairs_l2", "save_dir": str(tmp_path)}
    outcome = ranks.run(fit, 2, Fit("fsdp2", epochs=1, train=options))[0]
    manifest = torch.load(tmp_path / "manifest.pt", weights_only=True)
    assert manifest["best_value"] == outcome.best == outcome.evaluations[0]["pairs_l2"]
    assert (tmp_path / "best_model_state_dict.pt").exists()
    torch.save({**manifest, "best_value": 0.0}, tmp_path / "manifest.pt")
    before = (tmp_path / "best_model_state_dict.pt").read_bytes()
    again = ranks.run(fit, 2, Fit("fsdp", epochs=2, train={**options, "resume_from_dir": str(tmp_path)}))[0]
    assert again.best == 0.0
    assert (tmp_path / "best_model_state_dict.pt").read_bytes() == before


# ------------------------------------------------------------------------------------------------ refusals


REFUSALS = {
    "model": "ModelError: expected a model that fsshard.wrap returned",
    "reduction": "ConfigurationError: global_loss_reduction: 'sum', 'mean' or None, got 'product'",
    "optimizer": "OptimizerError: expected this model's optimizer",
    "scheduler": "OptimizerError: the scheduler drives another optimizer",
    "loss": "ConfigurationError: Silent does not say whether it sums or averages",
    "lengths": "RankMismatch: numbers of batches differ",
    "folder": "ConfigurationError: resume_from_dir=",
    "patches": "ConfigurationError: MultigridPatching2D(use_distributed=True) gives ranks different patches",
    "rules": "ConfigurationError: incremental_loss_gap=False, incremental_grad=False",
    "kind": "ModelError: expected a wrapped FNO",
    "resumed": "ConfigurationError: resume_from_dir='here': neuralop's files say neither",
}


def test_what_cannot_work_raises_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    begin_with(ranks.run(refused, 2, str(tmp_path)), REFUSALS)


def test_folders_that_cannot_be_resumed_from(ranks: RankPool, saved: tuple[Path, Outcome], tmp_path: Path) -> None:
    strange, incomplete = tmp_path / "strange", tmp_path / "incomplete"
    for folder in (strange, incomplete):
        shutil.copytree(saved[0], folder)
    (incomplete / "optimizer.pt").unlink()
    state = torch.load(saved[0] / "model_state_dict.pt", weights_only=False)
    torch.save({**state, "_metadata": {"non_linearity": shutil.rmtree}}, strange / "model_state_dict.pt")
    for folder, epochs, words in (
        (saved[0], EPOCHS // 2, "nothing left to train"),
        (strange, EPOCHS, "shutil.rmtree"),
        (incomplete, EPOCHS, "optimizer.pt, which is not there"),
    ):
        job = Fit("ddp", epochs=epochs, train={"resume_from_dir": str(folder)})
        for error in ranks.run_expecting_errors(fit, 2, job):
            assert words in str(error)


# ------------------------------------------------------------------------------------------------ parts


def test_how_losses_reduce() -> None:
    assert loss_reduction(LpLoss(d=2)) == loss_reduction(H1Loss(d=2)) == loss_reduction(MSELoss()) == "sum"
    assert loss_reduction(LpLoss(d=2, reduction="mean")) == loss_reduction(torch.nn.MSELoss()) == "mean"
    assert loss_reduction(LpLoss(d=2).abs) == "sum"
    assert loss_reduction(WeightedSumLoss([LpLoss(d=2), H1Loss(d=2)])) == "sum"
    assert loss_reduction(WeightedSumLoss([LpLoss(d=2), torch.nn.MSELoss()])) is None
    assert loss_reduction(Silent()) is loss_reduction(lambda out, y: out) is None
    assert loss_reduction(torch.nn.MSELoss(reduction="none")) is None


def test_each_sample_counts_once() -> None:
    assert undivided(DataLoader(Pairs(4, 0)))
    assert not undivided(DataLoader(Pairs(4, 0), sampler=DistributedSampler(Pairs(4, 0), 2, 0)))
    for world, batch, count, drop_last in itertools.product((1, 2, 3, 4), (1, 2, 3), (3, 5, 8, 9), (False, True)):
        data, seen = Pairs(count, 0), []
        for rank in range(world):
            sampler = DistributedSampler(data, world, rank, shuffle=False)
            loader = EvaluationLoader(DataLoader(data, batch_size=batch, sampler=sampler, drop_last=drop_last))
            for sample in loader:
                assert len(sample["x"]) == len(sample["y"])
                seen += [] if loader.void else [float(row.sum()) for row in sample["x"]]
        assert len(seen) == len(set(seen)) and (drop_last or len(seen) == count), (world, batch, count)
