"""Marks on gradients: a rank's own part, the mean over all ranks, a part on top of a mean, or a part already sent.

DDP need not know: under it the mean is on all ranks, and what a later backward adds to it is reduced with it. Here
its owner alone has it. The notes are attributes of the gradient itself, so that whoever drops a gradient, in
whichever way, drops what is known of it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fsshard.errors import GradientError
from fsshard.torch_private.tensors import version_of

__all__ = ["carried", "carry", "forget", "has_note", "is_common", "is_sent", "mark_common", "mark_sent"]


def mark_common(gradient: Tensor) -> None:
    """Note that this is the mean over the ranks."""
    gradient._fsshard_common = True  # type: ignore[attr-defined]


def mark_sent(gradient: Tensor) -> None:
    """Note that its owner has this part."""
    gradient._fsshard_sent = True  # type: ignore[attr-defined]


def is_sent(gradient: Tensor | None) -> bool:
    """Whether the owner has this part already: it is here to be looked at, and goes when the next one comes."""
    return getattr(gradient, "_fsshard_sent", False)


def has_note(gradient: Tensor) -> bool:
    """Whether anything is known of this gradient: it is the tensor that a reduction left, or was added to since."""
    notes = gradient.__dict__
    return "_fsshard_common" in notes or "_fsshard_sent" in notes or "_fsshard_carry" in notes


def is_common(gradient: Tensor) -> bool:
    """Whether this is the mean over the ranks, and nothing was added to it."""
    return getattr(gradient, "_fsshard_common", False)


def forget(gradient: Tensor) -> None:
    """The gradient was set to zero: a part like any other."""
    gradient.__dict__.pop("_fsshard_common", None)
    gradient.__dict__.pop("_fsshard_carry", None)
    gradient.__dict__.pop("_fsshard_sent", None)


def carry(gradient: Tensor, common: Tensor) -> None:
    """Note the mean that a part has to be added to, on all ranks alike."""
    gradient._fsshard_carry = (common, version_of(gradient))  # type: ignore[attr-defined]


def carried(gradient: Tensor) -> Tensor | None:
    """The mean that a part has to be added to.

    Raises:
        GradientError: the part was changed in place since, and not to zero.
    """
    found: Any = getattr(gradient, "_fsshard_carry", None)
    if found is None:
        return None
    common, version = found
    if version_of(gradient) != version:
        if bool(gradient.any()):
            raise GradientError(
                "a gradient was changed in place between backward passes under no_sync() and their reduction, "
                "although it contains an earlier, reduced one; change it after the reduction, or zero it before"
            )
        forget(gradient)
        return None
    result: Tensor = common
    return result
