"""Pairs of whole scripts on two ranks, recorded and compared by the command line, which they know nothing of."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fsshard.cli.app import main
from tests.parity.scripts import fronts, strangers

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
Recorded = Callable[..., Path]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Record a command of Python, once."""
    folder = tmp_path_factory.mktemp("pairs")

    def record(name: str, *words: str) -> Path:
        path = folder / name
        if not path.exists():
            assert main(["trace", str(path), "--", sys.executable, *words]) == 0
        return path

    return record


@pytest.mark.long
@pytest.mark.parametrize("name", ["by-hand", "fsdp1", "accelerate", "fabric", "lightning", "transformers"])
def test_engines_and_trainers_of_others(recorded: Recorded, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """They train what replicas do whose gradients are averaged by hand, and what ours do, to the last bit."""
    by_hand, other, ours = (recorded(one, *TORCHRUN, fronts.__file__, one) for one in ("by-hand", name, "ours"))
    assert main(["compare", str(by_hand), str(other)]) == main(["compare", str(other), str(ours)]) == 0
    said = capsys.readouterr().out
    assert said.count("on 2 ranks have equal weights to the last bit, 4 parameters in 4 steps.") == 2
    assert ("renamed" in said) == (name == "lightning")
    assert "also different" not in said  # transformers has two groups, of the same settings


FAULTS = {
    "rate": ("30", "step 30: lr of group 0 0.01 -> 0.005"),
    "sampler": ("2", "step 2: rank 0 was given other samples (another sampler, seed or preparation of data?)"),
    "no average": ("1", "step 1: ranks 0 and 1 of no average hold different weights: are gradients not"),
    "bf16": ("0", "step 0: models put out float32 -> bfloat16, autocast to torch.bfloat16"),
}
"""Fault -> the step from which on weights differ, and what is named first."""


@pytest.mark.long  # test_recorder.py plants these at every commit, in ranks that are there already
@pytest.mark.parametrize("fault", FAULTS)
def test_faults(recorded: Recorded, capsys: pytest.CaptureFixture[str], fault: str) -> None:
    """Of 32 steps."""
    right, wrong = (recorded(one or "right", strangers.__file__, "ddp", one) for one in ("", fault))
    assert main(["compare", str(right), str(wrong)]) == 1
    sentence, cause, *_ = capsys.readouterr().out.splitlines()
    step, first = FAULTS[fault]
    assert sentence.startswith("NOT the same training") and f"on 2 ranks part at step {step}, weight of " in sentence
    assert cause.startswith(f"before that: {first}")


@pytest.mark.long
def test_a_renamed_layer(recorded: Recorded, capsys: pytest.CaptureFixture[str]) -> None:
    right, renamed = (recorded(one or "right", strangers.__file__, "ddp", one) for one in ("", "renamed"))
    assert main(["compare", str(right), str(renamed)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert "have equal weights to the last bit" in said[0]
    assert said[1:-1] == ["renamed: last.weight is head.weight now", "renamed: last.bias is head.bias now"]
