"""A backend is one class."""

from __future__ import annotations

from fsshard.backends import registry
from fsshard.backends.base import Backend


def test_a_backend_is_one_class_in_one_file() -> None:
    for cls in registry.loaded_backends():
        own = [base for base in cls.__mro__ if issubclass(base, Backend) and base is not Backend]
        assert [base.__name__ for base in own[1:]] in ([], ["TorchShardedBackend"])
