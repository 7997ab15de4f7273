"""``fsshard parity RECIPE --record FILE`` and ``--against FILE``: what is kept, exit codes, mistakes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fsshard.launching.pool
from fsshard.cli import app as cli
from fsshard.parity import Recipe, Trace
from tests.parity import faults

RECIPE = "tests.parity.faults:mlp"


def half_rate() -> Recipe:
    return dataclasses.replace(faults.mlp(), hyper={"lr": 0.05})


@pytest.fixture
def shared(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The command takes the session's ranks, and leaves them running."""

    class Shared:
        most_ranks = ranks.most_ranks
        run = staticmethod(ranks.run)

        def __init__(self, device: str = "cpu") -> None:
            assert device == "cpu"

        def __enter__(self) -> Shared:
            return self

        def __exit__(self, *_: object) -> None: ...

        def close(self) -> None: ...

    monkeypatch.setattr(fsshard.launching.pool, "RankPool", Shared)
    monkeypatch.setattr("fsshard.parity.running.RankPool", Shared)
    return


def test_recorded_and_compared(shared: None, tmp_path: Path, capfd: Any) -> None:
    file = tmp_path / "trace.json"
    assert cli.main(["parity", RECIPE, "--record", str(file), "--steps", "2", "--tensors"]) == 0
    said = capfd.readouterr().out.splitlines()
    assert said[0] == f"2 steps of {RECIPE} under ddp on 2 ranks: {file}"
    assert f"  torch {torch.__version__}" in said
    assert said[-1] == f"compare with it: fsshard parity {RECIPE} --against {file}"
    trace = Trace.load(file)
    assert (trace.steps, trace.backend, trace.world_size, trace.detail) == (2, "ddp", 2, "tensors")
    assert cli.main(["parity", RECIPE, "--against", str(file), "--json", "-"]) == 0
    out, err = capfd.readouterr()
    (cell,) = json.loads(out)["cells"]
    assert (cell["backend"], cell["world_size"], cell["verdict"], len(cell["steps"])) == ("ddp", 2, "exact", 2)
    assert "all agree: 1 exact" in err
    assert cli.main(["parity", "tests.cli.test_record:half_rate", "--against", str(file), "--backends", "fsdp2"]) == 1
    said = capfd.readouterr().out
    assert "recipe.hyper {'lr': 0.1} -> {'lr': 0.05}" in said
    assert "first: step 0, param_groups of group 0: lr, rank 0: expected 0.1, got 0.05; not equal" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--record", "t.json"], "give one RECIPE"),
        ([RECIPE, RECIPE + "x", "--record", "t.json"], "give one RECIPE"),
        ([RECIPE, "--record", "t.json", "--backends", "ddp,fsdp2"], "give --backends one value, not 2"),
        ([RECIPE, "--record", "t.json", "--world-size", "1,2"], "give --world-size one value, not 2"),
        ([RECIPE, "--record", "nowhere/t.json"], "there is no folder"),
        ([RECIPE, "--record", "t.json", "--against", "u.json"], "--against means nothing to --record"),
        ([RECIPE, "--record", "t.json", "--plot", "x.png"], "--plot means nothing to --record"),
        ([RECIPE, "--tensors"], "give --record too"),
        ([RECIPE, "--against", "absent.json"], "absent.json: cannot be read: No such file"),
        ([RECIPE, "--against", "setup.cfg"], "setup.cfg: this is no JSON, or it is cut off"),
        ([RECIPE, "--against", "t.json", "--reference", "none"], "--reference has no meaning beside --against"),
        ([RECIPE, RECIPE + "x", "--against", "t.json"], "give one RECIPE"),
        (["--golden", "--record", "t.json"], "leave out --record"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], said: str, shared: None, capfd: Any) -> None:
    assert cli.main(["parity", *arguments]) == 2
    out, err = capfd.readouterr()
    (line,) = err.splitlines()
    assert line.startswith("fsshard: ") and said in line and out == ""
    assert not Path("t.json").exists()


def test_a_recipe_that_differs_from_itself_is_not_recorded(shared: None, tmp_path: Path, capfd: Any) -> None:
    file = tmp_path / "t.json"
    assert cli.main(["parity", "tests.parity.faults:restless", "--record", str(file), "--steps", "1", "-q"]) == 2
    assert "the recipe is not deterministic" in capfd.readouterr().err
    assert not file.exists()
