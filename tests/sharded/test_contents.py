"""The contents of modules: buffers, rank 0's everywhere; and changes after wrap, named where they are looked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsshard
from fsshard.errors import ModelError
from tests.models import Spectral, batch, net, take_step, with_sgd
from tests.on_ranks import on_backends, on_ranks
from tests.sets import often
from tests.sharded.training import ALL, train
from tests.training_runs import DISTRIBUTED, check_equal, differences


class Noisy(nn.Module):
    """Its buffers differ between ranks after each training forward."""

    seen: Tensor
    spectrum: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = Spectral(4), nn.BatchNorm1d(4)
        self.register_buffer("seen", torch.zeros(4))
        self.register_buffer("spectrum", torch.zeros(4, dtype=torch.complex64))
        self.register_buffer("flag", torch.tensor(False), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += x.detach().mean(0)
            self.spectrum += torch.fft.fft(x.detach().mean(0))
        return self.norm(self.layer(x)) + self.seen


def job_put_in_later(backend: str) -> Tensor:
    """A module with buffers comes between forwards that are looked at; return what an evaluation gives then."""
    torch.manual_seed(0)
    model, optimizer = with_sgd(nn.Sequential(nn.Linear(4, 4), nn.Identity(), nn.Linear(4, 2)), backend=backend)
    x = batch(dist.get_rank())
    with torch.no_grad():
        for _ in range(4):
            model.eval()(x)
    for number in range(10):
        if number == 8:
            model.module[1] = nn.BatchNorm1d(4, affine=False)
        model.train()(x).square().mean().backward()
        take_step(optimizer)
    with torch.no_grad():
        return model.eval()(torch.ones(1, 4))  # type: ignore[no-any-return]


@pytest.mark.parametrize("backend", ["ddp", "fsdp2"])
def test_buffers_of_a_module_that_was_put_in_later(ranks: Any, backend: str) -> None:
    first, second = ranks.run(job_put_in_later, 2, backend)
    assert torch.equal(first, second)


# ------------------------------------------------------------------------------------------- several forwards


class Scaled(nn.Module):
    """BatchNorm and a product save buffers for the backward pass."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("scale", torch.arange(1.0, 5.0))
        self.register_buffer("spectrum", torch.zeros(4, dtype=torch.complex64))
        self.register_buffer("flag", torch.tensor(False), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.spectrum = self.spectrum + torch.fft.fft(x.detach().mean(0))
        return self.norm(self.first(x).tanh()) * self.scale + self.spectrum.abs()


def siamese(model: Any, x: Tensor) -> Tensor:
    return (model(x) - model(x + 1)).square().mean()


def evaluation_in_between(model: Any, x: Tensor) -> Tensor:
    output = model(x)
    model.eval()
    with torch.no_grad():
        target = model(x + 1)
    model.train()
    return (output - target).square().mean()


def a_part_in_training_mode(model: Any, x: Tensor) -> Tensor:
    """As in fine-tuning of a part, whose statistics go on."""
    model.eval()
    model.module.norm.train()
    with torch.no_grad():
        model(x + 1)
    model.train()
    return model(x).square().mean()


class Replica(nn.Module):
    """The bare model with rank 0's buffers before each forward."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        for buffer in self.module.buffers():
            dist.broadcast(buffer.data, 0)
        return self.module(x)


@pytest.mark.parametrize("loss", [siamese, evaluation_in_between, a_part_in_training_mode])
@on_ranks()
def test_buffers_are_rank_zeros_before_each_of_several_forwards(loss: Any) -> None:
    """Sending buffers raised their version counters: "modified by an inplace operation" in the backward pass."""
    results = []
    for backend in [None, *DISTRIBUTED]:
        torch.manual_seed(0)
        model = Replica(Scaled()) if backend is None else fsshard.wrap(Scaled(), backend=backend)
        parameters = list(model.parameters())
        make = torch.optim.SGD if backend is None else fsshard.build_optimizer
        optimizer = make(parameters, lr=0.1) if backend is None else make(model, torch.optim.SGD, lr=0.1)
        for step in range(2):
            torch.manual_seed(10 * step + dist.get_rank())
            loss(model, torch.randn(3, 4)).backward()
            for parameter in parameters if backend is None else []:
                dist.all_reduce(parameter.grad.div_(2))
            take_step(optimizer)
        if backend is None:
            for buffer in model.buffers():
                dist.broadcast(buffer.data, 0)
        results.append((model.module if backend is None else model).state_dict())
    replica, *wrapped = results
    for result in wrapped:
        check_equal(replica, result)


# ------------------------------------------------------------------------------------------- unlike shapes


class Cached(nn.Module):
    """A forward keeps a table as long as the longest sequence that this rank has seen."""

    table: Tensor

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.norm, self.last = nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.register_buffer("table", torch.arange(8.0))
        self.register_buffer("turned", torch.zeros(2, 3).t())

    def forward(self, x: Tensor, length: int, first: float) -> Tensor:
        if length > len(self.table):
            table = first + torch.arange(float(length))
            if self.how == "assignment":
                self.table = table
            elif self.how == "resize_":
                self.table.resize_(length).copy_(table)
            else:
                self.norm.register_buffer("longer", table)
        if self.training:
            self.turned += x.sum()
        return self.last(self.norm(x))


def job_unlike_shapes(backend: str) -> list[list[dict[str, Any]]]:
    """The state dicts where one rank has seen the longer sequence, and where then both have seen a longer one."""
    found = []
    for how in ("assignment", "resize_", "register_buffer"):
        for longer in (0, 1):
            torch.manual_seed(0)
            model, optimizer = with_sgd(Cached(how), backend=backend)
            torch.manual_seed(dist.get_rank())
            states = []
            for one, other in ((12, 8), (12, 8), (8, 8), (16, 16)):
                length = one if dist.get_rank() == longer else other
                model(torch.randn(3, 4), length, 100.0 * dist.get_rank()).sum().backward()
                take_step(optimizer)
                states.append(model.state_dict())
            found.append(states[-2:])
    return found


@pytest.mark.parametrize("backend", DISTRIBUTED)
def test_buffers_of_unlike_shapes_stay_each_ranks_own(ranks: Any, backend: str) -> None:
    """Rank 0's bytes were written into the beginning of the other rank's buffer, or ranks died, as under DDP."""
    results = ranks.run(job_unlike_shapes, 2, backend)
    for number, ways in enumerate(zip(*results, strict=True)):
        name, longer = ("norm.longer" if number > 3 else "table"), number % 2
        for rank, (unlike, alike) in enumerate(ways):
            assert list(differences(alike, ways[0][1])) == []  # rank 0's again
            assert alike[name].tolist() == [*range(16)]
            others = [_without(state, ("table", "norm.longer")) for state in (unlike, ways[0][0])]
            assert list(differences(*others)) == []
            held = unlike.get(name)
            if rank == longer:
                assert held is not None and held.tolist() == [100 * rank + i for i in range(12)]
            else:
                assert held is None or held.tolist() == [*range(8)]


def _without(state: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name not in names}


@on_ranks()
def test_raw_ddp_mixes_up_buffers_of_unlike_shapes() -> None:
    model = Cached("assignment")
    raw = nn.parallel.DistributedDataParallel(model, init_sync=False)
    model.table = torch.arange(8.0 + 8 * dist.get_rank()) + 100 * dist.get_rank()
    raw(torch.randn(3, 4), 0, 0.0)
    assert model.table[:8].tolist() == [*range(8)] and len(model.table) == 8 + 8 * dist.get_rank()


# ------------------------------------------------------------------------------------------- changes after wrap


class LowRank(nn.Module):
    """A layer beside its base, as adapters are injected."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(6, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.down(x)  # type: ignore[no-any-return]


def replaced_head(model: Any) -> None:
    model.last = nn.Linear(6, 1)


def adapter(model: Any) -> None:
    model.module.middle[1] = LowRank(model.module.middle[1])


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a head is swapped": (replaced_head, "added: last.weight, last.bias; removed: last.weight, last.bias"),
    "an adapter is injected": (adapter, "added: middle.1.down.weight"),
    "a layer is appended": (lambda m: m.middle.append(Spectral()), "added: middle.2.weight, middle.2.bias"),
    "a complex parameter": (
        lambda m: m.first.register_parameter("z", nn.Parameter(torch.ones(1, dtype=torch.complex64))),
        "added: first.z",
    ),
    "a parameter is assigned": (
        lambda m: setattr(m.last, "weight", nn.Parameter(torch.ones(1, 6))),
        "replaced: last.weight",
    ),
    "a parameter becomes none": (lambda m: setattr(m.last, "bias", None), "replaced: last.bias"),
    "tied": (lambda m: setattr(m.middle[0], "bias", m.module.first.bias), "replaced: middle.0.bias"),
    "replaced by nothing": (lambda m: setattr(m.module, "last", nn.Identity()), "removed: last.weight, last.bias"),
}


def some_steps(model: Any, steps: int = 1) -> None:
    train(model, fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1), range(steps))


@on_backends(often(ALL, "fsdp2", "fairscale", "none"))
def test_a_change_of_the_model_is_named(backend: str) -> None:
    found = {}
    for name, (change, _) in CHANGES.items():
        model = fsshard.wrap(net(), backend=backend)
        some_steps(model)
        try:
            change(model)
        except ModelError as error:
            found[name] = [str(error)]
            continue
        told = found[name] = []
        state = net().state_dict()
        evaluate = torch.no_grad()(lambda: model.eval()(batch(9)))  # noqa: B023
        load = lambda: model.load_state_dict(state)  # noqa: B023, E731
        for use in (evaluate, lambda: model.train()(batch(9)), model.state_dict, load):  # noqa: B023
            try:
                use()
                told.append("nothing was said")
            except ModelError as error:
                told.append(str(error))
    for name, told in found.items():
        assert all(CHANGES[name][1] in text and "wrap it then" in text for text in told), (name, told)


@on_ranks()
def test_a_change_of_a_compiled_model_is_named_by_the_step() -> None:
    """Nothing looks at a forward that the user has compiled; the step sees that a gradient is missing."""
    backend = "fsdp2"
    model = fsshard.wrap(net(), backend=backend)
    compiled = torch.compile(model, backend="eager")
    model.module.last = nn.Linear(6, 1)
    optimizer = fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
    compiled(batch(0)).sum().backward()
    with pytest.raises(ModelError, match=r"added: last\.weight.*wrap it then"):
        optimizer.step()


@on_backends(often(ALL, "fsdp2", "fairscale"))
def test_what_needs_no_training_may_come_and_go(backend: str) -> None:
    """Changes that need no training, between steps and between evaluations; state dicts and buffers go with them."""
    model = fsshard.wrap(net(), backend=backend, auto_wrap_policy={Spectral})
    some_steps(model)
    with torch.no_grad():
        model.eval()(batch(0))  # engines leave the root gathered
        model(batch(1))
    model.train()
    model.module.activation = nn.Tanh()
    model.module.alias = model.module.first
    model.first.register_buffer("seen", torch.ones(2))
    model.module.norm = nn.BatchNorm1d(3, affine=False)
    teacher = nn.Linear(4, 1).requires_grad_(False)
    model.teacher = teacher
    some_steps(model, 2)
    del model.module.alias
    some_steps(model)
    norm = [buffer for buffer in model._fsshard.buffers._now().values() if buffer is model.module.norm.running_mean]
    found = ["first.seen" in model.state_dict(), len(norm), model.teacher is teacher]
    assert found == [True, 1, True]


@on_backends(often(ALL, "fsdp2", "ddp"))
def test_a_change_may_be_taken_back(backend: str) -> None:
    """A change that is taken back; what was added is trained later."""
    model = fsshard.wrap(net(), backend=backend)
    before, model.module.last = model.module.last, nn.Linear(6, 1)
    with pytest.raises(ModelError, match=r"added: last\.weight"):
        model(batch(0))
    model.module.last = before
    some_steps(model)
    model.teacher = nn.Linear(4, 1).requires_grad_(False)
    model(batch(0))
    model.teacher.requires_grad_(True)
    with pytest.raises(ModelError, match=r"added: teacher\.weight"):
        model(batch(0))
