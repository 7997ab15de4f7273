"""Optimizers whose state has objects, and parameters given by keyword.

They are those of fsshard/state_objects.py and fsshard/sharded/optimizer_keywords.py.
All ranks have the same batch, so that one bare process is the judge for every number of ranks.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from neuralop.training import AdamW as GaLore
from neuralop.training.tensor_galore_projector import TensorGaLoreProjector
from torch import Tensor, nn

import fsshard
from fsshard import recipes
from fsshard.errors import CheckpointError, ConfigurationError, FsshardError, OptimizerError, UnsupportedByBackend
from fsshard.state_objects import SavedObject, described, fields_of, tensors_in
from tests.forked import forking
from tests.models import Spectral, take_step
from tests.on_ranks import on_ranks
from tests.optimizers import Written
from tests.sets import often
from tests.training_runs import differences

ENGINES = ("ddp", "fairscale", "fsdp", "fsdp2")


class Root(Enum):
    SQUARE = 2
    FOURTH = 4


@dataclass(slots=True)
class Factors:
    """As DistributedShampoo's: a dataclass with tensors in tuples."""

    sums: tuple[Tensor, Tensor]
    root: Root
    counted: int = 0


class Made(Written):
    """Keeps state that its constructor has made elsewhere, too, and steps by that: as DistributedShampoo does."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, lr)
        self.held = {}
        for group in self.param_groups:
            for p in group["params"]:
                sums = torch.zeros(len(p.reshape(-1)[:3])), torch.zeros(())
                self.state[p]["block_0"] = {"shampoo": Factors(sums, Root.SQUARE), "momentum": torch.zeros_like(p)}
                self.held[p] = self.state[p]["block_0"]["shampoo"], sums, self.state[p]["block_0"]["momentum"]

    def direction(self, group: dict[str, Any], parameter: Any) -> Tensor:
        factors, (first, total), momentum = self.held[parameter]
        factors.counted += 1
        first += parameter.grad.abs().reshape(-1)[:3]
        total += first.sum()
        momentum.mul_(0.9).add_(parameter.grad)
        return momentum * factors.counted / (1 + total + first.sum())


class Codes(Tensor):
    """A tensor in 8 bits with a scale for each block of 32 numbers, made of others as torchao's are."""

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor, block: int) -> Any:
        made = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)  # type: ignore[attr-defined]
        made.codes, made.scale, made.block = codes, scale, block
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)

    def __tensor_flatten__(self) -> Any:
        return ["codes", "scale"], [self.block]

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return cls(inner["codes"], inner["scale"], *context)

    def dequantize(self) -> Tensor:  # type: ignore[override]
        return ((self.codes.view(-1, self.block).float() - 128) * self.scale[:, None]).view(self.codes.shape)

    def set(self, value: Tensor) -> None:
        blocks = value.reshape(-1, self.block)
        self.scale.copy_(blocks.abs().amax(1) / 127)
        self.codes.copy_((blocks / self.scale.clamp(min=1e-12)[:, None]).round().add(128).view(self.codes.shape))


class EightBit(Written):
    """Momentum in 8 bits where a parameter has whole blocks, as torchao's and bitsandbytes' optimizers keep theirs."""

    def direction(self, group: dict[str, Any], parameter: Any) -> Tensor:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            whole = parameter.numel() % 32 == 0 and not parameter.is_complex()
            codes = torch.full(parameter.shape, 128, dtype=torch.uint8)
            state["momentum"] = Codes(codes, torch.zeros(codes.numel() // 32), 32) if whole else torch.zeros(0)
        state["step"] += 1
        if not isinstance(state["momentum"], Codes):
            return parameter.grad  # type: ignore[no-any-return]
        momentum = state["momentum"].dequantize() * 0.9 + parameter.grad
        state["momentum"].set(momentum)
        return momentum / state["step"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 8), Spectral(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))  # type: ignore[no-any-return]


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def asked(kind: str, named: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Class, groups and settings of a case."""
    if kind in ("GaLore", "names"):
        low = {name: p for name, p in named if p.dim() > 1}
        settings = {"lr": 0.02, "weight_decay": 0.01, "galore_rank": 0.5, "galore_update_proj_gap": 2}
        if kind == "names":
            return GaLore, None, {**settings, "galore_params": list(low)}
        return GaLore, [p for name, p in named if name not in low], {**settings, "galore_params": [*low.values()]}
    return {"Made": Made, "EightBit": EightBit}[kind], [p for _, p in named], {"lr": 0.05}


CLASSES = {"GaLore": [TensorGaLoreProjector], "names": [TensorGaLoreProjector], "Made": [], "EightBit": [Codes]}


def trained(model: Any, optimizer: Any, steps: range) -> dict[str, Any]:
    for step in steps:
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        take_step(optimizer)
    return dict(model.state_dict())


def wrapped(kind: str, backend: str) -> tuple[Any, Any]:
    model = fsshard.wrap(net(), backend=backend)
    optimizer_class, groups, settings = asked(kind, list(model.named_parameters()))
    return model, fsshard.build_optimizer(model, optimizer_class, groups, whole=True, **settings)


def bare_weights(kind: str, steps: int) -> dict[str, Any]:
    bare = net()
    optimizer_class, groups, settings = asked("GaLore" if kind == "names" else kind, list(bare.named_parameters()))
    return trained(bare, optimizer_class(groups, **settings), range(steps))


def job_train_and_save(kind: str, backend: str, folder: str) -> list[str]:
    want = bare_weights(kind, 3)
    model, optimizer = wrapped(kind, backend)
    trained(model, optimizer, range(2))
    fsshard.save(folder, model, optimizer)
    saved = optimizer.state_dict()
    weights = model.state_dict()
    wrong = list(differences(want, trained(model, optimizer, range(2, 3)), f"{backend}: "))
    other, again = wrapped(kind, backend)
    other.load_state_dict(weights)
    again.load_state_dict(saved)
    return wrong + list(differences(want, trained(other, again, range(2, 3)), f"{backend}, state dict: "))


def job_resume(kind: str, backend: str, folder: str) -> list[str]:
    want = bare_weights(kind, 4)
    model, optimizer = wrapped(kind, backend)
    if CLASSES[kind]:
        with pytest.raises(
            CheckpointError, match=rf"name the class, fsshard.load\(\.\.\., objects=\[{CLASSES[kind][0].__name__}\]"
        ):
            fsshard.load(folder, model, optimizer)
    fsshard.load(folder, model, optimizer, objects=CLASSES[kind])
    trained(model, optimizer, range(2, 3))
    fsshard.load(folder, model, optimizer)  # into the objects that are there now
    return list(differences(want, trained(model, optimizer, range(2, 4)), f"{backend}: "))


CASES = [(kind, engine) for kind in CLASSES for engine in ENGINES]
OFTEN = [("GaLore", "fsdp2"), ("names", "fairscale"), ("Made", "fsdp"), ("EightBit", "ddp")]


@pytest.mark.parametrize(("kind", "backend"), often(CASES, *OFTEN))
def test_state_with_objects_is_saved_and_goes_on(ranks: Any, tmp_path: Path, kind: str, backend: str) -> None:
    """Trained on two ranks as by one bare process, and from the file by another engine on four ranks and on one."""
    folder = str(tmp_path / "saved")
    assert ranks.run(job_train_and_save, 2, kind, backend, folder) == [[], []]
    other = ENGINES[(ENGINES.index(backend) + 1) % len(ENGINES)]
    assert ranks.run(job_resume, 4, kind, other, folder) == [[]] * 4
    assert ranks.run(job_resume, 1, kind, "none", folder) == [[]]
    index = json.loads((tmp_path / "saved" / "index.json").read_text())
    named = {node["class"].rpartition(".")[2] for node in nodes(index["optimizers"]) if node.get("$") == "object"}
    assert named == {"GaLore": {"TensorGaLoreProjector"}, "names": {"TensorGaLoreProjector"}}.get(
        kind, {"Factors", "Root"} if kind == "Made" else {"Codes"}
    )


def nodes(value: Any) -> Any:
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    for item in value if isinstance(value, list) else ():
        yield from nodes(item)


@on_ranks()
def test_on_shards_the_error_says_whole() -> None:
    model = fsshard.wrap(net(), backend="fsdp2")
    with pytest.raises(UnsupportedByBackend, match="whole=True"):
        fsshard.build_optimizer(model, EightBit)
    vouched = fsshard.build_optimizer(model, EightBit, separable=True)
    trained(model, vouched, range(1))
    for saves in (vouched.state_dict, lambda: fsshard.save("nowhere", model, vouched)):
        with pytest.raises(FsshardError, match="whole=True"):
            saves()
    with pytest.raises(ConfigurationError, match="a list of classes"):
        fsshard.load("nowhere", model, objects=Codes)


class Elsewhere(Written):
    def __init__(self, params: Any, lr: float = 0.1, special: Any = ()) -> None:
        super().__init__([*params, {"params": list(special)}], lr)
        self.special = list(special)


class Reads(Written):
    def __init__(self, params: Any, special: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.largest = max(p.max().item() for p in special)


@on_ranks(1)
def test_keywords_that_are_no_groups_settings_of_a_live_optimizer_and_memory() -> None:
    """The first are refused, the second kept, and the third counts what objects hold."""
    for kind, says in ((Elsewhere, "keeps them elsewhere"), (Reads, "without values")):
        model = fsshard.wrap(net(), backend="none")
        for special in (["last.weight"], (p for p in [model.last.weight])):
            with pytest.raises(OptimizerError, match=rf"special=\[...\].*{says}.*'params': these"):
                fsshard.build_optimizer(model, kind, [{"params": ["first.weight"]}], special=special)
    bare = net()
    low = [p for p in bare.parameters() if p.dim() > 1]
    rest = [p for p in bare.parameters() if p.dim() < 2]
    live = GaLore(rest, galore_params=low, galore_rank=0.5, galore_scale=0.25)
    _, handed = fsshard.wrap(bare, live, backend="none")
    inner = handed.inner
    assert (inner.galore_rank, inner.galore_scale, inner.param_groups[1]["galore"]) == (0.5, 0.25, True)
    model, optimizer = wrapped("EightBit", "none")
    trained(model, optimizer, range(1))
    held = sum(t.numel() * t.element_size() for state in optimizer.inner.state.values() for t in tensors_in(state))
    codes = sum(p.numel() for p in model.parameters() if p.numel() % 32 == 0 and not p.is_complex())
    assert held == codes + codes // 32 * 4 + 4 * len(optimizer.inner.state)
    assert model.memory_report().worst.by_kind["optimizer state"] == held


class Itself:
    def __init__(self) -> None:
        self.me = self


class SaysOtherwise:
    def __reduce__(self) -> Any:
        return SaysOtherwise, ()


def test_what_is_no_plain_object() -> None:
    """Modules, functions, classes, and what has a state of its own making are not looked into."""
    for value in (
        nn.Linear(1, 1),
        torch.optim.SGD([nn.Parameter(torch.ones(1))]),
        print,
        Itself,
        SaysOtherwise(),
        1,
        "a",
    ):
        assert fields_of(value) is None
    with pytest.raises(CheckpointError, match="holds itself"):
        described(Itself(), "state")
    assert described({"a": [Root.FOURTH]}, "state") == {"a": [SavedObject(f"{__name__}.Root", {"name": "FOURTH"})]}


@dataclass(frozen=True)
class Config:
    beta: float = 0.9
    root: Root = Root.SQUARE


class Configured(Written):
    """Has a setting that is an object, as DistributedShampoo's."""

    def __init__(self, params: Any, lr: float = 0.1, config: Any = None) -> None:
        super().__init__(params, lr, config=config)

    def direction(self, group: dict[str, Any], parameter: Any) -> Tensor:
        return parameter.grad * group["config"].beta  # type: ignore[no-any-return]


@on_ranks()
def test_settings_that_are_objects_stay_the_optimizers(tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    model = fsshard.wrap(net(), backend="fsdp2")
    config = Config(root=Root.FOURTH)
    optimizer = fsshard.build_optimizer(model, Configured, config=config)
    trained(model, optimizer, range(1))
    fsshard.save(folder, model, optimizer)
    fsshard.load(folder, model, optimizer)
    assert optimizer.param_groups[0]["config"] is config
    other = fsshard.build_optimizer(model, Configured, config=Config(0.8))
    with pytest.raises(FsshardError, match="'config' of a group"):
        fsshard.load(folder, model, other)


def test_estimates_count_what_objects_hold() -> None:
    """Less for a momentum in 8 bits than for one in a dataclass, and more than for none."""
    peaks = []
    with forking():
        for kind in (torch.optim.SGD, EightBit, Made):
            recipe = replace(recipes.mlp(), optimizer=kind, hyper={"lr": 0.1, "whole": True})
            peaks.append(fsshard.estimate(recipe, world_size=2, backend="fsdp2").peak)
    assert peaks[0] < peaks[1] < peaks[2]
