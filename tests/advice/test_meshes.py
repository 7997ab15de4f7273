"""The advice of fsshard/parallel and of engines about meshes, followed."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fsshard
from tests.advice.following import DIVIDED, cases, is_trained, plain, refuse, refused, right, square, train


def mesh_of(*shape: int, names: tuple[str, ...] | None = None) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def case_replicas_and_shards() -> None:
    two, turned = mesh_of(1, 2, names=("replicate", "shard")), mesh_of(1, 2, names=("shard", "replicate"))
    replicas, world = mesh_of(2, 1, names=("replicate", "shard")), dist.group.WORLD
    given = "pass device_mesh=init_device_mesh(device, (replicas, shards))"
    told: tuple[tuple[str, str, dict[str, Any]], ...] = (
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
    advice = "this is meant, name its dimensions mesh_dim_names=('replicate', 'shard')"
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


def case_ranks_beside_those_of_data() -> None:
    mesh = mesh_of(1, 2, names=("data", "cp"))
    refuse(
        "such as mesh['data'], and name the other dimensions in replicated= and sharded=",
        backend="fsdp2",
        replicated={".": mesh["cp"]},
    )
    summed(fsshard.wrap(plain(), backend="fsdp2", device_mesh=mesh["data"], replicated={".": mesh["cp"]}))
    model = fsshard.wrap(plain(), backend="fsdp2", device_mesh=mesh["data"])
    with refused("say which: fsshard.wrap(..., replicated={...}, sharded={...}); if they do neither"):
        model.check_knows_all_ranks("save")
    fsshard.wrap(plain(), backend="fsdp2", device_mesh=mesh["data"], replicated={}).check_knows_all_ranks("save")


def summed(model: Any) -> None:
    """The ranks' gradients are added up."""
    is_trained(train(model, steps=1).state_dict(), loss=lambda bare, x: 2 * square(bare, x), steps=1)


def split_by_columns(mesh: Any) -> Any:
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    torch.manual_seed(0)
    return parallelize_module(nn.Linear(4, 6), mesh, ColwiseParallel())


def case_optimizers_of_parts() -> None:
    from tests.optimizers import MyMuon

    mesh = mesh_of(1, 2, names=("data", "tp"))
    with refused("use an optimizer that works number by number, such as torch.optim.AdamW, or a mesh of data alone"):
        model = fsshard.wrap(split_by_columns(mesh["tp"]), backend="ddp", device_mesh=mesh["data"])
        fsshard.build_optimizer(model, MyMuon)
    model = fsshard.wrap(split_by_columns(mesh["tp"]), backend="ddp", device_mesh=mesh["data"])
    fsshard.build_optimizer(model, torch.optim.AdamW)
    fsshard.build_optimizer(fsshard.wrap(nn.Linear(4, 6), backend="ddp"), MyMuon)


@pytest.mark.parametrize("case", cases(globals()), ids=lambda case: case.__name__)
def test_advice_is_right(ranks: Any, case: Any) -> None:
    ranks.run(case, 2)
