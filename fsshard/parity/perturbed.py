"""How far rounding alone carries a training: the same training with every operation rounded otherwise.

Another torch, or another processor, computes the same operations with other kernels, whose last digits differ. What
becomes of such differences after some steps depends on the training, so it is measured on the training itself: every
floating point result of forward and backward is moved by one unit in the last place, up or down at random (Monte
Carlo arithmetic: Parker, UCLA report CSD-970002, 1997; Denis, de Oliveira Castro and Petit, Verificarlo, ARITH 2016).
Each run of this kind is one draw of the rounding errors; :func:`fsshard.parity.bounds.spread_factor` says how far
beyond the largest of some draws the next may reach. Inputs of sums are moved one by one, so the errors that kernels
make by adding in other orders are drawn with them.

Operations that training does not differentiate (positions, masks, indices computed in float) are left alone: rounding
them otherwise may move an index, which no kernel does that rounds correctly.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fsshard.nested import leaves as tree_leaves
from fsshard.torch_private.dispatch import TorchDispatchMode, schema_of

__all__ = ["perturbed"]


@contextlib.contextmanager
def perturbed(generator: torch.Generator) -> Iterator[None]:
    """Move results of differentiated operations, within, by one unit in the last place.

    Args:
        generator: draws the directions; the global generators are left alone.
    """
    with _RoundedOtherwise(generator):
        yield


class _RoundedOtherwise(TorchDispatchMode):
    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator = generator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace == "aten" and _makes_new(func) and _differentiated((args, kwargs)):
            for leaf in tree_leaves(out):
                if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
                    self._move(leaf)
        return out

    def _move(self, value: Tensor) -> None:
        real = torch.view_as_real(value) if value.is_complex() else value
        step = torch.finfo(real.dtype).eps
        up = torch.empty(real.shape, dtype=real.dtype).bernoulli_(0.5, generator=self._generator).to(real.device)
        real.mul_(up.mul_(2 * step).add_(1 - step))


def _makes_new(func: Any) -> bool:
    """Return whether all that it returns lies in memory of its own."""
    schema = schema_of(func)
    return not schema.is_mutable and all(value.alias_info is None for value in schema.returns)


def _differentiated(arguments: Any) -> bool:
    """In forward a tensor requires a gradient; in backward nothing does, and nothing is recorded."""
    given = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
    return bool(given) and (not torch.is_grad_enabled() or any(leaf.requires_grad for leaf in given))
