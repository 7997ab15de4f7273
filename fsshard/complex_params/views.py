"""The view of its storage that a module shows, whatever state an engine has put the storage in."""

from __future__ import annotations

import functools
import sys
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from fsshard.complex_params.pairs import SUFFIX, Form, Kind, is_odd, viewable

__all__ = ["KEPT", "export_stored", "is_dtensor", "view_property"]

KEPT = "_fsshard_shown"
"""Attribute of a module that shows its user's parameters: a :class:`~fsshard.complex_params.shown.Kept`."""

_PAIRED = (torch.float32, torch.float64)


@functools.cache
def _warn_of_copies() -> None:
    warnings.warn("fsshard copies a complex weight at each access: the engine packed it at an odd offset", stacklevel=5)


def view_property(name: str, kind: Kind) -> property:
    """Return the property by which a module shows what it stores as ``kind`` under another name."""
    stored_name = name + SUFFIX
    shows = kind.form is not Form.RENAMED  # tltorch's own attribute is a view, and no parameter
    kind = kind if shows else Kind.COMPLEX
    layout = kind.layout

    def get(self: Any) -> Any:
        members = self.__dict__
        stored = members.get(stored_name)  # FSDP1 puts unsharded views here
        if stored is None:
            stored = members["_parameters"].get(stored_name)
        if stored is None:
            # None; or a plain buffer, in what tltorch's slicing makes of this very class under Dynamo.
            return type(self)._fsshard_origin.__getattr__(self, name)
        flat = members.get("_fsshard_flat")
        shape = None if flat is None else flat.get(name)
        if not shows or torch.compiler.is_compiling() or KEPT not in members:
            return see(stored, shape)
        return members[KEPT].show(name, stored, kind, see if shape is None else functools.partial(see, shape=shape))

    def see(stored: Tensor, shape: torch.Size | None = None) -> Tensor:
        part = _see(stored, kind)
        if shape is not None:  # a list of numbers; of a shard what the engine holds, a list as well
            if torch.compiler.is_compiling() or not (part is stored or is_dtensor(part)):
                part = kind.turn_back(part.view(shape))
        elif kind.order and part.dim() == len(kind.order):  # stored in the order of its memory, and no flat shard
            part = part.permute(kind.way_back)
        if layout is None or is_dtensor(part) or part.dim() != len(layout.shape):
            return part  # at rest under FSDP, whose shards are what the engine holds
        return layout.as_dtensor(part)

    return property(get)


def _see(stored: Tensor, kind: Kind) -> Tensor:
    """Return what the property returns: the user's view of ``stored``, whatever state an engine has put it in."""
    if kind.form is Form.COMPLEX and stored.dim() > 1 and stored.dtype in _PAIRED:
        try:
            return torch.view_as_complex(stored)  # at each access of a weight: no questions where it works
        except RuntimeError:  # begins at an odd place, or is a flat shard
            pass
    return _see_any(stored, kind)


def _see_any(stored: Tensor, kind: Kind) -> Tensor:
    if kind.form is Form.SCALAR:
        # At rest under FSDP2 it is a DTensor of one element, which one rank holds. As it is, it can be asked for its
        # dtype and be written in place (logit_scale.data.clamp_) without communication.
        return stored.reshape(()) if stored.numel() == 1 and not is_dtensor(stored) else stored
    if kind.form is Form.PLAIN or stored.dim() < 2 or stored.shape[-1] != 2:
        return stored  # a flat shard (FSDP1 at rest): hand back what the engine holds, and never read its memory
    if torch.compiler.is_compiling():  # probing offsets and strides would break the graph
        wide = stored.float() if stored.dtype in (torch.bfloat16, torch.float16) else stored
        number = torch.view_as_complex(wide)
        return number.squeeze(0) if kind.form is Form.COMPLEX_SCALAR else number
    if stored.dtype in (torch.bfloat16, torch.float16):
        stored = stored.float()  # view_as_complex refuses bfloat16 and makes complex32 of float16
    if is_odd(stored) and _has_memory(stored):
        stored = viewable(stored)
        _warn_of_copies()
    number = torch.view_as_complex(stored)
    # A DTensor of one number cannot lose the dimension that it is sharded along.
    return number.squeeze(0) if kind.form is Form.COMPLEX_SCALAR and not is_dtensor(stored) else number


def _has_memory(tensor: Tensor) -> bool:
    # FSDP1 frees the storage of a resharded parameter (torch 2.13): copying from it is a segmentation fault.
    if type(tensor) is not Tensor and type(tensor) is not nn.Parameter:
        return True  # DTensor and other subclasses have no single storage to ask
    return tensor.numel() == 0 or tensor.untyped_storage().nbytes() > 0


def is_dtensor(value: object) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # no DTensor can exist before its module does
    return module is not None and isinstance(value, module.DTensor)


def export_stored(stored: Any, kind: Kind) -> Any:
    """Return the user's tensor over the memory of ``stored``, a DTensor if that is one; a flat shard as it is."""
    if is_dtensor(stored):
        if kind.form is not Form.COMPLEX and not kind.order:
            return stored  # 0-dim values have no dimension to shard: they stay as FSDP2 holds them
        # From the local shard: DTensor's own view_as_complex needs a redistribution for a dim 0 of size 1.
        return _map_dtensor(stored, kind.to_user(stored.to_local()), kind)
    if (kind.is_complex and stored.dim() < 2) or (kind.form is Form.SCALAR and stored.numel() != 1):
        return stored  # a flat shard
    return stored if kind.form is Form.PLAIN and stored.dim() != len(kind.order) else kind.to_user(stored)


def _map_dtensor(value: Any, local: Tensor, kind: Kind) -> Any:
    """Return the user's DTensor for the stored one ``value``, over ``local``, its part here (no communication)."""
    from torch.distributed.tensor import DTensor, Shard

    shape = kind.user_shape(value.shape)
    stride = kind.turn_back(
        torch.empty([shape[dim] for dim in kind.order or range(len(shape))], device="meta")
    ).stride()
    placements = value.placements
    if kind.order:
        placements = [Shard(kind.order[p.dim]) if isinstance(p, Shard) else p for p in placements]
    return DTensor.from_local(local, value.device_mesh, placements, run_check=False, shape=shape, stride=stride)
