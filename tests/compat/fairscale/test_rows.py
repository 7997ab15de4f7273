"""The table of rows: every row is shown by a test, docs/fairscale.md has it, and a run that differs from it says so."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.compat.fairscale.row_table import BEGIN, END, MARK, PAGE, table, table_in, with_table
from tests.compat.fairscale.rows import ROWS

ROOT = Path(__file__).resolve().parents[3]


def marks_in(path: Path) -> list[int]:
    """The rows that a test file's marks name; parametrised or not, each once."""
    calls = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    marks = [call for call in calls if ast.unparse(call.func).endswith(f"mark.{MARK}")]
    return [ast.literal_eval(argument) for mark in marks for argument in mark.args]


def test_the_rows_are_all_there() -> None:
    assert list(ROWS) == list(range(1, 35))
    for row in ROWS.values():
        assert "|" not in row.fault + row.here and len(row.fault) < 100


def test_every_row_is_shown_by_a_test() -> None:
    shown = {number for path in (ROOT / "tests").rglob("test_*.py") for number in marks_in(path)}
    assert sorted(shown) == sorted(ROWS)


def test_the_page_has_the_table() -> None:
    """That its numbers are true is checked by every run of all marked tests, at its end."""
    found = table_in((ROOT / PAGE).read_text(encoding="utf-8"))
    assert found is not None, f"{PAGE} lacks the table; make rows"
    lines, expected = found.splitlines(), table({}).splitlines()
    assert lines[:2] == expected[:2]
    assert [line.rpartition(" | ")[0] for line in lines[2:]] == [line.rpartition(" | ")[0] for line in expected[2:]]
    assert all(int(line.split("|")[-2]) >= 1 for line in lines[2:])


@pytest.mark.parametrize(
    "text", ["", BEGIN, f"{END} {BEGIN}", f"{BEGIN} {BEGIN} {END}", f"{BEGIN} {END} {END}", f"{END} {BEGIN} {END}"]
)
def test_a_file_without_a_place_for_it(text: str) -> None:
    assert table_in(text) is None
    with pytest.raises(ValueError, match="once each and in this order"):
        with_table(text, "x")


def test_the_rest_of_the_file_stays() -> None:
    text = with_table(f"before\n{BEGIN}\nold\n{END}\nafter", "new")
    assert text == f"before\n{BEGIN}\n\nnew\n\n{END}\nafter" and table_in(text) == "new"
    assert with_table(text, "new") == text


# ---------------------------------------------------------------------------------- the plugin, in a small project

TESTS = """
import pytest
@pytest.mark.fairscale_row(1)
@pytest.mark.fairscale_row(2)
@pytest.mark.parametrize("x", [0, 1])
def test_two(x): assert True
@pytest.mark.fairscale_row(2, 33)
def test_three(): {last}
def test_other(): pass
"""


class Project:
    """Two files of marked tests and a page with a place for the table."""

    def __init__(self, pytester: pytest.Pytester) -> None:
        self.pytester = pytester
        pytester.makeini(f"[pytest]\ntestpaths = tests\nmarkers = {MARK}(number): a row")
        self.page = pytester.path / PAGE
        self.page.parent.mkdir()
        self.page.write_text(f"# Title\n{BEGIN}\n{END}\n")
        self.write("assert True")
        (pytester.path / "tests" / "more").mkdir()
        (pytester.path / "tests/more/test_more.py").write_text(
            "import pytest\n@pytest.mark.fairscale_row(34)\ndef test_more(): pass\n"
        )

    def write(self, last: str) -> None:
        folder = self.pytester.path / "tests"
        folder.mkdir(exist_ok=True)
        (folder / "test_rows.py").write_text(TESTS.format(last=last))

    def run(self, *arguments: str) -> tuple[int, str]:
        done = self.pytester.runpytest("-p", "tests.compat.fairscale.row_table", "-p", "no:cacheprovider", *arguments)
        return int(done.ret), f"{done.stdout}\n{done.stderr}"

    def counts(self) -> dict[int, str]:
        rows = (table_in(self.page.read_text()) or "").splitlines()[2:]
        return {int(row.split("|")[1]): row.split("|")[-2].strip() for row in rows if row.split("|")[-2].strip() != "0"}


@pytest.fixture
def project(pytester: pytest.Pytester) -> Project:
    return Project(pytester)


def test_by_the_mark_alone(project: Project) -> None:
    (project.pytester.path / "tests/test_speaks.py").write_text("def test(): assert 'pytest.mark.fairscale_row(1)'\n")
    assert project.run("-m", MARK, f"--fairscale-rows={PAGE}")[0] == 0
    assert project.run("-m", MARK)[0] == 0 and project.run()[0] == 0
    assert project.counts() == {1: "2", 2: "3", 33: "1", 34: "1"}


def test_written_and_then_held_to_it(project: Project) -> None:
    assert project.run()[0] == 1  # there is no table yet
    code, text = project.run("--fairscale-rows", PAGE)
    assert code == 0 and "wrote 34 rows, 4 tests, into fairscale.md" in text
    assert project.counts() == {1: "2", 2: "3", 33: "1", 34: "1"}
    assert project.run()[0] == 0
    for part in (("-k", "two"), ("tests/more",), ("tests/test_rows.py::test_three",)):
        project.page.write_text("# no table\n")
        assert project.run(*part)[0] == 0  # says nothing of all rows


def test_a_table_that_is_not_true_fails_a_run_of_all(project: Project) -> None:
    project.run("--fairscale-rows", PAGE)
    project.page.write_text(project.page.read_text().replace(" | 3 |", " | 4 |"))
    code, text = project.run()
    assert code == 1 and "fairscale.md: the table of FairScale's rows is not what this run makes; make rows" in text
    assert project.run("-k", "not other")[0] == 1  # all marked ones


@pytest.mark.parametrize("last", ["assert False", "pytest.skip('no fairscale')"])
def test_a_test_that_did_not_pass_writes_no_table(project: Project, last: str) -> None:
    project.run("--fairscale-rows", PAGE)
    before = project.page.read_text()
    project.write(last)
    code, text = project.run("--fairscale-rows", PAGE)
    assert code == 1 and "fairscale.md is left as it is: not all of the marked tests have passed" in text
    assert "test_rows.py::test_three" in text and project.page.read_text() == before
    assert project.run()[0] == ("False" in last)  # with a skipped one, a run says nothing of all rows


def test_a_part_writes_no_table(project: Project) -> None:
    code, text = project.run("--fairscale-rows", PAGE, "tests/more")
    assert code == 1 and "left as it is: not all of the marked tests were asked for" in text


def test_a_row_that_there_is_not(project: Project) -> None:
    project.write("pass\n@pytest.mark.fairscale_row(35)\ndef test_no_such(): pass")
    code, text = project.run()
    assert code == int(pytest.ExitCode.USAGE_ERROR) and "fairscale_row: there is no row 35" in text
