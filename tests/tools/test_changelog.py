"""A release needs a section of the changelog that is not longer than a page."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import changelog

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("lines", "told"), [(0, "got 0 under 'Unreleased'"), (61, "got 61 under 'Unreleased'")])
def test_one_that_does_not_is_refused(tmp_path: Path, lines: int, told: str) -> None:
    file = tmp_path / "CHANGELOG.md"
    old = "## 0.1.0\n" + "- old\n" * 100
    file.write_text("# Changelog\n\n## Unreleased\n\n" + "- new\n" * lines + old)
    with pytest.raises(SystemExit, match=told):
        changelog.main(file)


def test_a_release_asks_first() -> None:
    recipe = (ROOT / "Makefile").read_text().partition("\nrelease:\n")[2]
    assert recipe.lstrip().startswith("$(PYTHON) -m tools.changelog\n")
