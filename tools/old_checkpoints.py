"""Writes small checkpoints with the code of today, and digests of what they load to, for the versions after it.

Every version must load what each one before it has written. What is in ``tests/checkpoint/old/`` was written by the
code of then and is never written anew; who changes what lies on the disk adds a folder there, before the change::

    python -m tools.old_checkpoints tests/checkpoint/old/format-2
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fsshard

CASES: dict[str, tuple[str, int, str, str]] = {
    "none": ("none", 1, "complex64", "AdamW"),
    "ddp": ("ddp", 2, "complex64", "SGD"),
    "fairscale": ("fairscale", 2, "complex64", "AdamW"),
    "fsdp": ("fsdp", 2, "channels_last", "AdamW"),
    "fsdp2": ("fsdp2", 2, "complex128", "AdamW"),
    "adafactor": ("ddp", 2, "channels_last", "Adafactor"),
    "four": ("fsdp2", 4, "complex64", "AdamW"),
    "mesh": ("fsdp2", 4, "mesh", "AdamW"),
}
"""Name of a checkpoint -> engine, number of ranks, kind of model, optimizer."""


class Net(nn.Module):
    """Tied weights, a complex one, odd sizes, a buffer, and state that is no tensor."""

    count: Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embed = nn.Linear(2, 3, bias=False)
        self.tied = nn.Linear(2, 3)
        self.tied.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(0.5))
        if kind.startswith("complex"):
            self.wave = nn.Parameter(torch.zeros(3, 1, dtype=getattr(torch, kind)))
        else:
            self.conv = nn.Conv2d(4 if kind == "whole" else 2, 2, 2, bias=False)
        self.register_buffer("count", torch.tensor(7))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        if kind == "complex128":
            self.double()
        if kind == "channels_last":
            self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.scale.dtype)
        y = (self.embed(x) + self.tied(x)) * self.scale
        if hasattr(self, "wave"):
            out: Tensor = (y.to(self.wave.dtype) @ self.wave).abs()
            return out
        out = y.sum() + self.conv(x.repeat(1, 4).view(-1, 2, 2, 2)).square().sum()
        return out

    def get_extra_state(self) -> dict[Any, Any]:
        """Nothing that JSON has."""
        return {"note": (1, 2.5), 3: torch.tensor([1.5])}

    def set_extra_state(self, state: Any) -> None:
        """Take it back."""
        assert state["note"] == (1, 2.5)


def build(kind: str, optimizer: str, backend: str) -> tuple[Any, Any]:
    """The wrapped model of a case, and an optimizer with two groups over it."""
    options: dict[str, Any] = {}
    if kind == "mesh" and backend == "none":
        kind = "whole"
    elif kind == "mesh":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tp"))
        options = {"device_mesh": mesh["data"], "sharded": {"conv.weight": (mesh["tp"], 1)}}
    model = fsshard.wrap(Net(kind), backend=backend, **options)
    named = [name for name, _ in model.named_parameters()]
    groups = [{"params": named[:1], "lr": 0.02}, {"params": named[1:]}]
    options = {"momentum": 0.9} if optimizer == "SGD" else {}
    return model, fsshard.build_optimizer(
        model, getattr(torch.optim, optimizer), param_groups=groups, lr=0.01, **options
    )


def _write(context: Any, folder: str, name: str) -> dict[str, str] | None:
    backend, _, kind, optimizer = CASES[name]
    model, optimizers = build(kind, optimizer, backend)
    for step in range(2):
        optimizers.zero_grad()
        model(torch.randn(4, 2, generator=torch.Generator().manual_seed(step))).sum().backward()
        optimizers.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizers, step_size=3)
    random: Any = {} if name == "none" else {"rng": False}  # generators take 15 kB a rank
    mine = [context.rank, torch.tensor(0.5)]
    fsshard.save(f"{folder}/{name}", model, optimizers, scheduler, step=2, mine=mine, **random)
    found = digests(model, optimizers)
    return found if context.rank == 0 else None


def digests(model: Any, optimizer: Any) -> dict[str, str]:
    """Name of each value of the model's and the optimizer's state -> what tells it from any other. Collective."""
    found: dict[str, str] = {}

    def add(name: str, value: Any) -> None:
        if isinstance(value, Tensor):
            plain = value.detach().cpu().contiguous()
            data = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
            found[name] = f"{plain.dtype} {tuple(plain.shape)} {hashlib.sha256(data).hexdigest()[:16]}"
        elif isinstance(value, dict):
            for key, item in value.items():
                add(f"{name}/{key}", item)
        else:
            found[name] = repr(value)

    add("model", dict(model.state_dict()))
    state = optimizer.state_dict()
    add("state", state["state"])
    add("groups", {str(number): group for number, group in enumerate(state["param_groups"])})
    return found


def main() -> None:
    """Write all cases, and ``digests.json`` beside them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", default=list(CASES))
    arguments = parser.parse_args()
    found = {}
    for name in arguments.names:
        found[name] = fsshard.launch(_write, CASES[name][1], (str(arguments.folder), name))
    (arguments.folder / "digests.json").write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
