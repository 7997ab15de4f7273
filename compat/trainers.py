"""Shared by the fronts of Lightning, Accelerate, Hugging Face and neuraloperator: samples, gradients, optimizers."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsshard
from fsshard.errors import ConfigurationError, StateDictError
from fsshard.parallel.data_rank import DataRank
from fsshard.planning.entries import Entry
from fsshard.sharded.controller import controller_of
from fsshard.sharded.module import ShardedModule
from fsshard.sharded.optimizer import ShardedOptimizer, groups_by_name
from fsshard.sharded.unwrapping import ModelBeforeWrap

# State of a model or of an optimizer by name, as a front hands it on.
State = dict[str, Any]
Arguments = Mapping[str, Any]

MARK = "_fsshard_taken"


def name_calls(model: ShardedModule, save: str, load: str) -> None:
    """Let errors about whole weights name the calls by which a front's users save and load, who have called no wrap."""
    if model.backend.guard is not None:
        model.backend.guard.save = save
        model.backend.guard.load = load


@dataclass
class WrappedModel:
    """An engine's hold on a Trainer's model, kept by the model itself, so that it is there for as long as that.

    Attributes:
        wrapped: what ``fsshard.wrap`` made of it, just now.
        bare: what it was like before.
    """

    wrapped: ShardedModule
    bare: ModelBeforeWrap

    def __post_init__(self) -> None:
        self.bare.wrapped()
        vars(self.wrapped.module)[MARK] = self

    def come_back(self) -> None:
        """Let the model be plain again, with whole weights in host memory. Collective."""
        self.bare.hand_back(self.wrapped)
        vars(self.wrapped.module).pop(MARK, None)

    # No engine holds a copy of the model, or one that was pickled.
    def __deepcopy__(self, memo: dict[int, Any]) -> None: ...

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def wrapped_model_of(model: Any) -> Any:
    """Return the :class:`WrappedModel` of a model that a Trainer of ours has put under an engine, else None."""
    return getattr(model, "__dict__", {}).get(MARK)


# ------------------------------------------------------------------------------------------------ samples


def split_over(model: nn.Module | None) -> Any:
    """Return what :func:`fsshard.parallel.shard_domain` made of the model; None: its samples are whole."""
    # Where it is not imported nothing is split.
    sharding = sys.modules.get("fsshard.parallel.domain.sharding")
    if sharding is None or model is None:
        return None
    return sharding.domain_of(model.modules())


def data_rank_of(settings: Arguments) -> DataRank | None:
    """Return which part of the data ``device_mesh=`` gives this rank; None: each rank has its own.

    Raises:
        ConfigurationError: the mesh's dimensions have names that do not tell which are for data.
    """
    mesh = settings.get("device_mesh")
    # Replicas and shards need no names.
    if mesh is None or not (mesh.mesh_dim_names or mesh.ndim == 1):
        return None
    return fsshard.data_rank(mesh)


def sampler_arguments(
    settings: Arguments,
    model: nn.Module | None,
    lightnings: State | None,
) -> State | None:
    """Return a ``DistributedSampler``'s ``num_replicas`` and ``rank``. Collective where a domain splits the model.

    Args:
        settings: further arguments of :func:`fsshard.wrap`, of which ``device_mesh`` is asked.
        model: whose domain is asked then, if it is known.
        lightnings: what Lightning would take: all ranks.
    """
    place = data_rank_of(settings)
    domain = split_over(model)
    if settings.get("device_mesh") is None and domain is not None:
        place = _place_of_domain(domain)
    if place is None:
        return lightnings
    return {"num_replicas": place.size, "rank": place.rank}


def _place_of_domain(domain: Any) -> DataRank:
    """Return the number of this rank's domain, in the order of their first ranks. Collective."""
    axes_of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(axes_of_ranks, [axis.ranks for axis in domain.axes])
    firsts = []
    for axes in axes_of_ranks:
        members = []
        for rank in axes[0]:
            members += axes_of_ranks[rank][-1]
        firsts.append(min(members))
    domains = sorted(set(firsts))
    return DataRank(domains.index(firsts[dist.get_rank()]), len(domains))


# ------------------------------------------------------------------------------------------------ gradients


def clip_by_value(
    model: ShardedModule,
    limit: float,
    chosen: Iterable[Entry] | None = None,
) -> None:
    """Put every number of the final gradients between -limit and limit. Collective.

    Args:
        model: wrapped.
        limit: above 0.
        chosen: some of its parameters, the same ones on every rank; None: all.

    Raises:
        ConfigurationError: a parameter is complex.
    """
    entries = list(model.backend.entries.values() if chosen is None else chosen)
    for entry in entries:
        # As torch: "clamp is not supported for complex types".
        if entry.kind.is_complex:
            raise ConfigurationError(
                f"clipping by value: parameter {entry.name!r} is complex, and complex numbers have no order; clip by "
                "norm"
            )
    controller_of(model).finish_gradients(entries)
    for entry in entries:
        gradient = entry.grad()
        if gradient is not None:
            gradient.clamp_(-limit, limit)


def check_scaler(scaler: Any) -> None:
    """Raise ConfigurationError if :func:`scaler_like` cannot replace a scaler: it is of a user's own kind."""
    known = (torch.amp.GradScaler, torch.cuda.amp.GradScaler, torch.cpu.amp.GradScaler, fsshard.GradScaler)
    if scaler is not None and type(scaler) not in known:
        raise ConfigurationError(
            f"scaler {type(scaler).__name__}(...): ranks with parts of the gradients need fsshard's "
            "scaler, which takes over the settings of a torch.amp.GradScaler, and of no other kind"
        )


def scaler_like(scaler: Any, model: ShardedModule) -> fsshard.GradScaler:
    """Return a scaler for all ranks, with another's scale, factors and interval; see :func:`check_scaler`."""
    check_scaler(scaler)
    new = fsshard.GradScaler(model, enabled=scaler.is_enabled())
    if scaler.is_enabled():
        new.load_state_dict(scaler.state_dict())
    return new


# ------------------------------------------------------------------------------------------------ optimizer states


def by_name(state: Mapping[str, Any], optimizer: ShardedOptimizer) -> State:
    """Name the numbered parameters in a torch optimizer's state dict as ours are; one with names stays as it is.

    Raises:
        StateDictError: groups of other sizes.
    """
    own = groups_by_name(optimizer)
    saved = state["param_groups"]
    members = itertools.chain.from_iterable(group["params"] for group in saved)
    if all(isinstance(member, str) for member in members):
        return dict(state)
    sizes = [len(group["params"]) for group in own]
    saved_sizes = [len(group["params"]) for group in saved]
    if sizes != saved_sizes:
        raise StateDictError(f"the optimizer has groups of {sizes} parameters, and the checkpoint of {saved_sizes}")
    names: dict[Any, str] = {}
    groups = []
    for own_group, group in zip(own, saved, strict=True):
        names.update(zip(group["params"], own_group["params"], strict=True))
        groups.append({**group, "params": list(own_group["params"])})
    states = {names[number]: values for number, values in state["state"].items()}
    return {"state": states, "param_groups": groups}


def by_number(optimizer: ShardedOptimizer, *, keep: bool = True) -> State:
    """Return the state dict that a torch optimizer over the whole model would give. Collective.

    Args:
        optimizer: its state is assembled one parameter at a time, in host memory.
        keep: a rank that passes False takes part and gets ``{}``.
    """
    groups = groups_by_name(optimizer)
    numbers: dict[str, int] = {}
    for group in groups:
        for name in group["params"]:
            numbers[name] = len(numbers)
    states = whole_states(optimizer, keep=keep)
    if not keep:
        return {}
    numbered = {numbers[name]: values for name, values in states.items()}
    numbered_groups = []
    for group in groups:
        numbered_groups.append({**group, "params": [numbers[name] for name in group["params"]]})
    return {"state": dict(sorted(numbered.items())), "param_groups": numbered_groups}


def whole_states(optimizer: ShardedOptimizer, *, keep: bool) -> dict[str, State]:
    """Return each parameter's whole state in host memory, where ``keep``. Collective."""
    states: dict[str, State] = {}
    # One at a time: they need not fit on a device together.
    for name, whole in optimizer.iterate_state():
        if not keep or not whole:
            continue
        states[name] = {}
        for key, value in whole.items():
            states[name][key] = value.cpu() if isinstance(value, Tensor) else value
    return states
