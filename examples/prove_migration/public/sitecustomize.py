"""Lets training scripts that ask for GPUs run on a CPU, as they are: Python imports this file first in every process.

Only what a script says of devices is answered differently. Nothing here changes a number that a training computes.
"""

from __future__ import annotations

import contextlib
import functools
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

CPU = torch.device("cpu")


def _is_gpu(device: Any) -> bool:
    return (isinstance(device, int) and not isinstance(device, bool)) or str(device).startswith("cuda")


def _to_cpu(function: Any) -> Any:
    """Return ``function`` with arguments that name a GPU replaced by the CPU."""

    @functools.wraps(function)
    def to(self: Any, *arguments: Any, **options: Any) -> Any:
        places = [CPU if _is_gpu(argument) else argument for argument in arguments]
        if _is_gpu(options.get("device")):
            options["device"] = CPU
        return function(self, *places, **options)

    return to


def _without_device_ids(function: Any) -> Any:
    @functools.wraps(function)
    def init(self: Any, *arguments: Any, **options: Any) -> None:
        options.pop("device_ids", None)
        options.pop("output_device", None)
        function(self, *arguments, **options)

    return init


def _not_pinned(function: Any) -> Any:
    @functools.wraps(function)
    def init(self: Any, *arguments: Any, **options: Any) -> None:
        options.pop("pin_memory", None)
        function(self, *arguments, **options)

    return init


def _over_gloo(function: Any) -> Any:
    @functools.wraps(function)
    def init_process_group(*arguments: Any, **options: Any) -> None:
        options.pop("device_id", None)
        options["backend"] = "gloo"
        function(*arguments[1:], **options)

    return init_process_group


COUNT = int(os.environ.get("GPUS", "2"))


def answer_as_gpus() -> None:
    """Let torch say that there are GPUs, and put everything on the CPU."""
    torch.cuda.device_count = lambda: COUNT  # type: ignore[assignment]
    torch.cuda.set_device = lambda device: None  # type: ignore[assignment]
    Tensor.pin_memory = lambda self, device=None: self  # type: ignore[method-assign]
    Tensor.to = _to_cpu(Tensor.to)  # type: ignore[method-assign]
    nn.Module.to = _to_cpu(nn.Module.to)  # type: ignore[method-assign]
    nn.parallel.DistributedDataParallel.__init__ = _without_device_ids(nn.parallel.DistributedDataParallel.__init__)  # type: ignore[method-assign]
    DataLoader.__init__ = _not_pinned(DataLoader.__init__)  # type: ignore[method-assign]
    dist.init_process_group = _over_gloo(dist.init_process_group)
    # Scripts that import the function by name take it from here.
    dist.distributed_c10d.init_process_group = dist.init_process_group


def answer_as_accelerators() -> None:
    """Let the CPU be what scripts ask torch.accelerator for; torch.compile then takes it for a GPU."""
    torch.accelerator.is_available = lambda: True  # type: ignore[assignment]
    torch.accelerator.device_count = lambda: COUNT  # type: ignore[assignment]
    torch.accelerator.current_accelerator = lambda check_available=False: CPU  # type: ignore[assignment]
    torch.accelerator.set_device_index = lambda device: None  # type: ignore[assignment]
    torch.accelerator.device_index = lambda device: contextlib.nullcontext()  # type: ignore[assignment,misc]


if "WITHOUT_GPUS" in os.environ:
    # A script that sets no seed of its own trains the same twice.
    torch.manual_seed(0)
    if os.environ["WITHOUT_GPUS"]:
        answer_as_gpus()
    if os.environ["WITHOUT_GPUS"] == "accelerator":
        answer_as_accelerators()
