"""AdaScale: FairScale's behaviours, and the same gain on all ranks whatever wraps the model.

The numbers in names of tests are the rows of docs/fairscale.md.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import fairscale.optim.adascale as real
import pytest
import torch
import torch.distributed as dist
from fairscale.nn.data_parallel import ShardedDataParallel as RealShardedDataParallel
from fairscale.optim.oss import OSS as RealOSS
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import fsshard.compat.fairscale.optim.adascale as ours
from fsshard.compat.errors import MisuseError
from fsshard.compat.fairscale.nn import checkpoint_wrapper
from fsshard.compat.fairscale.nn.data_parallel import ShardedDataParallel
from fsshard.compat.fairscale.optim import OSS
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


# -- one process: gradients are accumulated --------------------------------------------------------------------------


def accumulating(count: int = 2, library: Any = ours, momentum: float = 0.0, **options: Any) -> tuple[nn.Linear, Any]:
    torch.manual_seed(0)
    model = nn.Linear(2, 2, bias=False)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=momentum)
    return model, library.AdaScale(optimizer, num_gradients_to_accumulate=count, **options)


def orthogonal(model: nn.Module) -> None:
    """Two gradients that have nothing in common."""
    backward(model, (1.0, 0.0), 2)
    backward(model, (0.0, 1.0), 2)


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
    assert optimizer.gain() == 1.0
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
        optimizer.zero_grad()
        assert model.weight.grad is None


@pytest.mark.parametrize("scale", [None, 1.5])
@pytest.mark.parametrize("debias", [True, False])
def test_averages_over_steps(debias: bool, scale: float | None) -> None:
    """As the real library's, and where averages are corrected as the paper's; the number of gradients changes."""
    generator = torch.Generator().manual_seed(1)
    options: dict[str, Any] = {"smoothing": 0.5, "debias_ewma": debias, "scale": scale}
    both = [accumulating(3, library, **options) for library in (ours, real)]
    local, total, gains = [], [], []
    for step in range(7):
        if step == 5:
            for _, optimizer in both:
                optimizer.set_scale(6.0, update_estimate=debias)
                optimizer.set_num_gradients_to_accumulate(6, update_smoothing=not debias)
        count = 3 if step < 5 else 6
        batches = torch.randn(count, 2, generator=generator)
        local.append([2 * float(batch.square().sum()) for batch in batches])
        total.append(2 * float(batches.mean(0).square().sum()))
        found = []
        for model, optimizer in both:
            for batch in batches.tolist():
                backward(model, batch, count)
            found.append(float(optimizer.gain()))
            optimizer.step()
            optimizer.zero_grad()
        assert found[0] == pytest.approx(found[1], rel=1e-6)  # FairScale's sums are in float32
        gains.append(found[0])
    assert not debias or gains[:5] == pytest.approx(paper(local, total, scale or 3.0, 0.5)[:5], rel=1e-6)
    assert both[0][1].smoothing == both[1][1].smoothing and both[0][1].scale == 6.0
    assert torch.allclose(both[0][0].weight, both[1][0].weight, rtol=1e-6)


@pytest.mark.parametrize("debias", [True, False])
def test_groups_have_gains_of_their_own_and_can_be_added(debias: bool) -> None:
    seen: list[list[float]] = []
    for library in (ours, real):
        torch.manual_seed(0)
        parts = [nn.Linear(2, 2), nn.Linear(2, 3), nn.Linear(3, 4)]
        optimizer = library.AdaScale(  # type: ignore[attr-defined]
            SGD(parts[0].parameters(), lr=0.1), num_gradients_to_accumulate=2, debias_ewma=debias
        )
        gains: list[float] = []
        for count in (2, 3):
            optimizer.add_param_group({"params": list(parts[count - 1].parameters()), "lr": 0.01})
            model = nn.Sequential(*parts[:count])
            for batch in ((1.0, 2.0), (3.0, 1.0)):
                backward(model, batch, 2)
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

    model, _ = accumulating()
    optimizer = AdaScale(Takes(model.parameters(), lr=0.5), num_gradients_to_accumulate=2)
    assert optimizer.step(None, grad_scale=3) == (None, {"grad_scale": 3}, 0.5)
    orthogonal(model)
    with pytest.raises(RuntimeError, match="no step"):
        optimizer.step(fails=True)
    assert optimizer.param_groups[0]["lr"] == 0.5 == optimizer.defaults["lr"]  # for schedulers


def test_nothing_is_changed_in_the_middle_of_a_step() -> None:
    model, optimizer = accumulating(3)
    backward(model, (1.0, 0.0))
    calls: dict[str, Callable[[], object]] = {
        "step": optimizer.step,
        "zero_grad": optimizer.zero_grad,
        "state_dict": optimizer.state_dict,
        "load_state_dict": lambda: optimizer.load_state_dict({"state": {}, "param_groups": []}),
        "set_scale": lambda: optimizer.set_scale(2.0),
        "add_param_group": lambda: optimizer.add_param_group({"params": []}),
        "set_num_gradients_to_accumulate": lambda: optimizer.set_num_gradients_to_accumulate(3),
    }
    for name, call in calls.items():
        with pytest.raises(MisuseError, match=f"{name} of AdaScale in the middle of a step: 1 backward passes of num"):
            call()


def test_refused() -> None:
    calls: list[Callable[[], object]] = [
        lambda: accumulating(scale=0.5),
        lambda: accumulating(smoothing=1.0),
        lambda: accumulating(0),
        lambda: accumulating()[1].set_scale(0.9),
        lambda: accumulating()[1].scale_grad_by_num_grads_to_accum(),
        lambda: copy.deepcopy(accumulating()[1]),
    ]
    for call in calls:
        with pytest.raises(AssertionError) as caught:  # FairScale's kind
            call()
        assert isinstance(caught.value, MisuseError)
    for single in (lambda: accumulating(1), lambda: accumulating()[1].set_num_gradients_to_accumulate(1)):
        with pytest.raises(RuntimeError, match="num_gradients_to_accumulate 1 there is one"):
            single()


def test_gradients_in_half_precision_do_not_overflow() -> None:
    half = nn.Parameter(torch.ones(2, dtype=torch.float16))
    optimizer = AdaScale(SGD([half], lr=0.1), num_gradients_to_accumulate=2)
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
    assert float(optimizer._state["grad_var_avg"]) == pytest.approx(2.0 * ((5.0 + 5.0) * 4 / 2 - 10.0))


def test_steps_that_overflow_leave_the_estimates() -> None:
    model, optimizer = accumulating()
    orthogonal(model)
    gain = optimizer.gain()
    optimizer.step()
    optimizer.zero_grad()
    for batch in ((float("inf"), 0.0), (0.0, 1.0)):
        backward(model, batch, 2)
    assert optimizer.gain() == gain


def test_a_layer_that_is_frozen_and_thawed() -> None:
    torch.manual_seed(0)
    first, second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    first.requires_grad_(False)
    model = nn.Sequential(first, second)
    optimizer = AdaScale(SGD(model.parameters(), lr=0.1), num_gradients_to_accumulate=2)
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


@on_ranks()
def test_fully_sharded_parameters_are_refused() -> None:
    model = fully_shard(nn.Linear(2, 2), mesh=dist.init_device_mesh("cpu", (2,)))
    with pytest.raises(MisuseError, match="each rank's own gradient"):
        AdaScale(SGD(model.parameters(), lr=0.1))


def test_reentrant_checkpointing_is_refused_and_ours_works() -> None:
    from torch.utils.checkpoint import checkpoint

    model, optimizer = accumulating()
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(MisuseError, match="runs inside of another one, as under reentrant checkpointing"):
        checkpoint(model, x, use_reentrant=True).sum().backward()
    model, optimizer = accumulating()
    orthogonal(checkpoint_wrapper(model))
    assert optimizer.gain() == pytest.approx(2.0)


def test_parameters_are_let_go() -> None:
    model, optimizer = accumulating()
    optimizer.unhook()
    assert optimizer._hook_handles == []
    model, optimizer = accumulating()
    backward(model, (1.0, 0.0))
    seen = weakref.ref(optimizer), weakref.ref(model.weight)
    del model, optimizer
    gc.collect()
    assert [each() for each in seen] == [None, None]


@pytest.mark.fairscale_row(14)
def test_row_14_the_wrapper_hands_on_debias_ewma() -> None:
    options: dict[str, Any] = {"num_gradients_to_accumulate": 2, "debias_ewma": False, "lr": 0.1, "momentum": 0.5}
    ours_, raw = (library.AdaScaleWrapper(nn.Linear(2, 2).parameters(), **options) for library in (ours, real))
    assert [(each._debias_ewma, each._is_scaled_loss) for each in (ours_, raw)] == [(False, True), (True, False)]
    assert ours_.param_groups[0]["momentum"] == 0.5


@pytest.mark.fairscale_row(30)
def test_row_30_unused_parameters_and_zero_grad() -> None:
    gains = []
    for unused in ([], [nn.Parameter(torch.ones(3))]):
        model, _ = accumulating()
        optimizer = AdaScale(SGD([*model.parameters(), *unused], lr=0.1), num_gradients_to_accumulate=2)
        for batch in ((1.0, 2.0), (0.0, 1.0)):
            backward(model, batch, 2)
        optimizer.step()
        gains.append(optimizer.gain())
    assert gains[0] == gains[1]
    optimizer.zero_grad(set_to_none=False)
    assert torch.equal(model.weight.grad, torch.zeros(2, 2))
    raw = real.AdaScale(SGD([*model.parameters(), *unused], lr=0.1), num_gradients_to_accumulate=2)
    with pytest.raises(TypeError):
        raw.zero_grad(set_to_none=True)
    backward(model, (1.0, 2.0), 2)
    with pytest.raises(AttributeError):
        backward(model, (1.0, 2.0), 2)


# -- state -----------------------------------------------------------------------------------------------------------


def trained(library: Any, steps: int = 3, **options: Any) -> tuple[nn.Linear, Any]:
    model, optimizer = accumulating(2, library, momentum=0.9, **options)
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
@pytest.mark.parametrize("library", [ours, real], ids=["ours", "real"])
def test_row_30_state_goes_through_a_file_and_training_goes_on_alike(library: Any, debias: bool) -> None:
    """FairScale's own loads here too; its file is none that torch reads by default."""
    model, optimizer = trained(library, debias_ewma=debias)
    state = saved(optimizer.state_dict(), weights_only=library is ours)
    again, new = trained(ours, steps=0, debias_ewma=debias)
    again.load_state_dict(model.state_dict())
    before = copy.deepcopy(state)
    new.load_state_dict(state)
    assert str(before) == str(state)  # FairScale's OSS empties what it is given
    for each in ((model, optimizer), (again, new)):
        go_on(*each, 7, 3)
    assert new.gain() == (optimizer.gain() if library is ours else pytest.approx(float(optimizer.gain()), rel=1e-6))
    assert library is real or torch.equal(model.weight, again.weight)
    assert set(new.state_dict()["state"]["adascale"]) == set(optimizer.state_dict()["state"]["adascale"])
    assert new.param_groups is new._optimizer.param_groups  # torch has put new ones there


@pytest.mark.fairscale_row(30)
def test_row_30_states_of_other_optimizers() -> None:
    """A plain one loads with a warning, estimates of other groups do not, and nothing is loaded."""
    _, optimizer = trained(ours)
    state = optimizer.state_dict()
    gain = optimizer.gain()
    state["state"]["adascale"]["grad_var_avg"] = torch.zeros(2)
    with pytest.raises(MisuseError, match=r"of different parameter groups: expected .*'grad_var_avg': \(1,\)"):
        optimizer.load_state_dict(state)
    del state["state"]["adascale"]["grad_var_avg"]
    with pytest.raises(MisuseError, match="of different parameter groups"):
        optimizer.load_state_dict(state)
    assert optimizer.gain() == gain
    with pytest.warns(UserWarning, match="no state of AdaScale"):
        optimizer.load_state_dict(SGD(nn.Linear(2, 2, bias=False).parameters(), lr=0.25).state_dict())
    assert optimizer.gain() == 1.0 and optimizer.param_groups[0]["lr"] == 0.25


# -- ranks -----------------------------------------------------------------------------------------------------------


def build(kind: str, accumulate: int = 1) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))
    options: dict[str, Any] = {"num_gradients_to_accumulate": accumulate}
    if kind == "raw":
        oss = RealOSS(model.parameters(), optim=SGD, lr=0.1)
        return model, RealShardedDataParallel(model, oss), real.AdaScale(oss, **options)
    if kind == "ddp":
        optimizer = AdaScale(SGD(model.parameters(), lr=0.1, momentum=0.9), **options)
    elif kind == "wrapper, ddp":
        optimizer = AdaScaleWrapper(model.parameters(), optim_cls=OSS, optim=SGD, lr=0.1, momentum=0.9, **options)
    else:
        optimizer = AdaScale(OSS(model.parameters(), optim=SGD, lr=0.1, momentum=0.9), **options)
    # FairScale's own tests give ShardedDataParallel the AdaScale, not the OSS.
    return model, DistributedDataParallel(model) if "ddp" in kind else ShardedDataParallel(model, optimizer), optimizer


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
@pytest.mark.parametrize("kind", ["native", "native, ddp", "wrapper, ddp"])
@on_ranks()
def test_row_13_sharded_gradients_give_the_gain_of_ddp(kind: str, accumulate: int) -> None:
    (gains, _, values), (found, _, ours_) = gains_of("ddp", accumulate), gains_of(kind, accumulate)
    assert gains == found and same(values, ours_)  # to the last bit


@pytest.mark.fairscale_row(13)
def test_row_13_raw_gains_differ_between_ranks(ranks: Any) -> None:
    (first, _, _), (second, _, _) = ranks.run(gains_of, 2, "raw", 1)
    assert all(abs(a - b) > 0.01 for a, b in zip(first, second, strict=True))


@pytest.mark.fairscale_row(30)
@on_ranks()
def test_row_30_state_of_adascale_around_oss() -> None:
    def train(wrapped: Any, optimizer: Any, seed: int) -> None:
        generator = torch.Generator().manual_seed(10 * seed + dist.get_rank())
        for _ in range(3):
            wrapped(torch.randn(5, 4, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    model, wrapped, optimizer = build("native")
    train(wrapped, optimizer, 0)
    optimizer.consolidate_state_dict(recipient_rank=-1)
    state = saved(optimizer.state_dict(), weights_only=True)
    assert list(state["state"]) == [*range(6), "adascale"] == list(optimizer.state_dict(all_ranks=True)["state"])
    again, new_wrapped, new = build("native")
    again.load_state_dict(model.state_dict())
    new.load_state_dict(state)
    train(wrapped, optimizer, 1)
    train(new_wrapped, new, 1)
    assert same(weights(model), weights(again)) and new.gain() == optimizer.gain()


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
