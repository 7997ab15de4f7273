"""The weather example: skill, the same losses under every engine, the command line, what is refused."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

import fsshard
from examples import weather_vit
from examples.vit import ViT
from examples.weather_vit import Outcome, parse
from tests.forked import run_script

SCRIPT = Path(__file__).resolve().parent.parent.parent / "examples" / "weather_vit.py"
SIZE = ["--width", "16", "--depth", "2", "--heads", "2", "--batch-size", "8", "--leads", "2"]
DATA = ["--shape", "16", "16", "--n-train", "4", "--n-validation", "1", "--n-steps", "12"]
SMALL = [*SIZE, *DATA, "--epochs", "3", "--warmup", "2", "--lr", "4e-3"]
BACKENDS = ["fairscale", "fsdp", "fsdp2", "ddp"]
SLOW = 240  # seconds that ranks may take on a busy machine


def train(cache: Path, arguments: list[str]) -> list[Outcome]:
    """Train on a rank."""
    os.environ["XDG_CACHE_HOME"] = str(cache)
    args = parse(arguments)
    return weather_vit.train_all(fsshard.init(), args, weather_vit.load_data(args))


def refused(cache: Path, arguments: list[str]) -> str:
    """Return what a rank is told before it has begun."""
    try:
        train(cache, arguments)
    except fsshard.FsshardError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.fixture(scope="module")
def outcomes(ranks: Any, cache: Path) -> list[list[Outcome]]:
    """Per rank, one outcome for each engine."""
    return ranks.run(train, 2, cache, [*SMALL, "--backend", *BACKENDS], timeout=SLOW)  # type: ignore[no-any-return]


def test_every_engine_gives_the_same_losses_and_errors(outcomes: list[list[Outcome]]) -> None:
    (first, *others), second_rank = outcomes
    assert len(first.losses) == 3 * (4 * 11 // 8) and len(first.rmse) == 2 and len(first.validation) == 3
    for outcome in (*others, *second_rank):
        assert repr(outcome.losses) == repr(first.losses), outcome.backend
        assert repr(outcome.rmse) == repr(first.rmse), outcome.backend
    for outcome in (*others, first):
        assert outcome.seen.keys() >= {"precision", "compile", "workers", "lr"}


def test_it_begins_with_persistence_and_beats_it(outcomes: list[list[Outcome]]) -> None:
    outcome = outcomes[0][0]
    assert outcome.persisted[0] < outcome.persisted[1]
    for lead in range(2):
        assert outcome.rmse[lead] < 0.95 * outcome.persisted[lead]
    assert outcome.validation[-1] < outcome.validation[0] and outcome.validation[-1] == outcome.rmse[0]


def test_two_ranks_train_as_one_does_on_all_windows(ranks: Any, cache: Path, outcomes: list[list[Outcome]]) -> None:
    (one,) = ranks.run(train, 1, cache, [*SMALL, "--nprocs", "1", "--backend", "none"])[0]
    # float32 sums in another order; measured 2e-7.
    assert outcomes[0][0].losses == pytest.approx(one.losses, rel=1e-5)
    assert outcomes[0][0].rmse == pytest.approx(one.rmse, rel=1e-5)


# Meshes -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def serial(ranks: Any, cache: Path) -> list[float]:
    """Losses of one process."""
    return ranks.run(train, 1, cache, [*SMALL, "--steps", "8", "--backend", "none"])[0][0].losses  # type: ignore[no-any-return]


@pytest.mark.parametrize("backends", [["fsdp2"], pytest.param(["fairscale", "fsdp", "ddp"], marks=pytest.mark.long)])
def test_every_engine_and_split_trains_as_one_process_does(
    ranks: Any, cache: Path, serial: list[float], backends: list[str]
) -> None:
    arguments = [*SMALL, "--steps", "8", "--compare", "--backend", *backends]
    found = ranks.run(train, 2, cache, arguments, timeout=SLOW)
    runs = [(outcome.split, outcome.backend) for outcome in found[0]]
    assert runs == [(split, backend) for split in ((2, 1, 1), (1, 2, 1), (1, 1, 2)) for backend in backends]
    for outcome in found[0]:
        # float32 sums in another order; measured 2e-7.
        assert outcome.losses == pytest.approx(serial, rel=1e-5), (outcome.split, outcome.backend)
        assert outcome.rmse == pytest.approx(found[0][0].rmse, rel=1e-5)
    assert max(serial) / min(serial) > 1.2, "it has learned something"


@pytest.mark.long
def test_all_three_dimensions_at_once(ranks: Any, cache: Path, serial: list[float]) -> None:
    arguments = [*SMALL, "--steps", "8", "--cp", "2", "--tp", "2", "--backend", "fsdp2", "fsdp"]
    found = ranks.run(train, 4, cache, arguments, timeout=SLOW)
    for outcome in (outcome for rank in found for outcome in rank):
        assert outcome.losses == pytest.approx(serial, rel=1e-5), outcome.backend
    whole = 4 * sum(parameter.numel() for parameter in ViT(3, (16, 16), 4, 16, 2, 2).parameters())
    assert all(outcome.held["parameters"] < 0.7 * whole for outcome in found[0]), "weights are cut"


# Flags ------------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_and_a_fused_optimizer_train_the_same_under_every_engine(
    ranks: Any, cache: Path, outcomes: list[list[Outcome]], precision: str
) -> None:
    arguments = [*SMALL, "--precision", precision, "--fused", "--backend", *BACKENDS]
    plain = ranks.run(train, 2, cache, arguments, timeout=SLOW)[0]
    full = outcomes[0][0]
    for outcome in plain:
        assert repr((outcome.losses, outcome.rmse)) == repr((plain[0].losses, plain[0].rmse)), outcome.backend
    assert plain[0].losses != full.losses, "it did compute in that precision"
    assert plain[0].rmse == pytest.approx(full.rmse, rel=0.05)
    assert ("loss scale 65536" in plain[0].seen["precision"]) == (precision == "fp16")


@pytest.mark.long
@pytest.mark.parametrize("how", ["unit", "whole"])
def test_compiled_it_trains_as_before(ranks: Any, cache: Path, serial: list[float], how: str) -> None:
    """Under aot_eager, which takes the same way through torch.compile, and no C++ compiler's time."""
    arguments = [*SMALL, "--compile", how, "--compile-backend", "aot_eager", "--steps", "8"]
    (outcome,) = ranks.run(train, 2, cache, arguments, timeout=SLOW)[0]
    # Sums within kernels in another order: 1e-7 of a step, which Adam's division by small numbers makes more of.
    assert outcome.losses == pytest.approx(serial, rel=1e-4)


# The command line -------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_as_a_script_with_a_picture_and_a_trace(cache: Path, tmp_path: Path) -> None:
    """torchrun itself is tested with the example of Darcy flow."""
    picture, traces = tmp_path / "weather.png", tmp_path / "traces"
    arguments = ["--steps", "6", "--backend", "fsdp2", "ddp", "--picture", str(picture), "--profile", str(traces)]
    done = run_script(SCRIPT, [*SIZE, *DATA, *arguments], {"XDG_CACHE_HOME": str(cache), "COLUMNS": "120"})
    assert done.returncode == 0, done.stderr
    assert "ViT on shallow water 16 x 16, 6 steps of 8 windows, 2 ranks" in done.stdout
    assert "largest difference in loss, fsdp2 - ddp: 0.0" in done.stdout
    assert re.search(r"persistence +│ +│ +│ +0\.\d{3} │ +0\.\d{3} │", done.stdout)
    for row in ("--precision fp32", "--compile off", "--fused off", "--workers 0", "--lr-scaling sqrt", "a plane"):
        assert row in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    files = sorted(file.name for file in traces.iterdir())
    assert files == ["ddp-rank0.json", "ddp-rank1.json", "fsdp2-rank0.json", "fsdp2-rank1.json"]
    events = json.loads((traces / files[2]).read_text())["traceEvents"]
    assert {"data", "forward", "backward", "optimizer"} <= {event.get("name") for event in events}


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_the_slurm_script_starts_it_with_flags_that_there_are(launcher: str, tmp_path: Path) -> None:
    """With commands of SLURM's that say what they were given."""
    for name, says in {"srun": 'echo "$@"', "scontrol": "printf 'node7\\nnode8\\n'"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{says}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "5", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_GPUS_ON_NODE": "4"}
    environment = {**slurm, "LAUNCHER": launcher, "PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    script = SCRIPT.parent / "slurm" / "weather_vit.sbatch"
    done = subprocess.run(["bash", script, "--tp", "4"], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    before, after = done.stdout.split("examples/weather_vit.py")
    args = parse(after.split())
    assert (args.tp, args.workers, args.pin_memory) == (4, 4, True)
    expected = "--nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-id 5 --rdzv-endpoint node7:29500"
    assert (expected in before) == (launcher == "torchrun") and ("python" in before) == (launcher == "srun")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--compile", "unit", "--cuda-graphs"], "--cuda-graphs needs a CUDA device, and this training runs on 'cpu'"),
        (["--cp", "2", "--tp", "2"], "--data 1 x --cp 2 x --tp 2 are not the 2 ranks"),
        (["--patch", "5"], "--patch 5 does not divide fields of 16 x 16"),
        (["--batch-size", "64"], "--batch-size 64 is more than all 44 windows to train on"),
    ],
)
def test_what_cannot_work_here_is_said_on_every_rank(ranks: Any, cache: Path, arguments: list[str], told: str) -> None:
    for said in ranks.run(refused, 2, cache, [*SMALL, *arguments]):
        assert said.startswith("ConfigurationError") and told in said
