"""Reads JSON from untrusted files: ambiguous, non-finite or endlessly nested input is refused."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

import numpy as np

from fsshard.errors import CorruptCheckpoint

__all__ = ["MAX_DIGITS", "parse"]

MAX_DIGITS = 1000
"""Digits that an integer can have; Python 3.10 takes quadratic time for more than it is given."""

_NOT_STRUCTURE = bytes(set(range(256)) - set(b'"[]{}'))


def parse(data: bytes | bytearray, where: str, *, max_depth: int) -> Any:
    """The value of UTF-8 JSON; no duplicated keys, no NaN or infinity, no deeper than ``max_depth``.

    Args:
        data: the text.
        where: what it is, for messages.
        max_depth: containers within containers.

    Raises:
        CorruptCheckpoint: it is anything else; no other exception comes out.
    """
    if 0 in data:  # a file with holes can claim any size without having it
        raise CorruptCheckpoint(f"{where}: holds zeros at byte {data.index(0)}; it is not text")
    # json raises RecursionError for deep text, but overflows the C stack where a user has raised the limit.
    if _depth(data) > max_depth:
        raise CorruptCheckpoint(f"{where}: JSON nested deeper than {max_depth}")
    try:
        return json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_object,
            parse_constant=_constant,
            parse_float=_float,
            parse_int=_int,
        )
    except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise CorruptCheckpoint(f"{where}: not valid JSON: {error}") from None


def _depth(data: bytes | bytearray) -> int:
    """How deep brackets nest up to the first error of syntax; linear in time and memory."""
    if b"\\" in data:
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    text = np.frombuffer(data.translate(None, _NOT_STRUCTURE), dtype=np.uint8)
    inside = np.cumsum(text == ord('"'), dtype=np.uint8) & 1  # of a string; a count of quotes modulo 256 will do
    opens = (text == ord("[")) | (text == ord("{"))
    closes = (text == ord("]")) | (text == ord("}"))
    steps = (opens.view(np.int8) - closes.view(np.int8)) * (inside == 0)
    return int(np.cumsum(steps, dtype=np.int32).max(initial=0))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice!r} stands twice")
    return found


def _constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON number")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:20]}... is out of range")
    return value


def _int(text: str) -> int:
    if len(text.lstrip("-")) > MAX_DIGITS:
        raise ValueError(f"an integer of {len(text)} digits")
    return int(text)
