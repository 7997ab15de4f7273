"""Runs the forward of a wrapped model, or another method in its place, and says what errors of the engine mean."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from fsshard.backends.base import Backend
from fsshard.backends.forward_guards import READS_SHARD
from fsshard.complex_params.shard_tensors import MIXED
from fsshard.errors import FsshardError, ModelError, PrecisionError
from fsshard.model.unit_inputs import is_write_to_unit_input

# Messages of torch 2.13 about operands in two dtypes: linear, convolution, RNN; and about another unit's under FSDP2.
MIXED_UP = ("same dtype", "should be the same", "does not match weight dtype")
SHARD = "got mixed torch.Tensor and DTensor"


def explain_forward_error(error: BaseException, backend: Backend) -> FsshardError | None:
    """Return an error of ours that says what torch's ``error`` means; None where it means what it says."""
    if not isinstance(error, (RuntimeError, ModelError)):
        return None
    text = str(error)
    if (SHARD in text or MIXED in text) and backend.facts.has_dtensors:
        return ModelError(READS_SHARD)
    param = backend.settings.precision.param
    if param not in (None, torch.float32) and any(part in text for part in MIXED_UP):
        return PrecisionError(
            f"{error}: the forward makes float32 tensors (from complex ones, or constants) that are used with weights "
            f"in {param}, or it was given some in an object that is not searched for tensors; call the model under "
            "`with model.autocast():`, which casts per operation too, or pass them in a dict, list, tuple or dataclass"
        )
    if is_write_to_unit_input(text) or "RegisterPostBackwardFunction" in text:
        return FsshardError(
            "a sharding unit changes its input in place, which FSDP2 does not allow, nor any backend where several "
            "tensors enter the unit; make the operation out of place, or leave the module out of auto_wrap_policy"
        )
    return None


class ForwardMethod:
    """Stand-in for a method ``own`` of the user's model: called outside of a forward, it goes through the engine."""

    def __init__(self, owner: Any, own: Callable[..., Any]) -> None:
        functools.update_wrapper(self, own)
        # What ``fsshard.wrap`` returned is not kept alive.
        self._owner = weakref.ref(owner)
        self._own = own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        owner = self._owner()
        if owner is None or owner._fsshard.runs_user_code:
            return self._own(*args, **kwargs)
        members = vars(owner.module)
        before = {name: members[name] for name in ("forward",) if name in members}

        def restore() -> None:
            members.pop("forward", None)
            members.update(before)

        def once(*args: Any, **kwargs: Any) -> Any:
            # The method may call the forward, as generate() of transformers does.
            restore()
            return self._own(*args, **kwargs)

        members["forward"] = _in_place_of(before.get("forward"), once)
        try:
            return owner(*args, **kwargs)
        finally:
            restore()

    def __reduce__(self) -> Any:
        own: Any = self._own
        # A copy of the model has its own method.
        return getattr, (own.__self__, own.__name__)


def _in_place_of(forward: Any, once: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``once``, within what wrap() has put around the model's own forward: casts of its parameters."""
    # The forward of a root that is computed again in the backward.
    forward = getattr(forward, "original", forward)
    if isinstance(forward, functools.partial) and forward.args:
        inner = _in_place_of(forward.args[0], once)
        return functools.partial(forward.func, inner, *forward.args[1:], **forward.keywords)
    return once
