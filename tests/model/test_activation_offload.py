"""Offloaded activations against bare replicas averaged by hand, where copies are done as late as streams allow."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsshard
from fsshard.complex_params.flattened import stored_in
from fsshard.complex_params.slots import ModuleTable
from fsshard.errors import ConfigurationError, ModelError
from fsshard.model import activation_offload, host_copies, recomputation
from fsshard.model.activation_checkpointing import apply_checkpointing
from fsshard.model.host_copies import Copies, Offloader, offloading_to
from tests.models import Spectral
from tests.optimizers import average
from tests.training_runs import ranks_of

ENGINES: list[tuple[str, dict[str, Any]]] = [
    ("none", {}),
    ("ddp", {}),
    ("fairscale", {}),
    ("fairscale", {"implementation": "native"}),
    ("fsdp", {}),
    ("fsdp2", {"merge_below": 0}),
]
WIDTH, SAMPLES = 24, 48


def unset(like: Tensor) -> Tensor:
    return torch.full_like(like, float("nan") if like.is_floating_point() or like.is_complex() else 1)


class LateCopies(Copies):
    """Copies that are done when they are waited for, and not before: until then their memory holds NaN, or ones."""

    def __init__(self) -> None:
        self.out = self.back = self.nbytes = 0
        self.queue: list[Callable[[], Any]] = []

    def leave(self, source: Tensor) -> tuple[Tensor, Any]:
        self.out, self.nbytes = self.out + 1, self.nbytes + source.numel() * source.element_size()
        return self._later(unset(source), source)

    def come_back(self, host: Tensor, device: torch.device, left: Any) -> tuple[Tensor, Any]:
        self.back += 1
        self.wait(left)  # a stream waits for the other
        return self._later(unset(host), host)

    def _later(self, target: Tensor, source: Tensor) -> tuple[Tensor, Any]:
        self.queue.append(lambda: target.copy_(source))
        return target, len(self.queue)

    def wait(self, mark: int) -> None:
        for number in range(mark):  # a stream does everything before it, too
            self.queue[number]()
            self.queue[number] = lambda: None


class offloading:
    """Context in which the CPU stands for a device from which activations leave, whatever their size."""

    def __init__(self, least: int = 1) -> None:
        self.copies = LateCopies()
        offloader = Offloader(self.copies)
        self._patches = [
            patch.object(host_copies, "LEAST", least),
            patch.object(activation_offload, "offloader_of", lambda device: offloader),
            patch.object(recomputation, "offloader_of", lambda device: offloader),
            offloading_to("elsewhere"),
        ]

    def __enter__(self) -> LateCopies:
        for one in self._patches:
            one.__enter__()
        return self.copies

    def __exit__(self, *details: Any) -> None:
        for one in reversed(self._patches):
            one.__exit__(*details)


class Block(nn.Module):
    """Saves inputs of several layers, chunks of one tensor, complex and conjugate tensors; holds units of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.three, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.spectral = Spectral(WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.three(x).chunk(3, -1)
        y = nn.functional.scaled_dot_product_attention(q[None], k[None], v[None])[0]
        z = self.spectral(self.drop(torch.sigmoid(self.out(y)) * y.exp().tanh()))
        return x + z


class Net(nn.Module):
    """Blocks between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def loss(model: Any, step: int) -> Tensor:
    seed = 31 * step + dist.get_rank()
    torch.manual_seed(seed)  # of the dropout
    x = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(seed))
    return model(x).square().mean()


def train(model: nn.Module, optimizer: Any, bare: bool) -> list[float]:
    losses = []
    for step in range(2):
        value = loss(model, step)
        value.backward()
        if bare:
            average(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return losses


CHOICES = {
    "offloaded": fsshard.Checkpointing({"Block"}, offload_to_cpu=True, recompute=False),
    "recomputed": fsshard.Checkpointing({"Block"}, offload_to_cpu=True),
}


def job_trains(backend: str, options: dict[str, Any], how: str) -> tuple[bool, int, int]:
    torch.manual_seed(0)
    bare = Net()
    module = copy.deepcopy(bare)
    expected = train(bare, torch.optim.AdamW(bare.parameters(), lr=1e-2), bare=True)
    units = {"auto_wrap_policy": {"Block", "Spectral", "Linear"}} if backend.startswith("fsdp") else {}
    with offloading() as copies:
        model = fsshard.wrap(module, backend=backend, activation_checkpointing=CHOICES[how], **units, **options)
        found = train(model, fsshard.build_optimizer(model, torch.optim.AdamW, lr=1e-2), bare=False)
    state = model.state_dict()
    same = found == expected and all(torch.equal(value, state[key]) for key, value in bare.state_dict().items())
    return same and list(state) == list(bare.state_dict()), copies.nbytes, copies.back


@pytest.mark.parametrize("how", CHOICES)
def test_engines_train_as_bare_replicas_and_weights_stay(ranks: Any, how: str) -> None:
    left = set()
    for backend, options in ENGINES:
        for same, nbytes, back in ranks.run(job_trains, ranks_of(backend), backend, options, how):
            assert same and nbytes and back, (backend, options, same, nbytes, back)
            left.add(nbytes)
    assert len(left) == 1, left  # no engine's gathered weights are among them


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    torch.manual_seed(1)
    return list(torch.autograd.grad(model(x).square().sum(), list(model.parameters())))


def offloaded(model: nn.Module) -> nn.Module:
    assert fsshard.checkpoint_blocks(model, CHOICES["offloaded"]) == [f"blocks.{number}" for number in range(4)]
    return model


def test_memory_leaves_once_and_as_it_lies() -> None:
    torch.manual_seed(0)
    plain, x = Net(), torch.randn(SAMPLES, 6)
    with offloading() as copies:
        found = gradients(offloaded(copy.deepcopy(plain)), x)
    assert all(map(torch.equal, found, gradients(plain, x)))
    assert copies.back == copies.out - host_copies.WINDOW  # the last ones had not left yet

    class Shares(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sin() * x.cos() * x[:, :8].exp().sum() + x.t().tanh().t()

    y = torch.randn(SAMPLES, WIDTH, requires_grad=True)
    model = nn.ModuleDict({"Block": Shares()})
    model["Block"].forward = activation_offload.OffloadedForward(model["Block"])  # type: ignore[method-assign]
    with offloading() as copies:
        model["Block"](y * 1)
    assert copies.out == 7  # the input once, sin, cos, their product, exp, its sum's product, tanh


def test_a_forward_looks_for_the_modules_once() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(20)))
    model.forward = activation_offload.OffloadedForward(model)  # type: ignore[method-assign]
    with offloading() as copies, patch.object(activation_offload, "stored_in", Mock(wraps=stored_in)) as looked:
        model(torch.randn(64, 8)).sum().backward()
    assert copies.out > 20 and looked.call_count == len(list(model.modules()))


def test_what_is_small_or_a_small_part_stays() -> None:
    x = torch.randn(SAMPLES, WIDTH, requires_grad=True)
    with offloading(least=SAMPLES * WIDTH * 4):
        assert host_copies.is_worth_leaving(x) and not host_copies.is_worth_leaving(x[1:])
    with offloading():
        assert not host_copies.is_worth_leaving(x[:5]) and host_copies.is_worth_leaving(x[:40])
    assert not host_copies.is_worth_leaving(x)  # it is there already


def test_a_second_backward_and_second_derivatives() -> None:
    torch.manual_seed(0)
    plain = Net().eval()
    x = torch.randn(SAMPLES, 6)

    def twice(model: nn.Module) -> list[Tensor]:
        parameters = list(model.parameters())
        value = model(x).square().sum()
        kept = torch.autograd.grad(value, parameters, retain_graph=True)
        first = torch.autograd.grad(value, parameters, create_graph=True)
        penalty = sum(gradient.abs().square().sum() for gradient in first)
        return [*kept, *first, *torch.autograd.grad(penalty, parameters)]

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):  # the others have no second derivative
        expected = twice(plain)
        with offloading():
            assert all(map(torch.equal, twice(offloaded(copy.deepcopy(plain))), expected))


class Given(nn.Module):
    """A block that computes with what it is given."""

    def __init__(self, compute: Callable[..., Tensor]) -> None:
        super().__init__()
        self.linear, self.compute = nn.Linear(16, 16), compute

    def forward(self, *args: Any) -> Tensor:
        return self.compute(self.linear, *args)


def given(how: str, compute: Callable[..., Tensor], *args: Any) -> int:
    """Compare gradients with those without offloading; return the bytes that left."""
    found = []
    for one in (None, how):
        torch.manual_seed(0)
        model = nn.Sequential(Given(compute))
        with offloading() as copies:
            if one is not None:
                fsshard.checkpoint_blocks(model, dataclasses.replace(CHOICES[one], policy={"Given"}))
            found.append(torch.autograd.grad(model[0](*args).sum(), list(model.parameters())))
    assert all(map(torch.equal, *found))
    return copies.nbytes


@pytest.mark.parametrize("how", CHOICES)
def test_inputs_of_every_kind(how: str) -> None:
    z = torch.randn(8, 16, dtype=torch.complex64).conj()

    def product(linear: Any, x: Tensor, y: Tensor) -> Tensor:
        return linear(x) * linear(y).exp()

    for pair in ((z.real, z.imag), (z.imag, z.real), (z.conj().real, z.imag), (z.imag, -z.imag)):
        given(how, product, *pair)
    large = torch.randn(4000, 16)
    assert given(how, lambda linear, x: linear(x).sin(), large[:2]) < large.nbytes
    given(how, lambda linear, x: linear(linear.weight[x]).sin(), torch.tensor([1, 5, 5]))
    given(how, lambda linear, x: linear(linear.weight.masked_fill(x, 0.5)).sin(), torch.eye(16) > 0)
    eye = torch.eye(8, 16)
    for sparse in (eye.to_sparse(), eye.to_sparse_csr()):
        given(how, lambda linear, x: linear(x @ linear.weight).sin(), sparse)
    rows = torch.nested.nested_tensor([torch.randn(3, 16), torch.randn(5, 16)], layout=torch.jagged)
    given(how, lambda linear, x: linear(x).sin().values(), rows)


def test_a_negated_view_is_not_its_base() -> None:
    z = torch.randn(8, 16, dtype=torch.complex64).conj()
    for pair in ((z.real, z.imag), (z.imag, z.real)):
        offloader = Offloader(LateCopies())
        kept = [offloader.keep(one) for one in pair]
        assert all(torch.equal(offloader.fetch(one), two) for one, two in zip(kept, pair, strict=True))


def test_an_input_that_is_changed_is_cloned_before_the_call() -> None:
    """As the error advises."""

    def roll(block: Any, x: Tensor, clone: bool) -> Tensor:
        shift = torch.zeros(8, 16)
        for _ in range(6):
            x = block(x, shift.clone() if clone else shift)
            shift += 1
        return x

    model = nn.Sequential(Given(lambda linear, x, shift: linear(x) + shift))
    with offloading():
        fsshard.checkpoint_blocks(model, fsshard.Checkpointing({"Given"}, offload_to_cpu=True))
        x = torch.randn(8, 16)
        with pytest.raises(ModelError, match=PLACE):
            roll(model[0], x, clone=False).sum().backward()
        roll(model[0], x, clone=True).sum().backward()


PLACE = "compute out of place, clone it before the call if the block was given it, or leave the block out of Checkp"


class Careless(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        z = y.sin()
        y.add_(1)
        return z


def test_a_tensor_that_is_changed_while_it_leaves_is_told() -> None:
    """torch refuses it where nothing is offloaded; hooks on saved tensors make torch forget to look."""
    model = Careless()
    model.forward = activation_offload.OffloadedForward(model)  # type: ignore[method-assign]
    with offloading(), pytest.raises(ModelError, match=PLACE):
        model(torch.ones(8, 8, requires_grad=True)).sum().backward()


def job_cannot_be() -> None:
    with pytest.raises(ConfigurationError, match=r"recompute=False\) would change nothing: expected offload_to_cpu"):
        fsshard.Checkpointing(recompute=False)
    for choice in CHOICES.values():
        with pytest.raises(ConfigurationError, match="activations are in host memory already"):
            fsshard.wrap(Net(), backend="none", activation_checkpointing=choice)
    with offloading(), pytest.raises(ConfigurationError, match="leave out one of them, or recompute the blocks"):
        fsshard.wrap(Net(), backend="none", activation_checkpointing=CHOICES["offloaded"], compile=True)


def test_what_cannot_be(ranks: Any) -> None:
    ranks.run(job_cannot_be, 1)


def test_the_plan_says_which_blocks() -> None:
    planned = fsshard.plan(Net(), activation_checkpointing=CHOICES["offloaded"])
    assert list(planned.offloaded) == [f"blocks.{n}" for n in range(4)] and not planned.recomputed
    assert "activations in host memory: 4 blocks" in planned.explain()
    model = offloaded(Net())
    model.config = SimpleNamespace(use_cache=True)  # type: ignore[assignment]
    again = fsshard.plan(model)
    assert "activations in host memory: 4 blocks (by activation offloading, before wrap)" in again.explain()
    assert "recomputed in" not in again.explain()
    apply_checkpointing(ModuleTable(model), again, fsshard.Checkpointing())
    assert model.config.use_cache  # nothing runs twice
