"""The example that trains an FNO with a Muon per mode: it prints both errors, and engines give the same ones."""

from __future__ import annotations

import contextlib
import io
import os
import re
from pathlib import Path
from typing import Any

import pytest

import fsshard
from fsshard.launching.pool import RankPool


def job_train(cache: str) -> list[Any]:
    os.environ["XDG_CACHE_HOME"] = cache
    from examples.muon_per_mode import parse, train

    found = []
    for backend in ("ddp", "fsdp2"):
        with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(io.StringIO()):
            sizes = ["--n-train", "16", "--n-test", "4", "--batch-size", "8", "--epochs", "1"]
            found.append([train(fsshard.init(), parse(["--backend", backend, *sizes])), printed.getvalue()])
    return found


def test_both_errors_are_told(ranks: RankPool, cache: Path) -> None:
    pytest.importorskip("neuralop")
    (ddp, fsdp2), other = ranks.run(job_train, 2, str(cache))
    errors, printed = ddp
    assert fsdp2 == ddp and other[0][0] == errors
    assert set(errors) == {"AdamW", "Muon per mode"}
    assert errors["AdamW"][16] != errors["Muon per mode"][16]
    assert all(0 < error < 2 for of_sizes in errors.values() for error in of_sizes.values())
    assert re.findall(r"^(.*): relative L2 error [\d.]+% at 16 x 16, [\d.]+% at 32 x 32$", printed, re.M) == list(
        errors
    )
