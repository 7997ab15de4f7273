"""``p.data = value`` for the parameters that model.parameters() gives: copied to the engine's storage, or refused.

torch lets ``p`` have other memory then. A view of the engine's memory would be none any more, and of a DTensor nothing
but the outer tensor would change, which nobody reads (torch 2.13): lost without a word, ``vector_to_parameters`` too.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from fsshard.errors import FsshardError
from fsshard.torch_private.tensors import DATA, LOCAL_TENSOR, local_tensor

__all__ = ["data", "held_dtensor", "set_item"]


def _assign(tensor: Any, value: Any) -> None:
    """Copy ``value``, a tensor like ``tensor`` or (of a DTensor) the whole plain one, into the memory of ``tensor``."""
    if not isinstance(value, Tensor) or value.shape != tensor.shape or value.is_complex() != tensor.is_complex():
        found = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise FsshardError(
            f".data = ... of a parameter of the model: expected {tensor.dtype} {tuple(tensor.shape)} to copy into the "
            f"engine's memory, got {found}; change the model before fsshard.wrap"
        )
    given: Any = value
    with torch.no_grad():
        if not hasattr(tensor, LOCAL_TENSOR):
            DATA.__get__(tensor).copy_(value)
        elif not hasattr(value, LOCAL_TENSOR):
            local_tensor(tensor).copy_(_part(tensor, value))
        elif (given.device_mesh, given.placements) == (tensor.device_mesh, tensor.placements):
            local_tensor(tensor).copy_(local_tensor(given))
        else:
            raise FsshardError(
                f".data = ... of a parameter of the model: expected the placements {tensor.placements}, got "
                f"{given.placements}; give the whole tensor, or value.redistribute(...) to these"
            )


def _part(tensor: Any, whole: Tensor) -> Tensor:
    """Return this rank's rows, as ``torch.chunk`` cuts them."""
    mesh, dim = tensor.device_mesh, tensor.device_mesh.ndim - 1
    each = -(-whole.shape[0] // mesh.size(dim))
    start = min(each * mesh.get_local_rank(dim), whole.shape[0])
    return whole[start : start + each]


data = property(lambda tensor: DATA.__get__(tensor), _assign)
"""In place of torch's, for classes of parameters."""


def set_item(tensor: Any, index: Any, value: Any) -> None:
    """Assign to all elements; torch's own indexes rows that ranks share into a copy (torch 2.13).

    Raises:
        FsshardError: for anything but all of it; what is written to a copy is lost.
    """
    if index is Ellipsis or (isinstance(index, slice) and index == slice(None)):
        tensor.copy_(value)
        return
    raise FsshardError(
        f"p[{index!r}] = ... of a parameter of the model, which is sharded row by row: it would be written to a copy; "
        "write within `with torch.no_grad(), model.full_parameters(writeback=True):`, alike on every rank"
    )


GRAD: Any = Tensor.grad


def _set_grad(tensor: Any, value: Any) -> None:
    """Set the gradient; who drops it by hand is heard, since an engine cannot tell it from one that never came."""
    GRAD.__set__(tensor, value)
    drops: tuple[set[str], str] | None = tensor.__dict__.get("_fsshard_drops")
    if value is None and drops is not None:
        drops[0].add(drops[1])


def _equal(tensor: Any, other: Any) -> Any:
    """Return True for what shows this parameter to the user, so that both are one key of a dict; see ``shown.py``."""
    stands_for = other.__dict__.get("_fsshard_stored") if isinstance(other, Tensor) else None
    return True if stands_for is tensor else Tensor.__eq__(tensor, other)


@functools.cache
def held_dtensor() -> type[Tensor]:
    """Return the class of the DTensors that an engine holds as parameters."""
    from torch.distributed.tensor import DTensor

    class HeldDTensor(DTensor):
        def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Parameter:
            """Return a copy that is nobody's parameter: torch's own is for classes whose clone() has their type."""
            memo[id(self)] = copied = torch.nn.Parameter(self.detach().clone(), self.requires_grad)
            return copied

        data = data
        grad = property(GRAD.__get__, _set_grad)
        __hash__, __eq__ = Tensor.__hash__, _equal
        __setitem__ = set_item

    return HeldDTensor
