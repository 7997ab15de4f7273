"""Ten migration guides: the answers on the page are those that the command gives, and each script is short."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from tests.parity.page import part_of

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "migrations"
PAGE = (ROOT / "docs" / "data" / "migration.md").read_text(encoding="utf-8")
LONGEST = 60


def load() -> Any:
    spec = importlib.util.spec_from_file_location("run_migrations", FOLDER / "run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


run = load()


def without_numbers(text: str) -> str:
    """Return an answer without what another machine computes otherwise in its last digits, and says of itself."""
    lines = [line for line in text.splitlines() if not line.startswith("environment: ")]
    return re.sub(r"\(off .*?\)|[\d.]+e-\d+|\d+\.\d+|threads \d+", "", "\n".join(lines))


@pytest.mark.long
@pytest.mark.parametrize("name", run.PAIRS)
def test_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    if name == "torchrun":  # it is about the threads that torch takes if nobody says how many, as tests do
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    found = run.answers(name, tmp_path)
    assert without_numbers(part_of(PAGE, name) or "") == without_numbers(run.block(found))
    assert without_numbers(run.row(name, found)) in without_numbers(PAGE).splitlines()
    assert found[-1]["ok"], "as the guide says, or mended, it is the same training"


def test_scripts_are_short_and_know_nothing_of_fsshard() -> None:
    files = {f"{name}_{side}.py" for name in run.PAIRS for side in ("before", "after")}
    assert {file.name for file in FOLDER.glob("*.py")} == {*files, "task.py", "run.py"}
    for file in files:
        text = (FOLDER / file).read_text(encoding="utf-8")
        assert len(text.splitlines()) <= LONGEST and "fsshard" not in text, file


def test_a_page_that_is_written(tmp_path: Path) -> None:
    """Other rows and answers stay as they are."""
    page = tmp_path / "page.md"
    page.write_text(PAGE, encoding="utf-8")
    run.write(page, "zero", [{"text": "another answer", "verdict": "bound"}])
    text = page.read_text(encoding="utf-8")
    assert part_of(text, "zero") == "```console\nanother answer\n```"
    assert text.count("zero_after.py) | the same, within") == 1
    changed = [line for line in text.splitlines() if line not in PAGE.splitlines()]
    assert len(changed) == 2 and changed[1] == "another answer"


def test_each_pair_has_a_row_and_an_answer() -> None:
    for name, pair in run.PAIRS.items():
        answer = part_of(PAGE, name) or ""
        assert answer.count("$ fsshard compare") == 1 + run.is_mended(name), name
        assert (
            f"| [{pair.guide}]({pair.url}) | [before](../../examples/migrations/{name}_before.py)" in PAGE
            and f"## {pair.guide}" in PAGE
        ), name
