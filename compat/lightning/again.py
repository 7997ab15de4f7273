"""A module that is trained or tested again: after ``fit()`` it comes back from its engine, plain and whole."""

from __future__ import annotations

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
from fsshard.sharded.optimizer import ShardedOptimizer, groups_by_name
from fsshard.sharded.schedulers import point_at

from ..taken import Taken as TakenModel

__all__ = ["Taken", "free_memory", "hand_back", "lacking", "plain_scaler", "was_divided"]

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
    module = taken.wrapped.module
    kept = [_Left(optimizer, type(optimizer).__name__) for optimizer in taken.optimizers] if with_states else []
    taken.come_back()
    if not with_states:
        return
    parameters = {slot.name: slot.parameter for slot in parameter_slots(module)}
    for each in kept:
        each.show(parameters)
    replaced = [(old, _named(new)) for old, new in zip(taken.optimizers, kept, strict=True)]
    point_at(taken.schedulers, replaced)
    taken.left = {id(old): new for old, new in replaced}


class _Left(Optimizer):
    """The remains of an optimizer after ``fit()``: its groups, and on rank 0 its whole state."""

    def __init__(self, optimizer: ShardedOptimizer, kind: str) -> None:
        self.kind, self._refused = kind, ""
        self._groups, self._defaults = groups_by_name(optimizer), dict(optimizer.defaults)
        self._whole: dict[str, dict[str, Any]] = {}
        self._keeps = optimizer.model.backend.settings.is_first
        try:
            for name, state in optimizer.iterate_state():  # one at a time: they need not fit on a device together
                if self._keeps and state:
                    self._whole[name] = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in state.items()}
        except OptimizerError as error:  # on every rank; who saves nothing need not know
            self._refused = str(error)

    def show(self, parameters: dict[str, nn.Parameter]) -> None:
        """Be a torch optimizer over the plain parameters, by name."""
        groups = [{**group, "params": [parameters[name] for name in group["params"]]} for group in self._groups]
        super().__init__(groups, self._defaults)
        for name, state in self._whole.items():
            self.state[parameters[name]] = state

    def state_dict(self, *, rank0_only: bool = False) -> dict[str, Any]:
        """Return the state by parameter name, as a checkpoint has it; empty but on rank 0.

        Raises:
            OptimizerError: it could not be put together from parts.
        """
        if self._refused:
            raise OptimizerError(self._refused)
        return {"state": self._whole, "param_groups": self._groups} if self._keeps else {}

    def step(self, closure: Any = None) -> Any:
        """Raise: nothing steps after ``fit()``."""
        raise OptimizerError(
            f"{self.kind} belonged to an engine that fit() has ended, and cannot step any more; call fit() again, "
            "which makes optimizers anew, or make one over module.parameters()"
        )

    def __reduce__(self) -> Any:  # its class is found by no name
        members = ("kind", "_refused", "_groups", "_defaults", "_whole", "_keeps", "defaults", "state", "param_groups")
        return _left_again, ({name: vars(self)[name] for name in members},)


def _left_again(members: dict[str, Any]) -> _Left:
    found = _Left.__new__(_Left)
    found.__setstate__(members)
    return _named(found)


def _named(left: _Left) -> _Left:
    left.__class__ = type(left.kind, (_Left,), {"__module__": _Left.__module__})
    return left


def plain_scaler(scaler: Any, device: torch.device) -> torch.amp.GradScaler:
    """Torch's own in the place of one that knows an engine, at the same scale."""
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
    states = sum(
        value.nbytes
        for optimizer in taken.optimizers
        if with_states
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    )
    mine = (socket.gethostname(), weights, states, free_memory())
    group = backend.settings.group
    told = [mine] if group is None else per_rank(group, mine)
    needed: dict[str, int] = {told[0][0]: sum(states for _, _, states, _ in told)}
    free: dict[str, int] = {}
    for host, bytes_, _, left in told:
        needed[host] = needed.get(host, 0) + bytes_
        if left is not None:
            free[host] = min(left, free.get(host, left))
    short = [host for host in free if needed[host] > free[host]]
    if not short:
        return ""
    host = short[0]
    return (
        f"whole weights for all ranks of host {host} take {needed[host] / 1e9:.1f} GB, and {free[host] / 1e9:.1f} GB "
        "are free"
    )


def free_memory() -> int | None:
    """Bytes that this process may still take of its host, or its container (cgroup 2); None where nobody says."""
    found = [_available(), _left_in_container()]
    return min((each for each in found if each is not None), default=None)


def _available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _left_in_container() -> int | None:
    try:
        below = Path("/proc/self/cgroup").read_text().rpartition("0::/")[2].strip()
        folder = Path("/sys/fs/cgroup", below)
        folder = folder if (folder / "memory.max").exists() else Path("/sys/fs/cgroup")
        limit = (folder / "memory.max").read_text().strip()
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        used = int((folder / "memory.current").read_text())
    except (OSError, ValueError):
        return None
    return None if limit == "max" else int(limit) - used + int(stat.get("inactive_file", 0))
