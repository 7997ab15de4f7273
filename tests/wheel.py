"""Runs README's code and commands with the installed wheel, outside of this checkout, as a user does.

    make wheel TORCH=2.15.0
    python -m tests.wheel build/wheel/fsshard-*.whl .venv-2.15.0-wheel/bin    # Python alone, without any package

The second argument is the folder of the programs of an environment into which the wheel was installed, with the extras
``cli``, ``neuralop`` and ``plot``, pytest and scipy, and nothing of this checkout.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

from tests.documents import ROOT, blocks, commands, training

LOADS = """\
import fsshard, torch
from neuralop.models import TFNO

model = fsshard.wrap(TFNO(n_modes=(8, 8), in_channels=1, out_channels=1, hidden_channels=16), backend="none")
fsshard.load("ckpt/last", model)
assert any(weight.is_complex() for weight in model.state_dict().values())
assert "site-packages" in fsshard.__file__, fsshard.__file__
print("loaded by one process with torch", torch.__version__, "and", fsshard.__file__)
"""
"""One process reads what README's training has saved."""


def missing(distribution: Path) -> list[str]:
    """Files that git knows and a distribution has not: of the packages for a wheel, all for a source distribution."""
    if distribution.suffix == ".whl":
        listed = _known_to_git("fsshard", "compat", "fsshard_pytest.py")
        wanted = {f"fsshard/{name}" if name.startswith("compat/") else name for name in listed}
        with zipfile.ZipFile(distribution) as packed:
            return sorted(wanted - {*packed.namelist()})
    with tarfile.open(distribution) as packed_files:
        return sorted({*_known_to_git()} - {name.partition("/")[2] for name in packed_files.getnames()})


def _known_to_git(*paths: str) -> list[str]:
    command = ["git", "-C", str(ROOT), "ls-files", *paths]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def write(folder: Path) -> None:
    """README's files, as a user has them: a training, a test of its recipe, and the examples beside them."""
    (folder / "train.py").write_text(training())
    (folder / "load.py").write_text(LOADS)
    shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    (test,) = (block for block in blocks(ROOT / "README.md", "python") if "fsshard_parity" in block)
    (folder / "proof").mkdir()
    (folder / "proof" / "test_train.py").write_text(test)
    (folder / "proof" / "train.py").write_text("from fsshard.recipes import tfno as recipe\n")


def steps() -> list[str]:
    """Return what is run there, in order."""
    return [
        "python train.py",
        "python load.py",
        *commands(),
        "python -m pytest -q proof",
        "python -m fsshard.compat examples/fairscale_oss.py --epochs 1 --n-train 100",
    ]


def run(command: str, folder: Path, programs: Path) -> int:
    """Run a command with the programs of an environment, and nothing of the one that runs this; its exit code."""
    program, *words = shlex.split(command)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    variables = {**kept, "PATH": f"{programs}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    print(f"$ {command}", flush=True)
    begin = time.monotonic()
    code = subprocess.run([programs / program, *words], cwd=folder, env=variables).returncode
    print(f"-> {code}, {time.monotonic() - begin:.0f} s\n", flush=True)
    return code


def main(given: Sequence[str]) -> int:
    """0 only where the wheel is whole and every command succeeds; after ``--whole``, where all files are whole."""
    if given[0] == "--whole":
        lacking = {name: missing(Path(name)) for name in given[1:]}
        print("\n".join(f"{name}: {f'lacks {lacks}' if lacks else 'whole'}" for name, lacks in lacking.items()))
        return int(any(lacking.values()))
    wheel, programs = (Path(name).resolve() for name in given)
    absent = missing(wheel)
    print(f"{wheel.name}: {f'lacks {absent}' if absent else 'has every file of the packages'}\n", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        failed = [command for command in steps() if run(command, Path(folder), programs)]
    print(f"failed: {failed}" if failed or absent else f"{len(steps())} commands, all well")
    return int(bool(failed or absent))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
