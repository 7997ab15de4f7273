"""``torch.autograd.grad`` with respect to ``model.parameters()``.

What a wrapped model shows as a parameter is in no graph where the engine stores another tensor. The function asks its
inputs by ``__torch_function__`` (torch 2.13), so the classes of these views hand it on to here. Where the engine's
parameter is whole the answer is this rank's derivative, as it is under torch's DDP; where it is cut no rank has one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fsshard.errors import UnsupportedByBackend

__all__ = ["derivatives_by_views", "with_derivatives"]


def with_derivatives(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """Do what torch does with any parameter, but for derivatives with respect to it: a view's __torch_function__."""
    if func is torch.autograd.grad:
        return derivatives_by_views(*args, **kwargs)
    with torch.DisableTorchFunctionSubclass():
        return func(*args, **(kwargs or {}))


def derivatives_by_views(outputs: Any, inputs: tuple[Any, ...], **asked: Any) -> tuple[Tensor | None, ...]:
    """Return the derivatives by what the engine stores, in the user's shapes and dtypes.

    Args:
        outputs: of ``torch.autograd.grad``.
        inputs: a view of a parameter among them.
        asked: its other arguments.

    Raises:
        UnsupportedByBackend: ranks hold parts of the parameters.
    """
    entries = [getattr(tensor, "_fsshard_entry", None) for tensor in inputs]
    views = [tensor for tensor, entry in zip(inputs, entries, strict=True) if entry is not None]
    backend: Any = getattr(views[0], "_fsshard_backend")  # noqa: B009  of fsshard.sharded
    if backend.facts.divides == "elements":
        raise UnsupportedByBackend(
            "torch.autograd.grad with respect to model.parameters(), which are sharded",
            backend.name,
            "use loss.backward() and parameter.grad, or backend='ddp' or 'fairscale' (there each rank gets the "
            "derivative of its own loss)",
        )
    stored = [t if e is None else e.parameter for t, e in zip(inputs, entries, strict=True)]
    lenient = {} if asked.get("materialize_grads") else {"allow_unused": True}
    with torch.DisableTorchFunctionSubclass():
        # The views too: a loss that was computed with one outside of the forward says so.
        found = torch.autograd.grad(outputs, [*stored, *views], **{**asked, **lenient})[: len(inputs)]
    for index, gradient in enumerate(found):
        if gradient is None and not asked.get("allow_unused"):
            raise RuntimeError(
                f"The differentiated Tensor at index {index} appears to not have been used in the graph. Set "
                "allow_unused=True if this is the desired behavior."
            )
    batched = asked.get("is_grads_batched", False)
    return tuple(
        g if e is None or g is None else _user_gradient(e, g, batched) for g, e in zip(found, entries, strict=True)
    )


def _user_gradient(entry: Any, gradient: Tensor, batched: bool) -> Tensor:
    if batched:
        return torch.stack([_user_gradient(entry, one, batched=False) for one in gradient])
    shown: Tensor = entry.kind.to_user(gradient)
    return shown
