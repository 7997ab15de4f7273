"""The parts of which a backend's interface is made."""

from __future__ import annotations

import inspect

from fsshard.backends import registry
from fsshard.backends.base import Backend
from fsshard.backends.engine_state import EngineState

MOST = 15


def public(cls: type) -> list[str]:
    """What a part asks or offers: its own functions and properties without an underscore."""
    kinds = (property, classmethod)
    return [
        name
        for name, value in vars(cls).items()
        if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, kinds))
    ]


def test_no_part_is_large() -> None:
    parts = [cls for cls in Backend.__mro__ if issubclass(cls, EngineState)]
    assert len(parts) == 8
    assert {cls.__name__: len(public(cls)) for cls in parts if len(public(cls)) > MOST} == {}


def test_each_method_is_in_one_part() -> None:
    parts = [cls for cls in Backend.__mro__ if issubclass(cls, EngineState)]
    names = [name for cls in parts for name in public(cls)]
    assert len(names) == len(set(names)) > 40


def test_a_backend_is_one_class_in_one_file() -> None:
    for cls in registry.loaded_backends():
        own = [base for base in cls.__mro__ if issubclass(base, Backend) and base is not Backend]
        assert [base.__name__ for base in own[1:]] in ([], ["TorchShardedBackend"])
