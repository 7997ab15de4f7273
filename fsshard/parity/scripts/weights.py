"""Whole weights by the user's names, whatever engine has taken the model apart."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from fsshard.checkpoint.interop.foreign_names import WRAPPERS, clean_path
from fsshard.parity.engine import whole_weights


class Whole(NamedTuple):
    """A parameter or buffer."""

    name: str  # the user's
    value: Tensor  # whole; may be freed when the next one is asked for
    ranks: list[int] | None  # those that have gathered the same copy; None for a copy of this rank's own
    buffer: bool


Units = list[tuple[str, nn.Module]]
"""Path and module of what is gathered at once: the root, units of FSDP1, and models of fsshard's."""


def whole_tensors(root: nn.Module) -> Iterator[Whole]:
    """Yield parameters and buffers whole, few at a time. Collective where parameters are sharded: run it to its end."""
    prefix, units = prefix_of(root), [("", root)]
    for path, unit in units:  # to which the walk through a unit adds those within
        for found in _of_unit(path, unit, units):
            yield found._replace(name=clean_path(found.name.removeprefix(prefix)))


def user_names(root: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield parameters as they are, by the names of :func:`whole_tensors` (a flat one of FSDP1 has its own).

    None of fsshard's, whose optimizers have them by other names.
    """
    if any(map(_is_ours, (root, *root.modules()))):
        return
    prefix = prefix_of(root)
    for name, parameter in root.named_parameters():
        yield clean_path(name.removeprefix(prefix)), parameter


def prefix_of(module: nn.Module) -> str:
    """Return what wrappers put before each name, as DistributedDataParallel does: modules of one child, ``module``."""
    prefix, inner = "", module
    while len(children := dict(inner.named_children())) == 1 and not children.keys().isdisjoint({"module", *WRAPPERS}):
        ((name, inner),) = children.items()
        prefix += f"{name}."
    return prefix


def _is_ours(module: nn.Module) -> bool:
    known = sys.modules.get("fsshard.sharded.module")  # who has wrapped a model has imported it
    return known is not None and isinstance(module, known.ShardedModule)


def _own_modules(path: str, module: nn.Module, units: Units) -> Iterator[tuple[str, nn.Module]]:
    """Yield a module, and those below it that are in no other unit; add the units below."""
    yield path, module
    for name, child in module.named_children():
        if isinstance(child, FullyShardedDataParallel) or _is_ours(child):
            units.append((f"{path}{name}.", child))
        else:
            yield from _own_modules(f"{path}{name}.", child, units)


def _of_unit(path: str, unit: nn.Module, units: Units) -> Iterator[Whole]:
    ranks: list[int] | None = None
    if _is_ours(unit):
        model: Any = unit
        ranks = dist.get_process_group_ranks(model.backend.settings.group)
        named = whole_weights(model)
        yield from (Whole(path + name, value, ranks, False) for name, value in named)
        yield from (Whole(path + name, value, None, True) for name, value in model.named_buffers())
        return
    seen: set[int] = set()
    with contextlib.ExitStack() as gathered:
        if isinstance(unit, FullyShardedDataParallel):
            ranks = dist.get_process_group_ranks(unit.process_group)
            gathered.enter_context(FullyShardedDataParallel.summon_full_params(unit, recurse=False, writeback=False))
        for name, module in _own_modules(path, unit, units):
            parameters = ((name + own, value, False) for own, value in module.named_parameters(recurse=False))
            buffers = ((name + own, value, True) for own, value in module.named_buffers(recurse=False))
            for full_name, value, buffer in (*parameters, *buffers):
                if id(value) not in seen and not nn.parameter.is_lazy(value):  # a shared one has its first name
                    seen.add(id(value))
                    yield _whole(full_name, value.detach(), None if buffer else ranks, buffer)


def _whole(name: str, value: Tensor, ranks: list[int] | None, buffer: bool) -> Whole:
    if isinstance(value, DTensor):
        return Whole(name, value.full_tensor(), value.device_mesh.mesh.flatten().tolist(), buffer)
    return Whole(name, value, ranks, buffer)
