"""``torch.nn.utils.clip_grad_norm_`` with a norm that another room computes, for ranks with parts of gradients.

Stands on torch/nn/utils/clip_grad.py (torch 2.13): ``clip_grad_norm_`` takes the norm from ``_get_total_norm``, and
that groups gradients by ``_group_tensors_by_device_and_dtype``. The first is looked up in its module at each call, so
that a script that has imported ``clip_grad_norm_`` before is reached as well.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad

from fsshard.torch_private.registry import Area

__all__ = ["Norm", "compute_norm_by", "grouped_by_device_and_dtype"]

Norm = Callable[[Sequence[Tensor], float, Callable[..., Tensor]], Tensor | None]
"""Takes the parameters, the order of the norm, and torch's own function of gradients, order and whether to raise; gives
None where the parameters are not its own."""

AREA = Area("clip_grad")
_WHERE = {
    "source": "torch/nn/utils/clip_grad.py",
    "otherwise": "wrap(), which makes clip_grad_norm_ right for what ranks share",
}
_NORM, _GROUPING = "_get_total_norm", "_group_tensors_by_device_and_dtype"
_torchs_norm = AREA.later(f"torch.nn.utils.clip_grad:{_NORM}", use="where clip_grad_norm_ has its norm from", **_WHERE)
_torchs_grouping = AREA.later(
    f"torch.nn.utils.clip_grad:{_GROUPING}", use="sorts gradients, in the order of torch's own sums", **_WHERE
)
_norms: list[Norm] = []


def compute_norm_by(norm: Norm, *, first: bool = False) -> None:
    """From now on ``clip_grad_norm_`` asks ``norm`` before it computes one itself. Once is enough.

    Args:
        norm: knows parameters whose gradients are not all here.
        first: before those that were given earlier.

    Raises:
        PrivateTorchMissing: this release of torch computes the norm elsewhere.
    """
    _take_part()
    if norm not in _norms:
        _norms.insert(0 if first else len(_norms), norm)


def grouped_by_device_and_dtype(tensors: list[Tensor]) -> list[list[int]]:
    """Places of the tensors of one device and dtype, in torch's own order of these, which is that of its sums."""
    if not tensors:
        return []
    groups: Any = _torchs_grouping.value([tensors], with_indices=True)
    return [places for _, places in groups.values()]


@functools.cache
def _take_part() -> None:
    original = _torchs_norm.value

    @functools.wraps(original)
    def total_norm(tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: Any = None) -> Any:
        parameters = _clipped_parameters(sys._getframe(1))
        total = _first_of(parameters, float(norm_type), functools.partial(original, foreach=foreach))
        if total is None:
            return original(tensors, norm_type, error_if_nonfinite, foreach)
        if error_if_nonfinite and not bool(torch.isfinite(total)):
            raise RuntimeError(f"the norm of order {norm_type} of the gradients is {float(total)}; nothing was clipped")
        return total

    setattr(clip_grad, _NORM, total_norm)


def _first_of(parameters: Sequence[Tensor], norm_type: float, torchs: Callable[..., Tensor]) -> Tensor | None:
    for norm in _norms if parameters else ():
        total = norm(parameters, norm_type, torchs)
        if total is not None:
            return total
    return None


def _clipped_parameters(caller: FrameType) -> list[Tensor]:
    """The parameters that ``clip_grad_norm_`` was given; none where something else asks for a norm.

    From its frame: it passes on the gradients alone, and a rank can have none while others wait for it.
    """
    if (caller.f_code.co_filename, caller.f_code.co_name) != (clip_grad.__file__, "clip_grad_norm_"):
        return []
    found = caller.f_locals.get("parameters")
    return [parameter for parameter in found if isinstance(parameter, Tensor)] if isinstance(found, list) else []


# ------------------------------------------------------------------------------------------------ counted on

AREA.stands_on(
    {
        "torch.nn.utils.clip_grad": "in which order norms are added up, and the names that clip_grad_norm_ looks up",
        "torch.utils._foreach_utils:_group_tensors_by_device_and_dtype": "in which order gradients are grouped",
    }
)
