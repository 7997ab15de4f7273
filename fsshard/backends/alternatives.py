"""What the other engines offer, for errors that say which one could do what this one cannot."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from fsshard.errors import UnsupportedByBackend

__all__ = ["ask_for_backends", "no_offload", "who_has_option", "who_has_strategy"]

_known_backends: Callable[[], Iterable[Any]] = tuple  # of classes of backends


def ask_for_backends(source: Callable[[], Iterable[Any]]) -> None:
    """Let ``source`` say which backends there are; it is asked only where an error is to name some."""
    global _known_backends
    _known_backends = source


def who_has_option(name: str) -> list[str]:
    """Return the names of the backends whose engines have an option."""
    return [backend.name for backend in _known_backends() if name in backend.facts.option_names]


def who_has_strategy(strategy: str) -> str:
    """Who has a sharding strategy, and what each has, in words."""
    backends = list(_known_backends())
    several = (backend for backend in backends if not backend.facts.one_process)
    has = [repr(backend.name) for backend in several if strategy in backend.facts.strategies]
    use = f"use backend={' or '.join(reversed(has))}" if has else "the nearest is 'HYBRID_SHARD' of 'fsdp2' and 'fsdp'"
    each = "; ".join(f"{backend.name} {', '.join(backend.facts.strategies)}" for backend in backends)
    return f"{use}, or leave it out, and each backend takes its own. They have: {each}"


def no_offload(backend: str) -> UnsupportedByBackend:
    """Return what is raised where a backend cannot keep shards in host memory."""
    return UnsupportedByBackend("cpu_offload=True", backend, "use backend='fsdp2' or 'fsdp' on a GPU")
