"""neuraloperator's losses divide by norms, and take differences between neighbours: of a slab they are silently wrong.

So are means of torch's losses, where ranks have slabs of different sizes.
So they refuse what a split model has returned. It is known again in two ways: by itself, and by the graph that leads
from it to the loss, unless a gather lies between. Without a graph (``torch.no_grad``) what was computed of an output,
and is not the output itself, is not known again.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fsshard.errors import ConfigurationError
from fsshard.parallel.domain.exchange import DomainGather
from fsshard.parallel.domain.slabs import alive, mark_of

__all__ = ["GUARDED", "guard_losses", "marked_in_graph"]

DERIVATIVES = ("dx", "dy", "dz")
GUARDED: dict[str, dict[str, tuple[str, ...]]] = {
    "data_losses": {
        "LpLoss": ("abs", "rel"),
        "H1Loss": ("abs", "rel"),
        "HdivLoss": ("abs", "rel"),
        "PointwiseQuantileLoss": ("__call__",),
        "MSELoss": ("__call__",),
    },
    "equation_losses": dict.fromkeys(
        ("BurgersEqnLoss", "ICLoss", "PoissonInteriorLoss", "PoissonBoundaryLoss", "PoissonEqnLoss"), ("__call__",)
    ),
    "differentiation": {
        "FiniteDiff": DERIVATIVES,
        "FourierDiff": (*DERIVATIVES, "derivative", "partial", "compute_multiple_derivatives"),
    },
}
"""neuraloperator 2.0's losses and derivatives of fields, and their methods that all uses of them go through."""

KEY = "fsshard.slab"
"""In the ``metadata`` of an autograd node: what it made is the output of a split model; True if slabs are uneven."""


def marked_in_graph(output: Tensor, is_uneven: bool) -> Tensor:
    """The same tensor, known in its graph for what a split model has returned."""
    node: Any = output.grad_fn
    if node is not None:
        node.metadata[KEY] = is_uneven
    return output


def guard_losses() -> None:
    """From now on neuraloperator's losses raise for a slab, and torch's means for uneven ones. Idempotent."""
    for name, function in list(vars(F).items()):
        is_loss = inspect.isroutine(function) and not hasattr(function, "refuses_slabs") and name[0] != "_"
        if is_loss and "reduction" in (getattr(function, "__annotations__", None) or ()):
            setattr(F, name, _guarded_mean(function))
    for module, kinds in GUARDED.items():
        found = importlib.import_module(f"neuralop.losses.{module}")
        for kind, methods in kinds.items():
            cls = getattr(found, kind, None)
            for name in methods:
                method = getattr(cls, name, None)
                if method is not None and not hasattr(method, "refuses_slabs"):
                    setattr(cls, name, _guarded(method, kind))


def _guarded_mean(function: Callable[..., Any]) -> Callable[..., Any]:
    takes = inspect.signature(function)

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if alive and not torch.compiler.is_compiling():
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
            if any(_is_slab(tensor, uneven=True) for tensor in tensors):
                given = takes.bind(*args, **kwargs).arguments
                if given.get("reduction", "mean") == "mean":
                    raise ConfigurationError(
                        f"the mean that {function.__name__} takes of a slab counts each rank alike, and the ranks have "
                        "different numbers of rows: use domain.mse_loss or domain.MSELoss, with the domain that "
                        "shard_domain returned; or any loss of domain.gather(output); or with the whole target y: "
                        f"`F.{function.__name__}(output, domain.scatter(y), reduction='sum') * domain.size / y.numel()`"
                    )
        return function(*args, **kwargs)

    guarded.refuses_slabs = True  # type: ignore[attr-defined]
    return guarded


def _guarded(method: Callable[..., Any], kind: str) -> Callable[..., Any]:
    @functools.wraps(method)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(value, Tensor) and _is_slab(value) for value in (*args, *kwargs.values())):
            raise ConfigurationError(
                f"neuraloperator's {kind} of a slab is not that of the whole field: use domain.LpLoss, domain.H1Loss, "
                "domain.MSELoss or domain.mse_loss, with the domain that shard_domain returned, or any loss of "
                "domain.gather(output)"
            )
        return method(self, *args, **kwargs)

    guarded.refuses_slabs = True  # type: ignore[attr-defined]
    return guarded


def _is_slab(value: Tensor, *, uneven: bool = False) -> bool:
    """Whether it is a slab, or computed of one; with ``uneven``: one of ranks that have different numbers of rows."""
    mark = mark_of(value)
    if mark is not None:
        return mark.domain.is_uneven(mark.sizes) if uneven else mark.domain.size > 1
    seen: set[Any] = set()
    left: list[Any] = [value.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if KEY in node.metadata and (node.metadata[KEY] or not uneven):
            return True
        if node.name() != f"{DomainGather.__name__}Backward":
            left += [before for before, _ in node.next_functions]
    return False
