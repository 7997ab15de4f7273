"""Writes what `make gpu` found to the files that FSSHARD_GPU_REPORT names: with .json and .md at the end."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fsshard.launching.pool import RankPool

_found: list[dict[str, Any]] = []


@pytest.fixture(scope="session")
def gpus() -> Iterator[RankPool]:
    """Ranks over nccl, with a GPU for each."""
    with RankPool(device="cuda") as pool:
        yield pool


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if "tests/gpu/" in report.nodeid and (report.when == "call" or not report.passed):
        why = report.longrepr[2] if report.skipped and isinstance(report.longrepr, tuple) else report.longreprtext
        _found.append(
            {
                "test": report.nodeid.partition("tests/gpu/")[2],
                "outcome": report.outcome,
                "seconds": round(report.duration, 2),
                "figures": dict(report.user_properties),
                "why": "" if report.passed else str(why)[-2000:],
            }
        )


def pytest_sessionfinish() -> None:
    name = os.environ.get("FSSHARD_GPU_REPORT")
    if name and _found:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(f"{name}.json").write_text(json.dumps({"machine": _machine(), "tests": _found}, indent=1) + "\n")
        Path(f"{name}.md").write_text(_page(_machine()))


def _machine() -> dict[str, str]:
    """Describe the machine, without names of hosts or users."""
    cuda = torch.cuda.is_available()
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split("\n")[0]
    except (OSError, subprocess.CalledProcessError):
        driver = "unknown"
    return {
        "devices": ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())) if cuda else "",
        "driver": driver,
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else "",
    }


def _page(machine: dict[str, str]) -> str:
    lines = ["# What `make gpu` found", "", *(f"* {name}: {value}" for name, value in machine.items()), ""]
    lines += ["| test | outcome | seconds | figures |", "|---|---|---|---|"]
    for one in _found:
        figures = "; ".join(f"{name}: {value}" for name, value in one["figures"].items())
        said = figures if one["outcome"] == "passed" else one["why"].strip().split("\n")[-1].replace("|", "/")
        lines.append(f"| {one['test']} | {one['outcome']} | {one['seconds']} | {said} |")
    return "\n".join(lines) + "\n"
