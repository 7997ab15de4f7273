"""Losses that hold derivatives, on each backend, against two bare replicas whose gradients are averaged by hand."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import fsshard
from fsshard.backends.whole import gather_grads
from fsshard.errors import FsshardError, ModelError, OptimizerError, UnsupportedByBackend
from tests.models import Spectral, take_step, with_adam
from tests.on_ranks import on_backends, on_ranks
from tests.optimizers import SOAP, average
from tests.sets import often
from tests.training_runs import DISTRIBUTED

grad = torch.autograd.grad


class Smooth(nn.Module):
    """Two layers of their own units, with or without complex weights; every derivative is another number."""

    def __init__(self, layer: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.middle = nn.ModuleList([layer(6), layer(6)])
        self.last = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for layer in self.middle:
            x = x + torch.tanh(layer(x))
        return self.last(x)


class Energy(Smooth):
    """Takes a derivative inside of its forward, as models of molecules do."""

    def forward(self, x: Tensor) -> Any:
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            energy = super().forward(x)
            (force,) = grad(energy.sum(), x, create_graph=True)
        return energy, force


class Square(nn.Linear):
    """A real layer whose class names a unit."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)


def build(kind: type[Smooth], *, numbers: str) -> Smooth:
    torch.manual_seed(0)
    return kind(Square if numbers == "real" else Spectral)


def points(step: int, which: int = 0) -> Tensor:
    seed = 1000 * which + 17 * step + dist.get_rank()
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))


def quiet(model: Any) -> Any:
    return model.no_sync() if hasattr(model, "no_sync") else contextlib.nullcontext()


# ------------------------------------------------------------------------------------------ losses; each runs backward


def penalty(model: Any, step: int) -> None:
    x = points(step).requires_grad_()
    out = model(x)
    (slope,) = grad(out.sum(), x, create_graph=True)
    (out.square().mean() + (slope.norm(dim=1) - 1).square().mean()).backward()


def penalty_alone(model: Any, step: int) -> None:
    """Its backward does not touch what the forward has returned."""
    x = points(step).requires_grad_()
    (slope,) = grad(model(x).square().sum(), x, create_graph=True)
    (slope.norm(dim=1) - 1).square().mean().backward()


def wgan_gp(model: Any, step: int) -> None:
    real, fake = points(step), points(step, 1)
    x = (0.3 * real + 0.7 * fake).requires_grad_()
    scores = model(real).mean() - model(fake).mean()
    (slope,) = grad(model(x).sum(), x, create_graph=True)
    (10 * (slope.norm(dim=1) - 1).square().mean() - scores).backward()


def wgan_gp_in_three(model: Any, step: int) -> None:
    """The penalty's own backward does not reach the last bias, which has the gradients of the others."""
    real, fake = points(step), points(step, 1)
    x = (0.3 * real + 0.7 * fake).requires_grad_()
    with quiet(model):
        (-model(real).mean()).backward()
    with quiet(model):
        model(fake).mean().backward()
    (slope,) = grad(model(x).sum(), x, create_graph=True)
    (slope.norm(dim=1) - 1).square().mean().backward()


def pinn_border_last(model: Any, step: int) -> None:
    """Boundary and interior, third derivatives in all."""
    x = points(step, 1).requires_grad_()
    u = model(x)
    (du,) = grad(u.sum(), x, create_graph=True)
    (ddu,) = grad(du[:, 0].sum(), x, create_graph=True)
    border = model(points(step)).square().mean()
    (border + (ddu[:, 0] + u[:, 0].sin()).square().mean()).backward()


def forces(model: Any, step: int) -> None:
    energy, force = model(points(step))
    (energy.square().mean() + force.square().mean()).backward()


def hessian_times_vector(model: Any, step: int) -> None:
    x = points(step)
    value, product = torch.autograd.functional.hvp(lambda x: model(x).square().sum(), x, x.cos(), create_graph=True)
    (value + product.square().mean()).backward()


def func_grad(model: Any, step: int) -> None:
    torch.func.grad(lambda x: model(x).square().sum())(points(step)).norm().backward()


def func_jvp(model: Any, step: int) -> None:
    x = points(step)
    out, tangent = torch.func.jvp(model, (x,), (x.cos(),))
    (out.square().mean() + tangent.square().mean()).backward()


def func_vmap(model: Any, step: int) -> None:
    torch.func.vmap(lambda x: model(x))(points(step)).square().mean().backward()


def forward_over_reverse(model: Any, step: int) -> None:
    x = points(step)
    slope, tangent = torch.func.jvp(torch.func.grad(lambda x: model(x).square().sum()), (x,), (x.cos(),))
    (slope.norm() + tangent.norm()).backward()


def dual_numbers(model: Any, step: int) -> None:
    x = points(step)
    with torch.autograd.forward_ad.dual_level():
        dual = model(torch.autograd.forward_ad.make_dual(x, x.cos()))
        out, tangent = torch.autograd.forward_ad.unpack_dual(dual)
    (out.square().mean() + tangent.square().mean()).backward()


def attack(model: Any, step: int) -> None:
    x = points(step).requires_grad_()
    (slope,) = grad(model(x).square().sum(), x)
    model((x + 0.1 * slope.sign()).detach()).square().mean().backward()


def saliency(model: Any, step: int) -> None:
    x = points(step).requires_grad_()
    out = model(x)
    (slope,) = grad(out.sum(), x, retain_graph=True)
    (out * slope.sum()).square().mean().backward()


def inputs_first(model: Any, step: int) -> None:
    x = points(step).requires_grad_()
    loss = model(x).square().mean()
    loss.backward(inputs=[x], retain_graph=True)
    loss.backward()


def needless_retain(model: Any, step: int) -> None:
    model(points(step)).square().mean().backward(retain_graph=True)


def hessian_of_weights(model: Any, step: int) -> None:
    weights = list(model.parameters())
    loss = model(points(step)).square().mean()
    slopes = torch.autograd.grad(loss, weights, create_graph=True)
    (loss + torch.stack([slope.abs().square().sum() for slope in slopes]).sum()).backward()


def scaled_by_slopes(model: Any, step: int) -> None:
    """Slopes in their own shapes and dtypes, complex where the weights are."""
    weights = dict(model.named_parameters())
    loss = model(points(step)).square().mean()
    slopes = torch.autograd.grad(loss, weights.values(), retain_graph=True, allow_unused=True)
    assert [(s.shape, s.dtype) for s in slopes] == [(w.shape, w.dtype) for w in weights.values()]
    (loss * torch.stack([slope.abs().sum() for slope in slopes]).sum()).backward()


ONE_PASS = (attack, needless_retain, forces)
SECOND = (penalty, penalty_alone, wgan_gp, wgan_gp_in_three, pinn_border_last, hessian_times_vector)
FUNCTIONS = (func_grad, func_jvp, func_vmap, forward_over_reverse)
OTHERS = (saliency, inputs_first)
ALL_BUT = ("none", "ddp", "fairscale")  # fsdp and fsdp2
APART: dict[str, Any] = {"merge_below": 0}
Found = dict[str, bool | str]
HYPER: dict[Any, dict[str, Any]] = {torch.optim.Adam: {"lr": 1e-2}, SOAP: {}}


def by_hand(
    loss: Callable[[Any, int], None],
    numbers: str,
    steps: int,
    shown: Callable[[nn.Module], Any] = lambda model: model,
    kind: Any = torch.optim.Adam,
) -> dict[str, Any]:
    """The weights of a bare replica that averages its gradients itself; the loss is computed with ``shown(model)``."""
    model = build(Energy if loss is forces else Smooth, numbers=numbers)
    optimizer = kind(model.parameters(), **HYPER[kind])
    for step in range(steps):
        loss(shown(model), step)
        average(model)
        take_step(optimizer)
    return model.state_dict()


def ours(
    backend: str,
    loss: Callable[[Any, int], None],
    numbers: str,
    steps: int,
    settings: dict[str, Any],
    kind: Any = torch.optim.Adam,
) -> dict[str, Any]:
    units = {"auto_wrap_policy": {Square} if numbers == "real" else {Spectral}}
    apart = APART if backend == "fsdp2" else {}
    built = build(Energy if loss is forces else Smooth, numbers=numbers)
    model = fsshard.wrap(built, backend=backend, **{**units, **apart, **settings})
    optimizer = fsshard.build_optimizer(model, kind, whole=kind is SOAP, **HYPER[kind])
    for step in range(steps):
        loss(model, step)
        take_step(optimizer)
    return model.state_dict()


def job(
    backend: str,
    losses: tuple[Callable[[Any, int], None], ...],
    numbers: str,
    steps: int = 2,
    kind: Any = torch.optim.Adam,
    **settings: Any,
) -> Found:
    """For each loss whether weights are those of the replicas, or the error."""
    found = {}
    for loss in losses:
        expected = by_hand(loss, numbers, steps, kind=kind)
        got = ours(backend, loss, numbers, steps, settings, kind)
        found[loss.__name__] = same(got, expected)
    return found


def all_right(ranks: Any, backend: str, losses: Any, numbers: str, **settings: Any) -> None:
    size = 1 if backend == "none" else 2
    expected = {loss.__name__: True for loss in losses}
    assert ranks.run(functools.partial(job, **settings), size, backend, losses, numbers) == [expected] * size


def burgers(model: Any, step: int) -> None:
    """u_t + u u_x = 0.01 u_xx."""
    x = points(step).requires_grad_()
    u = model(x)
    (first,) = grad(u.sum(), x, create_graph=True)
    (curve,) = grad(first[:, 0].sum(), x, create_graph=True)
    (first[:, 1] + u[:, 0] * first[:, 0] - 0.01 * curve[:, 0]).square().mean().backward()


def burgers_twice(model: Any, step: int) -> None:
    with quiet(model):
        burgers(model, 7 + step)
    burgers(model, step)


def data_then_burgers(model: Any, step: int) -> None:
    with quiet(model):
        model(points(step, 1)).square().mean().backward()
    burgers(model, step)


@pytest.mark.parametrize("numbers", often(["real", "complex"], "complex"))
def test_derivatives_reduce_nothing_that_was_accumulated(ranks: Any, numbers: str) -> None:
    """u_xx does not pass the model's outputs, at which engines learn that a pass begins."""
    for backend in DISTRIBUTED:
        all_right(ranks, backend, (burgers_twice, data_then_burgers), numbers)


@pytest.mark.parametrize("numbers", often(["real", "complex"], "complex"))
def test_soap_trains_burgers_as_replicas_do(ranks: Any, numbers: str) -> None:
    """Second derivatives, whole matrices and sharding together, to the last bit."""
    for backend in DISTRIBUTED:
        all_right(ranks, backend, (burgers,), numbers, steps=3, kind=SOAP)


@on_backends(often(DISTRIBUTED, "fsdp", "fsdp2"))
def test_derivatives_through_what_is_frozen(backend: str) -> None:
    """A second derivative reaches the inputs of a frozen unit without passing its outputs.

    Burgers through a frozen first layer, and through a frozen unit.
    """
    found = []
    for part in (lambda model: model.first, lambda model: model.middle[0]):
        bare, raw = build(Smooth, numbers="complex"), build(Smooth, numbers="complex")
        for each in (bare, raw):
            part(each).requires_grad_(False)
        model, optimizer = with_adam(raw, backend=backend, auto_wrap_policy={Spectral})
        judge = torch.optim.Adam(bare.parameters(), lr=1e-2)
        for step in range(2):
            burgers(bare, step)
            average(bare)
            burgers(model, step)
            for each in (judge, optimizer):
                take_step(each)
        found.append(same(model.state_dict(), bare.state_dict()) is True)
    assert found == [True, True]


@pytest.mark.parametrize("backend", often(DISTRIBUTED, "fsdp2"))
@on_ranks(4)
def test_four_ranks_train_as_replicas_but_for_rounding(backend: str) -> None:
    """In float64, since four ranks' gradients are added up in another order than by hand (SOAP amplifies that)."""
    torch.set_default_dtype(torch.float64)
    try:
        for loss in (burgers, penalty_alone, wgan_gp):
            expected = by_hand(loss, "real", 2)
            for name, got in ours(backend, loss, "real", 2, {}).items():
                torch.testing.assert_close(got, expected[name], rtol=1e-7, atol=1e-9)
    finally:
        torch.set_default_dtype(torch.float32)


def tfno() -> nn.Module:
    from neuralop.models import TFNO

    torch.manual_seed(0)
    sizes = {"n_modes": (3, 3), "hidden_channels": 4, "in_channels": 1, "out_channels": 1}
    return TFNO(**sizes, n_layers=2, factorization="Tucker", rank=0.5, implementation="reconstructed")  # type: ignore[no-any-return]


def pino(model: Any, step: int) -> None:
    """Burgers' equation and its initial values, and how the solution answers to these."""
    from neuralop.losses.equation_losses import BurgersEqnLoss, ICLoss

    seed = 17 * step + dist.get_rank()
    initial = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    u = model(initial)
    (slope,) = grad(u.square().sum(), initial, create_graph=True)
    (BurgersEqnLoss(visc=0.01)(u) + ICLoss()(u, initial) + slope.square().mean()).backward()


def job_pino(backend: str) -> list[bool]:
    bare, model = tfno(), fsshard.wrap(tfno(), backend=backend)
    optimizers = (torch.optim.Adam(bare.parameters(), lr=1e-2),)
    optimizers += (fsshard.build_optimizer(model, torch.optim.Adam, lr=1e-2),)
    for step in range(2):
        for each, optimizer in zip((bare, model), optimizers, strict=True):
            pino(each, step)
            if each is bare:
                average(bare)
            take_step(optimizer)
    got = model.state_dict()
    return [torch.equal(got[name], weight) for name, weight in bare.named_parameters()]


@pytest.mark.parametrize("backend", DISTRIBUTED)
def test_losses_of_neuraloperator_train_a_tfno_as_replicas_do(ranks: Any, backend: str) -> None:
    pytest.importorskip("neuralop")
    for equal in ranks.run(job_pino, 2, backend):
        assert equal and all(equal)


@pytest.mark.parametrize("loss", [penalty, wgan_gp, pinn_border_last])
@on_ranks()
def test_torchs_own_clipping_behind_a_backward(loss: Callable[[Any, int], None]) -> None:
    """FSDP2's sharded parameters are in their places, with their gradients.

    Clips as torch does, right behind the backward: (norm, that of averaged replicas, which gradients are alike).
    """
    bare = build(Smooth, numbers="real")
    loss(bare, 0)
    average(bare)
    model = fsshard.wrap(build(Smooth, numbers="real"), backend="fsdp2", auto_wrap_policy={Square}, **APART)
    loss(model, 0)
    want, norm = (clip_grad_norm_(list(each.parameters()), 0.1) for each in (bare, model.module))
    found = {e.name: g for e, g in gather_grads(model.backend)}
    norm = float(norm)
    want = float(want)
    alike = [torch.allclose(found[n], p.grad, rtol=1e-6, atol=0) for n, p in bare.named_parameters()]
    assert norm == pytest.approx(want, rel=1e-6) and all(alike)


EVERY = ONE_PASS + SECOND + FUNCTIONS + OTHERS
EVERY_OF_FSDP = tuple(loss for loss in (*ONE_PASS, *SECOND, *OTHERS) if loss is not pinn_border_last)
KEPT = (penalty_alone, pinn_border_last, forces)
BY_WEIGHTS = (hessian_of_weights, scaled_by_slopes)
LONG = pytest.mark.long
CASES = [
    pytest.param("fsdp2", (*SECOND, *OTHERS), "real", {}, marks=LONG),  # with complex weights at every commit
    pytest.param("fsdp2", (*ONE_PASS, *FUNCTIONS), "real", {}, marks=LONG),
    ("fairscale", (*KEPT, *FUNCTIONS), "real", {}),
    pytest.param("fairscale", EVERY, "real", {}, marks=LONG),
    pytest.param("fairscale", EVERY, "real", {"implementation": "native"}, marks=LONG),
    ("fairscale", SECOND, "complex", {"implementation": "native"}),
    pytest.param("none", EVERY, "real", {}, marks=LONG),
    pytest.param("ddp", EVERY, "real", {}, marks=LONG),
    ("fsdp2", EVERY, "complex", {}),
    ("ddp", EVERY, "complex", {}),
    pytest.param("none", EVERY, "complex", {}, marks=LONG),
    pytest.param("fairscale", EVERY, "complex", {}, marks=LONG),
    # Without units: what goes round a unit and into it is summed in another order where the unit begins.
    *((name, BY_WEIGHTS, "complex", {"auto_wrap_policy": None}) for name in ALL_BUT),
    *(pytest.param(name, BY_WEIGHTS, "real", {"auto_wrap_policy": None}, marks=LONG) for name in ALL_BUT),
    ("fsdp2", KEPT, "real", {"reshard_after_forward": False}),
    ("fsdp2", KEPT, "real", {"reshard_after_forward": True, "fast_collectives": False}),
    ("fairscale", SECOND, "real", {"find_unused_parameters": True}),
    pytest.param("fsdp2", SECOND, "real", {"find_unused_parameters": True}, marks=LONG),
    *((name, (dual_numbers,), "complex", {}) for name in ALL_BUT),
    ("fsdp", (*ONE_PASS, *SECOND, *OTHERS, dual_numbers), "real", {"sharding_strategy": "FULL_SHARD"}),
    ("fsdp", KEPT, "real", {"sharding_strategy": "SHARD_GRAD_OP"}),
    ("fsdp", SECOND, "real", {"find_unused_parameters": True, "auto_wrap_policy": None}),
    pytest.param("fsdp", EVERY_OF_FSDP, "complex", {}, marks=LONG),
]


@pytest.mark.parametrize(("backend", "losses", "numbers", "settings"), CASES)
def test_as_bare_replicas(ranks: Any, backend: str, losses: Any, numbers: str, settings: dict[str, Any]) -> None:
    all_right(ranks, backend, losses, numbers, **settings)


@on_ranks(1)
def test_grad_is_torchs_in_everything_else() -> None:
    bare = build(Smooth, numbers="complex")
    model = fsshard.wrap(build(Smooth, numbers="complex"), backend="none")
    slopes = []
    for each in (bare, model):
        weights = dict(each.named_parameters())
        penalty = torch.stack([weight.abs().sum() for weight in weights.values()]).sum()
        loss, weight = each(points(0)).sum(), weights["middle.0.weight"]
        slopes.append(torch.autograd.grad(loss + penalty, weight, retain_graph=True)[0])
    with pytest.raises(RuntimeError) as raised:
        torch.autograd.grad(torch.ones(1, requires_grad=True).sum(), weight, retain_graph=True)
    assert torch.autograd.grad(loss * 0, weight, retain_graph=True, allow_unused=True)[0] is not None
    assert list(torch.autograd.grad(loss * 0, {"w": weight}, retain_graph=True)) == ["w"]
    rows = torch.autograd.grad(model(points(0)).reshape(-1), weight, torch.eye(3), is_grads_batched=True)[0]
    assert rows.shape == (3, 6, 6) and rows.is_complex()
    same = torch.equal(*slopes)
    told = str(raised.value)
    assert same and "appears to not have been used in the graph" in told


def through_views(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Call a model through views of its parameters that are new in each forward."""

    def call(x: Tensor) -> Tensor:
        views = {name: parameter.view_as(parameter) for name, parameter in model.named_parameters()}
        return torch.func.functional_call(model, views, (x,))  # type: ignore[no-any-return]

    return call


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(torch.equal(one[key], other[key]) for key in other)


@on_ranks()
def test_fsdp_adds_up_what_a_forward_gives_before_the_next_ones() -> None:
    """FSDP1's weights are views, new in each forward: with three terms of one gradient the order of the sum shows."""
    got = ours("fsdp", pinn_border_last, "complex", 3, {})
    bare, viewed = (by_hand(pinn_border_last, "complex", 3, shown) for shown in (lambda model: model, through_views))
    assert same(got, viewed)
    assert all(torch.allclose(got[key], bare[key], rtol=1e-6, atol=1e-7) for key in bare)


def follow(model: Any, optimizer: Any, after: Callable[[Any, Any], None]) -> list[float]:
    """Take a derivative from which no backward goes on; do something; return what the next forwards give."""
    found = []
    for step in range(2):
        x = points(step).requires_grad_()
        (slope,) = grad(model(x).sum(), x, create_graph=True)
        (curve,) = grad(slope[:, 0].sum(), x)
        after(model, optimizer)
        found += [float(curve.norm()), float(model(points(step)).sum().detach())]
    return found


def train(model: Any, optimizer: Any) -> None:
    penalty_alone(model, 7)
    if not hasattr(model, "backend"):
        average(model)
    take_step(optimizer)


def write(model: Any, optimizer: Any) -> None:
    whole = model.full_parameters(writeback=True) if hasattr(model, "backend") else contextlib.nullcontext()
    with torch.no_grad(), whole:
        for parameter in model.parameters():
            parameter.mul_(0.9)


@pytest.mark.parametrize("after", [train, write])
@on_ranks()
def test_fsdp_keeps_units_until_weights_change(after: Callable[[Any, Any], None]) -> None:
    """The next forward sees what has been written, and after a backward nothing stays gathered."""
    bare = build(Smooth, numbers="complex")
    want = follow(bare, torch.optim.Adam(bare.parameters(), lr=1e-2), after)
    model = fsshard.wrap(build(Smooth, numbers="complex"), backend="fsdp", auto_wrap_policy={Spectral})
    got = follow(model, fsshard.build_optimizer(model, torch.optim.Adam, lr=1e-2), after)
    penalty(model, 0)
    gathered = model.backend.held_by_engine()["gathered units"]
    assert got == want
    assert sum(tensor.untyped_storage().size() for tensor in gathered) == 0


@pytest.mark.parametrize("backend", often(["ddp", "fairscale", "fsdp2", "fsdp"], "fsdp2", "fsdp"))
def test_second_derivatives_through_recomputed_blocks(ranks: Any, backend: str) -> None:
    all_right(ranks, backend, (penalty_alone, wgan_gp, forces), "real", activation_checkpointing=True)


# ------------------------------------------------------------------------------------------ what an engine cannot do


def create_graph_backward(model: Any, step: int) -> None:
    model(points(step)).square().mean().backward(create_graph=True)


def twice(model: Any, step: int) -> None:
    out = model(points(step))
    out.square().mean().backward(retain_graph=True)
    out.sin().mean().backward()


def penalty_in_silence(model: Any, step: int) -> None:
    with model.no_sync():
        penalty_alone(model, step)


def job_refused(backend: str, losses: tuple[Callable[[Any, int], None], ...], **settings: Any) -> list[Any]:
    """Per loss the error; each with a model of its own."""
    found = []
    for loss in losses:
        try:
            ours(backend, loss, "real", 1, settings)
        except FsshardError as error:
            found.append(error)
        else:
            found.append(None)
    return found


def refused(ranks: Any, backend: str, losses: Any, **settings: Any) -> list[FsshardError]:
    """The errors, which every rank has alike."""
    one, other = ranks.run(functools.partial(job_refused, **settings), 2, backend, losses)
    assert [str(error) for error in one] == [str(error) for error in other]
    return one


def test_fsdp_says_who_can(ranks: Any) -> None:
    (error,) = refused(ranks, "fsdp", (create_graph_backward,))
    assert "honour backward(create_graph=True); use backend='fsdp2' or 'fairscale'" in str(error)
    for error in refused(ranks, "fsdp", FUNCTIONS):
        assert isinstance(error, UnsupportedByBackend) and "torch.func; use backend='ddp'" in str(error)
    (error,) = refused(ranks, "fsdp", (twice,))
    assert isinstance(error, ModelError) and "a second backward() since the last forward" in str(error)


def test_ddp_with_a_static_graph_says_so(ranks: Any) -> None:
    """Raw DDP reduces after the first derivative, and nothing afterwards: weights off by 1e-2, in silence."""
    for error in refused(ranks, "ddp", (penalty, attack, saliency), static_graph=True):
        assert isinstance(error, UnsupportedByBackend) and "leave static_graph off" in str(error)
    for settings in ({"static_graph": True}, {"find_unused_parameters": True}):
        for error in refused(ranks, "ddp", (func_grad, func_vmap), **settings):
            assert isinstance(error, UnsupportedByBackend) and "torch.func with" in str(error)


def test_ddp_refuses_what_it_would_not_reduce(ranks: Any) -> None:
    found = refused(ranks, "ddp", (twice, penalty_in_silence))
    assert [type(error) for error in found] == [ModelError, OptimizerError]
    texts = ("a second backward()", "no_sync")
    for error, text in zip(found, texts, strict=True):
        assert text in str(error)


def test_ddp_sends_what_a_penalty_does_not_reach(ranks: Any) -> None:
    """With find_unused_parameters DDP alone knows for what it waits."""
    all_right(ranks, "ddp", tuple(set(SECOND) - {wgan_gp_in_three}), "real", find_unused_parameters=True)
    alone = ("ddp", wgan_gp_in_three, "real", 2, {"find_unused_parameters": True})
    for error in ranks.run_expecting_errors(ours, 2, *alone):
        assert "Expected to have finished reduction in the prior iteration" in str(error)


@pytest.mark.parametrize("backend", DISTRIBUTED)
def test_blocks_that_are_no_units_are_recomputed_for_second_derivatives(ranks: Any, backend: str) -> None:
    settings = {"activation_checkpointing": {Square}, "auto_wrap_policy": None}
    all_right(ranks, backend, (burgers,), "real", **settings)
