"""Names of backends: who has one, what may have one, and what becomes of one in other processes."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch

from fsshard import backends
from fsshard.backends import Backend, backend_class, backend_names, register_backend, registry
from fsshard.backends.none import SingleBackend
from fsshard.errors import ConfigurationError, UnknownBackend
from fsshard.launching import supervisor

OURS = ["none", "ddp", "fsdp", "fsdp2", "fairscale"]
SIXTH = "tests.backends.a_sixth_backend"
PATH = f"{SIXTH}:HandAveraged"


@pytest.fixture(autouse=True)
def nothing_stays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget after each test what it has registered."""
    monkeypatch.setattr(registry, "_paths", dict(registry._OURS))
    monkeypatch.setattr(registry, "_classes", {n: c for n, c in registry._classes.items() if n in registry._OURS})
    registry._entry_points.cache_clear()
    sys.modules.pop(SIXTH, None)
    with mock.patch.dict(supervisor.handed, clear=True):
        yield
    registry._entry_points.cache_clear()


@pytest.fixture
def sixth() -> Any:
    return importlib.import_module(SIXTH).HandAveraged


def test_ours_are_listed_under_the_names_that_they_have() -> None:
    assert backend_names() == OURS
    assert [backend_class(name).name for name in OURS] == OURS
    assert {cls.name for cls in registry.loaded_backends()} == set(OURS)
    assert backend_class("auto", 1).name == "none" and backend_class("auto", 2).name == "fsdp2"


def test_a_name_that_nobody_has() -> None:
    for name in ("fsdp3", None, ["ddp"]):
        with pytest.raises(UnknownBackend, match="none, ddp, fsdp, fsdp2, fairscale"):
            backend_class(name)


def test_public_names_are_pinned() -> None:
    assert backends.__all__ == [
        "Backend",
        "EngineFacts",
        "Settings",
        "backend_class",
        "backend_names",
        "register_backend",
    ]


def test_models_that_our_engines_have_wrapped_are_known_without_them() -> None:
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.nn.parallel import DistributedDataParallel

    from fsshard.oss.sharded_ddp import ShardedDataParallel

    kinds = (DistributedDataParallel, FullyShardedDataParallel, FSDPModule, ShardedDataParallel)
    assert {kind.__name__ for kind in kinds} == registry.wrapper_classes()


@pytest.mark.parametrize("name", [None, "", "auto", "my engine", "a:b", 7])
def test_a_name_that_has_no_meaning(name: Any) -> None:
    with pytest.raises(ConfigurationError, match="expected letters, digits and underscores, which users write in"):
        register_backend(type("Mine", (SingleBackend,), {"name": name}))


def test_what_is_no_backend() -> None:
    with pytest.raises(ConfigurationError, match="takes a subclass"):
        register_backend(torch.nn.Linear)  # type: ignore[type-var]
    with pytest.raises(ConfigurationError, match="takes a subclass"):
        backend_class("torch.nn:Linear")


def test_two_classes_of_one_name(sixth: type[Backend]) -> None:
    class Other(SingleBackend):
        name: ClassVar[str] = "by_hand"

    class Ours(SingleBackend):
        name: ClassVar[str] = "ddp"

    for cls in (Other, Ours):
        with pytest.raises(ConfigurationError, match=r"give .* another name"):
            register_backend(cls)
    assert backend_class("by_hand") is sixth and register_backend(sixth) is sixth


def test_a_class_is_found_by_its_path_too() -> None:
    assert PATH not in backend_names() and "by_hand" not in backend_names()
    found = backend_class(PATH)
    assert found.name == "by_hand" and backend_class("by_hand") is found and "by_hand" in backend_names()
    for path in ("tests.backends.a_seventh:Mine", f"{SIXTH}:Mine"):
        with pytest.raises(ConfigurationError, match=r"cannot be imported here \((ModuleNotFound|Attribute)Error"):
            backend_class(path)


def test_an_installed_package_brings_one(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    installed = [
        EntryPoint("by_hand", PATH, registry.GROUP),
        EntryPoint("ddp", PATH, registry.GROUP),
        EntryPoint("renamed", PATH, registry.GROUP),
    ]
    monkeypatch.setattr(registry.metadata, "entry_points", lambda *, group: installed)
    assert backend_names() == [*OURS, "by_hand", "renamed"] and SIXTH not in sys.modules
    assert "two packages have a backend 'ddp'" in caplog.text
    assert backend_class("by_hand").__qualname__ == "HandAveraged"
    with pytest.raises(ConfigurationError, match="whose name is 'by_hand'"):
        backend_class("renamed")


def test_other_processes_are_told_where_it_is(sixth: type[Backend]) -> None:
    ((take, told),) = supervisor.handed.values()
    assert told == (("by_hand", PATH),)
    registry._paths.pop("by_hand"), registry._classes.pop("by_hand"), supervisor.handed.clear()
    supervisor.take_over(((take, told),))
    assert backend_class("by_hand").name == "by_hand" and [*supervisor.handed.values()] == [(take, told)]
    supervisor.take_over(((take, ()),))  # as a pool's ranks are told by the next job, when it is gone
    assert "by_hand" not in backend_names() and [*supervisor.handed.values()] == [(take, ())]


def test_the_readme_has_a_row_for_each() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r'^\| `"(\w+)"` \|', readme, re.MULTILINE)) == sorted(OURS)
