"""Finds where to hook a forward's outputs so that the hook runs when their backward begins.

Of an output that is a view, autograd forgets the node when anything is written to it in place (``h = block(h)``, ``h +=
residual``, where the block ends in ``view`` or ``transpose``): it then goes from the memory's own tensor to the
writing, and hooks on the view are never called. FSDP2 warns of it ("returned a view tensor"), FSDP1 does not; what
follows is weights that are not there in backward, or gradients that are reduced by nobody, silently (torch 2.13). Hooks
on the tensor that the view is of are called all the same.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import types
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fsshard.errors import ModelError
from fsshard.nested import grad_tensors, leaves
from fsshard.torch_private.autograd import (
    functorch_transforms_active,
    next_sequence_number,
    sequence_number,
)
from fsshard.torch_private.fsdp1 import handle_of, is_recomputing, needs_pre_backward_unshard, pre_backward_hook
from fsshard.torch_private.fsdp2 import hook_outputs_by, pre_backward, state_of
from fsshard.torch_private.tensors import base_of


def hidden_tensors(output: Any, since: int = 0) -> list[Tensor]:
    """Return tensors of a forward's output that take a gradient, where no engine looks: in attributes of objects.

    What was made before ``since``, from :func:`forward_begins` (by the blocks before, in a cache that is passed on), is
    left out.
    """
    if isinstance(output, (Tensor, *_NO_OBJECTS)):
        return []
    tensors: dict[int, Tensor] = {}
    _find_hidden(output, tensors, set(), hidden=False)
    return [t for t in tensors.values() if t.grad_fn is not None and sequence_number(t.grad_fn) >= since]


def _find_hidden(
    value: Any,
    tensors: dict[int, Tensor],
    seen: set[int],
    *,
    hidden: bool,
) -> None:
    if isinstance(value, Tensor):
        if hidden and value.requires_grad:
            tensors[id(value)] = value
        return
    if isinstance(value, _NO_OBJECTS) or id(value) in seen or len(seen) >= MOST_OBJECTS:
        return
    seen.add(id(value))
    fields: dict[str, Any] = {}
    if isinstance(value, Mapping):
        inside = []
        for item in value.values():
            inside.append(("", item))
        hidden = hidden or not isinstance(value, dict)
    elif isinstance(value, (list, tuple, set, frozenset, collections.deque, collections.UserList)):
        inside = [("", item) for item in value]
        hidden = hidden or not isinstance(value, (list, tuple))
    else:
        if dataclasses.is_dataclass(value):
            fields = {}
            for field in dataclasses.fields(value):
                fields[field.name] = getattr(value, field.name, None)
        inside = list({**getattr(value, "__dict__", {}), **fields}.items())
    for name, item in inside:
        _find_hidden(item, tensors, seen, hidden=hidden or bool(name and name not in fields))


def check_output(output: Any) -> None:
    """Raise if the model's forward has returned something that computes later, when it is asked."""
    lazy = []
    for leaf in leaves(output):
        if isinstance(leaf, (Iterator, Awaitable, AsyncIterator)):
            lazy.append(type(leaf).__name__)
    if lazy:
        raise ModelError(
            f"the forward of the model returns a {lazy[0]}, which would compute after the engine has resharded the "
            "weights, and whose backward the engine would not notice; return its items: list(...)"
        )


MOST_OBJECTS = 256
"""How many containers and objects of an output are looked into: an output that refers to half of a program is slow."""

_NO_OBJECTS = (
    type(None), bool, int, float, complex, str, bytes, bytearray, type, nn.Module, torch.dtype, torch.device,
    types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, torch.Size, torch.Generator,
)  # fmt: skip


forward_begins = next_sequence_number
"""Gives what to pass to :func:`bases` afterwards: the number of the next node of autograd's in this thread."""


def bases(outputs: Iterable[Tensor], since: int = 0) -> list[Tensor]:
    """Return what ``outputs`` are views of and was made since :func:`forward_begins`; the rest has its own backward."""
    by_id: dict[int, Tensor] = {}
    for tensor in outputs:
        base = base_of(tensor)
        node = None if base is None else base.grad_fn
        if node is not None and sequence_number(node) >= since:
            by_id[id(base)] = base  # type: ignore[assignment]
    return list(by_id.values())


def hook_bases(unit: Any, output: Any, since: int) -> None:
    """Give what the outputs of an FSDP1 unit are views of the hook that FSDP1 has given the outputs."""
    handle = handle_of(unit)
    if torch.is_grad_enabled() and not is_recomputing(handle):
        hidden = hidden_tensors(output, since)
        hook = pre_backward_hook()
        for tensor in hidden + bases(grad_tensors(output) + hidden, since):
            tensor.register_hook(functools.partial(hook, unit, unit, handle))
            if handle is not None:
                needs_pre_backward_unshard(handle)


def hook_views_too(unit: Any) -> None:
    """Let FSDP2 hook what the outputs of ``unit`` are views of, and not warn of them any more."""
    state = state_of(unit)
    since = [0]
    unit.register_forward_pre_hook(lambda *_: since.__setitem__(0, forward_begins()))

    def register_by(torchs: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def register(output: Any) -> Any:
            if functorch_transforms_active():
                return torchs(output)
            if torch.is_grad_enabled():
                outputs = grad_tensors(output) + hidden_tensors(output, since[0])
                distinct = {id(tensor): tensor for tensor in outputs + bases(outputs)}
                for tensor in distinct.values():
                    tensor.register_hook(pre_backward(state))
            return output

        return register

    hook_outputs_by(state, register_by)
