"""Lightning's own tests as judges of our strategies: ``make judges``, or ``python -m tests.compat.judges.run``.

``FSSHARD_LIGHTNING_CHECKOUT`` names a checkout of Lightning's repository at the version that is installed. Its tests
run once with Lightning's own DDPStrategy wherever :mod:`.lightning` puts one, one CPU included, and once per engine.
A test judges us if it makes such a strategy and passes with Lightning's own: so tests that need a GPU, a network, a
package that is not installed, or a strategy without processes drop out by themselves.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
VARIABLE = "FSSHARD_LIGHTNING_CHECKOUT"
ENGINES = ("fsdp2", "ddp")

TESTS = (
    "tests_fabric/strategies/test_ddp_integration.py",
    "tests_fabric/test_fabric.py",
    "tests_pytorch/strategies/test_ddp_integration.py",
    "tests_pytorch/callbacks",
    "tests_pytorch/checkpointing",
    "tests_pytorch/models/test_hooks.py",
    "tests_pytorch/models/test_restore.py",
    "tests_pytorch/trainer/optimization",
)
LEFT_OUT = {
    "tests_pytorch/callbacks/progress": "progress bars",
    "tests_pytorch/callbacks/test_pruning.py": "torch's pruning puts parameters in the place of parameters",
    "tests_pytorch/callbacks/test_spike.py": "its module assigns weight.data in training_step",
}
"""Part of the tests -> why it is not run."""

REASONS = (
    ("has put under an engine", "another Trainer fits or tests the module again"),
    ("a Trainer over fsshard fits once", "the same Trainer fits again"),
    ("under FSDPModule already", "the same model is set up twice"),
    ("cannot be copied or pickled", "the Trainer or module is copied or pickled after fit()"),
    ("a loss is computed with", "reads a weight outside of the forward, where a rank has a part"),
    ("this rank's part of the weights", "asks the module, not the Trainer, for a state dict"),
    ("configure_optimizers gave no optimizer", "trains without an optimizer"),
    ("StochasticWeightAveraging:", "stochastic weight averaging of parts"),
    ("past the engine", "manual optimization that calls layers past forward"),
    ("toggle_optimizer", "toggle_optimizer"),
    ("object layout differs", "torch's fully_shard takes no subclass of typing.Generic"),
    ("_MagicMock", "counts calls of a mock in the place of torch's optimizer, DDP or scheduler"),
    ("Mock name=", "counts calls of a mock in the place of torch's optimizer, DDP or scheduler"),
    ("expected call not found", "counts calls of a mock in the place of torch's optimizer, DDP or scheduler"),
    ("an LR scheduler is attached", "counts calls of a mock in the place of torch's optimizer, DDP or scheduler"),
)
"""Words of what a test failed with -> what it asks for that we do not give. The first that fits counts."""


def reason(failure: str) -> str:
    """Why a test fails, in a few words; for one that the table lacks, its own last line."""
    found = next((why for words, why in REASONS if words in failure), None)
    return found or next((line for line in failure.splitlines() if line.strip()), "nothing told")[:150]


def outcomes(checkout: Path, engine: str, tests: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Run the tests.

    Args:
        checkout: Lightning's repository.
        engine: what is put in; ``"theirs"``: Lightning's own DDPStrategy.
        tests: pytest's arguments.

    Returns:
        Test -> what :class:`.record.Record` writes.
    """
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder, "record")
        record.touch()
        given = {"FSSHARD_JUDGED": engine, "FSSHARD_JUDGED_RECORD": str(record)}
        given["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(checkout / "tests"), os.environ.get("PYTHONPATH", "")])
        plugins = ("no:cacheprovider", "no:fsshard", "tests.compat.judges.lightning")
        command = [sys.executable, "-m", "pytest", "-q", "--continue-on-collection-errors", "--tb=no"]
        command += [*(word for name in plugins for word in ("-p", name)), *tests]
        command += [f"--ignore={path}" for path in LEFT_OUT]
        subprocess.run(command, cwd=checkout / "tests", env={**os.environ, **given}, check=False)
        return {line["test"]: line for line in map(json.loads, record.read_text().splitlines())}


def table(theirs: Mapping[str, Mapping[str, Any]], ours: Mapping[str, Mapping[str, Any]], engine: str) -> list[str]:
    """Lines of Markdown: how many tests judge an engine, how many pass, and why the others do not."""
    judges = [name for name, line in theirs.items() if line["used"] and line["outcome"] == "passed" and name in ours]
    failed = Counter(reason(ours[name]["why"]) for name in judges if ours[name]["outcome"] != "passed")
    lines = [
        f"`{engine}`: {len(judges) - failed.total()} of {len(judges)} pass",
        "",
        "| why not | tests |",
        "|---|---|",
    ]
    return lines + [f"| {why} | {count} |" for why, count in failed.most_common()]


def main(tests: Sequence[str]) -> int:
    """Print a table for each engine, or why there is none."""
    if not os.environ.get(VARIABLE):
        print(f"skipped: {VARIABLE} names no checkout of Lightning's repository, whose tests would run here")
        return 0
    checkout = Path(os.environ[VARIABLE]).resolve()
    theirs = outcomes(checkout, "theirs", tests)
    for engine in ENGINES:
        ours = outcomes(checkout, engine, tests)
        for name, line in ours.items():
            if line["outcome"] == "failed" and theirs.get(name, {}).get("outcome") == "passed":
                print(f"{engine}: {name}: {reason(line['why'])}")
        print("\n".join(["", *table(theirs, ours, engine), ""]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:] or TESTS))
