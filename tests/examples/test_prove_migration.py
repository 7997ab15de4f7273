"""The example of a proven migration: its commands, its workflow and its test."""

from __future__ import annotations

import importlib
import runpy
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

import fsshard
from fsshard.parity.scripts.recorder import Settings

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "prove_migration"


@pytest.fixture
def copy(pytester: pytest.Pytester) -> Path:
    """A copy to change."""
    shutil.copytree(EXAMPLE, pytester.path, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    return pytester.path


@pytest.mark.long  # tests/parity/scripts compares these engines at every commit, in ranks that are there already
def test_the_scripts_train_the_same(copy: Path, pytester: pytest.Pytester) -> None:
    """Real torchrun, raw DDP and raw FSDP2; and they train another way where one is changed."""
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(passed=1)
    sentence = "0-old_train and 1-new_train on 2 ranks have equal weights to the last bit, 6 parameters in 20 steps."
    result.stdout.fnmatch_lines([f"test_migration.py::test_migration: The same training: {sentence}"])
    assert sentence.partition(" have ")[2] in (EXAMPLE / "README.md").read_text()


def run_here(command: Sequence[str], folder: Path, settings: Settings) -> int:
    """Run a script as torchrun's only rank, in this process: the long test above has torchrun's own."""
    with fsshard.trace(folder, steps=slice(settings.first, settings.last)):
        runpy.run_path(command[-1])
    return 0


def test_a_difference_is_the_text_of_the_failure(
    copy: Path, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fsshard.parity.scripts.command.run", run_here)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    text = (copy / "new_train.py").read_text()
    (copy / "new_train.py").write_text(text.replace("T_max=20", "T_max=10"))
    test = (copy / "test_migration.py").read_text()
    (copy / "test_migration.py").write_text(test.replace("world_size=2", "world_size=1, steps=3"))
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(failed=1)
    told = "\n".join(result.outlines)
    assert "NOT the same training: 0-old_train and 1-new_train on 1 rank part at step 1, weight of 0.weight" in told
    assert "before that: step 1: lr of group 0 0.0099" in told and "Traceback" not in told


def test_the_workflow_runs_the_commands_of_the_page() -> None:
    workflow = (EXAMPLE / ".github" / "workflows" / "migration.yml").read_text()
    readme = (EXAMPLE / "README.md").read_text()
    commands = [line for line in readme.splitlines() if line.startswith("fsshard ")]
    assert len(commands) == 3 and all(command in workflow for command in commands)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("scripts='old.py'", "expects two paths, scripts=['old_train.py', 'new_train.py'], got 'old.py'"),
        ("scripts=['a', 'b'], backends=['ddp']", "does not know backends beside scripts; it takes scripts, world_size"),
        ("scripts=['nowhere.py', 'b'], world_size=1", "nowhere.py ended with exit code 3"),
    ],
)
def test_arguments_that_have_no_meaning(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, arguments: str, told: str
) -> None:
    # Not by its path: a run of pytest within another leaves packages with modules that are imported anew.
    monkeypatch.setattr(importlib.import_module("fsshard.parity.scripts.command"), "run", lambda *_: 3)
    pytester.makepyfile(f"import pytest\n@pytest.mark.fsshard_parity({arguments})\ndef test_it(): pass\n")
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(failed=1)
    assert told in "\n".join(result.outlines)
