"""JSON out of a file that somebody else may have written."""

from __future__ import annotations

import json

import pytest

from fsshard.checkpoint.format.strict_json import MAX_DIGITS, parse
from fsshard.errors import CorruptCheckpoint


def test_what_is_sound_is_read_as_json_reads_it() -> None:
    value = {"a": [1, -2.5, None, True, 'quo"te', "back\\slash", "[{"], "b": {"c": {}}}
    assert parse(json.dumps(value).encode(), "it", max_depth=3) == value


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a": 1, "a": 2}', "the key 'a' stands twice"),
        ("NaN", "NaN is no JSON number"),
        ("[-Infinity]", "-Infinity is no JSON number"),
        ("1e999", "out of range"),
        ("1" * (MAX_DIGITS + 1), f"an integer of {MAX_DIGITS + 1} digits"),
        ("[[[[1]]]]", "nested deeper than 3"),
        ("{", "not valid JSON"),
        ("\xff", "not valid JSON"),
        ("\0", "holds zeros at byte 0"),
    ],
)
def test_anything_else_is_one_kind_of_error(text: str, said: str) -> None:
    with pytest.raises(CorruptCheckpoint, match=said) as raised:
        parse(text.encode("latin-1"), "the index", max_depth=3)
    assert str(raised.value).startswith("the index: ")


def test_brackets_within_strings_do_not_nest() -> None:
    assert parse(b'["[[[[[[", "a\\"[[[["]', "it", max_depth=1) == ["[[[[[[", 'a"[[[[']
