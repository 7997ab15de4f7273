"""Refuses ``float(p.norm())`` of sharded tensors, where torch would give each rank another number.

``item()``, ``float()`` and ``bool()`` of a DTensor are those of the rank's local tensor, whatever its placements (torch
2.13), so a norm of a sharded weight or gradient that is computed for a log was another number on every rank. Gathering
it unasked would be a collective, and who logs on rank 0 only would wait forever.
"""

from __future__ import annotations

from typing import Any

from fsshard.errors import FsshardError
from fsshard.patches import DTENSOR_ITEM

__all__ = ["refuse_numbers_of_parts"]


def refuse_numbers_of_parts(backend: Any) -> None:
    """Let tensors that are parts, or sums that are not summed yet, give no numbers while the engine lives.

    Those over its own meshes: DTensors over others keep what they had.
    """
    DTENSOR_ITEM.keep_for(backend, _refuse)


def _refuse(value: Any) -> None:
    whole = all(placement.is_replicate() for placement in value.placements)
    engines = () if whole else DTENSOR_ITEM.needing(_refuse)
    if any(entry.parameter.device_mesh == value.device_mesh for engine in engines for entry in engine.entries.values()):
        raise FsshardError(
            "a Python number was asked of a tensor of which this rank has only a part (it was computed from a sharded "
            "parameter or gradient), so every rank would get another number. On every rank write "
            "value.full_tensor().item(), or compute with the whole weights within model.full_parameters()"
        )
