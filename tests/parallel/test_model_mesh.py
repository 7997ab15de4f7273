"""Checks that what wrap is told of other mesh dimensions is understood, or refused with the words that help."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fsshard
from fsshard.complex_params.slots import ModuleTable
from fsshard.errors import ConfigurationError, RankMismatch
from fsshard.parallel.model_mesh import find_model_mesh
from tests.on_ranks import on_ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(4), nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.fc.weight


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"replicated": "norm"}, "expected a mapping from a parameter's name"),
    ({"replicated": {"nrom": "tp"}}, "fits no parameter; the model has norm.weight"),
    ({"replicated": {"(": "tp"}}, "no regular expression"),
    ({"replicated": {3: "tp"}}, "expected a name, a pattern, a module class, or "),
    ({"replicated": {"norm": 3}}, r'expected a mesh dimension such as mesh\["cp"\]'),
    ({"replicated": {"norm": ("tp", "max")}}, r'expected a mesh dimension such as mesh\["cp"\]'),
    ({"replicated": {"norm": "whole"}}, r'expected a mesh dimension such as mesh\["cp"\]'),
    ({"sharded": {"fc": ("tp", "0")}}, r'expected \(mesh\["tp"\], dim\)'),
    ({"sharded": {"fc.bias": ("tp", 1)}}, "'fc.bias' has 1 dimensions, and no dimension 1"),
    ({"replicated": {"norm": "tp"}, "sharded": {"norm.bias": ("tp", 0)}}, "is named twice for mesh dimension 'tp'"),
    ({"replicated": {"norm": "data"}}, "they must have this rank alone in common"),
]


@on_ranks(4)
def test_refused_on_every_rank() -> None:
    """Case by case what is said."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tp"))
    meshes = {"tp": mesh["tp"], "data": mesh["data"], "whole": mesh}

    def meant(value: Any) -> Any:
        if isinstance(value, tuple):
            return (meant(value[0]), value[1])
        if isinstance(value, dict):
            return {key: meant(item) for key, item in value.items()}
        return meshes.get(value, value) if isinstance(value, str) else value

    told = []
    for given, _ in REFUSED:
        with pytest.raises(ConfigurationError) as caught:
            fsshard.wrap(Net(), backend="ddp", device_mesh=mesh["data"], **meant(given))
        told.append(str(caught.value))
    for text, (_, words) in zip(told, REFUSED, strict=True):
        assert re.search(words, text), text


@on_ranks()
def test_understood() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tp"))
    net, data = ModuleTable(Net()), mesh["data"].get_group()
    assert find_model_mesh(net, data) is None
    said = find_model_mesh(net, data, {nn.LayerNorm: (mesh["tp"], "mean")}, {r"^fc\.weight": (mesh["tp"], -1)})
    assert said is not None and said.shape() == {"data": 1, "tp": 2} and said.divides
    assert said.group.size() == 2 and list(said.layouts) == ["norm.weight", "norm.bias", "fc.weight"]
    assert [layout.mean for layout in said.layouts["norm.bias"]] == [True]  # type: ignore[attr-defined]
    (split,) = said.layouts["fc.weight"]
    assert split.whole_shape(torch.Size([4, 4])) == (4, 8)
    # A tied parameter is one; a process group will do; a dimension of one rank is nothing.
    named = find_model_mesh(net, data, {r"^tied\.weight": mesh["tp"].get_group()}, {"bias": mesh["data"]})
    assert named is not None and list(named.layouts) == ["fc.weight"] and not named.divides
    none = find_model_mesh(net, data, {(): mesh["tp"]})
    assert none is not None and none.shape() == {"data": 1, "tp": 2} and not none.layouts
    empty = find_model_mesh(net, data, {})
    assert empty is not None and empty.axes == () and empty.group is data


@on_ranks(4)
def test_a_dimension_that_is_named_nowhere() -> None:
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("data", "cp", "tp"))
    said = {"norm": mesh["tp"]}
    with pytest.raises(ConfigurationError, match=r"mesh \(data=1, cp=2, tp=2\): dimension 'cp' is not named"):
        fsshard.wrap(Net(), backend="ddp", device_mesh=mesh["data"], replicated=said)
    torch.manual_seed(0)
    fsshard.wrap(Net(), backend="ddp", device_mesh=mesh["data"], replicated={**said, (): mesh["cp"]})
    # Ranks of another stage have another model, and replicas of the data are no dimension of the model.
    for names in (("data", "pp", "tp"), ("pp", "dp_replicate", "tp")):
        other = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=names)
        torch.manual_seed(0)
        fsshard.wrap(Net(), backend="ddp", device_mesh=other[names[0]], replicated={"norm": other["tp"]})


@on_ranks(4)
def test_some_ranks_of_data_say_nothing() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tp"))
    said = {"norm": mesh["tp"]} if mesh["data"].get_local_rank() else None
    with pytest.raises(RankMismatch) as raised:
        fsshard.wrap(Net(), backend="ddp", device_mesh=mesh["data"], replicated=said)
    error = raised.value
    assert "1 of the 2 data-parallel ranks passed replicated=" in str(error), error


@on_ranks()
def test_ranks_that_say_different_things() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tp"))
    torch.manual_seed(0)
    said = {"norm": mesh["tp"]} if dist.get_rank() else {"norm": (mesh["tp"], "mean")}
    with pytest.raises(RankMismatch) as raised:
        fsshard.wrap(Net(), backend="ddp", device_mesh=mesh["data"], replicated=said)
    assert "replicated= and sharded= differ" in str(raised.value)
