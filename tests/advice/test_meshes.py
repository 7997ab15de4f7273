"""The advice of fsshard/parallel and of engines about meshes, followed."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fsshard
from tests.advice.following import DIVIDED, cases, plain, refuse, refused, right


def mesh_of(*shape: int, names: tuple[str, ...] | None = None) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def case_replicas_and_shards() -> None:
    two, turned = mesh_of(1, 2, names=("replicate", "shard")), mesh_of(1, 2, names=("shard", "replicate"))
    replicas, world = mesh_of(2, 1, names=("replicate", "shard")), dist.group.WORLD
    given = "pass device_mesh=init_device_mesh(device, (replicas, shards))"
    told = (
        ("leave device_mesh out where these are all ranks, else pass process_group=", "ddp", {"device_mesh": two}),
        ("make it with mesh_dim_names=(", "fsdp2", {"device_mesh": turned}),
        ("use backend='ddp', without a mesh", "fairscale", {"device_mesh": replicas}),
        (f"for replicas and shards {given}", "fsdp2", {"process_group": (world, world)}),
        (
            "or leave it out, with a mesh of replicas and shards",
            "fsdp",
            {"sharding_strategy": "FULL_SHARD", "device_mesh": two},
        ),
        *((given, backend, {"sharding_strategy": "HYBRID_SHARD"}) for backend in DIVIDED),
    )
    for advice, backend, settings in told:
        refuse(advice, backend=backend, **settings)
    right(backend="ddp", process_group=dist.new_group([0, 1]))
    for backend in (*DIVIDED, "fairscale"):
        right(backend=backend, device_mesh=two)
    right(backend="fsdp2", sharding_strategy="HYBRID_SHARD", device_mesh=mesh_of(1, 2))
    right(backend="fairscale", implementation="real", device_mesh=two)


def case_names_of_dimensions() -> None:
    named = mesh_of(1, 2, names=("a", "b"))
    advice = "this is intended, name its dimensions mesh_dim_names=('replicate', 'shard')"
    for mesh, warned in ((named, True), (mesh_of(1, 2, names=("dp_replicate", "dp_shard")), False)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fsshard.wrap(plain(), backend="fsdp2", device_mesh=mesh)
        said = [advice in str(w.message) for w in caught]
        assert any(said) == (warned and dist.get_rank() == 0)  # which speaks for all
    fsshard.wrap(plain(), backend="fsdp2", device_mesh=named["a"], replicated={})
    for names, slice_of in (
        (None, "mesh['data'], once the mesh has mesh_dim_names="),
        (("a", "b", "c"), "mesh['a']"),
        (("dp_replicate", "dp_shard", "tp"), "mesh['dp_replicate', 'dp_shard']"),
    ):
        mesh = mesh_of(1, 2, 1, names=names)
        refuse(f"pass device_mesh={slice_of}", backend="fsdp2", device_mesh=mesh)
    right(backend="fsdp2", device_mesh=mesh["dp_replicate", "dp_shard"])
    with refused("pass a 1-D slice such as mesh['a'], or name the dimensions (data, replicate, shard; tp, cp, pp"):
        fsshard.data_rank(mesh_of(2, 1, names=("a", "tp")))
    assert fsshard.data_rank(mesh_of(2, 1, names=("a", "tp"))["a"]).size == 2
    assert fsshard.data_rank(mesh_of(2, 1, names=("data", "tp"))).size == 2


@pytest.mark.parametrize("case", cases(globals()), ids=lambda case: case.__name__)
def test_advice_is_right(ranks: Any, case: Any) -> None:
    ranks.run(case, 2)
