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
from tests.advice.following import DIVIDED, batch, cases, is_right, plain, refused, square


def mesh_of(*shape: int, names: tuple[str, ...] | None = None) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def case_replicas_and_shards() -> None:
    two = mesh_of(1, 2, names=("replicate", "shard"))
    with refused("leave device_mesh out where these are all ranks, else pass process_group=torch.distributed.new_grou"):
        fsshard.wrap(plain(), backend="ddp", device_mesh=two)
    is_right(fsshard.wrap(plain(), backend="ddp"))
    is_right(fsshard.wrap(plain(), backend="ddp", process_group=dist.new_group([0, 1])))
    for backend in (*DIVIDED, "fairscale"):
        is_right(fsshard.wrap(plain(), backend=backend, device_mesh=two))
    for backend in DIVIDED:
        for strategy in ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"):
            with refused("pass device_mesh=init_device_mesh(device, (replicas, shards))"):
                fsshard.wrap(plain(), backend=backend, sharding_strategy=strategy)
    mesh = mesh_of(1, 2)
    is_right(fsshard.wrap(plain(), backend="fsdp2", sharding_strategy="HYBRID_SHARD", device_mesh=mesh))
    with refused("make it with mesh_dim_names=("):
        fsshard.wrap(plain(), backend="fsdp2", device_mesh=mesh_of(1, 2, names=("shard", "replicate")))
    for implementation in ("native", "real"):
        for mesh in (two, two["shard"], None):
            is_right(fsshard.wrap(plain(), backend="fairscale", implementation=implementation, device_mesh=mesh))
    with refused("use backend='ddp', without a mesh"):
        fsshard.wrap(plain(), backend="fairscale", device_mesh=mesh_of(2, 1, names=("replicate", "shard")))
    with refused("for replicas and shards pass device_mesh=init_device_mesh(device, (replicas, shards))"):
        fsshard.wrap(plain(), backend="fsdp2", process_group=(dist.group.WORLD, dist.group.WORLD))
    with refused("or leave it out, with a mesh of replicas and shards"):
        fsshard.wrap(plain(), backend="fsdp", sharding_strategy="FULL_SHARD", device_mesh=two)


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
        with refused(f"pass device_mesh={slice_of}"):
            fsshard.wrap(plain(), backend="fsdp2", device_mesh=mesh)
    is_right(fsshard.wrap(plain(), backend="fsdp2", device_mesh=mesh["dp_replicate", "dp_shard"]))
    with refused("pass a 1-D slice such as mesh['a'], or name the dimensions (data, replicate, shard; tp, cp, pp"):
        fsshard.data_rank(mesh_of(2, 1, names=("a", "tp")))
    assert fsshard.data_rank(mesh_of(2, 1, names=("a", "tp"))["a"]).size == 2
    assert fsshard.data_rank(mesh_of(2, 1, names=("data", "tp"))).size == 2


def case_ranks_beside_those_of_data() -> None:
    mesh = mesh_of(1, 2, names=("data", "cp"))
    with refused("such as mesh['data'], and name the other dimensions in replicated= and sharded="):
        fsshard.wrap(plain(), backend="fsdp2", replicated={".": mesh["cp"]})
    summed(fsshard.wrap(plain(), backend="fsdp2", device_mesh=mesh["data"], replicated={".": mesh["cp"]}))
    model = fsshard.wrap(plain(), backend="fsdp2", device_mesh=mesh["data"])
    with refused("say which: fsshard.wrap(..., replicated={...}, sharded={...}); if they do neither"):
        model.check_knows_all_ranks("save")
    fsshard.wrap(plain(), backend="fsdp2", device_mesh=mesh["data"], replicated={}).check_knows_all_ranks("save")


def summed(model: Any) -> None:
    """The ranks' gradients are added up."""
    optimizer = fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
    square(model, batch()).backward()
    optimizer.step()
    bare = plain()
    sum(square(bare, batch(0, rank)) for rank in range(2)).backward()
    for name, parameter in bare.named_parameters():
        assert torch.allclose(model.state_dict()[name], parameter - 0.1 * parameter.grad, atol=1e-6)


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
