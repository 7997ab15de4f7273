"""The original parameters that stored ones replaced: found again, restored, and refused where still in use."""

from __future__ import annotations

import weakref
from collections.abc import Callable, MutableMapping
from typing import Any, NamedTuple, cast

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from fsshard.complex_params.pairs import Kind
from fsshard.errors import ModelError, StaleParameter
from fsshard.torch_private.tensors import POST_ACCUMULATE_HOOKS, backward_hooks_of

__all__ = [
    "MARKS",
    "adopt",
    "attributes_of",
    "check_no_gradient_hooks",
    "forget_replacement",
    "has_gradient_hooks",
    "original_of",
    "restored",
    "stored_for",
]


class _Original(NamedTuple):
    parameter: weakref.ref[nn.Parameter]
    hook: Any


class _Successor(NamedTuple):
    stored: weakref.ref[nn.Parameter]
    hook: Any


MARKS = ("_fsshard", "_fsdp", "_is_fsdp", "__", "register_")
"""What attributes begin with that are ours, or an engine's; ``register_hook`` where it is refused."""

# Neither keeps the other alive: stored parameter -> the one it replaced, and the way back.
_originals: MutableMapping[nn.Parameter, _Original] = WeakIdKeyDictionary()
_successors: MutableMapping[nn.Parameter, _Successor] = WeakIdKeyDictionary()


def stored_for(parameter: nn.Parameter, kind: Kind, name: str) -> nn.Parameter:
    """The stored parameter of ``parameter``: the one there is, when another module has brought it in before."""
    known = _successors.get(parameter)
    stored = known.stored() if known is not None else None
    if stored is None:
        if known is not None and known.hook is not None:
            known.hook.remove()
        return _replacement(parameter, kind, name)
    value = kind.to_user(stored.detach())
    if (value.data_ptr(), value.dtype, value.shape) != (parameter.data_ptr(), parameter.dtype, parameter.shape):
        raise ModelError(
            f"parameter {name!r} was tensorfied before, and its replacement has been moved since; tensorfy modules "
            "that share parameters together, or assign a new nn.Parameter here"
        )
    return stored


def _replacement(parameter: nn.Parameter, kind: Kind, name: str) -> nn.Parameter:
    stored = nn.Parameter(kind.to_stored(parameter.detach()), requires_grad=parameter.requires_grad)
    if stored.data_ptr() != parameter.data_ptr():
        parameter.data = kind.to_user(stored.detach())  # it was not contiguous: let the two share memory all the same
    if parameter.grad is not None:
        stored.grad = kind.to_stored(parameter.grad)
    adopt(stored, parameter, name)
    return stored


def attributes_of(parameter: Tensor) -> dict[str, Any]:
    """The Python attributes that a user has set on a parameter, as ``p._no_weight_decay = True``."""
    return {key: item for key, item in vars(parameter).items() if not key.startswith(MARKS)}


def adopt(stored: nn.Parameter, parameter: nn.Parameter, name: str) -> Callable[[], None]:
    """Let ``stored`` take the place of the user's ``parameter``, whose use raises from then on.

    Returns:
        What undoes it.
    """
    stored.__dict__.update(attributes_of(parameter))
    message = (
        f"parameter {name!r} was captured before fsshard replaced it; use the module's attribute, or build the "
        "optimizer with fsshard.build_optimizer"
    )

    def refuse(_: Tensor) -> None:
        raise StaleParameter(message)

    hook = cast(Any, parameter).register_hook(refuse) if parameter.requires_grad else None
    parameter._fsshard_stale = message  # type: ignore[attr-defined]
    _originals[stored] = _Original(weakref.ref(parameter), hook)
    _successors[parameter] = _Successor(weakref.ref(stored), hook)

    def forget() -> None:
        if hook is not None:
            hook.remove()
        parameter.__dict__.pop("_fsshard_stale", None)
        _originals.pop(stored, None)
        _successors.pop(parameter, None)

    return forget


def restored(stored: nn.Parameter, kind: Kind) -> nn.Parameter:
    record = _originals.pop(stored, None)
    original = record.parameter() if record is not None else None
    if record is not None and record.hook is not None and original is not None:
        record.hook.remove()
    value = kind.to_user(stored.detach())
    if original is None:
        original = nn.Parameter(value, requires_grad=stored.requires_grad)
    else:
        original.data = value
        original.__dict__.pop("_fsshard_stale", None)
        _successors.pop(original, None)
        original.requires_grad_(stored.requires_grad)
    original.grad = None if stored.grad is None else kind.to_user(stored.grad)
    original.__dict__.update(attributes_of(stored))
    return original


def forget_replacement(parameter: nn.Parameter) -> None:
    """Let a user's parameter be used again, whose stored one is let go of."""
    known = _successors.pop(parameter, None)
    if known is not None and known.hook is not None:
        known.hook.remove()
    stored = None if known is None else known.stored()
    if stored is not None:
        _originals.pop(stored, None)


def original_of(stored: nn.Parameter) -> nn.Parameter | None:
    """The user's parameter that ``stored`` has replaced, if somebody still holds it."""
    record = _originals.get(stored)
    return None if record is None else record.parameter()


def has_gradient_hooks(parameter: nn.Parameter) -> bool:
    """Whether somebody has registered hooks on it."""
    known = _successors.get(parameter)
    ours = {known.hook.id} if known is not None and known.hook is not None else set()
    others = set(backward_hooks_of(parameter) or ()) - ours
    return bool(others or getattr(parameter, POST_ACCUMULATE_HOOKS, None))


def check_no_gradient_hooks(name: str, parameter: nn.Parameter) -> None:
    if has_gradient_hooks(parameter):
        what = "complex parameter" if parameter.is_complex() else "parameter"
        raise ModelError(
            f"{what} {name!r} has gradient hooks, which would be lost when it is stored as real pairs; register them "
            "after fsshard.wrap, on the module's output, or remove them"
        )
