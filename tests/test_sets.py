"""Which tests a command runs: those marked long later, and of those marked covering a few rows at once."""

from __future__ import annotations

import itertools
import re

import pytest

from tests.parity import matrix
from tests.sets import often

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
    found.stdout.fnmatch_lines("4 long tests were left out: make test-all runs them, or pytest --long")


def test_pairs_and_engines_that_are_not_alike() -> None:
    pairs = matrix.fewest([*itertools.product("ft", repeat=5)], 2)
    assert len(pairs) < 10 and {(a, b) for row in pairs for a, b in itertools.combinations(enumerate(row), 2)} == {
        ((i, a), (j, b)) for i, j in itertools.combinations(range(5), 2) for a in "ft" for b in "ft"
    }
    assert all(a != b for a, b in matrix.fewest([*itertools.product("abcd", repeat=2)]))
    with pytest.raises(ValueError, match=r"are none of \['ddp', 'fsdp'\]"):
        often(["ddp", "fsdp"], "fdsp")


def test_all_of_them_and_one_that_is_asked_for_by_name(project: pytest.Pytester) -> None:
    project.runpytest_inprocess("--long").assert_outcomes(passed=7, failed=1)
    (file,) = project.path.glob("test_*.py")
    project.runpytest_inprocess(f"{file.name}::test_long").assert_outcomes(passed=1)
