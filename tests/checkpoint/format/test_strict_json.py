"""JSON out of a file that somebody else may have written."""

from __future__ import annotations

import json

import pytest

from fsshard.checkpoint.format.strict_json import parse
from fsshard.errors import CorruptCheckpoint


def test_what_is_sound_is_read_as_json_reads_it() -> None:
    value = {"a": [1, -2.5, None, True, 'quo"te', "back\\slash", "[{"], "b": {"c": {}}}
    assert parse(json.dumps(value).encode(), "it") == value


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a": 1, "a": 2}', "the key 'a' stands twice"),
        ("NaN", "NaN is no JSON number"),
        ("[-Infinity]", "-Infinity is no JSON number"),
        ("1e999", "out of range"),
        ("1" * 5000, "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("{", "not valid JSON"),
        ("\xff", "not valid JSON"),
        ("\0", "not valid JSON"),
    ],
)
def test_anything_else_is_one_kind_of_error(text: str, said: str) -> None:
    with pytest.raises(CorruptCheckpoint, match=said) as raised:
        parse(text.encode("latin-1"), "the index")
    assert str(raised.value).startswith("the index: ")
