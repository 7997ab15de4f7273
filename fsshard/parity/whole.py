"""Whole weights, and an optimizer's whole state, by the user's names, whatever engine has taken the model apart."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
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


# Name of a parameter, and what an optimizer keeps for it, or a piece of that.
States = Iterator[tuple[str, dict[str, Any]]]
# Path and module of what is gathered at once: the root, units of FSDP1, and models of fsshard's.
Units = list[tuple[str, nn.Module]]


def whole_weights(model: ShardedModule) -> Iterator[tuple[str, Tensor]]:
    """Yield a wrapped model's weights whole, by the user's names, few at a time. Collective: run it to its end."""
    backend = model.backend
    parts = ((entry, entry.local()) for entry in backend.all)
    gathered = gather_all(parts, backend.settings.device)
    for entry, whole in zip(backend.all, gathered, strict=True):
        value = entry.kind.to_user(whole)
        yield entry.name, entry.put_together(value)


def whole_tensors(root: nn.Module, prefix: str = "") -> Iterator[Whole]:
    """Yield parameters and buffers whole, few at a time. Collective where parameters are sharded: run it to its end.

    ``prefix`` is what names begin with that is not the user's.
    """
    units = [("", root)]
    # The walk through a unit adds those within it to the list.
    for path, unit in units:
        for whole in _of_unit(path, unit, units):
            whole.name = clean_path(whole.name.removeprefix(prefix))
            yield whole


def whole_state(root: nn.Module, optimizer: Any, prefix: str = "") -> States:
    """Yield an optimizer's state by parameter, whole, one key at a time. Collective: run it to its end."""
    for name, state in _states(root, optimizer, prefix):
        for key, value in state.items():
            yield name, {key: _full(value)}


def _states(root: nn.Module, optimizer: Any, prefix: str) -> States:
    """Yield an optimizer's state by parameter; of one parameter it may come in several pieces."""
    # fsshard's own optimizers know their model, and gather for themselves.
    if hasattr(optimizer, "iterate_state"):
        if optimizer.model is root:
            yield from optimizer.iterate_state()
        return
    trained: set[int] = set()
    for group in getattr(optimizer, "param_groups", ()):
        trained.update(map(id, group["params"]))
    parameters = {}
    for name, parameter in user_names(root, prefix):
        if id(parameter) in trained:
            parameters[name] = parameter
    if not parameters:
        return
    for module in root.modules():
        if isinstance(module, FullyShardedDataParallel):
            yield from _state_of_fsdp1(root, optimizer)
            return
    # Within FairScale's OSS and torch's ZeroRedundancyOptimizer is one of what this rank updates.
    inner = getattr(optimizer, "optim", optimizer)
    state = getattr(inner, "state", {})
    for name, parameter in parameters.items():
        if parameter in state:
            yield name, state[parameter]


def _state_of_fsdp1(root: nn.Module, optimizer: Any) -> States:
    """Yield the state by parameter, one key at a time."""
    local = optimizer.state_dict()
    local_states = local["state"]
    everyone = dist.group.WORLD
    assert everyone is not None
    local_keys = set().union(*local_states.values())
    keys_of_ranks = per_rank(everyone, local_keys)
    keys = set().union(*keys_of_ranks)
    # On the CPU all keys of a parameter that are asked for at once are views of the same memory (torch 2.13,
    # _allgather_orig_param_states): Adam's averages of gradients have the values of those of their squares.
    for key in sorted(keys):
        local["state"] = {}
        for place, state in local_states.items():
            piece = {}
            if key in state:
                piece[key] = state[key]
            local["state"][place] = piece
        whole = FullyShardedDataParallel.optim_state_dict(root, optimizer, local)
        yield from whole["state"].items()


def user_names(root: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Parameter]]:
    """Yield parameters as they are, by the names of :func:`whole_tensors` (a flat one of FSDP1 has its own).

    None of fsshard's, whose optimizers have them by other names.
    """
    for module in (root, *root.modules()):
        if isinstance(module, ShardedModule):
            return
    for name, parameter in root.named_parameters():
        yield clean_path(name.removeprefix(prefix)), parameter


def prefix_of(module: nn.Module) -> str:
    """Return what wrappers put before each name, as DistributedDataParallel does: modules of one child, ``module``."""
    prefix = ""
    while True:
        children = dict(module.named_children())
        names = [*children]
        # The module of Lightning's Fabric has the user's own beside what it calls.
        is_wrapper = names[1:] in ([], ["_original_module"])
        wrapped = children.keys() & {"module", "_forward_module", *WRAPPERS}
        if not is_wrapper or not wrapped:
            return prefix
        module = children[names[0]]
        prefix += f"{names[0]}."


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


def _of_sharded_module(path: str, unit: ShardedModule) -> Iterator[Whole]:
    group = unit.backend.settings.group
    ranks = dist.get_process_group_ranks(group)
    for name, value in whole_weights(unit):
        full_name = path + name
        yield Whole(full_name, value, ranks, "weight")
    for name, value in unit.named_buffers():
        full_name = path + name
        yield Whole(full_name, value, None, "buffer")


def _of_unit(path: str, unit: nn.Module, units: Units) -> Iterator[Whole]:
    if isinstance(unit, ShardedModule):
        yield from _of_sharded_module(path, unit)
        return
    ranks = None
    gathered: Any = contextlib.nullcontext()
    if isinstance(unit, FullyShardedDataParallel):
        ranks = dist.get_process_group_ranks(unit.process_group)
        # One unit at a time, so that no more than its parameters are whole at once.
        gathered = FullyShardedDataParallel.summon_full_params(unit, recurse=False, writeback=False)
    seen = set()
    with gathered:
        for prefix, module in _own_modules(path, unit, units):
            with _gathered_by_deepspeed(module):
                for name, value, quantity in _own_tensors(module):
                    # A shared tensor has its first name, and one of a lazy module has no shape yet.
                    if id(value) in seen or nn.parameter.is_lazy(value):
                        continue
                    seen.add(id(value))
                    owners = ranks if quantity == "weight" else None
                    if isinstance(value, DTensor):
                        owners = value.device_mesh.mesh.flatten().tolist()
                    yield Whole(
                        name=prefix + name,
                        value=_full(value),
                        ranks=owners,
                        quantity=quantity,
                    )


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor, str]]:
    """Yield name, tensor and quantity of a module's own parameters and buffers."""
    for name, parameter in module.named_parameters(recurse=False):
        yield name, parameter, "weight"
    for name, buffer in module.named_buffers(recurse=False):
        yield name, buffer, "buffer"


def _gathered_by_deepspeed(module: nn.Module) -> Any:
    """Return the context in which a module's own parameters are whole under ZeRO-3; others are left alone."""
    zero = _known("deepspeed", "zero")
    if not zero:
        return contextlib.nullcontext()
    return zero.GatheredParameters([*module.parameters(recurse=False)])


def _full(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    detached = value.detach()
    return detached.full_tensor() if isinstance(detached, DTensor) else detached
