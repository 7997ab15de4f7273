"""Loops over Lightning Fabric, over its own DDP and over ours. What each rank runs."""

from __future__ import annotations

import tempfile
import warnings
from typing import Any

import lightning
import torch
from lightning.fabric.plugins import MixedPrecision
from lightning.fabric.strategies import DDPStrategy
from torch import Tensor, nn

from fsshard.compat.lightning import FabricStrategy
from fsshard.compat.lightning.plugins import Launched
from tests.compat.common import refusals
from tests.models import take_step

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"accumulate": 2},
    "by value": {"clip": {"clip_val": 0.1}, "dtype": torch.float32},
    "by norm": {"clip": {"max_norm": 0.5}},
    "bf16": {"precision": "bf16-mixed"},
    "fp16": {"precision": "16-mixed", "clip": {"max_norm": 1e3, "error_if_nonfinite": False}, "dtype": torch.float32},
}


class Model(nn.Module):
    """A weight that is complex, but where torch cannot clip, or scale, it."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first, self.weight = nn.Linear(6, 8), nn.Parameter(torch.randn(8, 4, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return (self.first(x).to(self.weight.dtype) @ self.weight).abs().sum(1)


def fabric_of(engine: str, precision: str = "32-true") -> lightning.Fabric:
    warnings.filterwarnings("ignore", module="lightning")
    own = DDPStrategy(cluster_environment=Launched())
    strategy = own if engine == "lightning" else FabricStrategy(engine)
    ranks = torch.distributed.get_world_size()
    given = {"precision": precision}
    if precision == "16-mixed":  # which is bf16 to Lightning on a CPU
        given = {"plugins": MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))}
    return lightning.Fabric(accelerator="cpu", devices=ranks, strategy=strategy, **given)


def run(
    engine: str,
    *,
    precision: str = "32-true",
    accumulate: int = 1,
    clip: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.complex64,
    save: str | None = None,
    load: str | None = None,
    steps: range = range(6),
) -> dict[str, Any]:
    """Losses and, on rank 0, weights."""
    fabric = fabric_of(engine, precision)
    fabric.launch()
    torch.manual_seed(0)
    bare = Model(dtype)
    model, optimizer = fabric.setup(bare, torch.optim.AdamW(bare.parameters(), lr=1e-2))
    if load is not None:
        fabric.load(load, {"model": model, "optimizer": optimizer})
    losses = []
    for step in steps:
        numbers = torch.Generator().manual_seed(10 * step + fabric.global_rank)
        x, y = torch.randn(4, 6, generator=numbers), torch.randn(4, generator=numbers)
        last = (step + 1) % accumulate == 0
        with fabric.no_backward_sync(model, enabled=not last):
            loss = (model(x) - y).square().mean()
            fabric.backward(loss / accumulate)
        losses.append(loss.item())
        if last:
            if clip is not None:
                fabric.clip_gradients(model, optimizer, **clip)
            take_step(optimizer)
    if save is not None:
        fabric.save(save, {"model": model, "optimizer": optimizer, "steps": steps.stop})
    state = fabric.strategy.get_module_state_dict(model._forward_module)
    return {"losses": losses, "state": {name: value.clone() for name, value in state.items()}}


def every_case(engine: str) -> dict[str, dict[str, Any]]:
    return {case: run(engine, **given) for case, given in CASES.items()}


def refused() -> dict[str, str]:
    """Map each thing that is refused to the error's type and text."""

    tried = {
        "precision": lambda: run("fsdp2", precision="bf16-true"),
        "directory": lambda: run("fsdp2", save=tempfile.gettempdir()),
    }
    return refusals(tried)
