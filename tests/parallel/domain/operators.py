"""Tiny operators, and what one process computes with neuraloperator's own classes: the judge of the tests here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

SMALL: dict[str, Any] = {"in_channels": 1, "out_channels": 1, "n_layers": 2, "projection_channel_ratio": 1}
TWO = {**SMALL, "n_modes": (6, 6), "hidden_channels": 4}
THREE = {**SMALL, "n_modes": (4, 4, 6), "hidden_channels": 3}


@contextmanager
def in_double() -> Iterator[None]:
    """Real numbers of 64 bits and complex ones of 128, in neuraloperator's own code as well, which names cfloat."""
    torch.set_default_dtype(torch.float64)
    single, torch.cfloat = torch.cfloat, torch.complex128
    try:
        yield
    finally:
        torch.cfloat = single
        torch.set_default_dtype(torch.float32)


def operator(settings: dict[str, Any]) -> Any:
    """neuraloperator's FNO, or TFNO if it is named; the same weights on every rank."""
    from neuralop.models import FNO, TFNO

    torch.manual_seed(0)
    settings = dict(settings)
    kind = TFNO if settings.pop("tfno", False) else FNO
    model = kind(**settings)
    for module in model.modules():
        if hasattr(module, "set_embedding"):
            module.set_embedding(torch.linspace(-1.0, 1.0, module.embed_dim))
    return model


def field(*shape: int, batch: int = 2, seed: int = 0, dtype: torch.dtype | None = None) -> Tensor:
    """Random numbers (batch, 1, *shape), the same on every rank."""
    return torch.randn(batch, 1, *shape, generator=torch.Generator().manual_seed(100 + seed), dtype=dtype)


def mesh_of(data: int, *domain: int) -> Any:
    """A mesh over all ranks, with one split dimension or two."""
    names = ("domain",) if len(domain) == 1 else ("dx", "dy")
    return init_device_mesh("cpu", (data, *domain), mesh_dim_names=("data", *names))


def averaged(model: nn.Module) -> None:
    """Average gradients by hand, as a data-parallel engine does."""
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    flat = torch.cat([torch.view_as_real(grad.to(torch.complex128)).flatten() for grad in grads])
    dist.all_reduce(flat)  # in float64, so that the mean adds no rounding of its own
    flat /= dist.get_world_size()
    for grad, mean in zip(grads, flat.split([2 * grad.numel() for grad in grads]), strict=True):
        pairs = torch.view_as_complex(mean.view(*grad.shape, 2))
        grad.copy_(pairs if grad.is_complex() else pairs.real)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Copies, by name."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def far(found: Tensor, wanted: Tensor, scale: Tensor | None = None) -> float:
    """The largest difference, relative to the largest number."""
    return float((found - wanted).abs().max() / (wanted if scale is None else scale).abs().max())


def worst(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest difference of all, relative to the largest number of all."""
    assert found.keys() == wanted.keys()
    largest = torch.stack([value.abs().max() for value in wanted.values()]).max()
    return max(far(found[name], wanted[name], largest) for name in wanted)
