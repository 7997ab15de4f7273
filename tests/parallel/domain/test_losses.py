"""Losses of slabs against neuraloperator's of the whole field; neuraloperator's own refuse slabs."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fsshard.errors import ConfigurationError
from fsshard.parallel import shard_domain
from fsshard.parallel.domain.domain import Domain
from fsshard.patches import NEURALOP_FIELD_METHODS
from tests.on_ranks import on_ranks
from tests.parallel.domain.operators import THREE, TWO, field, in_double, mesh_of, operator

pytest.importorskip("neuralop")

BOUND = 1e-13
"""Relative, in float64, of sums of some hundred terms."""


def apart(plain: Any, split: Any, domain: Domain, x: Tensor, y: Tensor) -> float:
    whole = x.clone().requires_grad_()
    wanted = plain(whole, y)
    wanted.backward()
    slab = domain.scatter(x).requires_grad_()
    loss = split(slab, domain.scatter(y))
    loss.backward()
    assert whole.grad is not None and slab.grad is not None
    # Every rank backpropagates the whole loss, or its part of it times their number, by which an engine divides.
    far = (slab.grad / domain.size - domain.scatter(whole.grad)).abs().max() / whole.grad.abs().max()
    return max(float(far), abs(float(loss / wanted) - 1))


@on_ranks(4)
def test_values_and_gradients() -> None:
    """By loss: how far its value, and the gradient of the field, are from those of one process."""
    from neuralop.losses import H1Loss, LpLoss
    from neuralop.losses.data_losses import MSELoss

    found = {}
    with in_double():
        domain = shard_domain(operator(TWO), mesh_of(1, 4)["domain"])
        x, y = field(17, 6), field(17, 6, seed=1)
        lp, own = LpLoss(d=2, p=2), domain.LpLoss(d=2, p=2)
        cubic, own_cubic = LpLoss(d=2, p=3, reduction="mean"), domain.LpLoss(d=2, p=3, reduction="mean")
        first, own_first = LpLoss(d=2, p=1, measure=2.0), domain.LpLoss(d=2, p=1, measure=2.0)
        h1, own_h1 = H1Loss(d=2, periodic_in_x=False), domain.H1Loss(d=2, periodic_in_x=False)
        cases = {
            "L2": (lp, own),
            "L2, absolute": (lp.abs, own.abs),
            "L3": (cubic, own_cubic),
            "L1, absolute": (first.abs, own_first.abs),
            "L1": (first, own_first),
            "H1": (h1, own_h1),
            "H1, absolute": (h1.abs, own_h1.abs),
            "MSE": (MSELoss(), domain.MSELoss()),
            "MSE of lines": (lambda a, b: MSELoss()(a, b, dim=[3]), lambda a, b: domain.MSELoss()(a, b, dim=[3])),
            "mean": (F.mse_loss, domain.mse_loss),
        }
        for name, (plain, split) in cases.items():
            found[name] = apart(plain, split, domain, x, y)
        pencils = shard_domain(operator(THREE), mesh_of(1, 2, 2)["dx", "dy"])
        x, y = field(7, 5, 6), field(7, 5, 6, seed=1)
        found["L2 of pencils"] = apart(LpLoss(d=3).abs, pencils.LpLoss(d=3).abs, pencils, x, y)
        found["H1 of pencils"] = apart(H1Loss(d=3), pencils.H1Loss(d=3), pencils, x, y)
    assert len(found) == 12
    assert {name: far for name, far in found.items() if not far <= BOUND} == {}


@on_ranks()
def test_neuraloperators_own_refuse_slabs() -> None:
    from neuralop.losses import FiniteDiff, H1Loss, ICLoss, LpLoss

    model = operator(TWO)
    plain = operator(TWO)
    domain = shard_domain(model, mesh_of(1, 2)["domain"])
    x, y = field(8, 8), field(8, 8, seed=1)
    out, target = model(domain.scatter(x)), domain.scatter(y)
    told = []

    def refused(call: Any) -> None:
        with pytest.raises(ConfigurationError) as caught:
            call()
        told.append(str(caught.value))

    refused(lambda: LpLoss(d=2)(out, target))
    refused(lambda: H1Loss(d=2).abs(2 * out + 1, torch.zeros(()).expand_as(out)))  # known by its graph
    with torch.no_grad():
        refused(lambda: LpLoss(d=2)(model(domain.scatter(x)), torch.ones(())))
    refused(lambda: ICLoss()(out.clone(), target))
    refused(lambda: FiniteDiff(dim=2, h=0.1).dx(out - 1))
    changed = model(domain.scatter(x))
    changed *= 2  # in place, as for the bare model
    refused(lambda: LpLoss(d=2)(changed, target))
    refused(lambda: domain.LpLoss(d=2)(out, y))
    refused(lambda: domain.LpLoss(d=1))
    for fine in (domain.gather(2 * out), plain(x)):
        LpLoss(d=2)(fine, y).backward(retain_graph=True)
    assert all("of a slab is not that of the whole field" in text for text in told[:6])
    assert "scatter the target" in told[6] and "pass d=2" in told[7]


def advised(domain: Domain, advice: str, y: Tensor) -> Any:
    def loss(output: Tensor, target: Tensor) -> Any:
        mine = eval(advice, {"F": F, "domain": domain, "output": output, "y": y})
        value = domain.table(mine.detach()[None]).mean()  # of all ranks, as a report would have it
        return mine - mine.detach() + value

    return loss


@on_ranks()
def test_means_of_uneven_slabs_are_refused_and_what_the_error_says_is_right() -> None:
    """With 17 rows on 4 ranks F.mse_loss is off by 1 %, its gradient by 27 %, and nothing says so.

    torch's losses of slabs of 4 + 4 rows are taken; of 5 + 4 refused, and what the error says is followed.
    """
    found = {}
    with in_double():
        model = operator(TWO)
        domain = shard_domain(model, mesh_of(1, 2)["domain"])
        losses = {name: getattr(F, name) for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")}
        for rows in (8, 9):
            x, y = field(rows, 6), field(rows, 6, seed=1)
            out, target = model(domain.scatter(x)), domain.scatter(y)
            for name, loss in {**losses, "module": torch.nn.MSELoss()}.items():
                for given in ((out, target), (2 * out + 1, torch.zeros_like(out)), (out.detach(), target)):
                    if rows == 8:
                        loss(*given)
                        continue
                    with pytest.raises(ConfigurationError, match="counts each rank alike") as caught:
                        loss(*given)
                    advice = str(caught.value).split("`")[1]
                    assert name in advice or name == "module"
                if rows == 9 and name in losses:
                    found[name] = apart(loss, advised(domain, advice, y), domain, x, y)
            for fine in ((out, target, None, None, "sum"), (domain.gather(out), y), (x, y)):
                F.mse_loss(*fine)
    assert {name: far for name, far in found.items() if not far <= BOUND} == {} and len(found) == 4


def test_every_loss_of_a_field_is_guarded() -> None:
    modules = [importlib.import_module(f"neuralop.losses.{name}") for name in NEURALOP_FIELD_METHODS]
    classes = {
        name
        for module in modules
        for name, kind in vars(module).items()
        if inspect.isclass(kind) and kind.__module__ == module.__name__
    }
    extensions = {"FCLegendre", "FCGram"}  # of lines of numbers: FourierDiff uses them
    assert classes - extensions == {name for kinds in NEURALOP_FIELD_METHODS.values() for name in kinds}


@on_ranks()
def test_half_precision_does_not_overflow() -> None:
    domain = shard_domain(operator(TWO), mesh_of(1, 2)["domain"])
    x = domain.scatter(torch.full((1, 1, 512, 512), 2.0, dtype=torch.float16))
    zero = torch.zeros_like(x)
    for loss in (domain.mse_loss, domain.MSELoss(), domain.LpLoss(d=2).rel):
        assert loss(x, x + 1).dtype == torch.float16 and loss(x, x.float() + 1).dtype == torch.float32
    assert float(domain.mse_loss(x, zero)) == 4.0
    assert float(domain.MSELoss()(x, zero)) == 4.0
    assert float(domain.LpLoss(d=2).rel(x, 2 * x)) == 0.5
