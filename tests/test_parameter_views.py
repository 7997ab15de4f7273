"""What views of parameters keep alive: no memory that an engine has left."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import fsshard
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
