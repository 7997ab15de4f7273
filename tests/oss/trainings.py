"""Models, data and trainings for the tests of OSS: DDP with the plain optimizer, and with OSS."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fsshard.oss.optimizer import OSS

OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "SGD": ("SGD", {"lr": 0.1}),
    "SGD nesterov": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "SGD fused": ("SGD", {"lr": 0.1, "momentum": 0.9, "fused": True}),
    "Adam": ("Adam", {"lr": 0.01}),
    "Adam amsgrad": ("Adam", {"lr": 0.01, "amsgrad": True}),
    "Adam tensor lr": ("Adam", {"lr": torch.tensor(0.01)}),
    "AdamW": ("AdamW", {"lr": 0.01}),
    "AdamW foreach": ("AdamW", {"lr": 0.01, "foreach": True}),
    "AdamW loop": ("AdamW", {"lr": 0.01, "foreach": False}),
    "AdamW fused": ("AdamW", {"lr": 0.01, "fused": True}),
    "Adadelta": ("Adadelta", {"lr": 1.0}),
    "RMSprop": ("RMSprop", {"lr": 0.01, "momentum": 0.5, "centered": True}),
    "Adagrad": ("Adagrad", {"lr": 0.05}),
    "NAdam": ("NAdam", {"lr": 0.01}),
    "RAdam": ("RAdam", {"lr": 0.01}),
    "Adamax": ("Adamax", {"lr": 0.01}),
    "ASGD": ("ASGD", {"lr": 0.01}),
    "Rprop": ("Rprop", {"lr": 0.01}),
    "Adafactor": ("Adafactor", {"lr": 0.01}),
}


def mlp(seed: int = 0) -> nn.Sequential:
    """Six parameters, two of them of odd size."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 15), nn.Tanh(), nn.Linear(15, 16), nn.Tanh(), nn.Linear(16, 3))


def batches(count: int, seed: int = 100) -> Iterator[Tensor]:
    """This rank's own."""
    generator = torch.Generator().manual_seed(seed + dist.get_rank())
    for _ in range(count):
        yield torch.randn(4, 8, generator=generator)


def build(kind: str, groups: Any, cls: Any, **settings: Any) -> Any:
    """The plain optimizer or an OSS over the same groups."""
    return cls(groups, **settings) if kind == "plain" else OSS(groups, optim=cls, **settings)


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices and vectors apart."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    return [
        {"params": matrices, "weight_decay": 0.1, "lr": 0.03},
        {"params": [p for p in model.parameters() if p.ndim < 2]},
    ]


def step(model: Callable[..., Tensor], optimizer: Any, batch: Tensor, set_to_none: bool = True) -> None:
    """Zero, backward, step."""
    optimizer.zero_grad(set_to_none)
    model(batch).square().mean().backward()
    optimizer.step()


def fill(model: nn.Module | Iterable[Tensor], value: float = 1.0) -> None:
    """Give every parameter a gradient of this number."""
    for p in model.parameters() if isinstance(model, nn.Module) else model:
        p.grad = torch.full_like(p, value)


def clip(optimizer: Any, model: nn.Module, limit: float, norm_type: float = 2.0) -> Tensor:
    """Clip by the method of an OSS, else by torch's function."""
    if isinstance(optimizer, OSS):
        return optimizer.clip_grad_norm(limit, norm_type)
    return nn.utils.clip_grad_norm_(model.parameters(), limit, norm_type)


def whole_state(optimizer: Any) -> dict[str, Any]:
    """Return the whole state of a plain optimizer or an OSS."""
    return optimizer.state_dict(all_ranks=True) if isinstance(optimizer, OSS) else optimizer.state_dict()


def weights(model: nn.Module) -> list[Tensor]:
    """Copies."""
    return [p.detach().clone() for p in model.parameters()]


def same(one: Any, other: Any) -> bool:
    """Return whether nested values are equal to the last bit, in dtype and in device; dicts in any order."""
    if isinstance(one, Tensor):
        alike = isinstance(other, Tensor) and (one.dtype, one.device) == (other.dtype, other.device)
        return alike and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def both(job: Callable[..., Any], *args: Any) -> bool:
    """Return whether a training, by its kind's name, gives the same for the plain optimizer and for OSS."""
    return same(job("plain", *args), job("oss", *args))


def ddp(model: nn.Module, **settings: Any) -> DistributedDataParallel:
    """Wrapped."""
    return DistributedDataParallel(model, **settings)


def refusal(call: Callable[[], Any]) -> tuple[str, str] | None:
    """Return the error that a call raises: the class's name and the text."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return None
