"""benchmarks/run_all.py with benchmarks that do nothing, and what all benchmarks have in common."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest

from benchmarks import page, run_all
from benchmarks.run_all import BENCHMARKS, ROOT, Benchmark

COMMANDS = {
    path.name: ast.parse(path.read_text())
    for path in sorted((ROOT / "benchmarks").glob("*.py"))
    if "ArgumentParser(" in path.read_text()
}
"""Files that can be run -> their syntax trees."""

FAKES = {
    "table": "print('2 ranks'); print('| a | b |'); print('|---|---|'); print('| 1 | 2 |'); print(); print('kept')",
    "places": "import os, sys; print(os.getcwd() + '/x', sys.prefix, 'end')",
    "crash": "print('| a |'); print('|---|', flush=True); raise RuntimeError('no luck in ' + __file__)",
    "missed": "import sys; print('| a |'); print('|---|'); print(); print('target missed'); sys.exit(1)",
}


@pytest.fixture
def fakes(tmp_path: Path) -> dict[str, Benchmark]:
    """One benchmark for each of :data:`FAKES`."""
    for name, source in FAKES.items():
        (tmp_path / f"{name}.py").write_text(source)
    return {
        name: Benchmark(name=name, title=f"Title of {name}", command=f"{name}.py", shows=f"What {name} shows.")
        for name in FAKES
    }


def run(fakes: dict[str, Benchmark], names: list[str], every: list[str], root: Path) -> tuple[int, str]:
    """The exit code and the page."""
    path = root / "docs" / "benchmarks.md"
    code = run_all.run_all([fakes[name] for name in names], [fakes[name] for name in every], path, root)
    assert [each.name for each in path.parent.iterdir()] == [path.name], "nothing else may be left beside the page"
    return code, path.read_text()


def test_page(fakes: dict[str, Benchmark], tmp_path: Path) -> None:
    code, text = run(fakes, ["table", "places"], ["table", "places"], tmp_path)
    assert code == 0
    assert text.startswith("# Benchmarks\n") and page.machine() in text and page.versions() in text
    assert "## Title of table\n\nWhat table shows.\n\n`python table.py` (" in text
    assert text.count(f", {page.processor()})\n") == 2, "each section names its CPU"
    assert "```\n2 ranks\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n```\nkept\n```" in text
    assert text.index("## Title of table") < text.index("## Title of places")
    assert "./x <venv> end" in text and str(tmp_path) not in text and str(Path.home()) + "/" not in text


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("crash", "**failed**: `exit code 1: RuntimeError: no luck in ./crash.py`"),
        ("missed", "**failed**: `exit code 1: target missed`"),
    ],
)
def test_failure_is_told_and_the_rest_runs(
    fakes: dict[str, Benchmark], tmp_path: Path, name: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = run(fakes, [name, "table"], [name, "table"], tmp_path)
    assert code == 1 and said in text and "kept" in text
    assert "| a |\n|---|" in text.split("## Title of table")[0]
    assert f"failed: {name}" in capsys.readouterr().out


def test_the_list_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_all.main(["--list"]) == 0
    shown = capsys.readouterr().out
    assert all(benchmark.command in shown for benchmark in BENCHMARKS)
    assert sum(benchmark.minutes for benchmark in BENCHMARKS) <= 46
    assert len({benchmark.name for benchmark in BENCHMARKS}) == len(BENCHMARKS)


def options(tree: ast.Module) -> set[str]:
    """The options that a file's parser takes."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    adding = [call for call in calls if call.func.attr == "add_argument"]  # type: ignore[attr-defined]
    return {call.args[0].value for call in adding if isinstance(call.args[0], ast.Constant)}  # type: ignore[misc]


@pytest.mark.parametrize("name", list(COMMANDS))
def test_docstring_has_the_command(name: str) -> None:
    docstring = ast.get_docstring(COMMANDS[name]) or ""
    assert f"\n    python benchmarks/{name}" in docstring
    assert set(re.findall(r"--[a-z0-9-]+", docstring)) <= options(COMMANDS[name]) | {"--fast"}


@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda benchmark: benchmark.name)
def test_commands_are_understood(benchmark: Benchmark) -> None:
    file, *rest = shlex.split(benchmark.command)
    given = {word for word in rest if word.startswith("--")}
    assert given <= options(COMMANDS[file.removeprefix("benchmarks/")])


def test_all_are_run() -> None:
    ran = {benchmark.command.split()[0].removeprefix("benchmarks/") for benchmark in BENCHMARKS}
    assert ran == set(COMMANDS) - {"run_all.py"}
