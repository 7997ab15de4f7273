"""Other libraries' own tests as judges of what stands in front of them: ``make judges``.

An environment variable names a checkout of a library's repository (:data:`FRONTS`). Its tests run once with the
library's own in the place that a plugin here gives it, and once per engine. A test judges us if it passes with the
library's own, and with ours makes an engine, or fails: so tests that need a GPU, a network, a package that is not
installed, or another version of the library drop out by themselves.

``python -m tests.compat.judges.run Accelerate tests/test_accelerator.py``: one library, and pytest's arguments.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
ENGINES = ("fsdp2", "ddp")
PYTEST = f"import sys; sys.path[0] = {str(ROOT)!r}; import pytest; sys.exit(pytest.main(sys.argv[1:]))"
"""In a checkout that has a package named ``tests``, too: the first one is ours."""


ONE_RANK = {
    "ACCELERATE_USE_CPU": "yes",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
    "RANK": "0",
    "WORLD_SIZE": "1",
}
"""In which Accelerate, and Hugging Face's Trainer over it, put a model under DDP."""


@dataclass(frozen=True)
class Front:
    """Another library in front of which we stand.

    Attributes:
        library: its name.
        variable: of the environment: where a checkout of its repository is.
        plugin: the module here that puts ours into its tests.
        runs: parts of the tests, each with what the environment of their process has.
        folder: of the checkout, where pytest runs.
        left_out: part of the tests -> why it is not run.
    """

    library: str
    variable: str
    plugin: str
    runs: tuple[tuple[tuple[str, ...], Mapping[str, str]], ...]
    folder: str = "."
    left_out: Mapping[str, str] = field(default_factory=dict)


def files(folder: str, names: str) -> tuple[str, ...]:
    return tuple(f"{folder}/test_{name}.py" for name in names.split())


LIGHTNING = Front(
    library="Lightning",
    variable="FSSHARD_LIGHTNING_CHECKOUT",
    plugin="tests.compat.judges.lightning",
    runs=(
        (
            (
                *("tests_fabric/strategies/test_ddp_integration.py", "tests_fabric/test_fabric.py"),
                *("tests_pytorch/strategies/test_ddp_integration.py", "tests_pytorch/trainer/optimization"),
                *("tests_pytorch/callbacks", "tests_pytorch/checkpointing"),
                *files("tests_pytorch/models", "hooks restore"),
            ),
            {},
        ),
    ),
    folder="tests",
    left_out={
        "tests_pytorch/callbacks/progress": "progress bars",
        "tests_pytorch/callbacks/test_pruning.py": "torch's pruning puts parameters in the place of parameters",
        "tests_pytorch/callbacks/test_spike.py": "its module assigns weight.data in training_step",
    },
)
TRAINER = "trainer trainer_callback trainer_jit_checkpoint trainer_seq2seq trainer_utils"
TRANSFORMERS = Front(
    library="transformers",
    variable="FSSHARD_TRANSFORMERS_CHECKOUT",
    plugin="tests.compat.judges.hugging_face",
    # A test that would download asks five times without the last of these.
    runs=((files("tests/trainer", TRAINER), {**ONE_RANK, "HF_HUB_OFFLINE": "1"}),),
)
ACCELERATE = Front(
    library="Accelerate",
    variable="FSSHARD_ACCELERATE_CHECKOUT",
    plugin="tests.compat.judges.hugging_face",
    runs=(
        (files("tests", "accelerator compile kwargs_handlers optimizer state_checkpointing"), ONE_RANK),
        (files("tests", "cpu grad_sync metrics scheduler"), {}),  # two ranks, forked from a process without a group
    ),
)
FRONTS = (LIGHTNING, TRANSFORMERS, ACCELERATE)


def outcomes(front: Front, checkout: Path, engine: str, tests: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """Run the tests.

    Args:
        front: whose.
        checkout: the library's repository.
        engine: what is put in; ``"theirs"``: the library's own, with DDP where it takes it.
        tests: of those that run, the ones to run, as pytest names them; none: all.

    Returns:
        Test -> what :class:`.record.Record` writes.
    """
    found = {}
    for paths, environment in front.runs:
        chosen = [test for test in tests if test.split("::")[0].startswith(paths)] if tests else list(paths)
        if chosen:
            found |= _outcomes(front, checkout, chosen, {**environment, "FSSHARD_JUDGED": engine})
    return found


def _outcomes(
    front: Front, checkout: Path, tests: Sequence[str], environment: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    folder = checkout / front.folder
    with tempfile.TemporaryDirectory() as temporary:
        record = Path(temporary, "record")
        record.touch()
        given = {"FSSHARD_JUDGED_RECORD": str(record), "FSSHARD_JUDGED_CHECKOUT": str(checkout)}
        given["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
        plugins = ("no:cacheprovider", "no:fsshard", front.plugin)
        command = [sys.executable, "-c", PYTEST, "-q", "--continue-on-collection-errors", "--tb=no"]
        command += [*(word for name in plugins for word in ("-p", name)), *tests]
        command += [f"--ignore={path}" for path in front.left_out]
        subprocess.run(command, cwd=folder, env={**os.environ, **environment, **given}, check=False)
        return {line["test"]: line for line in map(json.loads, record.read_text().splitlines())}


def reason(failure: str) -> str:
    """Return the first line of what a test failed with."""
    return next((line for line in failure.splitlines() if line.strip()), "nothing told")[:150]


def table(
    front: Front, theirs: Mapping[str, Mapping[str, Any]], ours: Mapping[str, Mapping[str, Any]], engine: str
) -> list[str]:
    """Lines of Markdown: how many tests judge an engine, how many pass, and why the others do not."""
    judges = [
        name
        for name, line in theirs.items()
        if line["outcome"] == "passed" and name in ours
        if ours[name]["used"] or ours[name]["outcome"] == "failed"
    ]
    failed = Counter(reason(ours[name]["why"]) for name in judges if ours[name]["outcome"] != "passed")
    lines = [
        f"{front.library}, `{engine}`: {len(judges) - failed.total()} of {len(judges)} pass",
        "",
        "| why not | tests |",
        "|---|---|",
    ]
    return lines + [f"| {why} | {count} |" for why, count in failed.most_common()]


def judge(front: Front, tests: Sequence[str] = ()) -> None:
    """Print a table for each engine, or why there is none."""
    if not os.environ.get(front.variable):
        print(f"skipped: {front.variable} names no checkout of {front.library}'s repository, whose tests would run")
        return
    checkout = Path(os.environ[front.variable]).resolve()
    theirs = outcomes(front, checkout, "theirs", tests)
    for engine in ENGINES:
        ours = outcomes(front, checkout, engine, tests)
        for name, line in ours.items():
            if line["outcome"] == "failed" and theirs.get(name, {}).get("outcome") == "passed":
                print(f"{engine}: {name}: {reason(line['why'])}")
        print("\n".join(["", *table(front, theirs, ours, engine), ""]))


def main(given: Sequence[str]) -> int:
    """Every library's, or those of one."""
    for front in FRONTS:
        if not given or given[0] == front.library:
            judge(front, given[1:])
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
