"""Every engine takes its way through ``device="cuda"``, on a machine without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.stub_cuda import build, why_not

if reason := why_not():
    pytest.skip(reason, allow_module_level=True)

from tests.stub_cuda.paths import CASES


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """All of them in one process: torch takes longer to import than they take."""
    environment = build(tmp_path_factory.mktemp("stub")) | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.stub_cuda.paths"]
    ran = subprocess.run(
        command, env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("case", CASES)
def test_a_path_through_cuda(outcomes: dict[str, str], case: str) -> None:
    assert outcomes[case] == ""
