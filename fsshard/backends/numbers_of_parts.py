"""A number is never a part's: ``float(p.norm())`` of what ranks share raises, where torch gives each rank its own.

``item()``, ``float()`` and ``bool()`` of a DTensor are those of the rank's local tensor, whatever its placements (torch
2.13), so a norm of a sharded weight or gradient that is computed for a log was another number on every rank. Gathering
it unasked would be a collective, and who logs on rank 0 only would wait for ever.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from fsshard.errors import FsshardError

__all__ = ["refuse_numbers_of_parts"]

_NUMBER = torch.ops.aten._local_scalar_dense.default
_MESHES: list[weakref.ref[Any]] = []
"""What our parameters are cut over. By reference, since equal meshes come and go with the models that have them."""


def refuse_numbers_of_parts(mesh: Any) -> None:
    """From now on tensors over ``mesh`` that are parts, or sums that are not summed yet, give no numbers.

    ``OpDispatcher._custom_op_handlers`` (torch 2.13, ``torch/distributed/tensor/_dispatch.py``) is where torch itself
    puts operations that no sharding rule covers; DTensors over other meshes keep what they had.
    """
    from torch.distributed.tensor import DTensor

    _MESHES[:] = [known for known in _MESHES if known() is not None and known() is not mesh] + [weakref.ref(mesh)]
    handlers = getattr(getattr(DTensor, "_op_dispatcher", None), "_custom_op_handlers", None)
    if handlers is not None and _NUMBER not in handlers:
        handlers[_NUMBER] = _number


def _number(call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    value = args[0]
    whole = all(placement.is_replicate() for placement in value.placements)
    if not whole and any(known() == value.device_mesh for known in _MESHES):  # torch's caches give an equal one back
        raise FsshardError(
            "a number is asked of a tensor of which this rank has a part only (it was computed with a parameter, or a "
            "gradient, that the ranks share): it would be another one on every rank. On every rank write "
            "value.full_tensor().item(), or within model.full_parameters() compute with the whole weights"
        )
    return call(value._local_tensor, *args[1:], **kwargs)
