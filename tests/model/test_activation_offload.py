"""Offloaded activations against bare replicas averaged by hand."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

import fsshard
from fsshard.complex_params.flattened import stored_in
from fsshard.complex_params.slots import ModuleTable
from fsshard.errors import ConfigurationError
from fsshard.model import activation_offload, host_copies
from fsshard.model.activation_checkpointing import apply_checkpointing
from fsshard.model.host_copies import offloading_to, to_device, to_host
from tests.models import Spectral, take_step
from tests.on_ranks import on_ranks
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


@contextmanager
def counting(least: int = host_copies.LEAST) -> Iterator[SimpleNamespace]:
    """Context in which tensors of at least so many bytes leave, and copies are counted."""
    count = SimpleNamespace(out=0, back=0, nbytes=0)

    class Counted(save_on_cpu):
        def __init__(self, pin_memory: bool) -> None:
            super().__init__(pin_memory)
            self.pack, self.unpack = self.pack_hook, self.unpack_hook
            self.pack_hook, self.unpack_hook = self.leave, self.come_back

        def leave(self, tensor: Tensor) -> Any:
            count.out, count.nbytes = count.out + 1, count.nbytes + tensor.nbytes
            return self.pack(tensor)

        def come_back(self, packed: Any) -> Tensor:
            count.back += 1
            return self.unpack(packed)

    with patch.object(host_copies, "LEAST", least), patch.object(host_copies, "save_on_cpu", Counted):
        yield count


@contextmanager
def offloading(least: int = 1) -> Iterator[SimpleNamespace]:
    """Context in which the CPU stands for a device from which activations leave, whatever their size."""
    with offloading_to("elsewhere"), counting(least) as count:
        yield count


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
        take_step(optimizer)
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


def test_gradients_are_those_of_before_and_strides_are_kept() -> None:
    torch.manual_seed(0)
    plain, x = Net(), torch.randn(SAMPLES, 6)
    with offloading() as copies:
        found = gradients(offloaded(copy.deepcopy(plain)), x)
    assert all(map(torch.equal, found, gradients(plain, x)))
    assert copies.back == copies.out

    image = torch.randn(2, 3, 4, 5, dtype=torch.complex64)
    with offloading():
        for one in (
            image,
            image.to(memory_format=torch.channels_last),
            image.mT,
            image.conj(),
            image.permute(3, 1, 0, 2),
        ):
            back = to_device(to_host(one))
            assert torch.equal(back, one) and back.stride() == one.stride() and back.is_conj() == one.is_conj()


def test_a_forward_looks_for_the_modules_once() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(20)))
    model.forward = activation_offload.OffloadedForward(model)  # type: ignore[method-assign]
    with offloading() as copies, patch.object(activation_offload, "stored_in", Mock(wraps=stored_in)) as looked:
        model(torch.randn(64, 8)).sum().backward()
    assert copies.out > 20 and looked.call_count == len(list(model.modules()))


def test_what_is_small_or_larger_than_its_memory_stays() -> None:
    x = torch.randn(SAMPLES, WIDTH, requires_grad=True)
    with offloading(least=SAMPLES * WIDTH * 4):
        assert host_copies.is_worth_leaving(x) and not host_copies.is_worth_leaving(x[1:])
    with offloading():
        assert host_copies.is_worth_leaving(x[:5]) and not host_copies.is_worth_leaving(x.expand(3, -1, -1))
        z = torch.randn(8, 16, dtype=torch.complex64).conj()
        assert host_copies.is_worth_leaving(z.real) and not host_copies.is_worth_leaving(z.imag)  # a negated view
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


@pytest.mark.parametrize("how", CHOICES)
def test_an_input_that_is_changed_afterwards_is_the_one_that_was_given(how: str) -> None:
    """As if it were cloned before the call: torch refuses it where nothing is offloaded."""

    def roll(block: Any, clone: bool) -> list[Tensor]:
        x, shift = torch.linspace(-1, 1, 8 * 16).view(8, 16), torch.zeros(8, 16)
        for _ in range(6):
            x = block(x, shift.clone() if clone else shift)
            shift += 1
        return list(torch.autograd.grad(x.sum(), list(block.parameters())))

    torch.manual_seed(0)
    model = nn.Sequential(Given(lambda linear, x, shift: linear(x) * shift))
    expected = roll(model[0], clone=True)
    with offloading():
        fsshard.checkpoint_blocks(model, dataclasses.replace(CHOICES[how], policy={"Given"}))
        assert all(map(torch.equal, roll(model[0], clone=False), expected))


@on_ranks(1)
def test_what_cannot_be() -> None:
    with pytest.raises(ConfigurationError, match=r"recompute=False\) would change nothing: expected offload_to_cpu"):
        fsshard.Checkpointing(recompute=False)
    for choice in CHOICES.values():
        with pytest.raises(ConfigurationError, match="activations are in host memory already"):
            fsshard.wrap(Net(), backend="none", activation_checkpointing=choice)
    with offloading(), pytest.raises(ConfigurationError, match="leave out one of them, or recompute the blocks"):
        fsshard.wrap(Net(), backend="none", activation_checkpointing=CHOICES["offloaded"], compile=True)


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
