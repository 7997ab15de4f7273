"""What fsshard knows of tensors that a user may hold, by identity, so that nothing is written on the user's objects."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary


@dataclass(kw_only=True)
class ParameterRecord:
    """One tensor's record.

    Attributes:
        refusal: why no torch optimizer may step it; empty where one may.
        is_stale: another parameter is trained in its place.
        is_shard: an engine has left this rank's part of it only.
        drops: the engine's set of names of dropped gradients, and the name in it; None where it keeps none.
    """

    refusal: str = ""
    is_stale: bool = False
    is_shard: bool = False
    drops: tuple[set[str], str] | None = None


_records: MutableMapping[Tensor, ParameterRecord] = WeakIdKeyDictionary()
"""Keeps no tensor alive."""
_UNKNOWN = ParameterRecord()


def record_of(tensor: Tensor) -> ParameterRecord:
    """Return what is known of a tensor; not to be changed."""
    return _records.get(tensor, _UNKNOWN)


def new_record(tensor: Tensor) -> ParameterRecord:
    """Return the tensor's own record, to be changed; an empty one is made where there is none."""
    return _records.setdefault(tensor, ParameterRecord())


def mark_stale(tensor: Tensor, refusal: str) -> None:
    """Let torch optimizers over a tensor, in whose place another is trained, raise ``refusal``."""
    record = new_record(tensor)
    record.refusal = refusal
    record.is_stale = True


def forget_record(tensor: Tensor) -> None:
    """Let a tensor be as any other."""
    _records.pop(tensor, None)
