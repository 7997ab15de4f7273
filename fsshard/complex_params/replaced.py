"""The original parameters that stored ones replaced: found again, restored, and refused where still in use."""

from __future__ import annotations

import weakref
from collections.abc import MutableMapping
from typing import Any, NamedTuple, cast

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from fsshard.complex_params.pairs import Kind
from fsshard.complex_params.parameter_records import forget_record, mark_stale
from fsshard.errors import ModelError, StaleParameter
from fsshard.torch_private.tensors import LOCAL_TENSOR, POST_ACCUMULATE_HOOKS, backward_hooks_of, storage_key

MARKS = ("_fsshard", "_fsdp", "_is_fsdp", "__", "register_")
"""Prefixes of attributes that are ours, or an engine's; ``register_hook`` where it is refused."""


class _Link(NamedTuple):
    """A stored parameter, the user's that it has replaced, and the hook that refuses gradients of that one."""

    stored: weakref.ref[nn.Parameter]
    original: weakref.ref[nn.Parameter]
    hook: Any


_links: MutableMapping[nn.Parameter, _Link] = WeakIdKeyDictionary()
"""By either of the two; neither keeps the other alive."""


class UngatheredParameter(nn.Parameter):
    """A whole parameter in ``full_parameters()``, where an engine that rounds what it gathers has gathered nothing."""


def memory_of(tensor: Tensor) -> tuple[int, int]:
    """Return what identifies the place of a tensor in memory; of a DTensor that of this rank's part."""
    tensor = getattr(tensor, LOCAL_TENSOR, tensor)
    # Not data_ptr(), which torch 2.13 warns of where the tensors are those of a simulation.
    return storage_key(tensor.untyped_storage()), int(tensor.storage_offset()) * tensor.itemsize


def stored_for(parameter: nn.Parameter, kind: Kind, name: str) -> nn.Parameter:
    """Return the stored parameter of ``parameter``: the one there is, when another module has brought it in before."""
    link = _links.get(parameter)
    stored = None if link is None else link.stored()
    if stored is not None:
        value = kind.to_user(stored.detach())
        if (memory_of(value), value.dtype, value.shape) != (memory_of(parameter), parameter.dtype, parameter.shape):
            raise ModelError(
                f"parameter {name!r} was tensorfied before, and its replacement has been moved since; tensorfy modules "
                "that share parameters together, or assign a new nn.Parameter here"
            )
        return stored
    if link is not None:
        forget_replacement(parameter)
    stored = nn.Parameter(kind.to_stored(parameter.detach()), requires_grad=parameter.requires_grad)
    if memory_of(stored) != memory_of(parameter):
        # It was not contiguous: let the two share memory all the same.
        parameter.data = kind.to_user(stored.detach())
    if parameter.grad is not None:
        stored.grad = kind.to_stored(parameter.grad)
    adopt(stored, parameter, name)
    return stored


def attributes_of(parameter: Tensor) -> dict[str, Any]:
    """Return the Python attributes that a user has set on a parameter, as ``p._no_weight_decay = True``."""
    return {key: item for key, item in vars(parameter).items() if not key.startswith(MARKS)}


def adopt(stored: nn.Parameter, parameter: nn.Parameter, name: str) -> None:
    """Let ``stored`` take the place of ``parameter``, whose use raises until :func:`forget_replacement`."""
    stored.__dict__.update(attributes_of(parameter))
    message = (
        f"parameter {name!r} was captured before fsshard replaced it, in an optimizer or a list from before wrap; "
        "build the optimizer with fsshard.build_optimizer after it, or use the module's attribute"
    )

    def refuse(_: Tensor) -> None:
        raise StaleParameter(message)

    hook = cast(Any, parameter).register_hook(refuse) if parameter.requires_grad else None
    mark_stale(parameter, message)
    _links[stored] = _links[parameter] = _Link(weakref.ref(stored), weakref.ref(parameter), hook)


def forget_replacement(either: nn.Parameter) -> nn.Parameter | None:
    """Let a user's parameter, given itself or by its stored one, be used again; return it if it is still there."""
    link = _links.pop(either, None)
    if link is None:
        return None
    original = link.original()
    for parameter in (link.stored(), original):
        if parameter is not None:
            _links.pop(parameter, None)
    if original is not None:
        forget_record(original)
        if link.hook is not None:
            link.hook.remove()
    return original


def restored(stored: nn.Parameter, kind: Kind) -> nn.Parameter:
    """Return the user's parameter that ``stored`` has replaced, or a new one, over the memory of ``stored``."""
    value = kind.to_user(stored.detach())
    original = forget_replacement(stored)
    if original is None:
        original = nn.Parameter(value, stored.requires_grad)
    original.data = value
    original.requires_grad_(stored.requires_grad)
    original.grad = None if stored.grad is None else kind.to_user(stored.grad)
    original.__dict__.update(attributes_of(stored))
    return original


def original_of(stored: nn.Parameter) -> nn.Parameter | None:
    """Return the user's parameter that ``stored`` has replaced, if somebody still holds it."""
    link = _links.get(stored)
    if link is None:
        return None
    return link.original()


def has_gradient_hooks(parameter: nn.Parameter) -> bool:
    """Return whether somebody else has registered hooks on it."""
    hooks = backward_hooks_of(parameter)
    if hooks:
        link = _links.get(parameter)
        ours = {link.hook.id} if link is not None and link.hook is not None else set()
        if set(hooks) - ours:
            return True
    return bool(getattr(parameter, POST_ACCUMULATE_HOOKS, None))


def check_no_gradient_hooks(name: str, parameter: nn.Parameter) -> None:
    if has_gradient_hooks(parameter):
        raise ModelError(
            f"parameter {name!r} has gradient hooks, which would be lost when it is stored as real pairs; register "
            "them after fsshard.wrap, on the module's output, or remove them"
        )
