"""Jobs with activations in host memory, and averages there."""

from __future__ import annotations

import copy
import gc
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fsshard
from tests.gpu.on_gpu import OnGpu
from tests.model.test_activation_offload import CHOICES, Net, counting, train
from tests.sharded import test_averages as averages


def job_in_host_memory(backend: str, settings: dict[str, Any], how: str) -> tuple[list[str], int, int]:
    """Return what differs from bare replicas, the bytes that left, and how many copies came back.

    Of attention's kernels one is used whose sums have an order.
    """
    with OnGpu(), sdpa_kernel(SDPBackend.MATH):
        torch.manual_seed(0)
        bare = Net()
        module = copy.deepcopy(bare)
        expected = train(bare, torch.optim.AdamW(bare.parameters(), lr=1e-2), bare=True)
        units = {"auto_wrap_policy": {"Block", "Spectral", "Linear"}} if backend.startswith("fsdp") else {}
        with counting(least=1) as copies:
            model = fsshard.wrap(module, backend=backend, activation_checkpointing=CHOICES[how], **units, **settings)
            found = train(model, fsshard.build_optimizer(model, torch.optim.AdamW, lr=1e-2), bare=False)
        state = model.state_dict()
    wrong = [] if found == expected else [f"losses {found}, of replicas {expected}"]
    wrong += [key for key, value in bare.state_dict().items() if not torch.equal(value, state[key])]
    return wrong, copies.nbytes, copies.back


WIDTH, ROWS, BLOCKS = 1024, 8192, 8


class Wide(nn.Sequential):
    """A block that saves nine times its input."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


def job_peak(backend: str, how: str | None) -> dict[str, Any]:
    """Return losses, peak of device memory in MiB, milliseconds of a step, and MiB that leave in one."""
    choice = {} if how is None else {"activation_checkpointing": fsshard.Checkpointing(
        {"Wide"}, offload_to_cpu=True, recompute=how == "recomputed")}  # fmt: skip
    gc.collect()
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    before = torch.cuda.memory_allocated()
    model = fsshard.wrap(
        nn.Sequential(*(Wide() for _ in range(BLOCKS))),
        backend=backend,
        auto_wrap_policy={"Wide"},
        device="cuda",
        **choice,
    )
    optimizer = fsshard.build_optimizer(model, torch.optim.SGD, lr=1e-2)
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).cuda()
    losses, times = [], []
    with counting() as copies:
        for _ in range(5):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            copies.nbytes = 0
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            stop.record()
            losses.append(loss.item())
            times.append(start.elapsed_time(stop))
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    return {"losses": losses, "peak": round(peak), "ms": round(min(times), 2), "left": copies.nbytes / 2**20}


def job_average_on_host(backend: str, settings: dict[str, Any]) -> list[str]:
    """Train on the device and average in host memory; return what differs from torch's average there of replicas."""
    wrong = []
    with OnGpu():
        bare = averages.built()
        judge = AveragedModel(bare, device=torch.device("cpu"), multi_avg_fn=get_ema_multi_avg_fn(0.9))
        own = torch.optim.Adam(bare.parameters(), lr=1e-2)
        model, optimizer = averages.wrapped(backend, settings)
        ema = fsshard.EMA(model, 0.9, device="cpu")
        for steps in (range(4), range(4, 6)):
            averages.train(bare, own, steps, lambda: judge.update_parameters(bare))
            averages.train(model, optimizer, steps, ema.update)
            with ema.swapped():
                shown = model.state_dict()
            for name, value in judge.module.named_parameters():
                wrong += [f"{name} is on {shown[name].device}"] if not shown[name].is_cuda else []
                wrong += [] if torch.equal(shown[name].cpu(), value) else [f"{name} after {steps}"]
            ema.load_state_dict(ema.state_dict())  # as a checkpoint gives it
        weights = model.state_dict()
        wrong += [f"weight {name}" for name, value in bare.named_parameters() if not torch.equal(weights[name], value)]
    held = {str(value.device) for each in ema.held.state.values() for value in each.values()}
    return wrong + ([] if held == {"cpu"} else [f"held on {held}"])
