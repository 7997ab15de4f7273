"""Tests whose body runs on ranks: an assertion that fails on one of them fails the test, with that rank's traceback."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import pytest

from tests.training_runs import ranks_of

if TYPE_CHECKING:
    from fsshard.launching.pool import RankPool


def on_ranks(world_size: int | Callable[[str], int] = 2) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test of a module's function that every rank of the session's pool runs, with the test's parameters.

    Args:
        world_size: how many ranks, or a function of the test's parameter ``backend`` that says so; a parameter of the
            test with the name ``world_size`` comes before it.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(ranks: RankPool, **parameters: Any) -> None:
            size = parameters.get("world_size", world_size)
            if callable(size):
                size = size(parameters["backend"])
            ranks.run(_run, size, body.__module__, body.__name__, parameters)

        ranks = inspect.Parameter("ranks", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = inspect.Signature([ranks, *inspect.signature(body).parameters.values()])  # type: ignore[attr-defined]
        return test

    return decorate


def on_backends(backends: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test with a parameter ``backend`` of a module's function that ranks run, under each of these."""
    return lambda body: pytest.mark.parametrize("backend", list(backends))(on_ranks(ranks_of)(body))


def _run(module: str, name: str, parameters: dict[str, Any]) -> None:
    """Run the body of a test on this rank."""
    getattr(importlib.import_module(module), name).__wrapped__(**parameters)
