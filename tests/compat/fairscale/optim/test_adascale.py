"""AdaScale: FairScale's behaviours, and the same gain on all ranks whatever wraps the model.

The numbers in names of tests are the rows of docs/fairscale.md.
"""

from __future__ import annotations

import contextlib
import copy
import io
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import fairscale.optim.adascale as real
import numpy as np
import pytest
import torch
import torch.distributed as dist
from fairscale.nn.data_parallel import ShardedDataParallel as RealShardedDataParallel
from fairscale.optim.oss import OSS as RealOSS
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import fsshard.compat.fairscale.optim.adascale as ours
from fsshard.compat.errors import MisuseError
from fsshard.compat.fairscale.nn import checkpoint_wrapper
from fsshard.compat.fairscale.nn.data_parallel import ShardedDataParallel
from fsshard.compat.fairscale.optim import OSS
from fsshard.errors import FsshardError
from tests.on_ranks import on_ranks
from tests.oss.trainings import same, weights

AdaScale, AdaScaleWrapper = ours.AdaScale, ours.AdaScaleWrapper


def paper(local: Sequence[Sequence[float]], total: Sequence[float], scale: float, smoothing: float) -> list[float]:
    """The gain after each step, by appendix B.3 with corrected averages: an implementation of its own.

    Args:
        local: for each step, the squared norms of its gradients before they were averaged.
        total: for each step, the squared norm of the average.
    """
    gains, var_avg, sqr_avg, weight = [], 0.0, 0.0, 0.0
    for norms, mean in zip(local, total, strict=True):
        count = len(norms)
        sigma = scale / (count - 1) * (sum(norms) / count - mean)
        mu = mean - sigma / scale
        var_avg = smoothing * var_avg + (1 - smoothing) * max(sigma, 1e-6)
        sqr_avg = smoothing * sqr_avg + (1 - smoothing) * max(mu, 0.0)
        weight = smoothing * weight + (1 - smoothing)
        var, sqr = var_avg / weight, sqr_avg / weight
        gains.append((var + sqr) / (var / scale + sqr))
    return gains


def backward(model: nn.Module, values: Sequence[float], divide: int = 1) -> None:
    (model(torch.tensor(values)).sum() / divide).backward()


def orthogonal(model: nn.Module) -> None:
    """Two gradients that have nothing in common."""
    backward(model, (1.0, 0.0), 2)
    backward(model, (0.0, 1.0), 2)


def linear(inputs: int = 2) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(inputs, 2, bias=False)


def accumulating(count: int = 2, inputs: int = 2, **options: Any) -> tuple[nn.Linear, Any]:
    model = linear(inputs)
    return model, AdaScale(SGD(model.parameters(), lr=0.1), num_gradients_to_accumulate=count, **options)


# -- one process: gradients are accumulated --------------------------------------------------------------------------


@pytest.mark.parametrize("scaled", [True, False], ids=["scaled loss", "unscaled loss"])
@pytest.mark.parametrize(
    ("batches", "gain"),
    [
        # The gradient of either row of the weight is the input: squared norms are twice the inputs'.
        (((1.0, 0.0), (0.0, 1.0)), 2.0),  # orthogonal: nothing in common
        (((1.0, 1.0), (1.0, 1.0)), 1.0),  # equal: no noise; to 1e-6, for the least variance that is assumed
        (((3.0, 0.0), (1.0, 0.0)), paper([[18.0, 2.0]], [8.0], 2.0, 0.0)[0]),
    ],
)
def test_the_gain_of_accumulated_gradients(scaled: bool, batches: Any, gain: float) -> None:
    model, optimizer = accumulating(is_scaled_loss=scaled)
    expected = torch.tensor(batches).mean(0).expand(2, 2)
    for _ in range(2):
        for batch in batches:
            backward(model, batch, 2 if scaled else 1)
        assert optimizer.gain() == pytest.approx(gain, abs=2e-6)
        if not scaled:
            optimizer.scale_grad_by_num_grads_to_accum()
        assert torch.equal(model.weight.grad, expected)  # gradients are looked at, and left as they are
        before = model.weight.detach().clone()
        optimizer.step()
        assert torch.allclose(before - model.weight.detach(), 0.1 * gain * expected, atol=1e-6)
        assert optimizer.param_groups[0]["lr"] == 0.1
        optimizer.zero_grad()
        assert model.weight.grad is None


def test_one_gradient_to_a_step_is_refused() -> None:
    assert accumulating()[1].gain() == 1.0  # the first one
    with pytest.raises(RuntimeError, match="variance between the gradients") as caught:
        AdaScale(SGD(linear().parameters(), lr=0.1))
    assert isinstance(caught.value, FsshardError)
    _, optimizer = accumulating()
    with pytest.raises(RuntimeError, match="num_gradients_to_accumulate 1 there is one"):
        optimizer.set_num_gradients_to_accumulate(1)


@pytest.mark.parametrize("scale", [None, 4.0, 2.0, 4 / 3])
def test_orthogonal_gradients_have_the_scale_as_gain(scale: float | None) -> None:
    model, optimizer = accumulating(4, inputs=4, scale=scale)
    for row in torch.eye(4).tolist():
        backward(model, row, 4)
    assert optimizer.scale == (scale or 4.0)
    assert optimizer.gain() == pytest.approx(scale or 4.0, rel=1e-6)


@pytest.mark.parametrize("debias", [True, False])
def test_averages_over_steps(debias: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    model, optimizer = accumulating(3, smoothing=0.5, debias_ewma=debias)
    raw_model = linear()
    raw = real.AdaScale(
        SGD(raw_model.parameters(), lr=0.1), num_gradients_to_accumulate=3, smoothing=0.5, debias_ewma=debias
    )
    local, total = [], []
    for _ in range(5):
        batches = torch.randn(3, 2, generator=generator)
        for batch in batches.tolist():
            backward(model, batch, 3)
            backward(raw_model, batch, 3)
        local.append([2 * float(batch.square().sum()) for batch in batches])
        total.append(2 * float(batches.mean(0).square().sum()))
        # FairScale's sums are in float32: a few roundings of 6e-8.
        assert optimizer.gain() == pytest.approx(float(raw.gain()), rel=1e-6)
        if debias:
            assert optimizer.gain() == pytest.approx(paper(local, total, 3.0, 0.5)[-1], rel=1e-6)
        for each in (optimizer, raw):
            each.step()
            each.zero_grad()
    assert torch.allclose(model.weight, raw_model.weight, rtol=1e-6)


def test_smoothing() -> None:
    assert accumulating(3)[1].smoothing == 1 - 3 / 1000
    assert accumulating(3, smoothing=0.25)[1].smoothing == 0.25
    _, optimizer = accumulating(3, smoothing=0.25)
    optimizer.set_num_gradients_to_accumulate(4, update_smoothing=False)
    assert optimizer.smoothing == 0.25
    optimizer.set_num_gradients_to_accumulate(1000)
    assert optimizer.smoothing == 0


@pytest.mark.parametrize("debias", [True, False])
@pytest.mark.parametrize("update", [True, False])
def test_another_number_of_gradients(debias: bool, update: bool) -> None:
    gains = []
    for library in (ours, real):
        model = linear()
        optimizer = library.AdaScale(  # type: ignore[attr-defined]
            SGD(model.parameters(), lr=0.1), num_gradients_to_accumulate=2, debias_ewma=debias
        )
        orthogonal(model)
        assert optimizer.gain() == pytest.approx(2.0)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.set_scale(6.0, update_estimate=update)
        assert optimizer.scale == 6.0
        optimizer.set_num_gradients_to_accumulate(6)
        for _ in range(6):
            backward(model, (0.0, 1.0), 6)
        gains.append(float(optimizer.gain()))
    assert gains[0] == pytest.approx(gains[1], rel=1e-6) and 1 < gains[0] < 6


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("debias", [True, False])
def test_groups_have_gains_of_their_own_and_can_be_added(debias: bool, scaled: bool) -> None:
    seen: list[list[float]] = []
    for library in (ours, real):
        torch.manual_seed(0)
        parts = [nn.Linear(2, 2), nn.Linear(2, 3), nn.Linear(3, 4)]
        optimizer = library.AdaScale(  # type: ignore[attr-defined]
            SGD(parts[0].parameters(), lr=0.1),
            num_gradients_to_accumulate=2,
            is_scaled_loss=scaled,
            debias_ewma=debias,
        )
        gains: list[float] = []
        for count in (2, 3):
            optimizer.add_param_group({"params": list(parts[count - 1].parameters()), "lr": 0.01})
            assert len(optimizer._hook_handles) == 2 * count
            model = nn.Sequential(*parts[:count])
            for batch in ((1.0, 2.0), (3.0, 1.0)):
                backward(model, batch, 2 if scaled else 1)
            if not scaled:
                optimizer.scale_grad_by_num_grads_to_accum()
            gains += [optimizer.gain(), *(optimizer.gain(pg_idx=index) for index in range(count))]
            before = [p.detach().clone() for p in model.parameters()]
            steps = [0.1 * optimizer.gain(0)] * 2 + [0.01 * optimizer.gain(1)] * 2
            optimizer.step()
            for old, parameter, step in zip(before, model.parameters(), steps):  # noqa: B905
                assert torch.allclose(old - parameter, step * parameter.grad, atol=1e-6)
            optimizer.zero_grad()
        seen.append(gains)
    assert seen[0] == pytest.approx(seen[1], rel=1e-5)
    assert len(set(seen[0])) > 4


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
def test_a_scheduler_sets_the_learning_rate_and_the_gain_multiplies_it(lr: Any) -> None:
    model, _ = accumulating()
    optimizer = AdaScale(SGD(model.parameters(), lr=lr), num_gradients_to_accumulate=2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns where it believes that no step was made
        for epoch in range(3):
            orthogonal(model)
            before = model.weight.detach().clone()
            optimizer.step()
            expected = 0.1 * 0.5**epoch
            assert torch.allclose(before - model.weight.detach(), torch.full((2, 2), expected * 2.0 * 0.5))
            assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(expected)
            optimizer.zero_grad()
            scheduler.step()


def test_step_gives_arguments_and_results_through() -> None:
    class Takes(SGD):
        def step(self, closure: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
            if kwargs.pop("fails", False):
                raise RuntimeError("no step")
            return closure, kwargs, self.param_groups[0]["lr"]

    model = linear()
    optimizer = AdaScale(Takes(model.parameters(), lr=0.5), num_gradients_to_accumulate=2)
    assert optimizer.step(None, grad_scale=3) == (None, {"grad_scale": 3}, 0.5)
    posts: list[Any] = []
    optimizer.register_step_post_hook(lambda *_: posts.append(1))
    optimizer.step()
    assert posts == [1]
    assert optimizer.defaults["lr"] == 0.5  # for schedulers
    orthogonal(model)
    with pytest.raises(RuntimeError, match="no step"):
        optimizer.step(fails=True)
    assert optimizer.param_groups[0]["lr"] == 0.5


CALLS: dict[str, Callable[[Any], object]] = {
    "step": lambda o: o.step(),
    "zero_grad": lambda o: o.zero_grad(),
    "state_dict": lambda o: o.state_dict(),
    "load_state_dict": lambda o: o.load_state_dict({"state": {}, "param_groups": []}),
    "set_scale": lambda o: o.set_scale(2.0),
    "add_param_group": lambda o: o.add_param_group({"params": []}),
    "set_num_gradients_to_accumulate": lambda o: o.set_num_gradients_to_accumulate(3),
}


@pytest.mark.parametrize("call", CALLS)
def test_nothing_is_changed_in_the_middle_of_a_step(call: str) -> None:
    model, optimizer = accumulating(3)
    backward(model, (1.0, 0.0))
    with pytest.raises(MisuseError, match=f"{call} of AdaScale in the middle of a step: 1 backward passes of num_grad"):
        CALLS[call](optimizer)


@pytest.mark.parametrize(
    "call",
    [
        lambda: accumulating(scale=0.5),
        lambda: accumulating(smoothing=1.0),
        lambda: accumulating(0),
        lambda: accumulating()[1].set_scale(0.9),
        lambda: accumulating()[1].scale_grad_by_num_grads_to_accum(),
    ],
)
def test_arguments_out_of_range(call: Any) -> None:
    with pytest.raises(AssertionError) as caught:  # FairScale's kind
        call()
    assert isinstance(caught.value, MisuseError)


def test_gradients_in_half_precision_do_not_overflow() -> None:
    model = linear().to(torch.bfloat16)
    half = nn.Parameter(torch.ones(2, dtype=torch.float16))
    optimizer = AdaScale(SGD([*model.parameters(), half], lr=0.1), num_gradients_to_accumulate=2)
    for value in (1000.0, -1000.0):
        (half * value).sum().backward()
    assert optimizer.gain() == pytest.approx(2.0)


def test_complex_and_sparse_gradients() -> None:
    weight = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    table = nn.Embedding(3, 1, sparse=True)
    optimizer = AdaScale(SGD([weight, table.weight], lr=0.1), num_gradients_to_accumulate=2)
    for index in (0, 1):
        ((weight[index] * 1j).imag + table(torch.tensor([index, index])).sum()).backward()
    # In each: one complex gradient of size 1, and one of 2 for a row that was looked up twice. The losses were not
    # divided: the local norms of 5 are taken as a half of the gradients'.
    assert optimizer.gain() == pytest.approx(2.0)
    assert float(optimizer._grad_var_avg()) == pytest.approx(2.0 * ((5.0 + 5.0) * 4 / 2 - 10.0))


def test_steps_that_overflow_leave_the_estimates() -> None:
    model, optimizer = accumulating()
    orthogonal(model)
    gain = optimizer.gain()
    optimizer.step()
    optimizer.zero_grad()
    for batch in ((float("inf"), 0.0), (0.0, 1.0)):
        backward(model, batch, 2)
    assert optimizer.gain() == gain
    optimizer.zero_grad()


def test_a_layer_that_is_frozen_and_thawed() -> None:
    torch.manual_seed(0)
    first, second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    first.requires_grad_(False)
    model = nn.Sequential(first, second)
    optimizer = AdaScale(SGD(model.parameters(), lr=0.1), num_gradients_to_accumulate=2)
    assert len(optimizer._hook_handles) == 1
    orthogonal(model)
    optimizer.step()
    first.requires_grad_(True)
    optimizer.zero_grad()
    assert len(optimizer._hook_handles) == 2
    fresh = AdaScale(SGD(model.parameters(), lr=0.1), num_gradients_to_accumulate=2)
    orthogonal(model)
    second.requires_grad_(False)  # a leftover gradient, of which no local parts come
    optimizer.step()
    assert fresh.gain() > 1


def test_reentrant_checkpointing_is_refused_and_ours_works() -> None:
    from torch.utils.checkpoint import checkpoint

    model, optimizer = accumulating()
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(MisuseError, match="runs inside of another one, as under reentrant checkpointing"):
        checkpoint(model, x, use_reentrant=True).sum().backward()
    model, optimizer = accumulating()
    wrapped = checkpoint_wrapper(model)
    orthogonal(wrapped)
    assert optimizer.gain() == pytest.approx(2.0)


def test_unhook_lets_parameters_go() -> None:
    import gc
    import weakref

    model, optimizer = accumulating()
    backward(model, (1.0, 0.0))
    assert len(optimizer._hook_handles) == 1
    optimizer.unhook()
    assert optimizer._hook_handles == []
    model, optimizer = accumulating()
    seen = weakref.ref(optimizer), weakref.ref(model.weight)
    del model, optimizer
    gc.collect()
    assert [each() for each in seen] == [None, None]


def test_copies_are_refused() -> None:
    with pytest.raises(MisuseError, match="use state_dict"):
        copy.deepcopy(accumulating()[1])


# -- state -----------------------------------------------------------------------------------------------------------


def trained(library: Any, steps: int = 3, **options: Any) -> tuple[nn.Linear, Any]:
    model = linear()
    optimizer = library.AdaScale(
        SGD(model.parameters(), lr=0.1, momentum=0.9), num_gradients_to_accumulate=2, **options
    )
    go_on(model, optimizer, 0, steps)
    return model, optimizer


def go_on(model: nn.Module, optimizer: Any, start: int, steps: int) -> None:
    generator = torch.Generator().manual_seed(start)
    for _ in range(steps):
        for batch in torch.randn(2, 2, generator=generator).tolist():
            backward(model, batch, 2)
        optimizer.step()
        optimizer.zero_grad()


def saved(state: Any, **options: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, **options)


@pytest.mark.fairscale_row(30)
@pytest.mark.parametrize("debias", [True, False])
def test_row_30_state_goes_through_a_file_and_training_goes_on_alike(debias: bool) -> None:
    model, optimizer = trained(ours, debias_ewma=debias)
    state = saved({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, weights_only=True)
    go_on(model, optimizer, 7, 3)
    again, new = trained(ours, steps=0, debias_ewma=debias)
    again.load_state_dict(state["model"])
    before = copy.deepcopy(state["optimizer"])
    new.load_state_dict(state["optimizer"])
    assert str(before) == str(state["optimizer"])  # FairScale's OSS empties what it is given
    go_on(again, new, 7, 3)
    assert torch.equal(model.weight, again.weight) and new.gain() == optimizer.gain()
    assert new.param_groups is new._optimizer.param_groups  # torch has put new ones there


@pytest.mark.fairscale_row(30)
def test_row_30_raw_state_is_refused_by_torch_load() -> None:
    _, optimizer = trained(real)
    with pytest.raises(Exception, match="weights_only"):
        saved(optimizer.state_dict(), weights_only=True)


@pytest.mark.parametrize("debias", [True, False])
def test_fairscales_own_state_loads(debias: bool) -> None:
    model, optimizer = trained(real, debias_ewma=debias)
    state = saved(optimizer.state_dict(), weights_only=False)
    assert isinstance(state["state"]["adascale"]["grad_sqr_avg"], np.ndarray)
    again, new = trained(ours, steps=0, debias_ewma=debias)
    again.load_state_dict(model.state_dict())
    new.load_state_dict(state)
    assert new.gain() == pytest.approx(float(optimizer.gain()), rel=1e-12)
    go_on(model, optimizer, 5, 3)
    go_on(again, new, 5, 3)
    assert new.gain() == pytest.approx(float(optimizer.gain()), rel=1e-6)
    assert set(new.state_dict()["state"]) == set(optimizer.state_dict()["state"])
    assert set(new.state_dict()["state"]["adascale"]) == set(optimizer.state_dict()["state"]["adascale"])


@pytest.mark.fairscale_row(30)
def test_row_30_a_plain_state_loads_with_a_warning() -> None:
    model = linear()
    plain = SGD(model.parameters(), lr=0.25, momentum=0.9)
    _, optimizer = trained(ours)
    with pytest.warns(UserWarning, match="no state of AdaScale"):
        optimizer.load_state_dict(plain.state_dict())
    assert optimizer.gain() == 1.0 and optimizer.param_groups[0]["lr"] == 0.25


def test_state_of_other_groups_is_refused_and_nothing_is_loaded() -> None:
    _, optimizer = trained(ours)
    before = optimizer.gain()
    state = optimizer.state_dict()
    state["state"]["adascale"]["grad_var_avg"] = torch.zeros(2)
    with pytest.raises(MisuseError, match=r"grad_var_avg has shape \(2,\), and this optimizer has 1"):
        optimizer.load_state_dict(state)
    del state["state"]["adascale"]["grad_var_avg"]
    with pytest.raises(MisuseError, match="no grad_var_avg"):
        optimizer.load_state_dict(state)
    assert optimizer.gain() == before


@pytest.mark.fairscale_row(30)
def test_row_30_zero_grad_takes_set_to_none() -> None:
    model, optimizer = trained(ours, steps=0)
    orthogonal(model)
    optimizer.zero_grad(set_to_none=False)
    assert torch.equal(model.weight.grad, torch.zeros(2, 2))
    optimizer.zero_grad(set_to_none=True)
    assert model.weight.grad is None
    with pytest.raises(TypeError):
        trained(real, steps=0)[1].zero_grad(set_to_none=True)


@pytest.mark.fairscale_row(30)
def test_row_30_unused_parameters() -> None:
    with_unused: list[float] = []
    for unused in ([], [nn.Parameter(torch.ones(3))]):
        model = linear()
        optimizer = AdaScale(SGD([*model.parameters(), *unused], lr=0.1), num_gradients_to_accumulate=2)
        for batch in ((1.0, 2.0), (0.0, 1.0)):
            backward(model, batch, 2)
        optimizer.step()
        with_unused.append(optimizer.gain())
    assert with_unused[0] == with_unused[1]
    model = linear()
    raw = real.AdaScale(SGD([*model.parameters(), nn.Parameter(torch.ones(3))], lr=0.1), num_gradients_to_accumulate=2)
    backward(model, (1.0, 2.0), 2)
    with pytest.raises(AttributeError):
        backward(model, (1.0, 2.0), 2)
    assert raw is not None


@pytest.mark.fairscale_row(14)
@pytest.mark.parametrize("debias", [True, False])
def test_row_14_the_wrapper_hands_on_debias_ewma(debias: bool) -> None:
    options: dict[str, Any] = {"num_gradients_to_accumulate": 2, "debias_ewma": debias, "lr": 0.1, "momentum": 0.5}
    optimizer = AdaScaleWrapper(linear().parameters(), **options)
    assert (optimizer._debias_ewma, optimizer._is_scaled_loss) == (debias, True)
    assert isinstance(optimizer._optimizer, SGD) and optimizer.param_groups[0]["momentum"] == 0.5
    raw = real.AdaScaleWrapper(linear().parameters(), **options)
    assert (raw._debias_ewma, raw._is_scaled_loss) == (True, debias)


# -- ranks -----------------------------------------------------------------------------------------------------------


def mlp() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))


def build(kind: str, accumulate: int) -> tuple[Any, nn.Module, Any]:
    model = mlp()
    parameters = list(model.parameters())
    if kind == "ddp":
        wrapped: nn.Module = DistributedDataParallel(model)
        return model, wrapped, AdaScale(SGD(parameters, lr=0.1), num_gradients_to_accumulate=accumulate)
    if kind in ("native", "native, ddp"):
        optimizer = AdaScale(OSS(parameters, optim=SGD, lr=0.1), num_gradients_to_accumulate=accumulate)
        # FairScale's own tests give ShardedDataParallel the AdaScale, not the OSS.
        wrap: Any = DistributedDataParallel if kind == "native, ddp" else ShardedDataParallel
        return model, wrap(model) if kind == "native, ddp" else wrap(model, optimizer), optimizer
    assert kind == "raw"
    oss = RealOSS(parameters, optim=SGD, lr=0.1)
    return model, RealShardedDataParallel(model, oss), real.AdaScale(oss, num_gradients_to_accumulate=accumulate)


def gains_of(kind: str, accumulate: int, steps: int = 3) -> Any:
    """Gains and parameters after each step, and what the paper gives for this run's gradients."""
    model, wrapped, optimizer = build(kind, accumulate)
    world = dist.get_world_size()
    generator = torch.Generator().manual_seed(dist.get_rank())
    seen, local, total = [], [], []
    for _ in range(steps):
        wrapped.zero_grad()
        batches = [torch.randn(5, 4, generator=generator) for _ in range(accumulate)]
        norms, mean = reference(model, batches, world)
        local.append(norms)
        total.append(mean)
        for index, batch in enumerate(batches):
            with contextlib.nullcontext() if index == accumulate - 1 else wrapped.no_sync():
                (wrapped(batch).square().mean() / accumulate).backward()
        seen.append(optimizer.gain())
        optimizer.step()
        optimizer.zero_grad()
    scale = float(world * accumulate)
    expected = paper(local, total, scale, max(1 - scale / 1000, 0))
    return seen, expected, weights(model)


def reference(model: nn.Module, batches: Sequence[Tensor], world: int) -> tuple[list[float], float]:
    """All ranks' squared norms, and that of the mean, in float64, of a copy of the model."""
    twin = copy.deepcopy(model).double()
    norms, mean = [], torch.zeros(sum(p.numel() for p in twin.parameters()), dtype=torch.float64)
    for batch in batches:
        gradients = torch.autograd.grad(twin(batch.double()).square().mean(), list(twin.parameters()))
        flat = torch.cat([g.reshape(-1) for g in gradients])
        everywhere = [torch.empty_like(flat) for _ in range(world)]
        dist.all_gather(everywhere, flat)
        norms += [float(each.square().sum()) for each in everywhere]
        mean += sum(everywhere)  # type: ignore[arg-type]
    return norms, float((mean / (world * len(batches))).square().sum())


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("world_size", [2, 3])
@on_ranks()
def test_the_gain_under_ddp_is_the_papers(world_size: int, accumulate: int) -> None:
    gains, expected, _ = gains_of("ddp", accumulate)
    assert gains == pytest.approx(expected, rel=1e-5)  # gradients in float32 against float64
    assert all(1 < gain < world_size * accumulate for gain in gains)


@pytest.mark.fairscale_row(13)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kind", ["native", "native, ddp"])
@on_ranks()
def test_row_13_sharded_gradients_give_the_gain_of_ddp(kind: str, accumulate: int) -> None:
    (gains, _, values), (found, _, ours_) = gains_of("ddp", accumulate), gains_of(kind, accumulate)
    assert gains == found and same(values, ours_)  # to the last bit


def raw_gains() -> list[float]:
    return gains_of("raw", 1)[0]  # type: ignore[no-any-return]


@pytest.mark.fairscale_row(13)
def test_row_13_raw_gains_differ_between_ranks(ranks: Any) -> None:
    first, second = ranks.run(raw_gains, 2)
    assert all(abs(a - b) > 0.01 for a, b in zip(first, second, strict=True))


def deep() -> nn.Sequential:
    """Four matrices of increasing size, which greedy partition spreads."""
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(size, size + 1, bias=False) for size in (2, 3, 4, 5)))


def built(way: str) -> tuple[float, list[Tensor]]:
    model = deep()
    wrapped = DistributedDataParallel(model)
    parameters = list(wrapped.parameters())
    build: dict[str, Callable[[], Any]] = {
        "plain": lambda: AdaScale(SGD(parameters, lr=0.1)),
        "AdaScale(OSS)": lambda: AdaScale(OSS(parameters, SGD, lr=0.1)),
        "AdaScaleWrapper(optim_cls=OSS)": lambda: AdaScaleWrapper(parameters, optim_cls=OSS, optim=SGD, lr=0.1),
        "raw": lambda: real.AdaScale(SGD(parameters, lr=0.1)),
    }
    optimizer = build[way]()
    for batch in ([[1.0, 0.0], [0.0, 1.0]], [[0.0, 1.0], [1.0, 0.0]]):
        wrapped(torch.tensor(batch[dist.get_rank()])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return float(optimizer.gain()), weights(model)


@on_ranks()
def test_every_way_to_build_it_trains_alike() -> None:
    gain, plain = built("plain")
    assert same((gain, plain), built("AdaScale(OSS)")) and same((gain, plain), built("AdaScaleWrapper(optim_cls=OSS)"))
    raw_gain, raw = built("raw")
    assert gain == pytest.approx(raw_gain, rel=1e-6)
    torch.testing.assert_close(plain, raw, rtol=1e-5, atol=1e-6)


@pytest.mark.fairscale_row(30)
@on_ranks()
def test_row_30_state_of_adascale_around_oss() -> None:
    def build_it() -> tuple[nn.Module, Any, Any]:
        model = mlp()
        optimizer = AdaScale(OSS(model.parameters(), SGD, lr=0.1, momentum=0.9))
        return model, ShardedDataParallel(model, optimizer), optimizer

    def train(wrapped: Any, optimizer: Any, seed: int) -> None:
        generator = torch.Generator().manual_seed(10 * seed + dist.get_rank())
        for _ in range(3):
            wrapped(torch.randn(5, 4, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    model, wrapped, optimizer = build_it()
    train(wrapped, optimizer, 0)
    optimizer.consolidate_state_dict(recipient_rank=-1)
    state = saved(optimizer.state_dict(), weights_only=True)
    values = copy.deepcopy(model.state_dict())
    assert list(state["state"]) == [*range(6), "adascale"]
    assert len(optimizer.state_dict(all_ranks=True)["state"]) == 7
    train(wrapped, optimizer, 1)
    again, new_wrapped, new = build_it()
    again.load_state_dict(values)
    new.load_state_dict(state)
    train(new_wrapped, new, 1)
    assert same(weights(model), weights(again)) and new.gain() == optimizer.gain()


@pytest.mark.fairscale_row(30)
@on_ranks()
def test_row_30_raw_state_of_adascale_around_oss() -> None:
    model = mlp()
    oss = RealOSS(model.parameters(), SGD, lr=0.1, momentum=0.9)
    optimizer, wrapped = real.AdaScale(oss), DistributedDataParallel(model)
    wrapped(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    oss.consolidate_state_dict(-1)
    with pytest.raises(TypeError):
        optimizer.state_dict()
    del oss.state["adascale"]

    def load() -> None:
        optimizer.load_state_dict(oss.state_dict(all_ranks=True))
        optimizer.gain()

    with pytest.raises(KeyError):
        load()


class Halves(nn.Module):
    """Each rank uses its own half."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

    def forward(self, x: Tensor) -> Tensor:
        return self.parts[dist.get_rank()](x)  # type: ignore[no-any-return]


@on_ranks()
def test_a_parameter_that_one_rank_uses() -> None:
    model = DistributedDataParallel(Halves(), find_unused_parameters=True)
    optimizer = AdaScale(SGD(model.parameters(), lr=0.1))
    model(torch.ones(2)).sum().backward()
    # Either rank's gradients are zero where the other's are not: orthogonal.
    assert optimizer.gain() == pytest.approx(2.0)
    optimizer.step()
