"""A module that is trained or tested again: after ``fit()`` it comes back from its engine, plain and whole."""

from __future__ import annotations

import functools
import math
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
from ..trainers import whole_states

divided: WeakSet[nn.Module] = WeakSet()
"""Modules that an engine has had that keeps parts of weights: one device may have no room for them."""


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
            divided.add(self.wrapped.module)

    def come_back_with_states(self) -> None:
        """Come back, with an :class:`EndedOptimizer` in the place of each optimizer. Collective."""
        saved = [_saved(optimizer) for optimizer in self.optimizers]
        self.come_back()
        parameters = {slot.name: slot.parameter for slot in parameter_slots(self.wrapped.module)}
        replaced = [
            (old, EndedOptimizer(old, parameters, each)) for old, each in zip(self.optimizers, saved, strict=True)
        ]
        point_at(self.schedulers, replaced)
        self.left = {id(old): new for old, new in replaced}


def _saved(optimizer: ShardedOptimizer) -> dict[str, Any]:
    """Return the whole state by name; empty but on rank 0, and ``{"refused": ...}`` where parts give none."""
    found: dict[str, Any] = {
        "param_groups": groups_by_name(optimizer),
        "keeps": optimizer.model.backend.settings.is_first,
    }
    try:
        return {**found, "state": whole_states(optimizer, keep=found["keeps"])}
    except OptimizerError as error:  # on every rank; who saves nothing need not know
        return {**found, "state": {}, "refused": str(error)}


class EndedOptimizer(Optimizer):
    """The remains of an optimizer after ``fit()``: its groups over the plain module, and on rank 0 its whole state."""

    def __init__(
        self,
        old: ShardedOptimizer,
        parameters: dict[str, nn.Parameter],
        saved: dict[str, Any],
    ) -> None:
        groups = [{**each, "params": [parameters[name] for name in each["params"]]} for each in saved["param_groups"]]
        super().__init__(groups, dict(old.defaults))
        self.kind = type(old).__name__
        self.saved = saved
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
        if self.saved["keeps"]:
            return {name: self.saved[name] for name in ("state", "param_groups")}
        return {}

    def step(self, closure: Any = None) -> Any:
        """Raise: nothing steps after ``fit()``."""
        raise OptimizerError(
            f"{self.kind} belonged to an engine that fit() has ended, and cannot step any more; call fit() again, "
            "which creates new optimizers, or make one over module.parameters()"
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
    mine = (socket.gethostname(), sum(v.nbytes for v in tensors if isinstance(v, Tensor)), free_memory())
    told = [mine] if backend.settings.group is None else per_rank(backend.settings.group, mine)
    hosts = [host for host, *_ in told]
    for host in dict.fromkeys(hosts):
        needed = weights * hosts.count(host) + (sum(states for _, states, _ in told) if host == hosts[0] else 0)
        free = min(free for where, _, free in told if where == host)
        if needed > free:
            gigabytes = f"{needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free"
            return f"whole weights for all ranks of host {host} take {gigabytes}"
    return ""


def free_memory() -> float:
    """Return the bytes that are left of the host, or the container (cgroup 2); infinite where nobody says."""
    found = math.inf
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found = int(line.split()[1]) * 1024
        below = Path("/proc/self/cgroup").read_text().rpartition("0::/")[2].strip()
        folder = Path("/sys/fs/cgroup", below)
        folder = folder if (folder / "memory.max").exists() else Path("/sys/fs/cgroup")
        limit = float((folder / "memory.max").read_text().strip().replace("max", "inf"))
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        used = int((folder / "memory.current").read_text()) - int(stat.get("inactive_file", 0))
        return min(found, limit - used)
    except (OSError, ValueError):
        return found  # another system, or no container
