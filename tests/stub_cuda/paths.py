"""Runs the library as one rank of eight whose group takes CUDA tensors only, and says which path fails.

    python -m tests.stub_cuda.paths NAME...

Over ``cudart.c``. Prints one line of JSON: case -> "" or its error.
"""

from __future__ import annotations

import contextlib
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

import fsshard
from fsshard.checkpoint.parts import collect
from fsshard.checkpoint.staging import Staging
from fsshard.comm.watchdog import Meeting, Watchdog
from fsshard.model import host_copies
from fsshard.sharded.averages import KEY
from fsshard.sharded.controller import controller_of
from fsshard.simulation.fakes import Fakes, fake_ranks
from fsshard.torch_private.patching import replaced

RANK, RANKS = 3, 8
HERE = torch.device("cuda", RANK)


class Spectral(nn.Module):
    """A complex weight beside real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16, dtype=torch.complex64))
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear((x.to(torch.complex64) @ self.weight).real)
        return out


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), Spectral(), nn.BatchNorm1d(16), Spectral(), nn.Linear(16, 1))


Look = Callable[[Any, Any], None]


def train(look: Look | None = None, **settings: Any) -> None:
    """Two steps, with clipping and a loss scale."""
    model = fsshard.wrap(net(), **settings)
    controller_of(model).simulate()
    optimizer = fsshard.build_optimizer(model, torch.optim.AdamW, lr=1e-3)
    scaler = fsshard.GradScaler(model, enabled=settings.get("mixed_precision") == "fp16")
    for _ in range(2):
        with model.autocast():
            loss = model(torch.randn(4, 16, device=HERE)).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        model.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    if look is not None:
        look(model, optimizer)


def staging(model: Any, optimizer: Any) -> None:
    """An asynchronous save pins what it copies from a device."""
    parts = [part.values for part in collect({"": model}, {"optimizer": optimizer}, {}, RANK).parts.values()]
    room = Staging()
    copies = room.copy(parts)
    assert model.backend.settings.cpu_offload or any(not part.is_cpu for part in parts)
    assert all(copy.is_pinned() != part.is_cpu for copy, part in zip(copies, parts, strict=True) if part.numel())
    assert all(copy.is_cpu for copy in copies)
    room.give_back()


def states(model: Any, optimizer: Any) -> None:
    """State dicts there and back, in the place where each belongs."""
    found = model.state_dict()
    assert {value.device for value in found.values()} == {HERE}
    assert {value.device.type for value in model.state_dict(offload_to_cpu=True).values()} == {"cpu"}
    model.load_state_dict(found)
    model.load_state_dict({name: value.cpu() for name, value in found.items()})
    optimizer.load_state_dict(optimizer.state_dict())
    with model.full_parameters(writeback=True):
        assert {parameter.device for parameter in model.parameters()} == {HERE}
    model.memory_report()


def faked(**settings: Any) -> None:
    """Two steps of the same on tensors without memory."""
    with Fakes() as fakes:
        with HERE:
            module = net()
        with fakes.wrapping(module):
            model = fsshard.wrap(module, **settings)
        controller_of(model).simulate()
        optimizer = fsshard.build_optimizer(model, torch.optim.AdamW, lr=1e-3)
        for _ in range(2):
            model(torch.randn(4, 16, device=HERE)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def estimated() -> None:
    """For GPUs, by every engine, where there are some; the simulation is in a process of its own, as a user's is."""
    backends = ["ddp", "fsdp", "fsdp2", "fairscale"]
    found = fsshard.estimate(
        net(), batch=torch.zeros(4, 16), backend=backends, world_size=RANKS, device="cuda", optimizer=torch.optim.AdamW
    )
    assert [(one.backend, one.device, one.world_size) for one in found] == [(name, "cuda", RANKS) for name in backends]
    assert all(one.peak % 512 == 0 and one.peak > one.by_kind["parameters"] > 0 for one in found), found
    assert torch.cuda.memory_allocated() == 0


def moved() -> None:
    """A model that is left on the CPU goes to this rank's device in such a job; without this, nothing else here ran."""
    model = fsshard.wrap(net(), backend="ddp")
    assert model.backend.settings.device == HERE
    assert {parameter.device for parameter in model.parameters()} == {HERE}
    with pytest.raises(fsshard.ConfigurationError, match="CUDA tensors only"):
        fsshard.wrap(net(), backend="ddp", device="cpu")


def averaged(model: Any, optimizer: Any) -> None:
    """An average in host memory, of weights on the device."""
    ema = fsshard.EMA(model, device="cpu")
    for _ in range(2):
        ema.update()
    held = [value for state in ema.held.state.values() for value in state.values()]
    assert all(value.is_cpu for value in held)
    groups = ema.state_dict()["param_groups"]
    weights = model.state_dict()
    ema.load_state_dict({"state": {name: {KEY: weights[name]} for name in groups[0]["params"]}, "param_groups": groups})
    ema.update()
    assert all(value.is_cpu for state in ema.held.state.values() for value in state.values())


def in_host_memory(recompute: bool, **settings: Any) -> None:
    """Activations of blocks wait in pinned memory."""
    pinned = []

    class Noted(save_on_cpu):
        def __init__(self, pin_memory: bool) -> None:
            super().__init__(pin_memory)
            pack = self.pack_hook
            self.pack_hook = lambda tensor: pinned.append((packed := pack(tensor))[1].is_pinned()) or packed

    choice = fsshard.Checkpointing({Spectral}, offload_to_cpu=True, recompute=recompute)
    with replaced(host_copies, "LEAST", 1), replaced(host_copies, "save_on_cpu", Noted):
        train(activation_checkpointing=choice, **settings)
    assert pinned and all(pinned)


def on_own_stream(**settings: Any) -> None:
    """Trained on a stream of the user's."""
    with torch.cuda.stream(torch.cuda.Stream()):
        train(**settings)


ENGINES: dict[str, dict[str, Any]] = {
    "ddp": {"backend": "ddp"},
    "fsdp": {"backend": "fsdp"},
    "fsdp2": {"backend": "fsdp2"},
    "fairscale": {"backend": "fairscale", "implementation": "real"},
    "native": {"backend": "fairscale", "implementation": "native"},
}
WAYS: dict[str, Callable[..., None]] = {
    "train": train,
    "bf16": lambda **engine: train(mixed_precision="bf16", **engine),
    "fp16": lambda **engine: train(mixed_precision="fp16", **engine),
    "recompute": lambda **engine: train(activation_checkpointing=True, **engine),
    "unused": lambda **engine: train(find_unused_parameters=True, **engine),
    "host": lambda **engine: in_host_memory(False, **engine),
    "host, recomputed": lambda **engine: in_host_memory(True, **engine),
    "averages": lambda **engine: train(averaged, **engine),
    "staging": lambda **engine: train(staging, **engine),
    "states": lambda **engine: train(states, **engine),
    "stream": on_own_stream,
    "fakes": faked,
}
OFFLOADED = ("train", "fp16", "unused", "staging", "states")

CASES: dict[str, Callable[[], None]] = {
    "moved": moved,
    "estimated": estimated,
    **{f"{name} {way}": lambda n=name, w=way: WAYS[w](**ENGINES[n]) for name in ENGINES for way in WAYS},
    **{
        f"{name} offloaded {way}": lambda n=name, w=way: WAYS[w](cpu_offload=True, **ENGINES[n])
        for name in ("fsdp", "fsdp2")
        for way in OFFLOADED
    },
    "fsdp prefetch": lambda: train(backend="fsdp", forward_prefetch=True, limit_all_gathers=True),
}


@contextlib.contextmanager
def cuda_ranks() -> Iterator[None]:
    """As :func:`fake_ranks`, over a group that takes CUDA tensors only, as one of NCCL does."""
    init = dist.init_process_group
    with (
        replaced(dist, "init_process_group", lambda _, **settings: init("cuda:fake", **settings)),
        # The other ranks never come.
        replaced(Watchdog, "meet", lambda _, group, what, note, limit: Meeting("", {RANK: note}, {}, late=False)),
        fake_ranks(RANK, RANKS, "nccl"),
    ):
        yield


def outcome(case: str) -> str:
    """Why it failed; empty if it did not."""
    try:
        with cuda_ranks():
            CASES[case]()
    except Exception:
        return traceback.format_exc()
    return ""


def main(names: list[str]) -> None:
    torch.cuda.set_device(HERE)
    print(json.dumps({name: outcome(name) for name in names or CASES}))


if __name__ == "__main__":
    main(sys.argv[1:])
