"""Which samples a rank is to see, and that ranks with one number are those that share them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fsshard
from fsshard.errors import ConfigurationError
from tests.on_ranks import on_ranks

Shape, Names = tuple[int, ...], tuple[str, ...]


def job_ranks(cases: list[tuple[Shape, Names | None, Any]]) -> list[tuple[int, int]]:
    found = []
    for shape, names, part in cases:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        found.append(tuple(fsshard.data_rank(mesh if part is None else mesh[part])))
    return [*found, tuple(fsshard.data_rank())]  # type: ignore[list-item]


WHERE: dict[str, tuple[Shape, Names | None, Any, list[int], int]] = {
    "a slice": ((2, 2), ("data", "tp"), "data", [0, 0, 1, 1], 2),
    "a slice of any name": ((2, 2), ("mine", "tp"), "mine", [0, 0, 1, 1], 2),
    "a mesh of one dimension": ((4,), None, None, [0, 1, 2, 3], 4),
    "data first": ((2, 2), ("data", "tp"), None, [0, 0, 1, 1], 2),
    "data last": ((2, 2), ("cp", "data"), None, [0, 1, 0, 1], 2),
    "replicas and shards": ((2, 2), ("replicate", "shard"), None, [0, 1, 2, 3], 4),
    "around another": ((2, 1, 2), ("dp_replicate", "tp", "dp_shard"), None, [0, 1, 2, 3], 4),
    "one of three": ((1, 2, 2), ("data", "cp", "tp"), None, [0, 0, 0, 0], 1),
    "domains": ((2, 2), ("DP", "domain"), None, [0, 0, 1, 1], 2),
}


def test_numbers_of_the_ranks(ranks: Any) -> None:
    answers = ranks.run(job_ranks, 4, [(shape, names, part) for shape, names, part, _, _ in WHERE.values()])
    for index, (case, (*_, expected, size)) in enumerate(WHERE.items()):
        assert [answer[index] for answer in answers] == [(rank, size) for rank in expected], case
    assert [answer[-1] for answer in answers] == [(rank, 4) for rank in range(4)]


def test_without_ranks() -> None:
    assert fsshard.data_rank() == (0, 1)


@pytest.mark.parametrize(
    ("shape", "names", "part", "text"),
    [
        ((1, 2), None, None, "a mesh (1, 2): nothing says whether"),
        ((1, 2), ("a", "tp"), None, "'a' does not say whether"),
        ((1, 2), ("data", "b"), None, "'b' does not say whether"),
        ((1, 2), ("cp", "tp"), None, "no dimension's name says whether"),
        ((1, 2), ("data", "tp"), "tp", "pass a 1-D slice such as mesh['data']"),
        ((1, 2), ("dp_replicate", "dp_shard_cp"), None, "along 'dp_shard_cp' ranks hold other shards"),
        ((1, 2), None, "elsewhere", "is not in a mesh (data=1, tp=1)"),
    ],
)
@on_ranks()
def test_what_cannot_be_told_is_refused(shape: Shape, names: Names | None, part: Any, text: str) -> None:
    if part == "elsewhere":
        other = dist.get_rank() ^ 1
        mesh = DeviceMesh("cpu", [[other]], mesh_dim_names=("data", "tp"), _init_backend=False)
    else:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    with pytest.raises(ConfigurationError, match=re.escape(text)):
        fsshard.data_rank(mesh if part in (None, "elsewhere") else mesh[part])


def test_what_is_no_mesh() -> None:
    with pytest.raises(ConfigurationError, match="expected a DeviceMesh"):
        fsshard.data_rank(3)
