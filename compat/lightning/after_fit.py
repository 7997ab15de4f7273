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

from ..trainers import State, WrappedModel, whole_states

# Modules that an engine has had that keeps parts of weights: one device may have no room for them.
divided: WeakSet[nn.Module] = WeakSet()


@dataclass
class WrappedLightningModule(WrappedModel):
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
        states = list(map(_saved, self.optimizers))
        self.come_back()
        parameters = {slot.name: slot.parameter for slot in parameter_slots(self.wrapped.module)}
        replaced = []
        for old, saved in zip(self.optimizers, states, strict=True):
            new = EndedOptimizer(old, parameters, saved)
            replaced.append((old, new))
            self.left[id(old)] = new
        point_at(self.schedulers, replaced)


def _saved(optimizer: ShardedOptimizer) -> State:
    """Return the whole state by name; empty but on rank 0, and ``{"refused": ...}`` where parts give none."""
    keeps = optimizer.model.backend.settings.is_first
    saved = {"param_groups": groups_by_name(optimizer), "keeps": keeps, "state": {}}
    try:
        saved["state"] = whole_states(optimizer, keep=keeps)
    except OptimizerError as error:
        # It is raised on every rank; who saves nothing need not know.
        saved["refused"] = str(error)
    return saved


class EndedOptimizer(Optimizer):
    """The remains of an optimizer after ``fit()``: its groups over the plain module, and on rank 0 its whole state."""

    def __init__(
        self,
        old: ShardedOptimizer,
        parameters: dict[str, nn.Parameter],
        saved: State,
    ) -> None:
        groups = []
        for group in saved["param_groups"]:
            groups.append({**group, "params": [parameters[name] for name in group["params"]]})
        super().__init__(groups, dict(old.defaults))
        self.kind = type(old).__name__
        self.saved = saved
        for name, state in saved["state"].items():
            self.state[parameters[name]] = state

    def __getstate__(self) -> State:
        return {**super().__getstate__(), "kind": self.kind, "saved": self.saved}

    def state_dict(self, *, rank0_only: bool = False) -> State:
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
    plain = torch.amp.GradScaler(device.type, enabled=scaler.is_enabled())
    plain.load_state_dict(scaler.state_dict())
    return plain


def lacking(wrapped_model: WrappedLightningModule, *, with_states: bool) -> str:
    """Say which host has no room for the whole weights of all its ranks, else nothing. Collective.

    Args:
        wrapped_model: what has the module.
        with_states: rank 0's host needs room for the optimizers' states, too.
    """
    backend = wrapped_model.wrapped.backend
    if backend.facts.divides != "elements":
        return ""
    weights = sum(entry.stored_shape.numel() * entry.parameter.element_size() for entry in backend.all)
    states = _bytes_of_states(wrapped_model.optimizers) if with_states else 0
    own = (socket.gethostname(), states, free_memory())
    group = backend.settings.group
    of_ranks = [own] if group is None else per_rank(group, own)
    needed: dict[str, float] = {}
    free: dict[str, float] = {}
    all_states = 0
    for host, states, bytes_left in of_ranks:
        all_states += states
        needed[host] = needed.get(host, 0) + weights
        free[host] = min(free.get(host, math.inf), bytes_left)
    # The states come together on rank 0's host.
    first_host, *_ = of_ranks[0]
    needed[first_host] += all_states
    for host in needed:
        if needed[host] > free[host]:
            gigabytes = f"{needed[host] / 1e9:.1f} GB, and {free[host] / 1e9:.1f} GB are free"
            return f"whole weights for all ranks of host {host} take {gigabytes}"
    return ""


def _bytes_of_states(optimizers: list[ShardedOptimizer]) -> int:
    total = 0
    for optimizer in optimizers:
        for state in optimizer.state.values():
            total += sum(value.nbytes for value in state.values() if isinstance(value, Tensor))
    return total


def free_memory() -> float:
    """Return the bytes that are left of the host, or the container (cgroup 2); infinite where nobody says."""
    free = math.inf
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
        root = Path("/sys/fs/cgroup")
        below = Path("/proc/self/cgroup").read_text().rpartition("0::/")[2]
        folder = root / below.strip()
        if not (folder / "memory.max").exists():
            folder = root
        limit = (folder / "memory.max").read_text().strip()
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        used = int((folder / "memory.current").read_text()) - int(stat.get("inactive_file", 0))
        return min(free, float(limit.replace("max", "inf")) - used)
    except (OSError, ValueError):
        return free  # another system, or no container
