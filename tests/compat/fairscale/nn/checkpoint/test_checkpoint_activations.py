"""checkpoint_wrapper: FairScale's names and behaviours, without the faults that its own has on torch 2.13.

The numbers in names of tests are the rows of docs/data/fairscale-faults.md.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import inspect
import io
import pickle
import threading
import weakref
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import fairscale.nn.checkpoint.checkpoint_activations as real
import pytest
import torch
from torch import Tensor, nn

import fsshard.compat.fairscale.nn.checkpoint.checkpoint_activations as ours
from fsshard.compat.fairscale.nn.checkpoint.checkpoint_utils import patch_batchnorm
from fsshard.errors import ModelError
from fsshard.model import recomputation
from tests.model.recomputed import Counter, Notes
from tests.models import take_step

Wrapper = Callable[..., nn.Module]


class Block(nn.Module):
    """A residual block; counts its forwards."""

    def __init__(self, norm: nn.Module | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.dropout, self.norm = nn.Dropout(dropout), norm or nn.Identity()
        self.counter = Counter()

    @property
    def calls(self) -> int:
        return self.counter.count

    def forward(self, x: Tensor) -> Tensor:
        self.counter.count += 1
        return x + self.norm(self.down(self.dropout(torch.relu(self.up(x)))))


def block(norm: type[nn.Module] | None = None, dropout: float = 0.0) -> Block:
    torch.manual_seed(0)
    return Block(norm(8) if norm else None, dropout)


def batch(seed: int = 1, rows: int = 6) -> Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed))


def first_tensor(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    if dataclasses.is_dataclass(output) and not isinstance(output, dict):
        return first_tensor([getattr(output, field.name) for field in dataclasses.fields(output)])
    parts = list(output.values()) if isinstance(output, dict) else list(output)
    return sum(first_tensor(part).float().sum() for part in parts if not isinstance(part, (int, str, type(None))))


def trained(module: nn.Module, *args: Any, steps: int = 2, **kwargs: Any) -> dict[str, Tensor]:
    """Everything that a few steps compute: outputs, gradients, parameters, buffers, random numbers."""
    found = {}
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(3)
    for step in range(steps):
        loss = first_tensor(module(*args, **kwargs)).float().square().mean()
        found[f"loss {step}"] = loss.detach()
        loss.backward()
        found |= {f"grad {step} {name}": p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
        take_step(optimizer)
    return found | {name: value.clone() for name, value in module.state_dict().items()} | {"random": torch.rand(1)}


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


# ------------------------------------------------------------------------------------------------ the same module


def test_the_module_stays_itself() -> None:
    module = block(nn.BatchNorm1d)
    keys, attributes = list(module.state_dict()), set(module.__dict__)
    wrapped = ours.checkpoint_wrapper(module)
    assert wrapped is module and type(wrapped) is Block
    assert list(wrapped.state_dict()) == keys and set(wrapped.__dict__) == attributes | {"forward"}
    assert [name for name, _ in wrapped.named_modules()] == [name for name, _ in block(nn.BatchNorm1d).named_modules()]
    assert inspect.signature(wrapped.forward) == inspect.signature(block().forward)
    assert wrapped.forward.__name__ == "forward"
    for none, kind in ((block, "function"), ([module], "list")):
        with pytest.raises(ModelError, match=f"got {kind}"):
            ours.checkpoint_wrapper(none)  # type: ignore[arg-type]


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_equal_to_the_plain_module(dropout: float, offload: bool) -> None:
    def stack(wrapper: Wrapper | None) -> nn.Module:
        blocks = [block(nn.LayerNorm, dropout) for _ in range(3)]
        return nn.Sequential(*(wrapper(b, offload) if wrapper else b for b in blocks))

    assert differing(trained(stack(None), batch()), trained(stack(ours.checkpoint_wrapper), batch())) == []


def test_memory_is_that_of_the_inputs() -> None:
    """Autograd keeps the input of a wrapped block, and nothing of what it computed."""

    def kept(module: nn.Module, x: Tensor) -> int:
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
            module(x)
        return sum(sizes)

    x = batch().requires_grad_()
    assert kept(ours.checkpoint_wrapper(block()), x) == x.numel() < kept(block(), x)


def test_called_twice_for_each_step_and_once_without_gradients() -> None:
    module = ours.checkpoint_wrapper(ours.checkpoint_wrapper(block()))  # twice is checkpointed once
    module(batch()).sum().backward()
    assert module.calls == 2
    for disabled in (torch.no_grad(), torch.inference_mode()):
        with disabled:
            module(batch())
    assert module.calls == 4


def test_only_what_needs_gradients_is_recomputed() -> None:
    """A frozen front is not run again; a frozen layer behind a trained one is."""
    stack = nn.Sequential(*(ours.checkpoint_wrapper(block()) for _ in range(3)))
    stack[0].requires_grad_(False)
    stack(batch()).sum().backward()
    assert [module.calls for module in stack] == [1, 2, 2]
    stack.requires_grad_(False)
    assert not stack(batch()).requires_grad


def test_freed_without_the_garbage_collector() -> None:
    module = ours.checkpoint_wrapper(block())
    forward, gone = module.forward, weakref.ref(module)
    gc.disable()
    try:
        module(batch()).sum().backward()
        del module
        assert gone() is None
    finally:
        gc.enable()
    with pytest.raises(ModelError, match="the module was freed"):
        forward(batch())


def test_a_graph_can_be_used_twice() -> None:
    def gradients(module: nn.Module) -> dict[str, Tensor]:
        torch.manual_seed(4)
        loss = module(batch()).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        return {**module.state_dict(), **{f"grad {name}": p.grad for name, p in module.named_parameters()}}

    module = block(nn.BatchNorm1d, 0.3)
    assert differing(gradients(module), gradients(ours.checkpoint_wrapper(block(nn.BatchNorm1d, 0.3)))) == []


# ------------------------------------------------------------------------------------------------ arguments and results

Pair = namedtuple("Pair", ["hidden", "rest"])


@dataclasses.dataclass
class Answer:
    hidden: Tensor
    count: int = 3


class Fields(OrderedDict):  # type: ignore[type-arg]
    """As transformers builds its ModelOutput: a dict by name, a tuple by index."""

    def __getitem__(self, key: Any) -> Any:
        return list(self.values())[key] if isinstance(key, int) else super().__getitem__(key)


class Giving(nn.Module):
    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.make = nn.Linear(8, 8), make

    def forward(self, x: Tensor) -> Any:
        return self.make(self.layer(x))


OUTPUTS: dict[str, Callable[[Tensor], Any]] = {
    "dict": lambda h: {"hidden": h, "size": 8},
    "ModelOutput": lambda h: Fields(hidden=h, again=h * 2),
    "dataclass": lambda h: Answer(h),
    "nested": lambda h: {"states": [h, (h * 2, {"deep": h.square()})], "none": None},
    "namedtuple": lambda h: Pair(h, None),
}


@pytest.mark.fairscale_row(12)
@pytest.mark.parametrize("kind", list(OUTPUTS))
def test_row_12_outputs_keep_their_kind(kind: str) -> None:
    plain, wrapped = Giving(OUTPUTS[kind]), ours.checkpoint_wrapper(Giving(OUTPUTS[kind]))
    assert type(wrapped(batch())) is type(plain(batch()))
    assert repr(wrapped(batch())).replace("ViewBackward", "") == repr(plain(batch())).replace("ViewBackward", "")
    assert differing(trained(plain, batch()), trained(wrapped, batch())) == []


@pytest.mark.fairscale_row(12)
def test_row_12_a_forward_of_the_instance() -> None:
    plain, raw, wrapped = block(), block(), block()
    for module in (plain, raw, wrapped):
        module.forward = lambda x, before=module.forward: before(x) * 2  # type: ignore[method-assign]
    assert not torch.equal(plain(batch()), real.checkpoint_wrapper(raw)(batch()))
    assert differing(trained(plain, batch()), trained(ours.checkpoint_wrapper(wrapped), batch())) == []


class Arguments(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8)

    def forward(self, states: list[Tensor], scale: float, *, extra: dict[str, Tensor], flag: bool = True) -> Any:
        hidden = self.layer(states[0]) * scale + extra["bias"]
        states.append(hidden)  # the caller sees it, once
        return hidden if flag else (hidden, None, "text", 3)


@pytest.mark.parametrize("flag", [False, True])
def test_arguments_of_all_kinds(flag: bool) -> None:
    found = []
    for wrapper in (None, ours.checkpoint_wrapper):
        module, x, bias = Arguments(), batch().requires_grad_(), batch(2).requires_grad_()
        states = [x]
        output = (wrapper(module) if wrapper else module)(states, 0.5, extra={"bias": bias}, flag=flag)
        first_tensor(output).square().mean().backward()
        assert len(states) == 2 and states[1].shape == (6, 8)
        found.append({"x": x.grad, "bias": bias.grad, "weight": module.layer.weight.grad})
    assert differing(*found) == []


def test_a_changed_input_is_noticed() -> None:
    """Keyword arguments too, which torch 2.13 keeps in a closure and does not check."""
    module, bias = ours.checkpoint_wrapper(Arguments()), batch(2)
    output = module([batch()], 0.5, extra={"bias": bias})
    bias.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.square().sum().backward()


# ------------------------------------------------------------------------------------------------ buffers


class Codebook(nn.Module):
    """Replaces one buffer, writes into another, and computes with both."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.seen += 1
        return x * self.seen - self.mean


class HandWritten(nn.BatchNorm1d):
    """As detectron2's: looks at no ``track_running_stats``."""

    def forward(self, input: Tensor) -> Tensor:
        mean = input.mean(0)
        self.running_mean += 0.1 * (mean.detach() - self.running_mean)
        return input - mean


def spectral(size: int) -> nn.Module:
    return nn.utils.parametrizations.spectral_norm(nn.Linear(size, size))


def channels(size: int) -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (2, size // 2)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten())


def cumulative(size: int) -> nn.Module:
    return nn.BatchNorm1d(size, momentum=None)


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, cumulative, HandWritten, channels, spectral, Codebook])
def test_buffers_are_updated_once(norm: Any) -> None:
    for wrapper in (ours.checkpoint_wrapper, nested):
        assert differing(trained(block(norm), batch()), trained(wrapper(block(norm)), batch())) == []


class Late(nn.Module):
    """Leaves its buffers alone for some calls, and then writes into one and replaces the other."""

    def __init__(self, size: int, memory: Callable[[Tensor], Tensor] = torch.clone) -> None:
        super().__init__()
        self.register_buffer("written", memory(torch.full((size,), 0.1)))
        self.register_buffer("replaced", memory(torch.full((size,), 0.1)))
        self.register_buffer("mask", memory(torch.tril(torch.ones(size, size)) / size))
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        x = x * (self.written + 1) + self.replaced
        if self.steps >= 2:
            self.written.mul_(0.5).add_(x.detach().mean(0), alpha=0.1)
            self.replaced = self.replaced * 0.5 + self.written
        return x @ self.mask * (self.written + 1) - self.replaced


def nested(module: nn.Module) -> nn.Module:
    ours.checkpoint_wrapper(module.norm)
    return ours.checkpoint_wrapper(module)


@pytest.mark.parametrize("memory", [torch.clone, Tensor.share_memory_, lambda t: torch.from_numpy(t.numpy().copy())])
@pytest.mark.parametrize("wrapper", [ours.checkpoint_wrapper, nested])
def test_buffers_that_change_after_a_while(wrapper: Wrapper, memory: Callable[[Tensor], Tensor]) -> None:
    plain, wrapped = block(Late), wrapper(block(lambda size: Late(size, memory)))
    for step in range(5):
        plain.norm.steps = wrapped.norm.steps = step
        found = trained(plain, batch(), steps=1)
        assert all(value.isfinite().all() for value in found.values())
        assert differing(found, trained(wrapped, batch(), steps=1)) == []


def test_buffers_that_do_not_change_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    clone, cloned = Tensor.clone, []
    monkeypatch.setattr(Tensor, "clone", lambda self: cloned.append(tuple(self.shape)) or clone(self))

    def clones(module: nn.Module) -> list[tuple[int, ...]]:
        cloned.clear()
        module(batch()).sum().backward()
        return [shape for shape in cloned if len(shape) < 2 or shape == (8, 8)]

    module = block(Late)
    inner, outer = ours.checkpoint_wrapper(module.norm), ours.checkpoint_wrapper(module)
    assert clones(outer) == 2 * [(8,), (8,), (8, 8)]  # of the outer, and of the inner
    assert clones(outer) == [] == clones(outer)
    inner.steps = 2
    assert clones(outer) and (8, 8) not in cloned
    assert torch._C._is_cow_tensor(inner.mask)


@pytest.mark.fairscale_row(34)
def test_row_34_statistics_without_gradients() -> None:
    """Recalibration: a forward in training mode under no_grad updates the statistics of the plain module."""
    plain, raw, wrapped = block(nn.BatchNorm1d), block(nn.BatchNorm1d), block(nn.BatchNorm1d)
    real.checkpoint_wrapper(raw)
    ours.checkpoint_wrapper(wrapped)
    with torch.no_grad():
        for module in (plain, raw, wrapped):
            module(batch())
    assert differing(plain.state_dict(), wrapped.state_dict()) == []
    assert "norm.running_mean" in differing(plain.state_dict(), raw.state_dict())


def test_patch_batchnorm() -> None:
    layers = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8))
    layers[2].disable_patch_batchnorm = True
    handles = patch_batchnorm(layers)
    assert len(handles) == 2
    with torch.no_grad():
        layers(batch())
    assert [int(layers[i].num_batches_tracked) for i in (0, 2)] == [0, 1]
    layers(batch())
    assert [int(layers[i].num_batches_tracked) for i in (0, 2)] == [1, 2]
    with torch.no_grad(), pytest.raises(ValueError, match="2D or 3D"):
        layers(torch.zeros(8))
    assert layers[0].track_running_stats  # after an error, where the real one leaves it turned off
    for handle in handles:
        handle.remove()
    with torch.no_grad():
        layers(batch())
    assert int(layers[0].num_batches_tracked) == 2


# ------------------------------------------------------------------------------------------------ copies


def zeroed(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    return module


@pytest.mark.fairscale_row(11)
def test_row_11_a_copy_is_its_own() -> None:
    raw = zeroed(copy.deepcopy(original := real.checkpoint_wrapper(block())))
    assert not torch.equal(raw(batch()), batch()), f"x + 0 is what the weights of the copy give, not of {original}"
    module = nn.Sequential(ours.checkpoint_wrapper(block(nn.LayerNorm), offload_to_cpu=True))
    twin = copy.deepcopy(copy.deepcopy(module))
    assert differing(trained(nn.Sequential(block(nn.LayerNorm)), batch()), trained(twin, batch())) == []
    assert all(parameter.grad is None for parameter in module.parameters())
    assert twin[0].forward.module is twin[0] and twin[0].forward.offload_to_cpu
    twin(batch()).sum().backward()
    assert twin[0].calls == 2 * 2 + 2 and module[0].calls == 0
    del module
    assert torch.equal(zeroed(twin)(batch()), batch())


@pytest.mark.fairscale_row(26)
def test_row_26_pickle() -> None:
    with pytest.raises(TypeError, match="weakref"):
        pickle.dumps(real.checkpoint_wrapper(block()))
    module = ours.checkpoint_wrapper(block(nn.BatchNorm1d, 0.3), offload_to_cpu=True)
    file = io.BytesIO()
    torch.save(nn.Sequential(module), file)
    file.seek(0)
    twins = [pickle.loads(pickle.dumps(module)), torch.load(file, weights_only=False)[0]]
    expected = trained(block(nn.BatchNorm1d, 0.3), batch())
    for twin in twins:
        assert twin.forward.module is twin and twin.forward.offload_to_cpu
        assert differing(expected, trained(twin, batch())) == []
        assert twin.calls == 4
    assert pickle.loads(pickle.dumps(module.forward)).offload_to_cpu


# ------------------------------------------------------------------------------------------------ autograd and autocast


@pytest.mark.fairscale_row(31)
def test_row_31_autograd_grad_and_second_derivatives() -> None:
    found = []
    for module in (smooth(), ours.checkpoint_wrapper(smooth())):
        x = batch().requires_grad_()
        (slope,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
        slope.square().sum().backward()
        found.append([slope, x.grad, *(p.grad for p in module.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    with pytest.raises(RuntimeError, match=r"not compatible with \.grad"):
        torch.autograd.grad(real.checkpoint_wrapper(block())(x).sum(), x)


def smooth() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def under_autocast(wrapper: Wrapper | None, first: nn.Module, dropout: float) -> dict[str, Tensor]:
    module = block(dropout=dropout)
    model = nn.Sequential(first, wrapper(module) if wrapper else module)
    torch.manual_seed(3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(batch())
    output.float().square().mean().backward()
    return {"output": output, **{name: p.grad for name, p in module.named_parameters()}}


@pytest.mark.fairscale_row(22)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_row_22_autocast_on_the_cpu(dropout: float) -> None:
    """Raw, the second forward is in float32: an error behind a layer, and else other gradients, silently."""
    torch.manual_seed(1)
    for first in (nn.Identity(), nn.Linear(8, 8)):
        expected = under_autocast(None, first, dropout)
        assert differing(expected, under_autocast(ours.checkpoint_wrapper, first, dropout)) == []
    assert differing(
        under_autocast(None, nn.Identity(), dropout), under_autocast(real.checkpoint_wrapper, nn.Identity(), dropout)
    )


class Noting(nn.Module):
    """Notes what it sees at each of its forwards."""

    def __init__(self, look: Callable[[], Any]) -> None:
        super().__init__()
        self.weight, self.notes, self.look = nn.Parameter(torch.ones(8)), Notes(), look

    def forward(self, x: Tensor) -> Tensor:
        self.notes.seen.append(self.look())
        return (x * self.weight).exp()


@pytest.mark.fairscale_row(22)
def test_row_22_autocast_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16 in the forward is bfloat16 in the second one; FairScale enters the default, float16."""
    monkeypatch.setattr(torch.utils.checkpoint.DefaultDeviceType, "_default_device_type", "cuda")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *a, **k: True)
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    module = ours.checkpoint_wrapper(
        Noting(lambda: (torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")))
    )
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)  # as state: ``torch.autocast`` itself turns off where there is no GPU
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        loss = module(batch()).sum()
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])
    loss.backward()
    assert module.notes.seen == [(True, torch.bfloat16)] * 2


# ------------------------------------------------------------------------------------------------ offloading


def test_offloading_frees_the_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU plays the device: inputs are kept without their graph, and brought back."""
    monkeypatch.setattr(recomputation, "is_worth_leaving", lambda leaf: isinstance(leaf, Tensor))
    found = []
    for wrapper in (None, ours.checkpoint_wrapper):
        module, x = block(dropout=0.3), batch().requires_grad_()
        hidden = x * 2
        gone = weakref.ref(hidden)
        torch.manual_seed(3)
        output = (wrapper(module, offload_to_cpu=True) if wrapper else module)(hidden)
        del hidden
        assert (gone() is None) is (wrapper is not None)
        output.square().sum().backward()
        found.append({"x": x.grad, **{name: p.grad for name, p in module.named_parameters()}})
    assert differing(*found) == []


# ------------------------------------------------------------------------------------------------ contexts


def test_disable_checkpointing() -> None:
    module = ours.checkpoint_wrapper(block())
    with ours.disable_checkpointing():
        assert ours.is_checkpointing_disabled() and ours.thread_local.is_checkpointing_disabled
        module(batch()).sum().backward()
    assert module.calls == 1 and not ours.is_checkpointing_disabled()
    outer = ours.checkpoint_wrapper(nn.Sequential(module, nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)))
    loss = outer(batch()).square().mean()
    with ours.disable_checkpointing():  # a nested block was checkpointed in the first forward, and is in the second
        loss.backward()
    assert module.calls == 4


@pytest.mark.parametrize("library", [real, ours], ids=["real", "ours"])
def test_where_we_are(library: Any) -> None:
    module = library.checkpoint_wrapper(Noting(lambda: (library.is_checkpointing(), library.is_recomputing())))
    module(batch()).sum().backward()
    with torch.no_grad():
        module(batch())
    with library.disable_checkpointing():
        module(batch())
    assert module.notes.seen == [(True, False), (False, True), (False, False), (False, False)]
    assert not library.is_checkpointing() and not library.is_recomputing()


def test_contexts_by_hand() -> None:
    seen = []
    with ours.enable_checkpointing(), ours.enable_recomputing():
        assert ours.is_checkpointing() and ours.is_recomputing()
        thread = threading.Thread(target=lambda: seen.append(ours.is_checkpointing() or ours.is_recomputing()))
        thread.start()
        thread.join()
    assert seen == [False] and not ours.is_checkpointing() and not ours.is_recomputing()


def test_an_error_in_the_module() -> None:
    module, fails = Giving(lambda h: h.exp() if not fails else {}["mine"]), True
    wrapped = ours.checkpoint_wrapper(module)
    with pytest.raises(KeyError, match="mine"):
        wrapped(batch())
    assert not ours.is_checkpointing()
    fails = False
    loss = wrapped(batch()).sum()
    fails = True
    with pytest.raises(KeyError, match="mine"):
        loss.backward()
    assert not ours.is_recomputing()


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.LayerNorm])
def test_compiled(norm: Any) -> None:
    def stack(wrapper: Wrapper | None) -> nn.Module:
        inner = block(norm)
        return nn.Sequential(nn.Linear(8, 8), wrapper(inner) if wrapper else inner)

    def go(wrapper: Wrapper | None, compiles: bool) -> dict[str, Tensor]:
        torch.manual_seed(6)
        model = stack(wrapper)
        run = torch.compile(model, backend="aot_eager") if compiles else model
        run(batch()).square().mean().backward()
        return {**model.state_dict(), **{f"grad {name}": p.grad for name, p in model.named_parameters()}}

    assert differing(go(None, compiles=False), go(ours.checkpoint_wrapper, compiles=True)) == []
