"""``fsshard parity --golden``: exit codes, and what goes to which stream."""

from __future__ import annotations

import json
import sys
import types
from dataclasses import dataclass
from typing import Any

import pytest

from fsshard.cli import app as cli
from fsshard.errors import RankFailed


def run(*arguments: str) -> int:
    return cli.main(["parity", "--golden", *arguments])


@dataclass
class Golden:
    name: str
    ok: bool
    verdict: str = "equal"
    text: str = ""
    equal: bool = True


@pytest.mark.parametrize(("oks", "code"), [((True, True), 0), ((True, False), 1), ((), 1)])
def test_golden(oks: tuple[bool, ...], code: int, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    results = [
        Golden(f"run{i}", ok, "equal" if ok else "different", "" if ok else "step 3") for i, ok in enumerate(oks)
    ]
    module = types.ModuleType("fsshard.parity.golden")
    module.check = lambda backend, timeout, progress: results  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fsshard.parity.golden", module)
    assert run("--backends", "ddp") == code
    expected = [
        "run0 under ddp: equal",
        "run1 under ddp: equal" if code == 0 else "run1 under ddp: different: step 3",
    ]
    assert capfd.readouterr().out.splitlines() == expected[: len(oks)]
    assert run("--json", "-", "--backends", "ddp") == code
    assert [(r["backend"], r["ok"]) for r in json.loads(capfd.readouterr().out)] == [("ddp", ok) for ok in oks]


def test_golden_runs_of_one_backend_that_fail_leave_the_others(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    asked: list[tuple[str, float]] = []

    def check(backend: str, timeout: float, progress: Any) -> list[Golden]:
        asked.append((backend, timeout))
        if backend == "fsdp":
            raise RankFailed(1, "ValueError", "broken", "Traceback of rank 1")
        return [Golden("run0", True)]

    module = types.ModuleType("fsshard.parity.golden")
    module.check = check  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fsshard.parity.golden", module)
    assert run("--backends", "ddp,fsdp,fsdp2", "--timeout", "9", "--json", "-") == 1
    out, err = capfd.readouterr()
    assert asked == [("ddp", 9.0), ("fsdp", 9.0), ("fsdp2", 9.0)]
    assert err.splitlines() == [
        "run0 under ddp: equal",
        "fsshard: golden runs under fsdp: rank 1 failed with ValueError: broken",
        "run0 under fsdp2: equal",
    ]
    assert [entry["ok"] for entry in json.loads(out)] == [True, False, True]
    assert json.loads(out)[1]["error"] == "rank 1 failed with ValueError: broken"
