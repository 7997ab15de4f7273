"""Reads JSON from untrusted files: ambiguous, non-finite or endlessly nested input is refused."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from fsshard.errors import CorruptCheckpoint

__all__ = ["MAX_DIGITS", "parse"]

MAX_DIGITS = 1000
"""Digits that an integer in a tree can have; Python refuses to read many more."""


def parse(data: bytes | bytearray, where: str) -> Any:
    """The value of UTF-8 JSON; no duplicated keys, no NaN or infinity, nested no deeper than Python takes.

    Args:
        data: the text.
        where: what it is, for messages.

    Raises:
        CorruptCheckpoint: it is anything else; no other exception comes out.
    """
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_object, parse_constant=_constant, parse_float=_float)
    except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise CorruptCheckpoint(f"{where}: not valid JSON: {error}") from None


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
