"""The interface of backends: how large it is, and that a backend is one class."""

from __future__ import annotations

from typing import Any

from torch import nn

import fsshard
from fsshard.backends import registry
from fsshard.backends.base import Backend

MEMBERS = 37
"""Of the interface, all that other rooms may know of an engine: what is added here is paid for by what goes."""


def job_members() -> list[str]:
    backend = fsshard.wrap(nn.Linear(2, 2), backend="none").backend
    told = {name for cls in Backend.__mro__ for name in vars(cls).get("__annotations__", {})}
    return sorted(name for name in {*dir(Backend), *vars(backend), *told} if not name.startswith("_"))


def test_the_interface_does_not_grow(ranks: Any) -> None:
    (members,) = ranks.run(job_members, 1)
    assert len(members) <= MEMBERS, members


def test_a_backend_is_one_class_in_one_file() -> None:
    for cls in registry.loaded_backends():
        own = [base for base in cls.__mro__ if issubclass(base, Backend) and base is not Backend]
        assert [base.__name__ for base in own[1:]] in ([], ["TorchShardedBackend"])
