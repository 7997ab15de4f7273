"""Digests of parts of a file: what counts, and what does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.torch_sources import Part, parts_of

SOURCE = '''"""A module."""
import functools
LIMIT: int = 3

@functools.cache
def reduce(x, dtype=None):
    """Reduces."""
    # in what dtype
    return x.to(dtype or "bf16")

class Unit:
    """A unit."""
    size = 1

    def gather(self):
        self._whole = f"{self.size:>{LIMIT}}"
        return self._whole

    @property
    def grad(self):
        return self._grad

    @grad.setter
    def grad(self, value):
        self._grad = value

if LIMIT:
    def late(): return ("only",)
else:
    def late(): return None
'''


def parts(text: str, folder: Path) -> dict[str, Part]:
    path = folder / "made_up.py"
    path.write_text(text)
    return parts_of(path)


def digests(text: str, folder: Path) -> dict[str, str]:
    return {name: part.digest for name, part in parts(text, folder).items()}


def test_a_file_is_cut_into_functions_methods_variables_and_what_classes_have_beside(tmp_path: Path) -> None:
    found = parts(SOURCE, tmp_path)
    assert list(found) == ["LIMIT", "Unit", "Unit.gather", "Unit.grad", "late", "reduce"]
    lines = {name: part.lines for name, part in found.items()}
    assert lines["reduce"] == "5-9" and lines["Unit"] == "11, 13"
    assert lines["Unit.grad"] == "19-21, 23-25" and lines["late"] == "28, 30"
    assert "_whole" in found["Unit.gather"].mentioned and "_whole" not in found["Unit"].mentioned
    assert "bf16" in found["reduce"].mentioned, "strings are names for getattr"


SAME = [
    ("# in what dtype", ""),
    ('"""Reduces."""', '"""Reduces a\n    gradient."""'),
    ('x.to(dtype or "bf16")', "(x.to(\n        (dtype or 'bf16'),\n    ))"),
    ("x, dtype=None", "x: object, dtype: str | None=None,"),
    ("def gather(self):", "def gather(\n        self,\n    ) -> str:"),
    ("LIMIT: int = 3", "LIMIT: float = 3"),
    ("@functools.cache\n", "@overload\ndef reduce(x: int) -> int: ...\n@functools.cache\n"),
    ("def late(): return None", "def late():\n\n        return None  # nothing"),
]
OTHERS = [
    ('dtype or "bf16"', 'dtype or "fp32"', "reduce"),
    ("dtype=None", "dtype=0", "reduce"),
    ("@functools.cache\n", "", "reduce"),
    ("int = 3", "int = 4", "LIMIT"),
    ("size = 1", "size = 2", "Unit"),
    ("class Unit:", "class Unit(dict):", "Unit"),
    ("self.size:>", "self.size:<", "Unit.gather"),
    ("self._grad = value", "self._grad = -value", "Unit.grad"),
    ('("only",)', '("only")', "late"),
]


@pytest.mark.parametrize(("before", "after", "changed"), [*((a, b, None) for a, b in SAME), *OTHERS])
def test_what_a_program_does_counts_for_its_part_and_formatting_does_not(
    before: str, after: str, changed: str | None, tmp_path: Path
) -> None:
    assert before in SOURCE
    was, now = digests(SOURCE, tmp_path), digests(SOURCE.replace(before, after), tmp_path)
    assert [name for name in was if was[name] != now[name]] == [changed] * (changed is not None)


def test_digests_are_the_same_under_every_python(tmp_path: Path) -> None:
    """The numbers are those of Python 3.10, 3.11, 3.12 and 3.13."""
    found = digests(SOURCE, tmp_path)
    assert found["Unit.gather"] == "78bb35c476" and found["late"] == "6839521751" and found["reduce"] == "9c7c4172fd"
