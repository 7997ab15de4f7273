"""Jobs for ranks on GPUs: each function is called on every rank."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import DeviceType

import fsshard
from fsshard.recipes.recipe import resolve
from fsshard.simulation.simulation import Job, measure
from tests.gpu.recipes import STEPS
from tests.models import take_step

TRAINED = 3
ENGINES: dict[str, dict[str, Any]] = {
    "fsdp": {"backend": "fsdp"},
    "fsdp2": {"backend": "fsdp2"},
    "fairscale": {"backend": "fairscale", "implementation": "real"},
    "native": {"backend": "fairscale", "implementation": "native"},
}


class Spectral(nn.Module):
    """A complex weight beside real ones."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width, dtype=torch.complex64) / width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear((x.to(torch.complex64) @ self.weight).real)
        return out


def net(width: int = 64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), Spectral(width), nn.GELU(), Spectral(width), nn.Linear(width, width))


def batch(step: int, width: int = 64) -> Tensor:
    """Another one for every rank and step."""
    generator = torch.Generator().manual_seed(100 * dist.get_rank() + step)
    return torch.randn(32, width, generator=generator).cuda()


def train(sgd: bool = False, stream: bool = False, **settings: Any) -> dict[str, Tensor]:
    """The weights after some steps."""
    model = fsshard.wrap(net(), **settings)
    chosen = (torch.optim.SGD, {"lr": 0.25}) if sgd else (torch.optim.Adam, {"lr": 1e-3})
    optimizer = fsshard.build_optimizer(model, chosen[0], **chosen[1])
    own = torch.cuda.Stream() if stream else torch.cuda.current_stream()
    own.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(own):
        for step in range(TRAINED):
            with model.autocast():
                model(batch(step)).square().mean().backward()
            take_step(optimizer)
    torch.cuda.current_stream().wait_stream(own)
    return {name: value.cpu() for name, value in model.state_dict().items()}


def native() -> dict[str, Tensor]:
    """The same in torch alone, for one rank."""
    model = net().cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(TRAINED):
        model(batch(step)).square().mean().backward()
        take_step(optimizer)
    return {name: value.cpu() for name, value in model.state_dict().items()}


def where() -> dict[str, Any]:
    """Return what the group and the model say of this rank's device."""
    model = fsshard.wrap(net(), backend="fsdp2")
    bound = dist.group.WORLD.bound_device_id  # type: ignore[union-attr]
    return {
        "bound": str(bound),
        "current": torch.cuda.current_device(),
        "rank": dist.get_rank(),
        "parameters": sorted({str(parameter.device) for parameter in model.parameters()}),
        "backend": str(dist.get_backend()),
    }


def asynchronous_save(folder: str, backend: str) -> bool:
    """Return whether a save has the weights of when it was called, which are written over at once."""
    model = fsshard.wrap(net(1024), backend=backend)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    handle = fsshard.save(Path(folder) / "saved", model, block=False)
    with torch.no_grad():
        for entry in model.backend.entries.values():
            entry.local().fill_(float("nan"))
    handle.wait()
    fsshard.load(Path(folder) / "saved", model)
    after = model.state_dict()
    return all(torch.equal(before[name], after[name]) for name in before)


def scaled(**settings: Any) -> tuple[list[float], bool]:
    """Scales before and after a step with an infinite gradient, and whether that step left the weights."""
    model = fsshard.wrap(net(), mixed_precision="fp16", **settings)
    optimizer = fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
    scaler = fsshard.GradScaler(model, init_scale=2.0**10)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    scales = [scaler.get_scale()]
    factor = float("inf") if dist.get_rank() == 0 else 1.0  # on one rank only
    with model.autocast():
        loss = model(batch(0)).square().mean() * factor
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    scales.append(scaler.get_scale())
    after = model.state_dict()
    return scales, all(torch.equal(before[name], after[name]) for name in before)


def memory(recipe: Any, backend: str, recomputed: Any = None) -> tuple[int, int, int]:
    """Bytes: the most that CUDA's allocator has handed out, those of cuBLAS's workspaces, and the tracker's peak."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()  # earlier tests' caches
    for dtype in (torch.float32, torch.complex64):
        # cuBLAS keeps a workspace per thread and stream, and a backward has a thread of its own.
        a = torch.randn(64, 64, device="cuda", dtype=dtype, requires_grad=True)
        torch.nn.functional.linear(a, a).abs().sum().backward()
        del a
    torch.cuda.synchronize()
    workspaces = torch.cuda.memory_allocated() - before
    changes = {} if recomputed is None else {"activation_checkpointing": recomputed}
    job = Job(source=recipe, changes=changes, backend=backend, mesh=(dist.get_world_size(),), device="cuda")
    peak = measure(job, STEPS).usage.peak  # the recipe resets CUDA's peak before the last step
    return torch.cuda.max_memory_allocated() - before, workspaces, peak


def seconds_of_a_step(source: str, backend: str, recomputed: Any = None) -> float:
    """The least of some steps, of the clock."""
    recipe, times = resolve(source), []
    torch.manual_seed(0)
    model = fsshard.wrap(recipe.build(), backend=backend, activation_checkpointing=recomputed)
    optimizer = fsshard.build_optimizer(model, recipe.optimizer, **recipe.hyper)
    batch = {key: value.cuda() for key, value in recipe.batches(0, 1, 0).items()}
    for _ in range(8):
        torch.cuda.synchronize()
        start = time.perf_counter()
        recipe.loss(model, batch).backward()
        take_step(optimizer)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times)


def overlap(backend: str) -> tuple[float, float]:
    """Milliseconds of NCCL's kernels in a step, and of them those during which another kernel ran."""
    torch.manual_seed(0)
    model = fsshard.wrap(nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(8))), backend=backend, auto_wrap_policy=1)
    optimizer = fsshard.build_optimizer(model, torch.optim.SGD, lr=1e-3)

    def step() -> None:
        model(torch.ones(2048, 4096, device="cuda")).square().mean().backward()
        take_step(optimizer)

    for _ in range(3):
        step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    spans = {True: [], False: []}
    for event in profile.events():
        if event.device_type is DeviceType.CUDA:
            spans["nccl" in event.name.lower()].append((event.time_range.start, event.time_range.end))
    both = sum(_covered(span, spans[False]) for span in spans[True])
    return sum(stop - start for start, stop in spans[True]) / 1000, both / 1000


def _covered(span: tuple[float, float], others: list[tuple[float, float]]) -> float:
    """How much of a span lies in one or more of the others."""
    total, reached = 0.0, span[0]
    for start, stop in sorted(others):
        low, high = max(start, reached), min(stop, span[1])
        if high > low:
            total, reached = total + high - low, high
    return total


def over_a_group_of_the_users(context: Any, name: str) -> dict[str, Tensor]:
    """As :func:`train`, over one that the user has made by this name of NCCL, in place of launch's."""
    dist.destroy_process_group()
    torch.cuda.set_device(0)
    dist.init_process_group(name, store=dist.HashStore(), rank=0, world_size=1)
    return train(backend="fsdp2")
