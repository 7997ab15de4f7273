"""Parameters that stay out of the engine, quantised ones among them, judged by bare replicas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsshard
from fsshard.errors import ConfigurationError, ModelError, OptimizerError, RankMismatch
from fsshard.model.ignored import Ignored
from fsshard.planning.torch_settings import _meaning
from tests.models import batch
from tests.on_ranks import on_ranks
from tests.parity.bare import average
from tests.training_runs import differences

ENGINES = ("fsdp2", "fairscale", "fsdp", "ddp")


class Int8(Tensor):
    """A weight in 8 bits with a scale for each row, made of two tensors as torchao's are."""

    @staticmethod
    def __new__(cls, numbers: Tensor, scale: Tensor) -> Any:
        made = Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=torch.float32)  # type: ignore[attr-defined]
        made.numbers, made.scale = numbers, scale
        return made

    @classmethod
    def of(cls, weight: Tensor) -> Int8:
        scale = weight.abs().amax(1, keepdim=True) / 127
        return cls((weight / scale).round().to(torch.int8), scale)  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].numbers, args[0].scale)
        if func is torch.ops.aten.copy_.default:
            args[0].numbers.copy_(args[1].numbers)
            args[0].scale.copy_(args[1].scale)
            return args[0]
        raise NotImplementedError(func)

    def __tensor_flatten__(self) -> Any:
        return ["numbers", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return cls(inner["numbers"], inner["scale"])


class Adapted(nn.Module):
    """A frozen weight in 8 bits, and matrices of low rank that train."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(Int8.of(torch.randn(outputs, inputs)), requires_grad=False)
        self.a = nn.Parameter(torch.randn(2, inputs) / 4)
        self.b = nn.Parameter(torch.randn(outputs, 2) / 4)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        return x @ (weight.numbers.float() * weight.scale).T + x @ self.a.T @ self.b.T


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Adapted(4, 6)
        self.own = nn.Parameter(torch.randn(6))
        self.turn = nn.Parameter(torch.randn(6, dtype=torch.complex64))
        self.last = Adapted(6, 5)
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x)) * self.own
        return self.norm(self.last((x * self.turn).real))  # type: ignore[no-any-return]


def net(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return Net()


def ignored_of(model: Any) -> list[nn.Parameter]:
    return [model.first.weight, model.own, model.turn, model.last.weight]


def trained(model: Any, optimizers: Any, steps: range, bare: bool = False) -> None:
    for step in steps:
        model.zero_grad()
        model(batch(step)).square().mean().backward()
        if bare:
            own = [model.own.grad.clone(), model.turn.grad.clone()]
            average(model)
            model.own.grad, model.turn.grad = own  # this rank's
        for optimizer in optimizers:
            optimizer.step()


def built(model: Any, parameters: Any) -> Any:
    """AdamW of the engine over all that trains in it, and torch's own over what is this rank's."""
    engines = fsshard.build_optimizer(model, torch.optim.AdamW, parameters, lr=0.05)
    return engines, torch.optim.SGD([model.own, model.turn], lr=0.1)


def numbers(state: Any) -> dict[str, Any]:
    """A state dict with the inner tensors of what is quantised."""
    found = {}
    for key, value in state.items():
        found[key] = value
        if isinstance(value, Int8):
            found[key], found[f"{key}, scale"] = value.numbers, value.scale
    return found


def job_exact(backend: str, folder: str) -> list[str]:
    bare = net()
    mine = {id(bare.own), id(bare.turn)}
    rest = [p for p in bare.parameters() if p.requires_grad and id(p) not in mine]
    native = [torch.optim.AdamW(rest, lr=0.05), torch.optim.SGD([bare.own, bare.turn], lr=0.1)]
    trained(bare, native, range(2), bare=True)
    model = net()
    stays = ignored_of(model)
    model = fsshard.wrap(model, backend=backend, ignored_states=stays, broadcast_buffers=False)
    others = [p for _, p in model.named_parameters() if not any(p is each for each in (model.own, model.turn))]
    engines, own = built(model, others)
    trained(model, [engines, own], range(2))
    assert model.first.weight is stays[0] and model.own.shape == (6,)
    wrong = list(differences(numbers(bare.state_dict()), numbers(model.state_dict()), backend))
    assert list(model.state_dict()) == list(net().state_dict())
    fsshard.save(folder, model, engines)
    fsshard.save(folder + "-adapters", model, only="trainable")
    saved = model.state_dict()
    trained(bare, native, range(2, 3), bare=True)
    trained(model, [engines, own], range(2, 3))
    wrong += differences(numbers(bare.state_dict()), numbers(model.state_dict()), f"{backend}, a step more")
    other = net(1)
    other = fsshard.wrap(other, backend=backend, ignored_params=ignored_of(other), broadcast_buffers=False)
    other.load_state_dict(saved)
    return wrong + list(differences(numbers(saved), numbers(other.state_dict()), f"{backend}, loaded"))


def job_load(backend: str, folder: str) -> list[str]:
    model = net(1)
    model = fsshard.wrap(model, backend=backend, ignored_states=ignored_of(model))
    optimizer = fsshard.build_optimizer(model, torch.optim.AdamW, lr=0.05)
    fsshard.load(folder, model, optimizer)
    found = numbers(model.state_dict())
    assert optimizer.state_dict()["state"]["first.a"]["step"] == 2
    # The adapters of a checkpoint go onto the base that is here.
    fresh = net()
    fresh = fsshard.wrap(fresh, backend=backend, ignored_states=ignored_of(fresh))
    loaded = fsshard.load(folder + "-adapters", fresh)
    assert set(loaded.missing) == {"first.weight", "last.weight"}
    return list(differences(found, numbers(fresh.state_dict()), backend))


@pytest.mark.parametrize("backend", ENGINES)
def test_a_quantised_base_and_what_trains_as_bare_replicas(ranks: Any, tmp_path: Path, backend: str) -> None:
    """Weights, each rank's own parameters, and state dicts to the last bit; from the file under another engine."""
    folder = str(tmp_path / "saved")
    assert ranks.run(job_exact, 2, backend, folder) == [[], []]
    other = ENGINES[ENGINES.index(backend) - 1]
    assert ranks.run(job_load, 3, other, folder) == [[]] * 3


@on_ranks()
def test_refusals_and_what_is_left_to_the_engine() -> None:
    rank = dist.get_rank()
    with pytest.raises(ModelError, match=r"keep them out: fsshard.wrap\(model, ignored_states=\[...\]\)"):
        fsshard.wrap(net(), backend="fsdp2")
    with pytest.raises(ConfigurationError, match="not the model's"):
        fsshard.wrap(net(), backend="ddp", ignored_modules=[nn.Linear(1, 1)])
    with pytest.raises(ConfigurationError, match="got a int that is not the model's"):
        fsshard.wrap(net(), backend="ddp", ignored_states=3)  # type: ignore[arg-type]
    model = net()
    own = ignored_of(model)[0]
    assert _meaning("ignored_states", own) == ("ignored_states", [own]), "one by itself, not its rows"
    stays = ignored_of(model) if rank else ignored_of(model)[:1] + ignored_of(model)[2:]
    with pytest.raises(RankMismatch):
        fsshard.wrap(model, ignored_states=stays)
    assert list(dict(model.named_parameters())) == list(dict(net().named_parameters()))
    model = fsshard.wrap(model, backend="ddp", ignored_states=ignored_of(model))
    for group in (None, [n for n, p in model.named_parameters() if n not in ("own", "turn")]):
        optimizer = fsshard.build_optimizer(model, torch.optim.SGD, group, lr=0.1)
        assert [entry.name for entry in optimizer.entries] == [
            "first.a",
            "first.b",
            "last.a",
            "last.b",
            "norm.weight",
            "norm.bias",
        ]
    with pytest.raises(OptimizerError, match=r"'own' is among ignored_states.*torch.optim.AdamW\(\[parameter\]\)"):
        fsshard.build_optimizer(model, torch.optim.SGD, model.parameters(), lr=0.1)
    held = model.memory_report().worst.by_kind["parameters"]
    inner = sum(p.numbers.numel() + 4 * p.scale.numel() for p in (model.first.weight, model.last.weight))
    plain = sum(p.numel() * p.element_size() for p in model.parameters() if not isinstance(p, Int8))
    assert held == inner + plain
    # Frozen for a while, and trained again: DDP is built anew, without what stays out.
    model.first.a.requires_grad_(False)
    model(batch(0)).sum().backward()
    model.zero_grad()
    assert model.own.grad is None and model.backend.engine is not None


def test_nothing_is_ignored() -> None:
    assert not Ignored(net()).parameters and not Ignored(net(), []).keys and Ignored(net(), [net()])._strange


@on_ranks(1)
def test_a_live_optimizer_over_all_leaves_frozen_ones_out() -> None:
    model = net()
    frozen = [model.first.weight, model.last.weight]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    _, live = fsshard.wrap(model, optimizer, backend="none", ignored_states=frozen)
    assert "own" in [entry.name for entry in live.entries] and len(live.entries) == 8
