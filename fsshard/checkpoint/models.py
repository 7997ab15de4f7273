"""The models of a checkpoint: one, or several by name, whose keys then begin with their names."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

import torch.distributed as dist

from fsshard.checkpoint.format.index import Index
from fsshard.errors import CheckpointError, ConfigurationError
from fsshard.planning.text import printable
from fsshard.sharded.module import ShardedModule

# By name, in one order on all ranks; a single model has the name "".
Models = Mapping[str, ShardedModule]


def prefix(model: str) -> str:
    """Return what the names of a model's keys and parameters begin with, for one of several; "" is a single model."""
    if model:
        return f"{model}."
    return ""


def check_model(model: object, call: str) -> ShardedModule:
    """Return the model itself; raise if it is not wrapped."""
    if not isinstance(model, ShardedModule):
        raise ConfigurationError(
            f"{call}: expected what fsshard.wrap returned as the model, got {type(model).__name__}; a model on one "
            "process takes fsshard.wrap(model, backend='none')"
        )
    return model


def name_models(models: object, call: str) -> dict[str, ShardedModule]:
    """Return a mapping of models in the order of their names, the same on all ranks; one alone under the name ""."""
    if not isinstance(models, Mapping):
        return {"": check_model(models, call)}
    for name, model in models.items():
        if not isinstance(name, str) or not name or set(name) & set("./"):
            raise ConfigurationError(f"{call}: a model cannot be named {name!r}; use a word without '.' and '/'")
        if not isinstance(model, ShardedModule):
            raise ConfigurationError(
                f"{call}: expected model {name!r} to be what fsshard.wrap returned, got {type(model).__name__}"
            )
    if len(set(map(id, models.values()))) != max(len(models), 1):
        raise ConfigurationError(f"{call}: expected different models by name, got {quoted(models) or 'none'}")
    if len(set(map(_ranks_of, models.values()))) > 1:
        raise ConfigurationError(
            f"{call}: the models {quoted(models)} are trained by different ranks; save each to a path of its own"
        )
    return dict(sorted(models.items()))


def _ranks_of(model: ShardedModule) -> tuple[int, ...]:
    group = model.backend.settings.everyone
    if group is None:
        return ()
    return tuple(dist.get_process_group_ranks(group))


def quoted(names: Iterable[str]) -> str:
    """List names for a message."""
    return ", ".join(printable(repr(name)) for name in names)


def choose_models(index: Index, names: Iterable[str], call: str, hint: str = "") -> dict[str, Index]:
    """Return the index of each of the models; the first one's has what belongs to none of them, too.

    Args:
        index: of the checkpoint.
        names: of the models that are wanted; "" is a single one.
        call: for messages.
        hint: how the caller asks for one of several models.

    Raises:
        CheckpointError: the checkpoint has one model, where several are wanted, or the other way round, or none of such
            a name.
    """
    chosen: dict[str, Index] = {}
    for name in names:
        if name not in (index.models or ("",)):
            has = "one model, which has no name"
            do = "pass it without one"
            if index.models:
                has = f"the models {quoted(index.models)}"
                do = hint or "pass a mapping of models by these names, or of one of them"
            unknown = f"no model was saved as {name!r}; " if name else ""
            raise CheckpointError(f"{call}: {unknown}the checkpoint has {has}; {do}")
        own = index.of_model(name) if name else index
        chosen[name] = dataclasses.replace(own, objects={}, rng=None) if chosen else own
    return chosen
