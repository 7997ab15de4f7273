"""Batches as people write them."""

from __future__ import annotations

import dataclasses
import types
from collections import OrderedDict, UserDict, defaultdict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from fsshard.nested import is_array, leaves, map_containers, map_leaves


class Named(NamedTuple):
    a: Any
    b: Any


@dataclasses.dataclass
class Data:
    a: Any
    made: int = dataclasses.field(init=False, default=7)


@pytest.mark.parametrize(
    "value",
    [
        {"a": 1, "b": [2, 3]},
        OrderedDict(b=1, a=2),
        defaultdict(list, a=1),
        UserDict(a=1),
        Named(1, (2, 3)),
        Data({"x": [1]}),
        [1, [2, (3,)]],
        5,
    ],
)
def test_structure_and_types_are_kept(value: Any) -> None:
    doubled = map_leaves(lambda one, other: one + other, value, value)
    assert type(doubled) is type(value)
    assert doubled == map_leaves(lambda leaf: 2 * leaf, value)
    assert map_leaves(lambda leaf: leaf, value) == value
    assert next(leaves(doubled)) == 2 * next(leaves(value))


def test_a_mapping_that_cannot_be_written_becomes_a_dict() -> None:
    assert map_leaves(lambda leaf: leaf + 1, types.MappingProxyType({"a": 1})) == {"a": 2}


def test_what_holds_samples() -> None:
    assert is_array(torch.zeros(3))
    assert is_array(np.zeros(3))
    assert not is_array(torch.tensor(1.0))
    assert not is_array([1, 2])


def test_what_is_looked_into_and_what_stays_as_it_is() -> None:
    given = {"plain": [1, (2,)], "mapping": UserDict(a=3), "fields": Data({"x": 4})}

    def minus(leaf: Any) -> Any:
        return -leaf if isinstance(leaf, int) else leaf

    found = {within: map_containers(minus, given, within) for within in ("plain", "fsdp2", "all")}
    assert all(each["plain"] == [-1, (-2,)] for each in found.values())
    assert found["plain"]["fields"] is given["fields"] and found["fsdp2"]["fields"].made == -7
    assert found["fsdp2"]["mapping"] is given["mapping"] and found["all"]["mapping"] == {"a": -3}
    assert map_containers(lambda leaf: leaf, given, "fsdp2") is given
    assert map_containers(lambda leaf: leaf, given, "plain")["plain"] is not given["plain"]
