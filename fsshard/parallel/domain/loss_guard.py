"""neuraloperator's losses divide by norms, and take differences between neighbours: of a slab they are silently wrong.

So are means of torch's losses, where ranks have slabs of different sizes.
So they refuse what a split model has returned. It is known again in two ways: by itself, and by the graph that leads
from it to the loss, unless a gather lies between. Without a graph (``torch.no_grad``) what was computed of an output,
and is not the output itself, is not known again.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from fsshard.errors import ConfigurationError
from fsshard.parallel.domain.exchange import DomainGather
from fsshard.parallel.domain.slabs import Slabs, mark_of
from fsshard.patches import FIELD_LOSSES

__all__ = ["guard_losses", "marked_in_graph"]

KEY = "fsshard.slab"
"""In the ``metadata`` of an autograd node: what it made is the output of a split model; True if slabs are uneven."""


def marked_in_graph(output: Tensor, is_uneven: bool) -> Tensor:
    """The same tensor, known in its graph for what a split model has returned."""
    node: Any = output.grad_fn
    if node is not None:
        node.metadata[KEY] = is_uneven
    return output


def guard_losses(domain: Slabs) -> None:
    """Let neuraloperator's losses raise for a slab of a domain, and torch's means for uneven ones, while it lives."""
    FIELD_LOSSES.keep_for(domain, _refuse_slabs)


def _refuse_slabs(loss: Callable[..., Any], kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    values = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    if kind and any(_is_slab(value) for value in values):
        raise ConfigurationError(
            f"neuraloperator's {kind} of a slab is not that of the whole field: use domain.LpLoss, domain.H1Loss, "
            "domain.MSELoss or domain.mse_loss, with the domain that shard_domain returned, or any loss of "
            "domain.gather(output)"
        )
    if kind or not any(_is_slab(value, uneven=True) for value in values):
        return
    if inspect.signature(loss).bind(*args, **kwargs).arguments.get("reduction", "mean") == "mean":
        raise ConfigurationError(
            f"the mean that {loss.__name__} takes of a slab counts each rank alike, and the ranks have "
            "different numbers of rows: use domain.mse_loss or domain.MSELoss, with the domain that "
            "shard_domain returned; or any loss of domain.gather(output); or with the whole target y: "
            f"`F.{loss.__name__}(output, domain.scatter(y), reduction='sum') * domain.size / y.numel()`"
        )


def _is_slab(value: Tensor, *, uneven: bool = False) -> bool:
    """Return whether it is, or was computed of, a slab; with ``uneven``: of ranks with different numbers of rows."""
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
