"""Models whose parameters are DTensors over "tp" train as on one process, under every engine."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import fsshard
from fsshard.errors import AlreadyWrapped, ConfigurationError, ModelError, UnsupportedByBackend
from tests.forked import forking
from tests.on_ranks import on_ranks
from tests.sets import often
from tests.training_runs import DISTRIBUTED, check_equal

BOUND = 4e-6
"""Bound for numbers of order 1 in float32: tp and data add in another order than one process."""


class Block(nn.Module):
    """Attention and a perceptron; heads and hidden units are divided."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.q, self.k, self.v, self.proj = (nn.Linear(16, 16) for _ in range(4))
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        q, k, v = (layer(normed).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        x = x + self.proj(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(torch.tanh(self.up(x)))


class Complex(nn.Module):
    """A complex weight, which is divided by its columns where it is a DTensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 8, dtype=torch.complex64) / 4)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if isinstance(weight, DTensor):  # a model written for one rank's part of the columns
            local = weight.to_local(grad_placements=weight.placements)
            held = DTensor.from_local(x, weight.device_mesh, [Replicate()], run_check=False)
            x = held.to_local(grad_placements=[Partial()])  # each rank has a part of the gradient of x
            part = (x.to(torch.complex64) @ local).real
            whole = DTensor.from_local(part, weight.device_mesh, [Shard(x.dim() - 1)], run_check=False)
            return whole.full_tensor(grad_placements=[Replicate()])
        return (x.to(torch.complex64) @ weight).real


class Net(nn.Module):
    """The blocks, a complex weight, a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.mixed = Complex()
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.mixed(x))


def in_parts(mesh: Any) -> Net:
    """Attention and perceptrons by torch's own plans, the complex weight by hand."""
    net = Net()
    plan = dict.fromkeys(("q", "k", "v", "up"), ColwiseParallel())
    plan |= {"proj": RowwiseParallel(), "down": RowwiseParallel()}
    for block in net.blocks:
        parallelize_module(block, mesh, plan)
    net.mixed.weight = nn.Parameter(distribute_tensor(net.mixed.weight.detach(), mesh, [Shard(1)]))
    return net


def batch(data_ranks: int, step: int) -> Tensor:
    return torch.randn(2 * data_ranks, 4, 16, generator=torch.Generator().manual_seed(50 + step))


def job_trains(backend: str, data_ranks: int, mixed: bool = False) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (data_ranks, 2), mesh_dim_names=("data", "tp"))
    data = mesh["data"]
    bare = in_parts(mesh["tp"])
    optimizer = torch.optim.SGD(bare.parameters(), lr=0.05, momentum=0.9)  # handed over live
    model, stepped = fsshard.wrap(bare, optimizer, backend=backend, device_mesh=data, auto_wrap_policy={Block})
    losses, norms = [], []
    for step in range(4):
        x = batch(data_ranks, step).chunk(data_ranks)[data.get_local_rank()]
        stepped.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        norms.append(float(model.clip_grad_norm_(0.5)))
        stepped.step()
        whole = loss.detach().clone()
        dist.all_reduce(whole, group=data.get_group())
        losses.append(float(whole) / data_ranks)
    state = model.state_dict()
    # A round trip through whole tensors, from rank 0 alone, changes nothing.
    first = state if dist.get_rank() == 0 else None
    model.load_state_dict(first, broadcast_from_rank0=True)
    stepped.load_state_dict(stepped.state_dict())
    again = model.state_dict(rank0_only=True)
    check_equal({} if dist.get_rank() else dict(state), dict(again))
    return {"losses": losses, "norms": norms, "weights": state, "state": stepped.state_dict()["state"]}


def on_one_process(data_ranks: int) -> dict[str, Any]:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    losses, norms = [], []
    for step in range(4):
        optimizer.zero_grad()
        loss = net(batch(data_ranks, step)).square().mean()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)))
        optimizer.step()
        losses.append(float(loss.detach()))
    names = [name for name, _ in net.named_parameters()]
    state = {names[at]: found for at, found in optimizer.state_dict()["state"].items()}
    return {"losses": losses, "norms": norms, "weights": net.state_dict(), "state": state}


@pytest.mark.parametrize(
    ("backend", "data_ranks"), often(itertools.product(DISTRIBUTED, [1, 2]), ("fsdp2", 2), ("fairscale", 1))
)
def test_trains_as_on_one_process(ranks: Any, backend: str, data_ranks: int) -> None:
    theirs = on_one_process(data_ranks)
    for ours in ranks.run(job_trains, 2 * data_ranks, backend, data_ranks):
        assert ours["losses"] == pytest.approx(theirs["losses"], abs=BOUND)
        assert ours["norms"] == pytest.approx(theirs["norms"], abs=BOUND)
        assert list(ours["weights"]) == list(theirs["weights"])
        for name, value in theirs["weights"].items():
            assert ours["weights"][name].dtype == value.dtype
            assert float((ours["weights"][name] - value).abs().max()) < BOUND, name
            momentum = theirs["state"][name]["momentum_buffer"]
            assert float((ours["state"][name]["momentum_buffer"] - momentum).abs().max()) < 10 * BOUND, name


class Perceptron(nn.Module):
    """A norm over the sequence, and two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))


def job_sequence(backend: str) -> list[float]:
    """Sequence parallelism: the norm's weights are DTensors that are replicated, and have parts of their gradients."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tp"))
    plan = {
        "": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Replicate()),
    }
    net = parallelize_module(Perceptron(), mesh["tp"], plan)
    model = fsshard.wrap(net, backend=backend, device_mesh=mesh["data"])
    return _steps(model, fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1), tokens)


def tokens(step: int) -> Tensor:
    return batch(1, step)


def _steps(model: Any, optimizer: Any, inputs: Callable[[int], Tensor]) -> list[float]:
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        loss = model(inputs(step)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


class SimpleCNN(nn.Module):
    """Two convolutions and a head over their mean."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.first, self.second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.second(torch.relu(self.first(x))))
        return self.head(x.mean(dim=(-2, -1)))


def job_distributed_module(backend: str) -> list[float]:
    """``distribute_module`` replicates every parameter over the other dimension, as the seed of domain parallelism."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "spatial"))

    def takes(_: Any, inputs: Any, device_mesh: Any) -> Any:
        return tuple(DTensor.from_local(x, device_mesh, [Replicate()], run_check=False) for x in inputs)

    def gives(_: Any, output: Any, device_mesh: Any) -> Any:
        return output.to_local()

    net = distribute_module(SimpleCNN(), mesh["spatial"], input_fn=takes, output_fn=gives)
    model = fsshard.wrap(net, backend=backend, device_mesh=mesh["data"])
    assert list(model.state_dict()) == list(SimpleCNN().state_dict())
    return _steps(model, fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1), images)


def images(step: int) -> Tensor:
    return torch.randn(3, 1, 6, 6, generator=torch.Generator().manual_seed(step))


OTHERS: dict[str, tuple[Any, Any, Any]] = {
    "sequence parallelism": (Perceptron, job_sequence, tokens),
    "distribute_module": (SimpleCNN, job_distributed_module, images),
}
"""The model, the job, and its inputs."""


@pytest.mark.parametrize("backend", DISTRIBUTED)
@pytest.mark.parametrize("how", OTHERS)
def test_other_plans_train_as_on_one_process(ranks: Any, how: str, backend: str) -> None:
    build, job, inputs = OTHERS[how]
    net = build()
    theirs = _steps(net, torch.optim.SGD(net.parameters(), lr=0.1), inputs)
    for ours in ranks.run(job, 2, backend):
        assert ours == pytest.approx(theirs, abs=BOUND)


def job_unequal(backend: str) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tp"))
    net = parallelize_module(nn.Sequential(nn.Linear(4, 5)), mesh["tp"], {"0": ColwiseParallel()})
    model = fsshard.wrap(net, backend=backend, device_mesh=mesh["data"])
    torch.manual_seed(0)
    assert model.state_dict()["0.weight"].shape == (5, 4)


def test_unequal_parts(ranks: Any) -> None:
    for backend in ("fsdp2", "fsdp", "ddp"):  # as the error advises
        ranks.run(job_unequal, 2, backend)
    for error in ranks.run_expecting_errors(job_unequal, 2, "fairscale"):
        assert isinstance(error, UnsupportedByBackend) and "in unequal parts along dim 0" in str(error)


@on_ranks()
def test_what_is_refused() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tp"))
    tp, data = mesh["tp"], mesh["data"]
    # over the ranks of data themselves
    with pytest.raises(ConfigurationError, match=r"have this rank alone in common; pass as device_mesh= the slice"):
        fsshard.wrap(in_parts(tp), backend="ddp")
    # on the meta device
    with torch.device("meta"):
        hollow = Perceptron()
    parallelize_module(hollow, tp, {"up": ColwiseParallel()})
    with pytest.raises(ModelError, match="on device meta: expected"):
        fsshard.wrap(hollow, backend="fsdp2", device_mesh=data)
    # a parameter that is named, too
    with pytest.raises(ConfigurationError, match="is a DTensor, whose placements define it along"):
        fsshard.wrap(in_parts(tp), backend="fsdp2", device_mesh=data, sharded={r"up\.weight": (tp, 0)})
    with pytest.raises(ConfigurationError, match=r"'blocks\.0\.q\.weight' is a DTensor, whose placements define it"):
        fsshard.wrap(in_parts(tp), backend="fsdp2", device_mesh=data, replicated={"weight": tp})
    # a buffer
    normed = distribute_module(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), tp)
    with pytest.raises(ModelError, match=r"buffer '1\.running_mean' is a DTensor"):
        fsshard.wrap(normed, backend="fsdp2", device_mesh=data)
    # what needs whole parameters
    model = fsshard.wrap(in_parts(tp), backend="ddp", device_mesh=data)
    with pytest.raises(UnsupportedByBackend, match="it needs each parameter whole"):
        fsshard.build_optimizer(model, torch.optim.Adafactor)
    with pytest.raises(UnsupportedByBackend, match="whole=True on a mesh that has dimensions besides data"):
        fsshard.build_optimizer(model, torch.optim.AdamW, whole=True)
    with pytest.raises(AlreadyWrapped):
        fsshard.wrap(model, backend="ddp", device_mesh=data)
    # Nothing is changed where something is refused.
    net = in_parts(tp)
    before = dict(net.named_parameters())
    with pytest.raises(ConfigurationError):
        fsshard.wrap(net, backend="fsdp2", device_mesh=data, no_such_option=1)
    after = dict(net.named_parameters())
    assert list(before) == list(after) and all(after[name] is value for name, value in before.items())
    net(batch(1, 0)).square().mean().backward()
    assert all(parameter.grad is not None for parameter in net.parameters())


def job_plan() -> Any:
    """Return this rank's plan, which ``estimate`` takes as its error advises."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tp"))
    net = in_parts(mesh["tp"])
    with pytest.raises(ConfigurationError, match=r"other parameters are DTensors; pass a recipe"):
        fsshard.estimate(net, batch=batch(1, 0))
    planned = fsshard.plan(net, auto_wrap_policy={Block})
    wrapped = fsshard.wrap(net, backend="fsdp2", device_mesh=mesh["data"], auto_wrap_policy={Block})
    assert {unit.name: unit.nbytes for unit in planned.units} == {u.name: u.nbytes for u in wrapped.plan.units}
    assert planned.parameters["blocks.0.up.weight"].shape == (16, 16), "half of the rows"
    assert planned.parameters["mixed.weight"].nbytes == 16 * 4 * 8
    return planned


def test_a_plan_counts_this_ranks_parts(ranks: Any) -> None:
    plans = ranks.run(job_plan, 2)[0], fsshard.plan(Net(), auto_wrap_policy={Block})
    with forking():
        parts, whole = (fsshard.estimate(plan, world_size=2, backend="fsdp2").bounds.peak for plan in plans)
    assert parts < whole
