"""A module that is trained or tested again: after ``fit()`` it comes back from its engine, plain and whole."""

from __future__ import annotations

import functools
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsshard.comm.agreement import per_rank
from fsshard.complex_params.slots import parameter_slots
from fsshard.errors import OptimizerError
from fsshard.sharded.handover import point_at
from fsshard.sharded.optimizer import ShardedOptimizer, groups_by_name

from ..trainers import Taken as TakenModel

__all__ = ["Taken", "free_memory", "hand_back", "lacking", "named_after", "plain_scaler", "was_divided"]

_divided: WeakSet[nn.Module] = WeakSet()


@dataclass
class Taken(TakenModel):
    """A LightningModule that an engine has.

    Attributes:
        optimizers: over it.
        schedulers: over those.
        stays: whether it is not to come back before it is trained again.
        failed: whether a ``fit()`` of it has, of which other ranks need not know.
        left: once it has come back, what is in the place of an optimizer, by id.
    """

    optimizers: list[ShardedOptimizer] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)
    stays: bool = False
    failed: bool = False
    left: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.wrapped.backend.facts.divides == "elements":
            _divided.add(self.wrapped.module)


def was_divided(module: nn.Module) -> bool:
    """Return whether an engine that keeps parts of weights has had it: one device may have no room for it."""
    return module in _divided


def hand_back(taken: Taken, *, with_states: bool) -> None:
    """Make the module plain again, with whole weights in host memory. Collective.

    Args:
        taken: what has it.
        with_states: in the optimizers' place comes what a checkpoint needs of them, their whole states, on rank 0.
    """
    states = [_saved(optimizer) for optimizer in taken.optimizers] if with_states else []
    taken.come_back()
    if not with_states:
        return
    parameters = {slot.name: slot.parameter for slot in parameter_slots(taken.wrapped.module)}
    replaced = [
        (old, EndedOptimizer(type(old).__name__, old.defaults, parameters, state))
        for old, state in zip(taken.optimizers, states, strict=True)
    ]
    point_at(taken.schedulers, replaced)
    taken.left = {id(old): new for old, new in replaced}


def _saved(optimizer: ShardedOptimizer) -> dict[str, Any]:
    """Return the whole state by name; empty but on rank 0, and ``{"refused": ...}`` where parts give none."""
    found: dict[str, Any] = {"state": {}, "param_groups": groups_by_name(optimizer)}
    try:
        for name, state in optimizer.iterate_state():  # one at a time: they need not fit on a device together
            if optimizer.model.backend.settings.is_first and state:
                found["state"][name] = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in state.items()}
    except OptimizerError as error:  # on every rank; who saves nothing need not know
        found["refused"] = str(error)
    found["keeps"] = optimizer.model.backend.settings.is_first
    return found


class EndedOptimizer(Optimizer):
    """The remains of an optimizer after ``fit()``: its groups over the plain module, and on rank 0 its whole state."""

    def __init__(
        self, kind: str, defaults: dict[str, Any], parameters: dict[str, nn.Parameter], saved: dict[str, Any]
    ) -> None:
        groups = [
            {**group, "params": [parameters[name] for name in group["params"]]} for group in saved["param_groups"]
        ]
        super().__init__(groups, dict(defaults))
        self.kind, self.saved = kind, saved
        self.state.update({parameters[name]: state for name, state in saved["state"].items()})

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "kind": self.kind, "saved": self.saved}

    def state_dict(self, *, rank0_only: bool = False) -> dict[str, Any]:
        """Return the state by parameter name, as a checkpoint has it; empty but on rank 0.

        Raises:
            OptimizerError: it could not be put together from parts.
        """
        if "refused" in self.saved:
            raise OptimizerError(self.saved["refused"])
        return {name: self.saved[name] for name in ("state", "param_groups")} if self.saved["keeps"] else {}

    def step(self, closure: Any = None) -> Any:
        """Raise: nothing steps after ``fit()``."""
        raise OptimizerError(
            f"{self.kind} belonged to an engine that fit() has ended, and cannot step any more; call fit() again, "
            "which makes optimizers anew, or make one over module.parameters()"
        )


def named_after(optimizer: Any, kind: str) -> None:
    """Let an optimizer's class have the name of the user's, which Lightning's LearningRateMonitor writes."""
    base: Any = type(optimizer)
    optimizer.__class__ = _named(kind, base)


@functools.cache  # LearningRateMonitor counts optimizers of one class
def _named(kind: str, base: Any) -> Any:
    return type(kind, (base,), {"__module__": base.__module__})


def plain_scaler(scaler: Any, device: torch.device) -> torch.amp.GradScaler:
    """Return torch's own in the place of one that knows an engine, at the same scale."""
    found = torch.amp.GradScaler(device.type, enabled=scaler.is_enabled())
    found.load_state_dict(scaler.state_dict())
    return found


def lacking(taken: Taken, *, with_states: bool) -> str:
    """Say which host has no room for the whole weights of all its ranks, else nothing. Collective.

    Args:
        taken: what has the module.
        with_states: rank 0's host needs room for the optimizers' states, too.
    """
    backend = taken.wrapped.backend
    if backend.facts.divides != "elements":
        return ""
    weights = sum(e.stored_shape.numel() * e.parameter.element_size() for e in backend.all)
    tensors = [v for o in taken.optimizers for state in o.state.values() for v in state.values()] if with_states else []
    states = sum(value.nbytes for value in tensors if isinstance(value, Tensor))
    mine = (socket.gethostname(), weights, states, free_memory())
    told = [mine] if backend.settings.group is None else per_rank(backend.settings.group, mine)
    for host in dict.fromkeys(host for host, *_ in told):
        here = [each for each in told if each[0] == host]
        needed = sum(bytes_ for _, bytes_, _, _ in here)
        needed += sum(bytes_ for _, _, bytes_, _ in told) if host == told[0][0] else 0
        free = min((left for *_, left in here if left is not None), default=needed)
        if needed > free:
            return (
                f"whole weights for all ranks of host {host} take {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are "
                "free"
            )
    return ""


def free_memory() -> int | None:
    """Bytes that this process may still take of its host, or its container (cgroup 2); None where nobody says."""
    found = []
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
        below = Path("/proc/self/cgroup").read_text().rpartition("0::/")[2].strip()
        folder = Path("/sys/fs/cgroup", below)
        folder = folder if (folder / "memory.max").exists() else Path("/sys/fs/cgroup")
        limit = (folder / "memory.max").read_text().strip()
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        used = int((folder / "memory.current").read_text()) - int(stat.get("inactive_file", 0))
        found += [] if limit == "max" else [int(limit) - used]
    except (OSError, ValueError):
        pass  # another system, or no container
    return min(found, default=None)
