"""The small repository with a parity suite: it passes, and it fails when it must."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from fsshard.launching.pool import RankPool
from fsshard.parity import ParityReport

ROOT = Path(__file__).resolve().parents[2]
REPOSITORY = ROOT / "examples" / "parity_ci"


def lend(pytester: pytest.Pytester, ranks: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pytester's tests, which run in this process, have the ranks of this session."""
    pytester.makeconftest(
        """
        import pytest, fsshard_pytest
        @pytest.fixture(scope="session")
        def _fsshard_ranks(): return fsshard_pytest.lent
        """
    )
    monkeypatch.setattr(sys.modules["fsshard_pytest"], "lent", ranks, raising=False)


@pytest.fixture
def copy(pytester: pytest.Pytester, ranks: RankPool, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy to change, which pytester runs in this process and on the pool of this session."""
    shutil.copytree(
        REPOSITORY, pytester.path, ignore=shutil.ignore_patterns("__pycache__", ".*_cache"), dirs_exist_ok=True
    )
    lend(pytester, ranks, monkeypatch)
    ranks.run(forget_the_last_copy, 2)
    return pytester.path


def forget_the_last_copy() -> None:
    for name in ("model", "test_parity"):
        sys.modules.pop(name, None)


def changed(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert text.count(old) == 1, f"{file.name} has {text.count(old)} of {old!r}"
    file.write_text(text.replace(old, new))


def test_the_suite_is_three_lines_and_passes(copy: Path, pytester: pytest.Pytester, tmp_path: Path) -> None:
    lines = [line for line in (REPOSITORY / "test_parity.py").read_text().splitlines() if line.strip()]
    assert len(lines) == 3
    assert all(line in (REPOSITORY / "README.md").read_text() for line in lines)
    result = pytester.runpytest_inprocess("--fsshard-parity-json", str(tmp_path / "reports"))
    result.assert_outcomes(passed=1)
    told = "\n".join(result.outlines)
    assert "test_parity.py::test_parity: fairscale exact, fsdp exact, fsdp2 exact (2 ranks)" in told
    (file,) = (tmp_path / "reports").iterdir()
    report = ParityReport.from_json(file.read_text())
    assert report.recipe == "recipe" and report.steps == 5 and report["fsdp2", 2].verdict == "exact"


def test_an_engine_that_trains_otherwise_fails_where_it_does(copy: Path, pytester: pytest.Pytester) -> None:
    """A loss that asks for the engine: the planted fault that a recipe can hold."""
    changed(
        copy / "model.py",
        "    return (model(before) - after).square().mean()",
        '    other = getattr(model, "backend", None) is not None and model.backend.name == "fsdp2"\n'
        "    return (model(before) - after).square().mean() * (1.5 if other else 1.0)",
    )
    result = pytester.runpytest_inprocess("--tb=short")
    result.assert_outcomes(failed=1)
    told = "\n".join(result.outlines)
    assert "fairscale exact, fsdp exact, fsdp2 different (2 ranks)" in told
    assert "step 0, loss, rank 0" in told
