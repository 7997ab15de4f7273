"""Freezes parameters around the forwards of a step, evaluates in it, skips one that broke off; bare replicas judge."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsshard
from tests import training_runs
from tests.models import Spectral, batch, take_step, with_sgd
from tests.on_ranks import on_ranks
from tests.optimizers import average
from tests.sets import often
from tests.training_runs import differences

ENGINES = (*training_runs.ENGINES, {"backend": "fsdp2", "auto_wrap_policy": {nn.Linear, Spectral}, "merge_below": 0})


class Adapted(nn.Module):
    """A frozen layer with an adapter that can be switched off, as PEFT's ``disable_adapter()`` does, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.adapter, self.head = nn.Linear(4, 4), Spectral(4), nn.Linear(4, 2)
        self.enabled = True

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.base(x)
        return self.head(torch.tanh(hidden + self.adapter(x) if self.enabled else hidden))

    @contextlib.contextmanager
    def without_adapter(self) -> Any:
        self.enabled = False
        self.adapter.requires_grad_(False)
        try:
            yield
        finally:
            self.adapter.requires_grad_(True)
            self.enabled = True


def adapted(head: bool) -> Adapted:
    torch.manual_seed(0)
    module = Adapted()
    module.base.requires_grad_(False)
    module.head.requires_grad_(head)
    return module


def preferences(model: Any, module: Adapted, number: int, reference_grad: bool) -> Tensor:
    """A loss against a reference pass between the forward and its backward, as DPO has it."""
    policy = model(batch(number))
    with module.without_adapter(), torch.set_grad_enabled(reference_grad):
        reference = model(batch(number)).detach()
    return (policy - reference).square().mean()


def bare(head: bool, reference_grad: bool) -> dict[str, Tensor]:
    module = adapted(head)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    for number in range(4):
        preferences(module, module, number, reference_grad).backward()
        average(module)
        take_step(optimizer)
    return module.state_dict()


def wrapped(head: bool, **settings: Any) -> tuple[Adapted, Any, Any]:
    module = adapted(head)
    model = fsshard.wrap(module, **settings)
    return module, model, fsshard.build_optimizer(model, torch.optim.Adam, lr=0.1)


@pytest.mark.parametrize(
    ("head", "unused", "reference_grad"),
    often([(True, False, False), (False, True, False), (True, False, True)], (False, True, False), (True, False, True)),
)
@on_ranks()
def test_a_reference_pass_may_freeze(tmp_path: Path, head: bool, unused: bool, reference_grad: bool) -> None:
    """An engine that is built anew while a graph awaits its backward loses the reduction, silently."""
    folder = str(tmp_path)
    want, found = bare(head, reference_grad), []
    for index, engine in enumerate(ENGINES):
        if reference_grad and engine["backend"] == "ddp" and unused:
            continue  # as raw DDP: "Expected to mark a variable ready only once" (torch 2.13)
        module, model, optimizer = wrapped(head, find_unused_parameters=unused, **engine)
        for number in range(4):
            if number == 2:
                fsshard.save(f"{folder}/{index}", model, optimizer)
                module, model, optimizer = wrapped(head, find_unused_parameters=unused, **engine)
                fsshard.load(f"{folder}/{index}", model, optimizer)
            preferences(model, module, number, reference_grad).backward()
            take_step(optimizer)
        found += [f"{engine}: {difference}" for difference in differences(want, dict(model.state_dict()))]
    assert not found


def job_frozen_after_an_evaluation(engine: dict[str, Any] | None) -> dict[str, Tensor]:
    """A layer is frozen and unfrozen between steps, each time after an evaluation; None: bare replicas."""
    module = adapted(head=True)
    model = module if engine is None else fsshard.wrap(module, **engine)
    silent = contextlib.nullcontext if engine is None else model.no_sync
    layer = [parameter for name, parameter in model.named_parameters() if name.startswith("head")]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9) if engine is None else None
    optimizer = optimizer or fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9)
    for number in range(6):
        with torch.set_grad_enabled(number > 3):  # some evaluate with gradients, and drop the graph
            model(batch(number))
        if number in (1, 3, 4, 5):
            for parameter in layer:
                parameter.requires_grad_(number in (3, 5))
        with silent():
            model(batch(number + 6)).square().mean().backward()
        model(batch(number)).square().mean().backward()
        if engine is None:
            average(module)
        take_step(optimizer)
    return dict(model.state_dict())


def job_frozen_by_its_module(engine: dict[str, Any] | None) -> dict[str, Tensor]:
    """The head is frozen before, and between, a forward and its backward; behind others that were dropped or raised."""
    module = adapted(head=True)
    model = module if engine is None else fsshard.wrap(module, **engine)
    silent = contextlib.nullcontext if engine is None else model.no_sync
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1) if engine is None else None
    optimizer = optimizer or fsshard.build_optimizer(model, torch.optim.AdamW, lr=0.1)
    for number in range(5):
        model.head.requires_grad_(number % 2 == 0)
        model.state_dict()
        with silent():
            model(batch(2 * number)).square().mean().backward()
        output = model(batch(2 * number + 1))
        model.head.requires_grad_(number in (0, 4))
        output.square().mean().backward()
        if engine is None:
            average(module)
        take_step(optimizer)
        if number % 2:
            model(batch(number))
        else:
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                model(torch.ones(2, 3))
    return dict(model.state_dict())


@pytest.mark.parametrize("job", [job_frozen_after_an_evaluation, job_frozen_by_its_module])
@on_ranks()
def test_freezing_between_steps(job: Callable[[Any], dict[str, Tensor]]) -> None:
    want, wrong = job(None), []
    for engine in ENGINES:
        if engine["backend"] == "fsdp" and job is job_frozen_by_its_module:
            continue  # it holds local gradients of a unit together
        wrong += [f"{engine}: {found}" for found in differences(want, job(engine))]
    assert not wrong


def job_frozen_in_mid_accumulation(engine: dict[str, Any] | None) -> dict[str, Tensor]:
    """Parts are frozen and unfrozen between a micro-batch under no_sync() and the next; None: bare replicas."""
    module = adapted(head=True)
    model = module if engine is None else fsshard.wrap(module, **engine)
    silent = contextlib.nullcontext if engine is None else model.no_sync
    parts = (module.adapter, module.head)
    if engine is None:
        optimizers = [torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9) for part in parts]
    else:
        groups = [[{"params": list(part.parameters())}] for part in parts]
        optimizers = [
            fsshard.build_optimizer(model, torch.optim.SGD, param_groups=group, lr=0.1, momentum=0.9)
            for group in groups
        ]

    def accumulate(number: int) -> None:
        model(batch(number)).square().mean().backward()

    def step(which: int) -> None:
        if engine is None:
            average(parts[which])
        take_step(optimizers[which])

    for number in range(4):
        with silent():
            accumulate(3 * number)
        parts[number % 2].requires_grad_(False)
        accumulate(3 * number + 1)
        step(1 - number % 2)
        if number > 1:  # the other one goes on, as the players of a GAN do in turn; else it is stepped as it is
            parts[number % 2].requires_grad_(True)
            parts[1 - number % 2].requires_grad_(False)
            accumulate(3 * number + 2)
        step(number % 2)
        module.adapter.requires_grad_(True)
        module.head.requires_grad_(True)
    return dict(model.state_dict())


@on_ranks()
def test_freezing_between_micro_batches() -> None:
    """Raw DDP leaves what was frozen the gradient of its own rank, silently."""
    want, found = job_frozen_in_mid_accumulation(None), []
    for engine in ENGINES:
        if engine["backend"] != "fsdp":  # which refuses it
            got = job_frozen_in_mid_accumulation(engine)  # equal but for the order in which gradients are added up
            found += [f"{engine}: {name}" for name in want if not torch.allclose(got[name], want[name], atol=1e-7)]
    assert not found


@on_ranks()
def test_raw_fsdp2_does_not_hear_of_freezing_after_an_evaluation() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    found = []
    for evaluate in (False, True):
        layer = nn.Linear(4, 4)
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
        bias = layer.bias
        if evaluate:
            with torch.no_grad():
                layer(batch(0))
        bias.requires_grad_(False)
        layer(batch(0)).sum().backward()
        found.append(bias.grad is not None)
    assert found == [False, True]


class BrokenOff(Exception):
    """A step that the script skips, as it does where memory has run out."""


def break_off(*_: Any) -> None:
    raise BrokenOff


def broken_forward(model: Any, layer: nn.Module) -> None:
    hook = layer.register_forward_hook(break_off)
    try:
        model(batch(99))
    finally:
        hook.remove()


def broken_backward(model: Any, layer: nn.Module, derivative: bool = False) -> None:
    hook = layer.register_forward_hook(lambda _, args, output: output.register_hook(break_off) and None)
    x = batch(99).requires_grad_()
    loss = model(x).square().mean()
    hook.remove()
    torch.autograd.grad(loss, x, create_graph=True) if derivative else loss.backward()


def broken_derivative(model: Any, layer: nn.Module) -> None:
    broken_backward(model, layer, derivative=True)


def dropped_micro_batch(model: Any, _: nn.Module) -> None:
    with model.no_sync() if hasattr(model, "no_sync") else contextlib.nullcontext():
        model(batch(99)).square().mean().backward()
    raise BrokenOff


def skipping(broken: Any, engine: dict[str, Any] | None) -> dict[str, Tensor]:
    """Train, where the fourth step breaks off; None: bare replicas."""
    module = adapted(head=True)
    model = module if engine is None else fsshard.wrap(module, **engine)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1) if engine is None else None
    optimizer = optimizer or fsshard.build_optimizer(model, torch.optim.Adam, lr=0.1)
    for number in range(6):
        if number == 3:
            with pytest.raises(BrokenOff):
                broken(model, module.adapter)
        else:
            with contextlib.nullcontext() if engine is None else model.no_sync():
                model(batch(number + 7)).square().mean().backward()
            model(batch(number)).square().mean().backward()
            if engine is None:
                average(module)
            optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


@pytest.mark.parametrize("broken", [broken_forward, broken_backward, broken_derivative, dropped_micro_batch])
@on_ranks()
def test_a_step_that_broke_off_leaves_nothing_behind(broken: Any) -> None:
    """Raw FSDP1 and FSDP2 train something else from there on, silently (torch 2.13)."""
    want, found = skipping(broken, None), []
    for engine in ENGINES:
        if engine["backend"] == "ddp" and broken is broken_backward:
            with pytest.raises(RuntimeError, match="Expected to have finished reduction in the prior iteration"):
                skipping(broken, engine)  # torch's own
            continue
        if engine["backend"] == "ddp" and broken is broken_derivative:
            continue  # raw DDP then sends under no_sync, too, and adds up in another order
        found += [f"{engine}: {difference}" for difference in differences(want, skipping(broken, engine))]
    assert not found


def evaluated(engine: dict[str, Any], evaluates: bool) -> dict[str, Tensor]:
    """Train in bfloat16; each step may evaluate first, with gradients, of which no backward comes."""
    model, optimizer = with_sgd(adapted(head=True), mixed_precision="bf16", **engine)
    for number in range(2):
        kept = [model(batch(number + 9)).square().mean()] if evaluates else []
        model(batch(number)).square().mean().backward()
        take_step(optimizer)
        kept.clear()
    return dict(model.state_dict())


@pytest.mark.parametrize("world_size", [2, 1])
@on_ranks()
def test_an_evaluation_with_gradients_loses_none(world_size: int) -> None:
    """Raw FSDP1 reduces no gradient in the next step, silently, in mixed precision (torch 2.13)."""
    found = []
    for engine in (*ENGINES, {"backend": "fsdp", "auto_wrap_policy": {nn.Linear, Spectral}}):
        want = evaluated(engine, False)
        found += [f"{engine}: {difference}" for difference in differences(want, evaluated(engine, True))]
    assert not found


@pytest.mark.filterwarnings("ignore::FutureWarning")
@on_ranks()
def test_raw_fsdp1_loses_gradients_after_an_evaluation() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

    found = []
    for evaluates in (False, True):
        settings = {"device_id": torch.device("cpu"), "use_orig_params": True}
        settings["mixed_precision"] = MixedPrecision(torch.bfloat16)
        inner = FullyShardedDataParallel(nn.Linear(4, 4), **settings)
        model = FullyShardedDataParallel(nn.Sequential(nn.Linear(4, 4), inner), **settings)
        if evaluates:
            model(batch(9))
        model(batch(0)).square().mean().backward()
        found.append(any(parameter.grad is not None for parameter in model.parameters()))
    assert found == [True, False]
