"""Whole weights, and an optimizer's whole state, by the user's names, whatever engine has taken the model apart."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from fsshard.backends.whole import gather_all
from fsshard.checkpoint.interop.foreign_names import WRAPPERS, clean_path
from fsshard.comm.agreement import per_rank
from fsshard.sharded.module import ShardedModule


@dataclass
class Whole:
    """A tensor that is recorded."""

    name: str  # the user's; of an optimizer's state "parameter: key"
    value: Tensor  # whole; may be freed when the next one is asked for, and is deleted before
    ranks: list[int] | None  # those that have gathered the same copy; None for a copy of this rank's own
    quantity: str  # "weight", "buffer" or "state"


Units = list[tuple[str, nn.Module]]
"""Path and module of what is gathered at once: the root, units of FSDP1, and models of fsshard's."""


def whole_weights(model: ShardedModule) -> Iterator[tuple[str, Tensor]]:
    """Yield a wrapped model's weights whole, by the user's names, few at a time. Collective: run it to its end."""
    backend = model.backend
    parts = ((entry, entry.local()) for entry in backend.all)
    for entry, whole in zip(backend.all, gather_all(parts, backend.settings.device), strict=True):
        yield entry.name, entry.put_together(entry.kind.to_user(whole))


def whole_tensors(root: nn.Module, prefix: str = "") -> Iterator[Whole]:
    """Yield parameters and buffers whole, few at a time. Collective where parameters are sharded: run it to its end.

    ``prefix`` is what names begin with that is not the user's.
    """
    units = [("", root)]
    for path, unit in units:  # to which the walk through a unit adds those within
        for found in _of_unit(path, unit, units):
            found.name = clean_path(found.name.removeprefix(prefix))
            yield found


def whole_state(root: nn.Module, optimizer: Any, prefix: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield an optimizer's state by parameter, whole, one key at a time. Collective: run it to its end."""
    trained = {id(parameter) for group in getattr(optimizer, "param_groups", ()) for parameter in group["params"]}
    mine = [(name, parameter) for name, parameter in user_names(root, prefix) if id(parameter) in trained]
    states: Iterable[tuple[str, Mapping[str, Any]]]
    if hasattr(optimizer, "iterate_state"):  # fsshard's
        states = optimizer.iterate_state() if optimizer.model is root else ()
    elif mine and any(isinstance(module, FullyShardedDataParallel) for module in root.modules()):
        states = _state_of_fsdp1(root, optimizer)
    else:
        # Within FairScale's OSS and torch's ZeroRedundancyOptimizer is one of what this rank updates.
        state = getattr(getattr(optimizer, "optim", optimizer), "state", {})
        states = ((name, state[parameter]) for name, parameter in mine if parameter in state)
    for name, key, value in ((name, key, value) for name, state in states for key, value in state.items()):
        yield name, {key: _full(value) if isinstance(value, Tensor) else value}


def _state_of_fsdp1(root: nn.Module, optimizer: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the state by parameter, one key at a time."""
    # On the CPU all keys of a parameter that are asked for at once are views of the same memory (torch 2.13,
    # _allgather_orig_param_states): Adam's averages of gradients have the values of those of their squares.
    local, everyone = optimizer.state_dict(), dist.group.WORLD
    assert everyone is not None
    for key in sorted(set().union(*per_rank(everyone, [key for one in local["state"].values() for key in one]))):
        state = {place: {k: v for k, v in one.items() if k == key} for place, one in local["state"].items()}
        whole = FullyShardedDataParallel.optim_state_dict(root, optimizer, {**local, "state": state})
        yield from whole["state"].items()


def user_names(root: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Parameter]]:
    """Yield parameters as they are, by the names of :func:`whole_tensors` (a flat one of FSDP1 has its own).

    None of fsshard's, whose optimizers have them by other names.
    """
    if any(isinstance(module, ShardedModule) for module in (root, *root.modules())):
        return
    for name, parameter in root.named_parameters():
        yield clean_path(name.removeprefix(prefix)), parameter


def prefix_of(module: nn.Module) -> str:
    """Return what wrappers put before each name, as DistributedDataParallel does: modules of one child, ``module``."""
    prefix, inner = "", module
    wrapped = {"module", "_forward_module", *WRAPPERS}
    # The module of Lightning's Fabric has the user's own beside what it calls.
    while [*(children := dict(inner.named_children()))][1:] in ([], ["_original_module"]) and children.keys() & wrapped:
        name, inner = next(iter(children.items()))
        prefix += f"{name}."
    return prefix


def steps_itself(module: nn.Module) -> bool:
    """Return whether a model is DeepSpeed's engine, whose own ``step`` ends a step: its optimizers gather later."""
    return isinstance(module, _known("deepspeed", "DeepSpeedEngine"))


def _known(module: str, name: str) -> Any:
    """Return what a module has, if somebody has imported it; or a tuple of no classes."""
    return getattr(sys.modules.get(module), name, ())


def _own_modules(path: str, module: nn.Module, units: Units) -> Iterator[tuple[str, nn.Module]]:
    """Yield a module, and those below it that are in no other unit; add the units below."""
    yield path, module
    for name, child in module.named_children():
        if isinstance(child, (FullyShardedDataParallel, ShardedModule)):
            units.append((f"{path}{name}.", child))
        else:
            yield from _own_modules(f"{path}{name}.", child, units)


def _of_unit(path: str, unit: nn.Module, units: Units) -> Iterator[Whole]:
    if isinstance(unit, ShardedModule):
        group = dist.get_process_group_ranks(unit.backend.settings.group)
        yield from (Whole(path + name, value, group, "weight") for name, value in whole_weights(unit))
        yield from (Whole(path + name, value, None, "buffer") for name, value in unit.named_buffers())
        return
    ranks: list[int] | None = None
    seen: set[int] = set()
    with contextlib.ExitStack() as gathered:
        if isinstance(unit, FullyShardedDataParallel):
            ranks = dist.get_process_group_ranks(unit.process_group)
            gathered.enter_context(FullyShardedDataParallel.summon_full_params(unit, recurse=False, writeback=False))
        for name, module in _own_modules(path, unit, units):
            with _gathered_by_deepspeed(module):
                weights = ((name + own, value, "weight") for own, value in module.named_parameters(recurse=False))
                buffers = ((name + own, value, "buffer") for own, value in module.named_buffers(recurse=False))
                for full_name, value, quantity in (*weights, *buffers):
                    if id(value) not in seen and not nn.parameter.is_lazy(value):  # a shared one has its first name
                        seen.add(id(value))
                        yield _whole(full_name, value, ranks if quantity == "weight" else None, quantity)


def _gathered_by_deepspeed(module: nn.Module) -> Any:
    """Return the context in which a module's own parameters are whole under ZeRO-3; others are left alone."""
    zero = _known("deepspeed", "zero")
    return zero.GatheredParameters([*module.parameters(recurse=False)]) if zero else contextlib.nullcontext()


def _whole(name: str, value: Tensor, ranks: list[int] | None, quantity: str) -> Whole:
    ranks = value.device_mesh.mesh.flatten().tolist() if isinstance(value, DTensor) else ranks
    return Whole(name, _full(value), ranks, quantity)


def _full(value: Tensor) -> Tensor:
    value = value.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value
