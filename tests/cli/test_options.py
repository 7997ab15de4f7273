"""Options that several commands have: what they take, and one line for what they do not."""

from __future__ import annotations

import pytest

from fsshard.cli.options import backend_names, meshes, naming_recipe, world_sizes
from fsshard.errors import ConfigurationError


def test_lists_are_split_stripped_and_told_apart() -> None:
    assert backend_names(" fsdp2, ddp,") == ["fsdp2", "ddp"]
    assert world_sizes(["1,2", "2", "8 "]) == [1, 2, 8]


def test_sizes_that_are_none() -> None:
    for text in ("", "0", "two", "1,-2", "1.5", "²"):
        with pytest.raises(ConfigurationError, match="expected positive whole numbers"):
            world_sizes([text])


def test_meshes() -> None:
    assert meshes([]) == []
    assert meshes(["data=2, tp=2,", "data=4"]) == [{"data": 2, "tp": 2}, {"data": 4}]
    for text in ["", "data", "=2", "data=", "data=two", "data=-1", "2x2"]:
        with pytest.raises(ConfigurationError, match="expected names and sizes, for example --mesh data=2,tp=2"):
            meshes([text])
    with pytest.raises(ConfigurationError, match="named twice"):
        meshes(["data=2,data=2"])


def test_an_error_names_its_recipe_once() -> None:
    assert naming_recipe("a:b", ValueError("too few")) == "a:b: too few"
    assert naming_recipe("a:b", ValueError("a:b is no recipe")) == "a:b is no recipe"
    assert naming_recipe("a:b", KeyboardInterrupt()) == "a:b: interrupted"
    assert naming_recipe("a:b", ValueError()) == "a:b: ValueError"
