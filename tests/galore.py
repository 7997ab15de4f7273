"""neuraloperator's AdamW with Tensor-GaLore, for models of which only some weights have a low rank."""

from __future__ import annotations

from typing import Any

from neuralop.training import AdamW
from torch import Tensor


class GaLore(AdamW):
    """Steps each weight of two or more dims, all of them longer than the rank, in low rank; a group for each weight."""

    def step(self, closure: Any = None) -> Any:
        groups = self.param_groups
        self.param_groups = []
        for group in groups:
            for parameter in group["params"]:
                low = is_low(parameter, self.galore_rank)
                self.param_groups.append({**group, "params": [parameter], "galore": low})
        try:
            return super().step(closure)
        finally:
            self.param_groups = groups


def is_low(parameter: Tensor, rank: int) -> bool:
    """Return whether tensorly finds that rank along every dim: it fills up with random numbers otherwise."""
    return parameter.dim() > 1 and min(parameter.shape) > rank
