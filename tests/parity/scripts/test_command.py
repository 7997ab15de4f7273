"""``fsshard trace`` and ``fsshard compare`` on whole scripts, which know nothing of them.

Tests fsshard/cli/scripts.py and fsshard/launching/children/sitecustomize.py too.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import fsshard
from fsshard.cli.app import main
from fsshard.errors import ConfigurationError
from fsshard.parity.scripts.command import run
from fsshard.parity.scripts.recorder import Settings
from fsshard.parity.scripts.store import ScriptTrace

SCRIPT = """
import os, sys
import torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn

def work(rank, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
    train(rank, 0.1)
    dist.destroy_process_group()

def train(rank, rate):
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.param_groups[0]["lr"] = rate if step else 0.1
        optimizer.zero_grad()
        model(torch.full((2, 3), float(step + rank))).square().mean().backward()
        optimizer.step()

if __name__ == "__main__":
    mp.spawn(work, (sys.argv[1],), nprocs=2)
"""


def job_slower(folder: Path) -> None:
    """Train as the script does, at half the rate after the first step, in a rank that is there already."""
    script = {}
    exec(SCRIPT, script)
    with fsshard.trace(folder):
        script["train"](dist.get_rank(), 0.05)


def test_a_script_that_spawns_its_ranks(ranks: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The command's children import torch and are recorded; what they print and return is theirs."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(tmp_path / "store")]
    assert main(["trace", str(tmp_path / "old"), "--tensors", "every=2", "--", *command]) == 0
    ranks.run(job_slower, 2, tmp_path / "new")
    assert f"3 steps on 2 ranks: {tmp_path / 'old'}" in capfd.readouterr().err
    assert ScriptTrace.load(tmp_path / "old").ranks[1].header.command[0] == str(script)
    assert main(["compare", str(tmp_path / "old"), str(tmp_path / "old")]) == 0
    said, looked_at = capfd.readouterr().out.splitlines()
    assert said == (
        "The same training: old and old on 2 ranks have equal weights to the last bit, 2 parameters in 3 steps."
    )
    assert looked_at.startswith("compared: DistributedDataParallel with 2 parameters and 0 buffers, SGD, losses")
    files = [str(tmp_path / "report.json"), str(tmp_path / "difference.png")]
    both = [str(tmp_path / "old"), str(tmp_path / "new")]
    assert main(["compare", *both, "--json", files[0], "--plot", files[1]]) == 1
    first, cause, *_ = capfd.readouterr().out.splitlines()
    assert first.startswith("NOT the same training: old and new on 2 ranks part at step 1, weight of weight, rank 0")
    assert cause == "before that: step 1: lr of group 0 0.1 -> 0.05"
    report = json.loads(Path(files[0]).read_text())
    assert (report["ok"], report["verdict"], report["sentence"]) == (False, "different", first)
    assert Path(files[1]).stat().st_size > 1000


def test_a_script_that_dies_midway(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """Its exit code is the command's; the steps before are whole; the user's own sitecustomize has run.

    Recording begins within a step of an optimizer, in a closure, as Lightning's do.
    """
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text("print('of the user')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "own"))
    text = (
        "import os, torch\nmodel = torch.nn.Linear(2, 1)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "def closure():\n    loss = model(torch.ones(1, 2)).sum()\n    loss.backward()\n    return loss\n"
        "for step in range(3): optimizer.step(closure)\nos._exit(3)\n"
    )
    assert run([sys.executable, "-c", text], tmp_path / "trace", Settings(first=1)) == 3
    assert capfd.readouterr().out == "of the user\n"
    (rank,) = ScriptTrace.load(tmp_path / "trace").ranks
    assert {number: len(step.losses) for number, step in rank.steps.items()} == {1: 1, 2: 1}
    assert main(["trace", str(tmp_path / "trace"), "--", sys.executable, "-c", ""]) == 2
    assert "holds a record already; remove it, or name another folder" in capfd.readouterr().err
    assert main(["trace", str(tmp_path / "trace"), "--overwrite", "--", sys.executable, "-c", ""]) == 1
    assert f"nothing is recorded: no process of {sys.executable} made a step" in capfd.readouterr().err


@pytest.mark.long
def test_scripts_that_ask_for_torch_first_and_train_in_several_processes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As transformers does; the first process is recorded, and the record says that there was another."""
    text = (
        "import os, importlib.util\nassert importlib.util.find_spec('torch') is not None\nimport torch\n"
        "def train():\n    model = torch.nn.Linear(2, 1)\n"
        "    model(torch.ones(1, 2)).sum().backward()\n    torch.optim.SGD(model.parameters(), lr=0.1).step()\n"
        "train()\nchild = os.fork()\ntrain()\n"
        "if child:\n    os.waitpid(child, 0)\n    import subprocess, sys\n"
        "    subprocess.run([sys.executable, '-c', sys.argv[1]]) if len(sys.argv) > 1 else None\n"
    )
    assert run([sys.executable, "-c", text], tmp_path / "one") == 0
    assert (ScriptTrace.load(tmp_path / "one").steps, ScriptTrace.load(tmp_path / "one").ended) == ([0, 1], [])
    assert run([sys.executable, "-c", text, text], tmp_path / "two") == 0
    (reason,) = ScriptTrace.load(tmp_path / "two").ended
    assert reason == "another process has trained as rank 0, and one record is of one training"
    assert f"the record ends here, the training goes on: {reason}" in capfd.readouterr().err


ADDING = """
import sys, torch
torch.manual_seed(0)
model = torch.nn.Linear(64, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[2]))
for step in range(3):
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step))
    for part in x.chunk(int(sys.argv[1])):
        (model(part).square().sum() / 256).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.long
def test_repeated_runs_bound_what_another_order_of_sums_does(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name, arguments, options in (
        ("old", ["1", "0.1"], ["--repeat", "4"]),
        ("new", ["4", "0.1"], []),
        ("wrong", ["4", "0.1001"], []),
    ):
        command = [sys.executable, "-c", ADDING, *arguments]
        assert main(["trace", str(tmp_path / name), *options, "--", *command]) == 0
    old, new, wrong = (str(tmp_path / name) for name in ("old", "new", "wrong"))
    capfd.readouterr()
    assert main(["compare", old, new]) == 0
    assert "have equal weights within what rounding does to the old script" in capfd.readouterr().out
    assert main(["compare", old, new, "--exactly"]) == 1 == main(["compare", old, wrong])
    assert "NOT the same training: old and new" in (out := capfd.readouterr().out)
    assert "before that: step 0: lr of group 0 0.1 -> 0.1001" in out


def test_a_command_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"got 'no-such-program x'; write, for example: fsshard trace a -- "):
        run(["no-such-program", "x"], tmp_path / "a")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--steps", "5"], "--steps '5': expected FIRST:STOP, for example 0:50"),
        (["--tensors", "often"], "--tensors 'often': expected every=N, for example every=100"),
    ],
)
def test_options_that_have_no_meaning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    assert main(["trace", str(tmp_path / "a"), *arguments, "--", sys.executable, "-c", ""]) == 2
    assert told in capsys.readouterr().err
