"""Helpers for the tests of all fronts: the engines, how refusals travel from ranks, how results are compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

ENGINES = ("ddp", "fsdp", "fsdp2", "fairscale")
HALVES = [ENGINES[2:], pytest.param(ENGINES[:2], marks=pytest.mark.long)]
"""fsdp2 and fairscale at every commit, ddp and fsdp with the long tests."""


def told(attempt: Callable[[], Any]) -> str:
    """Return the type and the text of the error that ``attempt`` raises."""
    try:
        attempt()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def refusals(tried: Mapping[str, Callable[[], Any]]) -> dict[str, str]:
    """Return what each attempt is told."""
    return {name: told(attempt) for name, attempt in tried.items()}


def begin_with(answers: list[dict[str, str]], words: Mapping[str, str]) -> None:
    """Assert that on every rank each answer begins with its words."""
    for answer in answers:
        assert {name: answer[name][: len(text)] for name, text in words.items()} == words


def same_tensors(ours: Mapping[str, Any], theirs: Mapping[str, Any], what: object) -> None:
    """Assert that both have the same tensors, in the same order, to the last bit."""
    assert list(ours) == list(theirs), what
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), (what, name)
