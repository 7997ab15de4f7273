"""What views of parameters keep alive: no memory that an engine has left."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import nn

import fsshard
from fsshard.errors import FsshardError
from fsshard.estimate.tracking import Tracker
from tests.jobs import DISTRIBUTED, ranks_of
from tests.models import batch, net


def job_live_bytes(backend: str, looks: bool) -> list[int]:
    """Live bytes once the optimizer is built and their peak on the way; then, of replicas, with weights frozen."""
    with Tracker() as tracker:
        model = fsshard.wrap(net(), backend=backend, sync_module_states=False)
        seen = list(model.parameters()) if looks else []
        tracker.reset()
        optimizer = fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
        gc.collect()
        found = [tracker.now, tracker.peak]
        if backend == "fairscale":
            shown = seen or list(model.parameters())
            for parameter in shown[::2]:
                parameter.requires_grad_(False)
            if not looks:
                shown = []
            with torch.no_grad():
                model(batch(0))
            gc.collect()
            found.append(tracker.now)
            for view, parameter in zip(seen, optimizer.param_groups[0]["params"], strict=False):
                assert view.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()
                assert view.requires_grad == parameter.requires_grad
                assert torch.equal(torch.view_as_real(view) if view.is_complex() else view, parameter)
        return found


@pytest.mark.parametrize("backend", ["none", *DISTRIBUTED])
def test_looking_at_parameters_keeps_no_second_copy(ranks: Any, backend: str) -> None:
    """OSS moves parameters into buffers of its own when it is built, and again when some are frozen."""
    size = ranks_of(backend)
    assert ranks.run(job_live_bytes, size, backend, True) == ranks.run(job_live_bytes, size, backend, False)


def job_gradients(backend: str) -> list[Any]:
    """What a list of parameters that was made before the training shows of gradients."""
    model = fsshard.wrap(net(), backend=backend)
    shown = dict(model.named_parameters())
    optimizer = fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
    model(batch(0)).square().mean().backward()
    entries = model.backend.entries
    weight, entry = shown["middle.0.weight"], entries["middle.0.weight"]
    local = model.backend.local_grad(entry)
    found: list[Any] = [(weight.grad is None) == (local is None)]
    if local is not None:
        numbers: Any = getattr(weight.grad, "_local_tensor", weight.grad)
        found.append(torch.equal(torch.view_as_real(numbers).reshape(-1), local.reshape(-1)))
    norm = float(torch.nn.utils.clip_grad_norm_(list(shown.values()), 1e-3)) if backend in ("none", "ddp") else 0.0
    found.append(norm)
    found.append(float(model.clip_grad_norm_(1e9)) if norm else 1e-3)
    with pytest.raises(FsshardError, match=r"'middle.0.weight' is the engine's"):
        weight.grad = torch.zeros_like(weight)
    weight.grad = None
    found.append(entry.parameter.grad is None)
    with pytest.raises(FsshardError, match="whose gradient would be lost"):
        weight.abs().sum().backward()
    copied = copy.deepcopy(shown["middle.1.weight"]) if backend in ("none", "ddp", "fairscale") else nn.Parameter()
    found.append(copied.grad is None and type(copied) is nn.Parameter)
    del optimizer
    return found


@pytest.mark.parametrize("backend", ["none", "ddp", "fairscale", "fsdp2"])
def test_a_view_has_the_gradient_of_now(ranks: Any, backend: str) -> None:
    """A list made once (for torch's clipping, say) would else miss complex weights, in silence."""
    for first, *found, norm, clipped, dropped, copied in ranks.run(job_gradients, ranks_of(backend), backend):
        assert first and all(found) and dropped and copied
        assert clipped == pytest.approx(1e-3, rel=1e-3) and (norm > 0.1 or backend in ("fairscale", "fsdp2"))
