"""How known projects call FairScale's FullyShardedDataParallel; see :mod:`tests.compat.fairscale.usage_by_projects`.

The real one does not run on the CPU (KeyError 'all_gather' in its first forward), so these are compared with torch's
DistributedDataParallel alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.compat.fairscale.usage_by_projects import STEPS, Outcome, batches, library, loss_of
from tests.models import take_step


def job(usage: str, name: str) -> Outcome:
    """Run a usage on this rank."""
    return USAGES[usage](library(name))


class Layers(nn.Module):
    """A front, layers of one kind, and a head."""

    def __init__(self, count: int = 3, wrapper: Callable[[nn.Module], nn.Module] = lambda module: module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(4, 6)
        self.layers = nn.ModuleList(wrapper(nn.Sequential(nn.Linear(6, 6), nn.Tanh())) for _ in range(count))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def full_state(model: nn.Module) -> dict[str, Tensor]:
    """Under the names of the plain module; FullyShardedDataParallel gives the whole on every rank."""
    if isinstance(model, DistributedDataParallel):
        model = model.module
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def steps(run: Any, optimizer: Any, micro_batches: int = 1) -> Outcome:
    """A loop as all of these projects have it."""
    losses = []
    for index, x in enumerate(batches(STEPS * micro_batches)):
        last = (index + 1) % micro_batches == 0
        with contextlib.nullcontext() if last else run.no_sync():
            loss = loss_of(run(x)) / micro_batches
            loss.backward()
        losses.append(loss.item())
        if last:
            take_step(optimizer)
    return {"losses": losses, "weights": full_state(run)}


def fairseq(fairscale: Any) -> Outcome:
    """fairseq, unilm: a subclass of FSDP, layers that are checkpointed and then wrapped if large enough.

    The optimizer's state goes through gather_full_optim_state_dict and get_shard_from_optim_state_dict.
    """
    if fairscale is None:
        model = Layers()
        run = DistributedDataParallel(model)
        optimizer = torch.optim.Adam(run.parameters(), lr=0.02)
        first = steps(run, optimizer, micro_batches=2)
        inside = {name: value.detach().clone() for name, value in model.named_parameters()}
        second = steps(run, optimizer)
        return {"first": first, "second": second, "inside": inside, "moments": moments(optimizer, model)}

    class FullyShardedDataParallel(fairscale.nn.data_parallel.FullyShardedDataParallel):  # type: ignore[misc]
        """fairseq's: knows whether to save shards, and shows what it wraps."""

        def __init__(self, *args: Any, use_sharded_state: bool = False, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.use_sharded_state = use_sharded_state

        @property
        def unwrapped_module(self) -> nn.Module:
            return self.module.module if self.flatten_parameters else self.module  # type: ignore[no-any-return]

    enable_wrap, wrap = fairscale.nn.enable_wrap, fairscale.nn.wrap
    checkpoint_wrapper = fairscale.nn.checkpoint.checkpoint_wrapper
    sizes = []

    def fsdp_wrap(module: nn.Module, min_num_params: int) -> nn.Module:
        module = checkpoint_wrapper(module, offload_to_cpu=False)
        sizes.append(sum(p.numel() for p in module.parameters()))
        return wrap(module, process_group=None) if sizes[-1] >= min_num_params else module  # type: ignore[no-any-return]

    settings = {
        "process_group": None,
        "reshard_after_forward": True,
        "mixed_precision": False,
        "fp32_reduce_scatter": False,
        "flatten_parameters": True,
        "cpu_offload": False,
        "compute_dtype": torch.float32,
        "bucket_cap_mb": 25,
        "state_dict_device": torch.device("cpu"),
        "use_sharded_state": False,
    }
    with enable_wrap(wrapper_cls=FullyShardedDataParallel, **settings):
        run = wrap(Layers(wrapper=lambda module: fsdp_wrap(module, min_num_params=40)))
    assert sizes == [42] * 3 and type(run) is FullyShardedDataParallel and not run.use_sharded_state
    assert type(run.unwrapped_module) is Layers
    optimizer = torch.optim.Adam(run.parameters(), lr=0.02)
    first = steps(run, optimizer, micro_batches=2)
    with run.summon_full_params():
        inside = {clean(name): value.detach().clone() for name, value in run.named_parameters()}
    full = from_rank_0(run.gather_full_optim_state_dict(optimizer))
    optimizer = torch.optim.Adam(run.parameters(), lr=0.02)
    optimizer.load_state_dict(run.get_shard_from_optim_state_dict(full))
    second = steps(run, optimizer)
    full = from_rank_0(run.gather_full_optim_state_dict(optimizer))
    return {"first": first, "second": second, "inside": inside, "moments": moments_of_full(full)}


def from_rank_0(full: Any) -> Any:
    """Send rank 0's object to the others: fairseq's reading of a checkpoint file, in short."""
    assert (full is None) == (dist.get_rank() != 0)
    holder = [full]
    dist.broadcast_object_list(holder, src=0)
    return holder[0]


def clean(name: str) -> str:
    """A parameter's name in the plain module."""
    return ".".join(part for part in name.split(".") if part not in ("module", "_fsdp_wrapped_module", "_fpw_module"))


def moments(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[float]:
    """Adam's state, without names: the gathered form numbers parameters by FairScale's own order."""
    state = [optimizer.state[p] for p in model.parameters()]
    return sorted(float(each[key].double().sum()) for each in state for key in ("exp_avg", "exp_avg_sq"))


def moments_of_full(full: dict[str, Any]) -> list[float]:
    state = full["state"].values()
    return sorted(float(each[key].double().sum()) for each in state for key in ("exp_avg", "exp_avg_sq"))


USAGES: dict[str, Callable[[Any], Outcome]] = {"fairseq": fairseq}
