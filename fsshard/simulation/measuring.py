"""Measures the constants of this machine: what ``fsshard doctor --measure`` writes. Two seconds or so per device."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsshard.checkpoint.format.tensors_file import dtype_name
from fsshard.planning.bounds import sent
from fsshard.sharded.optimizer import build_optimizer
from fsshard.simulation.machine import MACHINES, USUAL, Machine
from fsshard.simulation.tracking import Tracker
from fsshard.wrapping import wrap

# Samples of each measurement.
SAMPLES = 5
# Seconds that a sample takes at least: enough calls are made in it.
LEAST = 0.01
# Device -> rows of a square matrix, elements that an operator writes, elements that a collective sends.
SIZES = {"cpu": (384, 2**18, 2**20), "cuda": (4096, 2**27, 2**25)}
NARROW = 8
LAYERS = 12


def measured_machine(device: str) -> Machine:
    """Measure on this rank of a running job. Collective.

    On the CPU seconds are those of the processor, which other processes do not lengthen; on CUDA those of the clock.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
    """
    rows, written, elements = SIZES[device]
    ranks = dist.get_world_size()
    flops = [_flops(device, rows, dtype) for dtype in DTYPES]
    first, second = torch.ones(2, written, device=device).unbind()
    result = torch.empty_like(first)
    write = _seconds(device, lambda: torch.add(first, second, out=result))
    usual = MACHINES[USUAL[device]]
    # A model of almost no size spends its time on operators alone.
    operator = _per_operator(device)
    about = f"{platform.machine()}, torch {torch.__version__}"
    if ranks > 1:
        # A collective of almost nothing costs its latency, a large one what it sends besides.
        bare = _gather(device, 16, 20)
        large = _gather(device, elements, 4)
        bandwidth = sent("all_gather", 4 * elements * ranks, ranks) / max(large - bare, 1e-9)
        latency = max(bare, _per_collective(device, operator))
        source = f"{ranks} ranks, {about}"
    else:
        bandwidth = usual.sent
        latency = usual.collective
        source = f"1 rank, {about}; one rank: collectives as of {usual.name!r}"
    host = torch.empty(written, pin_memory=device == "cuda")
    leave = _seconds(device, lambda: host.copy_(first, non_blocking=True))
    nbytes = 4 * written
    constants = [
        *flops,
        nbytes / write,
        operator,
        bandwidth,
        latency,
        nbytes / leave,
    ]
    mean = torch.tensor(constants, dtype=torch.float64, device=device)
    # There is one file for all ranks.
    dist.all_reduce(mean)
    *flops, write_speed, operator, bandwidth, latency, host_speed = (mean / ranks).tolist()
    names = list(map(dtype_name, DTYPES))
    return Machine(
        name="measured",
        device=device,
        flops=dict(zip(names, flops, strict=True)),
        written=write_speed,
        operator=operator,
        sent=bandwidth,
        collective=latency,
        host=host_speed,
        source=f"fsshard doctor --measure on {source}",
    )


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def _flops(device: str, rows: int, dtype: torch.dtype) -> float:
    matrix = torch.ones(rows, rows, dtype=dtype, device=device)
    seconds = _seconds(device, lambda: matrix @ matrix)
    return 2 * rows**3 / seconds


def _gather(device: str, elements: int, calls: int) -> float:
    """Return the seconds of an all_gather to which every rank gives so many float32."""
    ranks = dist.get_world_size()
    part = torch.ones(elements, device=device)
    whole = torch.empty(elements * ranks, device=device)
    parts = list(whole.chunk(ranks))
    return _seconds(device, lambda: dist.all_gather(parts, part), calls)


def _narrow(device: str) -> nn.Module:
    """Return a model of almost no size, so that its step is all overhead."""
    layers = [nn.Sequential(nn.Linear(NARROW, NARROW), nn.GELU()) for _ in range(LAYERS)]
    return nn.Sequential(*layers).to(device)


def _trained(
    device: str,
    model: nn.Module,
    optimizer: Any,
    calls: int = 0,
) -> tuple[float, int, int]:
    """Return the seconds of a training step, its operators, and its collectives."""
    batch = torch.ones(2, NARROW, device=device)

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with Tracker() as tracker:
        step()
    operators = tracker.work.work().operators
    return _seconds(device, step, calls), operators, len(tracker.collectives)


def _per_operator(device: str) -> float:
    model = _narrow(device)
    optimizer = torch.optim.Adam(model.parameters())
    seconds, operators, _ = _trained(device, model, optimizer)
    return seconds / operators


def _per_collective(device: str, operator: float) -> float:
    """Return what a collective of an engine costs beyond its operators: many units of FSDP2 against one. Collective."""
    torch.manual_seed(0)
    steps = []
    for units in ({"Linear"}, None):
        model = wrap(_narrow(device), backend="fsdp2", auto_wrap_policy=units, merge_below=0)
        optimizer = build_optimizer(model, torch.optim.Adam)
        steps.append(_trained(device, model, optimizer, calls=4))
    (many, more_operators, more), (one, operators, fewer) = steps
    seconds = many - one - operator * (more_operators - operators)
    return seconds / (more - fewer)


def _seconds(device: str, call: Callable[[], Any], calls: int = 0) -> float:
    """Return the least seconds of a call over some samples of ``calls``; 0: as many as take :data:`LEAST` seconds.

    A collective needs their number given: every rank has to make as many.
    """
    call()
    if not calls:
        calls = 1
        while _sample(device, call, calls) < LEAST:
            calls *= 2
    samples = [_sample(device, call, calls) for _ in range(SAMPLES)]
    return min(samples) / calls


def _sample(device: str, call: Callable[[], Any], calls: int) -> float:
    clock = time.process_time if device == "cpu" else time.perf_counter
    if device == "cuda":
        torch.cuda.synchronize()
    start = clock()
    for _ in range(calls):
        call()
    if device == "cuda":
        torch.cuda.synchronize()
    return clock() - start
