"""Loops by Accelerate, over its own DDP and over ours. What each rank runs."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import accelerate
import numpy as np
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DataLoaderConfiguration, DistributedDataParallelKwargs, ProjectConfiguration
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fsshard
from fsshard.compat.accelerate import Accelerator, files
from tests.compat.common import told
from tests.models import take_step

OWN = "accelerate"
REAL: dict[str, Any] = {"dtype": torch.float32}
CASES: dict[str, dict[str, Any]] = {
    "accumulated": {"gradient_accumulation_steps": 2},
    "each synchronised": {"gradient_accumulation_steps": 2, "named": False, "order": "descent"},
    "bf16": {"mixed_precision": "bf16", "order": "loader first"},
    "by value": {"clip": "value", **REAL},
    "by norm": {"clip": "norm", "order": "descent"},
    "scaled": {"scaled": True, **REAL},
    "optimizer later": {"order": "later"},
    "optimizer earlier": {"order": "earlier"},
}


class Model(nn.Module):
    """A normalisation, random numbers, and a weight that is complex, but where torch cannot clip, or scale, it."""

    def __init__(self, dtype: torch.dtype = torch.complex64) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.1)
        self.weight = nn.Parameter(torch.randn(8, 4, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return (self.drop(self.norm(self.first(x))).to(self.weight.dtype) @ self.weight).abs().sum(1)


class Halving:
    """None of torch's schedulers, and unknown to prepare()."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.5


class Count:
    """A user's object with a state."""

    def __init__(self) -> None:
        self.number = 0

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]


def accelerator_of(engine: Any, **given: Any) -> Any:
    """Accelerate's own, or ours over an engine, or with a dict of settings; as in a new process."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    given.setdefault("dataloader_config", DataLoaderConfiguration(use_seedable_sampler=True))
    if engine == OWN:
        found = accelerate.Accelerator(cpu=True, **given)
    else:
        found = Accelerator(fsshard={"backend": engine} if isinstance(engine, str) else engine, **given)
    torch.set_num_threads(1)
    return found


def data(samples: int) -> TensorDataset:
    numbers = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(samples, 6, generator=numbers), torch.randn(samples, generator=numbers))


def prepared(accelerator: Any, order: str, dtype: torch.dtype) -> tuple[Any, Any, Any, Any]:
    """Model, optimizer, loader and scheduler, by one call or several."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = Model(dtype)
    loader = DataLoader(data(33), 4, shuffle=True)  # five batches for each of two ranks
    if order == "later":
        model = accelerator.prepare(model)
        optimizer, loader = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=1e-2), loader)
        scheduler = accelerator.prepare(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9))
        return model, optimizer, loader, scheduler
    made = torch.optim.AdamW(
        [{"params": model.first.parameters(), "lr": 3e-2}, {"params": [*model.norm.parameters(), model.weight]}],
        lr=1e-2,
    )
    if order == "earlier":
        scheduler = Halving(made)
        wrapped = accelerator.prepare_model(model)
        return wrapped, accelerator.prepare_optimizer(made), accelerator.prepare(loader), scheduler
    if order == "descent":  # AdamW would take a last digit of a small gradient for a whole step
        made = torch.optim.SGD(made.param_groups, lr=1e-2, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(made, 0.02, total_steps=40)
    if order == "loader first":
        loader, scheduler, made, model = accelerator.prepare(loader, scheduler, made, model)
        return model, made, loader, scheduler
    return accelerator.prepare(model, made, loader, scheduler)  # type: ignore[no-any-return]


def train(
    accelerator: Any,
    parts: tuple[Any, Any, Any, Any],
    *,
    epochs: range = range(2),
    skip: int = 0,
    save: str | None = None,
    clip: str | None = None,
    named: bool = True,
    scaled: bool = False,
    counted: int = 0,
) -> dict[str, Any]:
    """Losses, learning rates, evaluations and weights."""
    model, optimizer, loader, scheduler = parts
    count = Count()
    count.number = counted
    accelerator.register_for_checkpointing(count)
    losses, rates, seen = [], [], []
    for epoch in epochs:
        model.train()
        loader.set_epoch(epoch)
        batches = accelerator.skip_first_batches(loader, skip) if skip and epoch == epochs[0] else loader
        for number, (x, y) in enumerate(batches):
            with accelerator.accumulate(*([model] if named else [])):
                loss = (model(x) - y).square().mean()
                bad = scaled and number == 1 and accelerator.process_index == 1
                accelerator.backward(loss * float("inf") if bad else loss)
                if accelerator.sync_gradients and clip == "value":
                    accelerator.clip_grad_value_(model.parameters(), 0.1)
                if accelerator.sync_gradients and clip == "norm":
                    accelerator.clip_grad_norm_([p for n, p in model.named_parameters() if "first" in n], 0.3)
                    losses.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            count.number += 1
            losses.append(loss.item())
            rates.append(optimizer.param_groups[0]["lr"])
            if save is not None and (epoch, number) == (1, 1):
                accelerator.save_state(f"{save}/within")
        seen.append(evaluated(accelerator, model))
        if save is not None and epoch == 0:
            accelerator.save_state(f"{save}/between")
    state = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    return {"losses": losses, "rates": rates, "seen": seen, "state": state, "count": count.number}


def evaluated(accelerator: Any, model: Any) -> Tensor:
    """Predictions for seven samples: the last batch of a rank is filled up, and cut off again."""
    model.eval()
    loader = accelerator.prepare(DataLoader(data(7), 2))
    with torch.no_grad():
        found = torch.cat([accelerator.gather_for_metrics(model(x)) for x, _ in loader])
    accelerator._dataloaders.pop()
    assert found.shape == (7,)
    return found


def run(
    engine: str,
    *,
    order: str = "at once",
    dtype: torch.dtype = torch.complex64,
    load: str | None = None,
    scaled: bool = False,
    gradient_accumulation_steps: int = 1,
    mixed_precision: str | None = None,
    **given: Any,
) -> dict[str, Any]:
    accelerator = accelerator_of(
        engine, gradient_accumulation_steps=gradient_accumulation_steps, mixed_precision=mixed_precision
    )
    if scaled:  # Accelerate makes one for GPUs only
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    parts = prepared(accelerator, order, dtype)
    if load is not None:
        found = Count()
        accelerator.register_for_checkpointing(found)
        torch.manual_seed(99)
        accelerator.load_state(load)
        accelerator._custom_objects.clear()
        given["counted"] = found.number
    return train(accelerator, parts, scaled=scaled, **given)


def every_case(engine: str) -> dict[str, dict[str, Any]]:
    return {case: run(engine, **given) for case, given in CASES.items()}


RESUMED = {"fsdp2": OWN, "fairscale": "fsdp2", OWN: "fairscale"}
"""Engine -> whose state it goes on from."""


def resumed(folder: str) -> dict[str, Any]:
    """Two epochs under each engine; the second one, and the end of it, from the state of another; what files hold.

    Accelerate's own does not go on to the bit within an epoch: its loader draws a number when it begins again. What is
    the same there is what ours and theirs make of it.
    """
    found = {"whole": {}, "between": {}, "within": {}, "files": {}}
    for engine in RESUMED:
        found["whole"][engine] = run(engine, save=f"{folder}/{engine}")
        saved = Path(folder) / engine / "within"
        torch.distributed.barrier()
        found["files"][engine] = {
            "names": sorted(path.name for path in saved.iterdir()),
            "model": load_file(saved / "model.safetensors"),
            "optimizer": torch.load(saved / "optimizer.bin", weights_only=True),
        }
    for engine, source in RESUMED.items():
        found["between"][engine] = run(engine, load=f"{folder}/{source}/between", epochs=range(1, 2))
        found["within"][engine] = run(engine, load=f"{folder}/{source}/within", epochs=range(1, 2), skip=2)
    return found


class Two(nn.Module):
    """With a weight that has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())  # type: ignore[no-any-return]


def several(engine: str, folder: str) -> dict[str, Any]:
    """Two models with an optimizer each, one after the other; their state there and back, and one of them alone."""
    config = ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=1)
    unused = DistributedDataParallelKwargs(find_unused_parameters=True)
    accelerator = accelerator_of(engine, project_config=config, kwargs_handlers=[unused])
    torch.manual_seed(0)
    bare = [Two(), Model()]
    made = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.5) for each in bare]
    second, *optimizers, first, loader = accelerator.prepare(bare[1], *made, bare[0], DataLoader(data(8), 2))
    models = (first, second)

    def steps() -> None:
        for x, _ in loader:
            with accelerator.accumulate(*models):
                accelerator.backward(second(first(x)).mean())
                shown = [*first.parameters(), *accelerator.unwrap_model(second).parameters()]
                accelerator.clip_grad_norm_(shown, 1e9)
                for each in optimizers:
                    take_step(each)

    steps()
    accelerator.save_state()
    states = [{n: v.clone() for n, v in accelerator.get_state_dict(each).items()} for each in models]
    steps()
    accelerator.save_state(safe_serialization=False)
    accelerator.wait_for_everyone()
    left = sorted(path.name for path in (Path(folder) / "checkpoints").iterdir())
    steps()
    accelerator.load_state()
    steps()
    accelerator.save_model(first, f"{folder}/model", max_shard_size=200)
    accelerator.wait_for_everyone()
    written = sorted(path.name for path in Path(folder, "model").iterdir())
    inner = accelerator.unwrap_model(first)
    states += [{n: v.clone() for n, v in accelerator.get_state_dict(each).items()} for each in models]
    return {"states": states, "left": left, "written": written, "inner": isinstance(inner, Two)}


def _alone(what: Any) -> str:
    """Return what one rank is told while the others do something else, and then the same from these."""
    patience, files.PATIENCE = files.PATIENCE, 0.2
    try:
        if torch.distributed.get_rank():
            torch.distributed.barrier()
            return told(what)
        found = told(what)
        torch.distributed.barrier()
        return found
    finally:
        files.PATIENCE = patience


def refused(folder: str) -> dict[str, str]:
    """Return what each refused call raises, in the order of a script."""
    accelerator = accelerator_of("fsdp2", gradient_accumulation_steps=2)
    pair = [Model(), Model()]
    both = torch.optim.SGD([p for each in pair for p in each.parameters()], lr=0.1)
    found = {
        "of two": told(lambda: accelerator.prepare(*pair, both)),
        "of none": told(lambda: accelerator.prepare(pair[0], torch.optim.SGD(Model().parameters(), lr=0.1))),
        "shared": told(lambda: accelerator.prepare(nn.Sequential(pair[0]), pair[0])),
        "unknown": told(lambda: accelerator_of("fsdp3").prepare(Model())),
        "fp16": told(lambda: accelerator_of("fsdp2", mixed_precision="fp16")),
        "wrapped": told(lambda: accelerator_of("fsdp2").prepare(fsshard.wrap(Model()))),
        "second": told(lambda: accelerator_of("fsdp2").prepare(pair[0], fsshard.wrap(Model()))),
    }
    accelerator_of("fsdp2").prepare(*pair)  # none was changed where another was refused
    accelerator = accelerator_of("fsdp2", mixed_precision="bf16")
    compiled = accelerator.prepare(torch.compile(Model(), backend="eager"))
    found["compiled"] = " ".join(vars(accelerator.unwrap_model(compiled)))  # Accelerate's autocast is within
    accelerator = accelerator_of("fsdp2")
    accelerator.even_batches = False
    found["batches"] = told(lambda: accelerator.prepare(DataLoader(data(5), 1)))
    accelerator = accelerator_of("ddp", gradient_accumulation_steps=2)
    model = accelerator.prepare(Model())
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.randn(3, 6)).mean())
        found["local to ddp"] = told(lambda: accelerator.clip_grad_norm_(model.parameters(), 1.0))
    accelerator = accelerator_of("fsdp2", gradient_accumulation_steps=2)
    bare = Model()
    model, optimizer = accelerator.prepare(bare, torch.optim.SGD(bare.parameters(), lr=0.1))
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.randn(3, 6)).mean())
        found["local"] = told(lambda: accelerator.clip_grad_norm_(model.parameters(), 1.0))
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.randn(3, 6)).mean())
        found["complex"] = told(lambda: accelerator.clip_grad_value_(model.parameters(), 1.0))
        optimizer.step()
    found["alone"] = _alone(lambda: accelerator.get_state_dict(model))
    found["inner"] = told(lambda: accelerator.unwrap_model(model).state_dict())
    found["empty"] = told(lambda: accelerator.load_state(folder))
    accelerator.save_state(f"{folder}/state")
    accelerator = accelerator_of("fsdp2")
    other = nn.Linear(6, 3)
    accelerator.prepare(other, torch.optim.SGD(other.parameters(), lr=0.1))
    found["other"] = told(lambda: accelerator.load_state(f"{folder}/state"))
    return found
