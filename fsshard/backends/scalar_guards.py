"""Refuses ``float(p.norm())`` of sharded tensors, where torch would give each rank another number.

``item()``, ``float()`` and ``bool()`` of a DTensor are those of the rank's local tensor, whatever its placements (torch
2.13), so a norm of a sharded weight or gradient that is computed for a log was another number on every rank. Gathering
it unasked would be a collective, and who logs on rank 0 only would wait forever.
"""

from __future__ import annotations

import weakref
from typing import Any

from fsshard.errors import FsshardError
from fsshard.torch_private.dispatch import LOCAL_SCALAR_DENSE
from fsshard.torch_private.tensors import dtensor_handlers, local_tensor

__all__ = ["refuse_numbers_of_parts"]

_NUMBER = LOCAL_SCALAR_DENSE
_MESHES: list[weakref.ref[Any]] = []
"""What our parameters are cut over. By reference, since equal meshes come and go with the models that have them."""


def refuse_numbers_of_parts(mesh: Any) -> None:
    """From now on tensors over ``mesh`` that are parts, or sums that are not summed yet, give no numbers.

    ``OpDispatcher._custom_op_handlers`` (torch 2.13, ``torch/distributed/tensor/_dispatch.py``) is where torch itself
    puts operations that no sharding rule covers; DTensors over other meshes keep what they had.
    """

    _MESHES[:] = [known for known in _MESHES if known() is not None and known() is not mesh] + [weakref.ref(mesh)]
    handlers = dtensor_handlers()
    if handlers is not None and _NUMBER not in handlers:
        handlers[_NUMBER] = _number


def _number(call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    value = args[0]
    whole = all(placement.is_replicate() for placement in value.placements)
    if not whole and any(known() == value.device_mesh for known in _MESHES):  # torch's caches give an equal one back
        raise FsshardError(
            "a Python number was asked of a tensor of which this rank has only a part (it was computed from a sharded "
            "parameter or gradient), so every rank would get another number. On every rank write "
            "value.full_tensor().item(), or compute with the whole weights within model.full_parameters()"
        )
    return call(local_tensor(value), *args[1:], **kwargs)
