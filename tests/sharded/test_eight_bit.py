"""AdamW with its state in 8 bits, torchao's and bitsandbytes' own classes, where they are installed.

All ranks have the same batch, so that one bare process is the judge for every number of ranks.
"""

from __future__ import annotations

import importlib
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fsshard
from fsshard.errors import UnsupportedByBackend
from fsshard.state_objects import tensors_in
from tests.models import take_step
from tests.training_runs import differences

ENGINES = ("ddp", "fairscale", "fsdp", "fsdp2")
CLASSES = {"torchao": ("torchao.optim", "OptimState8bit"), "bitsandbytes": ("bitsandbytes.optim", "")}
"""Package -> the module of its AdamW8bit, and the class of a quantized tensor in its state."""


def net() -> nn.Module:
    """Return a model of which two weights are large enough to be quantized: 4,096 numbers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 3))


def adamw(package: str) -> Any:
    # What these packages warn of at their import, such as kernels for GPUs, is not for here.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(CLASSES[package][0]).AdamW8bit


def trained(model: Any, optimizer: Any, steps: range) -> dict[str, Any]:
    # torchao compiles its step, which takes half a minute a rank; without it everything is computed alike.
    with torch.compiler.set_stance("force_eager"):
        for step in steps:
            x = torch.randn(3, 64, generator=torch.Generator().manual_seed(step))
            model(x).square().mean().backward()
            take_step(optimizer)
    return dict(model.state_dict())


def bare_weights(package: str, steps: int) -> dict[str, Any]:
    bare = net()
    optimizer = adamw(package)(bare.parameters(), lr=0.01)
    weights = trained(bare, optimizer, range(steps))
    for large in (bare[0].weight, bare[2].weight):
        assert torch.uint8 in {tensor.dtype for tensor in tensors_in(optimizer.state[large])}
    return weights


def wrapped(package: str, backend: str) -> tuple[Any, Any]:
    model = fsshard.wrap(net(), backend=backend)
    with torch.compiler.set_stance("force_eager"):
        return model, fsshard.build_optimizer(model, adamw(package), whole=True, lr=0.01)


def job_train_and_save(package: str, backend: str, folder: str) -> list[str]:
    model, optimizer = wrapped(package, backend)
    trained(model, optimizer, range(2))
    fsshard.save(folder, model, optimizer)
    return list(differences(bare_weights(package, 3), trained(model, optimizer, range(2, 3)), f"{backend}: "))


def job_resume(package: str, backend: str, folder: str) -> list[str]:
    model, optimizer = wrapped(package, backend)
    quantized = CLASSES[package][1]
    objects = [getattr(importlib.import_module("torchao.optim.subclass_8bit"), quantized)] if quantized else []
    fsshard.load(folder, model, optimizer, objects=objects)
    return list(differences(bare_weights(package, 4), trained(model, optimizer, range(2, 4)), f"{backend}: "))


def job_on_shards(package: str) -> None:
    model = fsshard.wrap(net(), backend="fsdp2")
    with torch.compiler.set_stance("force_eager"), pytest.raises(UnsupportedByBackend, match="pass whole=True"):
        fsshard.build_optimizer(model, adamw(package))


@pytest.mark.parametrize("backend", ENGINES)
@pytest.mark.parametrize("package", CLASSES)
def test_trains_and_resumes_as_a_bare_process(ranks: Any, tmp_path: Path, package: str, backend: str) -> None:
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed: `make eight-bit` installs it and runs this")
    folder = str(tmp_path / "saved")
    assert ranks.run(job_train_and_save, 2, package, backend, folder) == [[], []]
    other = ENGINES[(ENGINES.index(backend) + 1) % len(ENGINES)]
    assert ranks.run(job_resume, 4, package, other, folder) == [[]] * 4
    assert ranks.run(job_resume, 1, package, "none", folder) == [[]]
    ranks.run(job_on_shards, 2, package)
