"""Name what torch.nn.utils.clip_grad takes norms with (torch 2.13).

The function that ``clip_grad_norm_`` takes the norm from, and the one that sorts gradients for it.
"""

from __future__ import annotations

from torch import Tensor

from fsshard.torch_private.registry import Area

AREA = Area("clip_grad", otherwise="wrap(), which makes clip_grad_norm_ right for what ranks share")
torchs_total_norm = AREA.later(
    "torch.nn.utils.clip_grad:_get_total_norm", use="where clip_grad_norm_ has its norm from"
)
_torchs_grouping = AREA.later(
    "torch.nn.utils.clip_grad:_group_tensors_by_device_and_dtype",
    use="sorts gradients, in the order of torch's own sums",
)


def grouped_by_device_and_dtype(tensors: list[Tensor]) -> list[list[int]]:
    """Places of the tensors of one device and dtype, in torch's own order of these, which is that of its sums."""
    if not tensors:
        return []
    groups = _torchs_grouping.value([tensors], with_indices=True)
    return [places for _, places in groups.values()]
