"""Which tests a command runs: those marked long later, and of those marked covering a few rows at once."""

from __future__ import annotations

import re

import pytest

TESTS = """
import pytest

@pytest.mark.covering
@pytest.mark.parametrize("engine", ["ddp", "fsdp", "fsdp2"])
@pytest.mark.parametrize("size", [2, 3])
def test_covering(engine, size):
    assert (engine, size) != ("ddp", 3), "one of those that come later"

@pytest.mark.long
def test_long():
    pass

def test_other():
    pass
"""


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeini("[pytest]\nmarkers =\n    covering\n    long\n")
    pytester.makeconftest('pytest_plugins = ["tests.sets"]')
    pytester.makepyfile(TESTS)
    return pytester


def test_each_value_occurs_at_every_commit_and_the_rest_is_said_to_come_later(project: pytest.Pytester) -> None:
    found = project.runpytest_inprocess("-v", "--strict-markers")
    found.assert_outcomes(passed=4, deselected=4)
    ran = set(re.findall(r"test_covering\[(\S+)\] PASSED", str(found.stdout)))
    assert {part for name in ran for part in name.split("-")} == {"2", "3", "ddp", "fsdp", "fsdp2"} and len(ran) == 3
    found.stdout.fnmatch_lines("4 long tests were left out: make test-all runs them")


def test_all_of_them_and_one_that_is_asked_for_by_name(project: pytest.Pytester) -> None:
    project.runpytest_inprocess("--long").assert_outcomes(passed=7, failed=1)
    (file,) = project.path.glob("test_*.py")
    asked = project.runpytest_inprocess(f"{file.name}::test_covering[3-ddp]")
    asked.assert_outcomes(failed=1)
