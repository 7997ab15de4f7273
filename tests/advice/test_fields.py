"""The advice of fsshard/parallel/domain, followed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsshard
from fsshard.parallel import shard_domain
from fsshard.parallel.domain.accepted import check_operator
from tests.advice.following import cases, refused
from tests.parallel.domain.operators import TWO, field, mesh_of, operator

pytest.importorskip("neuralop")

FACTORS = {**TWO, "factorization": "tucker", "rank": 0.5}


class Near(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def case_fields() -> None:
    mesh = mesh_of(1, 2)["domain"]
    bare, model = operator(TWO), operator(TWO)
    model.load_state_dict(bare.state_dict())
    domain = shard_domain(model, mesh)
    x, rank = field(8, 8), mesh.get_local_rank()
    with pytest.warns(UserWarning, match=r"if they are the whole field, pass domain.scatter\(x\)"):
        model(field(8, 8))
    whole = domain.gather(model(domain.scatter(x)))
    assert torch.allclose(whole, bare(x), atol=1e-6)
    leaf = x.clone().requires_grad_()
    with refused("take it of the slab, domain.scatter(field.detach()).requires_grad_(), and divide "):
        domain.scatter(leaf)
    slab = domain.scatter(leaf.detach()).requires_grad_()
    domain.gather(model(slab)).square().mean().backward()
    bare(leaf).square().mean().backward()
    expected = leaf.grad.tensor_split(2, dim=2)[rank]
    assert torch.allclose(slab.grad / domain.size, expected, atol=1e-6)
    with refused("They need the same samples (fsshard.data_rank(mesh) for the sampler), cut along"):
        model(field(8, 8, batch=1 + rank)[:, :, :4].contiguous())
    assert fsshard.data_rank(mesh_of(1, 2)).size == 1
    model(x.tensor_split(2, dim=2)[rank].clone())


def case_losses() -> None:
    from neuralop.losses import LpLoss

    bare, model = operator(TWO), operator(TWO)
    model.load_state_dict(bare.state_dict())
    domain = shard_domain(model, mesh_of(1, 2)["domain"])
    x, y = field(8, 8), field(8, 8, seed=1)
    with refused(
        "use domain.LpLoss, domain.H1Loss, domain.MSELoss or domain.mse_loss, with the domain that shard_domain"
    ):
        LpLoss(d=2)(model(domain.scatter(x)), domain.scatter(y))
    expected = LpLoss(d=2)(bare(x), y)
    assert torch.allclose(domain.LpLoss(d=2)(model(domain.scatter(x)), domain.scatter(y)), expected)
    assert torch.allclose(LpLoss(d=2)(domain.gather(model(domain.scatter(x))), y), expected)
    for loss in (domain.H1Loss(d=2), domain.MSELoss(), domain.mse_loss):
        assert loss(model(domain.scatter(x)), domain.scatter(y)).isfinite().all()
    with refused("spatial dimensions; pass d="):
        domain.LpLoss(d=1)


def case_layers() -> None:
    with refused("if it does, pass pointwise=(its class,), and if it only contains an operator, split that"):
        check_operator(nn.Sequential(operator(TWO), Near()), 1, ())
    check_operator(nn.Sequential(operator(TWO), Near()), 1, (Near,))
    softmax = operator({**TWO, "non_linearity": torch.softmax})
    with refused("not known to be pointwise; if it is, pass pointwise=(it,)"):
        check_operator(softmax, 1, ())
    check_operator(softmax, 1, (torch.softmax,))
    mesh = mesh_of(1, 2)["domain"]
    with refused("cannot be cut by modes, which share its factors; leave weights='whole', or take a dense weight"):
        shard_domain(operator(FACTORS), mesh, weights="modes")
    shard_domain(operator(FACTORS), mesh, weights="whole")
    shard_domain(operator(TWO), mesh, weights="modes")


def case_ranks_that_average() -> None:
    mesh = mesh_of(1, 2)
    model = operator(TWO)
    shard_domain(model, mesh["domain"])
    with refused("leaving device_mesh out; or, with shard_domain(weights='modes'), pass replicated=domain.replicated"):
        fsshard.wrap(model, backend="ddp", device_mesh=mesh["data"])
    fsshard.wrap(model, backend="ddp")
    model = operator(TWO)
    domain = shard_domain(model, mesh["domain"], weights="modes")
    fsshard.wrap(model, backend="ddp", device_mesh=mesh["data"], replicated=domain.replicated)


@pytest.mark.parametrize("case", cases(globals()), ids=lambda case: case.__name__)
def test_advice_is_right(ranks: Any, case: Any) -> None:
    ranks.run(case, 2)
