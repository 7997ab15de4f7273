"""``torch.autograd.grad`` with respect to ``model.parameters()``.

What a wrapped model shows as a parameter is in no graph where the engine stores another tensor: torch says "appears to
not have been used in the graph", and with ``allow_unused=True`` gives None, without a word. The function is a plain one
that asks the tensors nothing, so it is replaced by one that looks at them first. Where the engine's parameter is whole
the answer is this rank's derivative, as it is under torch's DDP; where it is cut no rank has one.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor

from fsshard.errors import UnsupportedByBackend

__all__ = ["watch_derivatives"]


def watch_derivatives() -> None:
    """From now on ``torch.autograd.grad`` knows the parameters of wrapped models.

    Who has imported the function by its own name before, has torch's.
    """
    torchs = torch.autograd.grad
    if hasattr(torchs, "_fsshard_signature"):
        return

    @functools.wraps(torchs)
    def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> tuple[Tensor | None, ...]:
        wanted = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
        if not any(_is_managed(tensor) for tensor in wanted):
            plain: tuple[Tensor | None, ...] = torchs(outputs, wanted, *args, **kwargs)
            return plain
        _check_whole(wanted)
        asked = inspect.signature(torchs).bind(outputs, wanted, *args, **kwargs)
        return _by_stored(torchs, wanted, asked.arguments)

    grad._fsshard_signature = True  # type: ignore[attr-defined]
    torch.autograd.grad = grad  # type: ignore[assignment]


def _is_managed(tensor: object) -> bool:
    members = getattr(tensor, "__dict__", ())
    return "_fsshard_cut" in members or "_fsshard_entry" in members


def _check_whole(wanted: tuple[Any, ...]) -> None:
    for tensor in wanted:
        backend = getattr(tensor, "_fsshard_backend", None)
        if backend is None or backend.facts.divides == "elements":
            name = getattr(tensor, "_fsshard_cut", None) if backend is None else backend.name
            if name is not None:
                raise UnsupportedByBackend(
                    "torch.autograd.grad with respect to model.parameters(), which are sharded",
                    name,
                    "use loss.backward() and parameter.grad, or backend='ddp' or 'fairscale' (there each rank gets the "
                    "derivative of its own loss)",
                )


def _by_stored(torchs: Any, wanted: tuple[Any, ...], asked: dict[str, Any]) -> tuple[Tensor | None, ...]:
    """The derivatives by what the engine stores, in the user's shapes and dtypes."""
    entries = [getattr(tensor, "_fsshard_entry", None) for tensor in wanted]
    stored = [t if e is None else e.parameter for t, e in zip(wanted, entries, strict=True)]
    # The views too: a loss that was computed with one outside of the forward says so.
    views = [tensor for tensor, entry in zip(wanted, entries, strict=True) if entry is not None]
    lenient = {} if asked.get("materialize_grads") else {"allow_unused": True}
    found = torchs(**{**asked, **lenient, "inputs": [*stored, *views]})[: len(wanted)]
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
