"""Where a hook on what a forward has returned is sure to run when its backward begins.

Of an output that is a view, autograd forgets the node when anything is written to it in place (``h = block(h)``,
``h += residual``, where the block ends in ``view`` or ``transpose``): it then goes from the memory's own tensor to the
writing, and hooks on the view are never called. FSDP2 warns of it ("returned a view tensor"), FSDP1 does not; what
follows is weights that are not there in backward, or gradients that are reduced by nobody, in silence (torch 2.13).
Hooks on the tensor that the view is of are called all the same.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import types
from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fsshard.errors import ModelError

__all__ = [
    "bases",
    "check_output",
    "forward_begins",
    "grad_tensors",
    "hidden_tensors",
    "hook_bases",
    "hook_views_too",
    "lazy_part",
]


def grad_tensors(output: Any) -> Iterator[Tensor]:
    """The tensors in a model's output that take a gradient: in dicts, lists, tuples and dataclasses, nested."""
    if isinstance(output, Tensor):
        if output.requires_grad:
            yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from grad_tensors(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from grad_tensors(value)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        for item in dataclasses.fields(output):
            yield from grad_tensors(getattr(output, item.name))


def hidden_tensors(output: Any, since: int = 0) -> list[Tensor]:
    """The tensors in an output that take a gradient and lie where no engine looks: in attributes of objects.

    Args:
        output: of a forward.
        since: :func:`forward_begins` before it; what was made earlier (by the blocks before, in a cache that is passed
            on) is left out.
    """
    if isinstance(output, (Tensor, *_NO_OBJECTS)):
        return []
    found: dict[int, Tensor] = {}
    _find_hidden(output, found, set(), hidden=False)
    return [t for t in found.values() if t.grad_fn is not None and t.grad_fn._sequence_nr() >= since]


def _find_hidden(value: Any, found: dict[int, Tensor], seen: set[int], *, hidden: bool) -> None:
    if isinstance(value, Tensor):
        if hidden and value.requires_grad:
            found[id(value)] = value
        return
    if isinstance(value, _NO_OBJECTS) or id(value) in seen or len(seen) >= MOST_OBJECTS:
        return
    seen.add(id(value))
    fields: set[str] = set()
    if isinstance(value, Mapping):
        inside: list[tuple[str, Any]] = [("", item) for item in value.values()]
        hidden = hidden or not isinstance(value, dict)
    elif isinstance(value, (list, tuple, set, frozenset, collections.deque, collections.UserList)):
        inside = [("", item) for item in value]
        hidden = hidden or not isinstance(value, (list, tuple))
    else:
        inside, fields = list(_attributes(value)), {field.name for field in _fields(value)}
    for name, item in inside:
        _find_hidden(item, found, seen, hidden=hidden or bool(name and name not in fields))


def _fields(value: Any) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """What an object holds, by name; nothing that it would compute."""
    yield from getattr(value, "__dict__", {}).items()
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            descriptor = kind.__dict__.get(name)
            if isinstance(descriptor, types.MemberDescriptorType):
                with contextlib.suppress(AttributeError):
                    yield name, descriptor.__get__(value)


def check_output(output: Any, whose: str) -> None:
    """Raise where a forward has returned what will compute only when it is asked.

    Raises:
        ModelError: the engine has put weights away by then, and does not learn of the backward.
    """
    lazy = lazy_part(output)
    if lazy:
        raise ModelError(
            f"the forward of {whose} returns a {lazy}, which computes when the engine has put the weights away, and "
            "of whose backward the engine would not learn; return what it gives: list(...)"
        )


MOST_OBJECTS = 256
"""How many containers and objects of an output are looked into: an output that refers to half of a program is slow."""

_NO_OBJECTS = (
    type(None), bool, int, float, complex, str, bytes, bytearray, type, nn.Module, torch.dtype, torch.device,
    types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, torch.Size, torch.Generator,
)  # fmt: skip


def lazy_part(output: Any) -> str:
    """The type of what, in a model's output, computes when it is asked and not in the forward; or ""."""
    if isinstance(output, (Tensor, str, bytes)) or output is None:
        return ""
    if isinstance(output, (Iterator, Awaitable, AsyncIterator)):
        return type(output).__name__
    if isinstance(output, Mapping):
        output = tuple(output.values())
    if isinstance(output, (list, tuple)):
        return next((found for item in output if (found := lazy_part(item))), "")
    return ""


def forward_begins() -> int:
    """What :func:`bases` is to be told afterwards: the number of the next node of autograd's in this thread."""
    return torch._C._autograd._get_sequence_nr()


def bases(outputs: Iterable[Tensor], since: int = 0) -> list[Tensor]:
    """What those of ``outputs`` are views of that can be written in place.

    Args:
        outputs: of a forward, which take a gradient.
        since: :func:`forward_begins` before it. What was made earlier, and not written since, has a backward of its
            own, before and after this forward's.
    """
    found: dict[int, Tensor] = {}
    for tensor in outputs:
        base = tensor._base
        node = None if base is None else base.grad_fn
        if node is not None and node._sequence_nr() >= since and _may_be_written(tensor):
            found[id(base)] = base  # type: ignore[assignment]
    return list(found.values())


def _may_be_written(view: Tensor) -> bool:
    """Whether autograd takes a writing to ``view``: not to one of several views, and not to what a Function returns."""
    return bool(torch._C._autograd._get_creation_meta(view) == torch._C._autograd.CreationMeta.DEFAULT)


def hook_bases(unit: Any, output: Any, since: int) -> None:
    """Give what the outputs of an FSDP1 unit are views of the hook that FSDP1 has given the outputs."""
    from torch.distributed.fsdp._common_utils import HandleTrainingState
    from torch.distributed.fsdp._runtime_utils import _pre_backward_hook

    handle = unit._handle
    recomputed = handle is not None and handle._training_state == HandleTrainingState.BACKWARD_PRE
    if torch.is_grad_enabled() and not recomputed:
        hidden = hidden_tensors(output, since)
        for tensor in (*hidden, *bases([*grad_tensors(output), *hidden], since)):
            tensor.register_hook(functools.partial(_pre_backward_hook, unit, unit, handle))
            if handle is not None:
                handle._needs_pre_backward_unshard = True


def hook_views_too(unit: Any) -> None:
    """Let FSDP2 hook what the outputs of ``unit`` are views of, and not warn of them any more."""
    from torch.distributed.fsdp._common_utils import collect_grad_tensors

    state = unit._get_fsdp_state()
    since = [0]
    unit.register_forward_pre_hook(lambda *_: since.__setitem__(0, forward_begins()))
    torchs = state._register_pre_backward_hook

    def register(output: Any) -> Any:
        if torch._C._are_functorch_transforms_active():
            return torchs(output)
        if torch.is_grad_enabled():
            outputs = (*collect_grad_tensors(output), *hidden_tensors(output, since[0]))
            for tensor in (*outputs, *bases(outputs)):
                tensor.register_hook(state._pre_backward)
        return output

    state._register_pre_backward_hook = register
