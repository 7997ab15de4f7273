"""The T5 example: the same losses under every engine, means over tokens, the best weights, the command line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsshard
from examples import docstrings, t5_summarization
from examples import summarization as parts
from examples.t5_summarization import Outcome, build_model, parse
from tests.forked import run_script
from tests.on_ranks import on_ranks
from tests.sets import often

pytest.importorskip("transformers")

SCRIPT = Path(__file__).resolve().parent.parent.parent / "examples" / "t5_summarization.py"
SIZE = ["--width", "16", "--layers", "1", "--text-length", "24", "--summary-length", "16", "--batch-size", "8"]
SMALL = [*SIZE, "--epochs", "2", "--gamma", "0.9", "--lr", "2e-2"]
BACKENDS = ["fairscale", "fsdp", "fsdp2", "ddp"]


def sentences(first: int, count: int) -> tuple[docstrings.Pair, ...]:
    """Summaries of very different lengths."""
    return tuple((f"number {n}, {'and so on ' * (n % 3)}", "ab" * (1 + 5 * n % 8)) for n in range(first, first + count))


DATA = docstrings.Pairs(sentences(0, 40), sentences(40, 9))
"""Nine to judge by: two ranks need one more."""


def train(arguments: list[str], data: docstrings.Pairs = DATA) -> list[Outcome]:
    """Train on a rank."""
    return t5_summarization.train_all(fsshard.init(), parse(arguments), data)


def bare(state: dict[str, Tensor], *arguments: str) -> nn.Module:
    """The model on one process, with these weights; strict."""
    model = build_model(parse([*SIZE, *arguments]))
    model.load_state_dict(state)
    return model.eval()


@torch.no_grad()
def validation_loss(model: Any, data: docstrings.Pairs) -> float:
    """The mean over all tokens, in float64 and one pair at a time, by Hugging Face's own loss."""
    total, tokens = 0.0, 0
    for example in parts.encode(data.validation, 24, 16):
        batch = parts.collate([example])
        loss = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=batch["labels"]).loss
        total, tokens = total + float(loss) * batch["labels"].numel(), tokens + batch["labels"].numel()
    return total / tokens


@pytest.fixture(scope="module")
def outcomes(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[list[Outcome]], Path]:
    """Per rank, one outcome for each engine; and the folder of their checkpoints. Dropout is on."""
    folder = tmp_path_factory.mktemp("t5") / "new"
    results = ranks.run(train, 2, [*SMALL, "--backend", *BACKENDS, "--save", str(folder)])
    return results, folder


# Training ---------------------------------------------------------------------------------------------------------


def test_every_engine_gives_the_same_losses_and_weights(outcomes: tuple[list[list[Outcome]], Path]) -> None:
    (first, *others), second_rank = outcomes[0]
    assert [outcome.backend for outcome in (first, *others)] == BACKENDS
    assert len(first.losses) == 2 * 40 // 8 and len(first.validation) == 2
    for outcome in (*others, *second_rank):
        assert repr(outcome.losses) == repr(first.losses), outcome.backend
        assert repr(outcome.validation) == repr(first.validation), outcome.backend
        assert outcome.accuracy == first.accuracy, outcome.backend
        assert outcome.best_epoch == first.best_epoch
    for outcome in others:
        assert list(outcome.best) == list(first.best)
        assert all(torch.equal(outcome.best[key], value) for key, value in first.best.items()), outcome.backend


def test_the_best_weights_are_on_rank_0_and_in_a_file(outcomes: tuple[list[list[Outcome]], Path]) -> None:
    results, folder = outcomes
    assert all(not outcome.best for outcome in results[1])
    assert sorted(file.name for file in folder.iterdir()) == sorted(f"t5-docstrings-{b}.safetensors" for b in BACKENDS)
    for outcome in results[0]:
        state = parts.read_checkpoint(folder / f"t5-docstrings-{outcome.backend}.safetensors")
        assert set(state) == set(outcome.best)
        assert outcome.best.keys() == state.keys()
        assert all(torch.equal(state[name], value) for name, value in outcome.best.items())


def test_the_validation_loss_is_the_mean_over_all_tokens(outcomes: tuple[list[list[Outcome]], Path]) -> None:
    """And a bare model takes the weights as they are."""
    outcome = outcomes[0][0][0]
    # float32 sums of fewer than 16 * 9 = 144 tokens, each within 2^-24 relatively: 144 * 6e-8 < 1e-5.
    assert validation_loss(bare(outcome.best), DATA) == pytest.approx(min(outcome.validation), rel=1e-5)


def test_two_ranks_train_as_one_does_on_all_samples(ranks: Any) -> None:
    """Without dropout. Summaries differ in length, so a mean of the ranks' means would be another loss."""
    arguments = [*SMALL, "--dropout", "0", "--optimizer", "adadelta", "--lr", "1"]
    (one,) = ranks.run(train, 1, [*arguments, "--backend", "none", "--nprocs", "1"])[0]
    (two,) = ranks.run(train, 2, [*arguments, "--backend", "ddp"])[0]
    # The order of float32 sums differs; measured 1.2e-7, and up to 1.7e-3 with a mean of the ranks' means.
    assert two.losses == pytest.approx(one.losses, rel=2e-6)
    assert two.validation == pytest.approx(one.validation, rel=2e-6)


@pytest.mark.long
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_trains_the_same_under_every_engine(
    outcomes: tuple[list[list[Outcome]], Path], ranks: Any, precision: str
) -> None:
    """fp16 with the scaler; and blocks that are recomputed, dropout included, change no bit of it."""
    arguments = [*SMALL, "--precision", precision]
    plain = ranks.run(train, 2, [*arguments, "--backend", *BACKENDS])[0]
    (recomputed,) = ranks.run(train, 2, [*arguments, "--activation-checkpointing", "--backend", "fsdp2"])[0]
    for outcome in (*plain, recomputed):
        assert repr((outcome.losses, outcome.validation)) == repr((plain[0].losses, plain[0].validation))
    first, last = plain[0].validation
    assert last < 0.95 * first
    full = outcomes[0][0][0]
    assert plain[0].losses != full.losses  # it did compute in that precision
    # Means of logits' losses that are each within a few ulps (2^-8 in bfloat16) of float32's: the same curve.
    assert plain[0].validation == pytest.approx(full.validation, rel=0.05)


@pytest.mark.parametrize("backend", often(BACKENDS, "fsdp2"))
@on_ranks()
def test_a_model_generates_under_every_engine(backend: str) -> None:
    """Generated under an engine, between two steps, and by a bare model with the same weights."""
    ctx, args = fsshard.init(), parse(SIZE)
    trainer = t5_summarization.Trainer(ctx, args, backend)
    train_loader, _ = t5_summarization.make_loaders(ctx, args, (parts.encode(DATA.train, 24, 16), []))
    said = []
    for epoch in (1, 2):
        trainer.train_epoch(train_loader, epoch, lambda loss: None)
        with trainer.model.full_parameters():
            said += parts.generate(trainer.model, DATA.validation[:3], 24, 16)
        state = trainer.model.state_dict()
    under = said[3:]
    alone = parts.generate(bare(state), DATA.validation[:3], 24, 16)
    assert under == alone and any(under)


# The command line -------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_as_a_script(cache: Path, tmp_path: Path) -> None:
    """On the data that every machine has; torchrun is tested with the elastic example."""
    picture = tmp_path / "t5.png"
    common = ["--epochs", "2", "--n-train", "48", "--n-validation", "8"]
    own = {"XDG_CACHE_HOME": str(cache), "COLUMNS": "120"}
    engines = ["fairscale", "fsdp2"]
    done = run_script(SCRIPT, [*SIZE, *common, "--backend", *engines, "--picture", str(picture)], own)
    assert done.returncode == 0, done.stderr
    told = done.stdout
    for kind in ("training", "validation"):
        assert f"largest difference in {kind} loss, fairscale - fsdp2: 0.0" in told
    lines = re.findall(
        r"(\w+)  epoch (\d)  train [\d.]+  validation ([\d.]+)  accuracy [\d.]+ %  whole [\d.]+ %  lr", told
    )
    assert [(name, epoch) for name, epoch, _ in lines] == [(name, epoch) for name in engines for epoch in "12"]
    assert told.count("\ngenerated  ") == 3
    assert picture.read_bytes().startswith(b"\x89PNG")
