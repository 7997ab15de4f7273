"""Checks, and puts into one form, the arguments that save, load and export have in common."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from fsshard.backends.settings import Settings
from fsshard.checkpoint.format.index import (
    Tree,
    Values,
)
from fsshard.checkpoint.models import Models, quoted
from fsshard.checkpoint.position import DataPosition
from fsshard.errors import ConfigurationError
from fsshard.sharded.averages import EMA
from fsshard.sharded.module import ShardedModule
from fsshard.sharded.optimizer import ShardedOptimizer

TIMEOUT = 300.0
"""Seconds to wait for ranks, where the caller does not say."""


def check_call(name: str, path: object, timeout: object, **flags: object) -> tuple[str, str]:
    """Check a path, a timeout and flags; return the path from the home directory, and the call as messages show it."""
    if not isinstance(path, (str, os.PathLike)):
        raise ConfigurationError(
            f"{name}: expected a path first and the model second, got {type(path).__name__} as the path"
        )
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
        raise ConfigurationError(f"{name}: timeout={timeout!r}: expected seconds, more than 0")
    for flag, value in flags.items():
        if not isinstance(value, bool):
            raise ConfigurationError(
                f"{name}: {flag}= is an option and takes True or False, got {type(value).__name__}; state of that name "
                "has to be renamed"
            )
    path = os.path.expanduser(os.fspath(path))
    return path, f"{name}({path!r})"


def name_optimizers(
    models: Models,
    optimizer: object,
    call: str,
    averages: Mapping[str, EMA] | None = None,
) -> dict[str, ShardedOptimizer]:
    """Name one optimizer ("optimizer"), a sequence of them ("0", "1", ...), or a mapping (by its keys).

    An average of weights is, in a checkpoint, the state of an optimizer of its name.
    """
    if optimizer is None:
        named = {}
    elif isinstance(optimizer, Mapping):
        named = {str(name): value for name, value in optimizer.items()}
    elif isinstance(optimizer, Sequence):
        named = {str(index): value for index, value in enumerate(optimizer)}
    else:
        named = {"optimizer": optimizer}
    own = set(map(id, models.values()))
    for name, value in named.items():
        if not name or "/" in name:
            raise ConfigurationError(f"{call}: an optimizer cannot be named {name!r}; use a word without '/'")
        if not isinstance(value, ShardedOptimizer) or id(value.model) not in own:
            raise ConfigurationError(
                f"{call}: expected optimizer {name!r} to be this model's, got a {type(value).__name__} of another "
                "model or of none; build it with fsshard.build_optimizer, or hand a live one to fsshard.wrap"
            )
    for name, average in (averages or {}).items():
        if id(average.model) not in own:
            raise ConfigurationError(f"{call}: {name}= is the average of another model")
        if name in named:
            raise ConfigurationError(f"{call}: {name!r} names two things, an optimizer and an average; rename one")
        named[name] = average.held
    return named


def described_call(
    call: str,
    models: Iterable[str],
    optimizer: Any,
    objects: Values,
    **options: Any,
) -> str:
    """Return the call with all that ranks have to agree on, so that they find out where they do not."""
    arguments = []
    if any(models):
        arguments.append(f"{{{quoted(models)}}}")
    if isinstance(optimizer, Mapping):
        names = sorted(str(name) for name in optimizer)
        arguments.append(f"optimizer={{{', '.join(map(repr, names))}}}")
    elif isinstance(optimizer, Sequence):
        arguments.append(f"optimizer=[{len(optimizer)}]")
    elif optimizer is not None:
        arguments.append("optimizer")
    for name in sorted(objects):
        arguments.append(f"{name}=")
    for key, value in options.items():
        arguments.append(f"{key}={value!r}")
    return f"{call[:-1]}, {', '.join(arguments)})"


def named_objects(scheduler: Any, scaler: Any, others: Values) -> Tree:
    """Return what is saved besides the model and its optimizers, by name; several with state as one object each."""
    objects = {}
    if scheduler is not None:
        objects["scheduler"] = scheduler
    if scaler is not None:
        objects["scaler"] = scaler
    objects.update(others)
    return {name: combine_states(value) for name, value in objects.items()}


def with_loader(state: Values, loader: Any, settings: Settings) -> Tree:
    """Return state by name, with the loader's place in the data among it."""
    if loader is None:
        return dict(state)
    return {"loader": DataPosition(loader, settings), **state}


def check_places(scheduler: Any, scaler: Any, call: str) -> None:
    """Raise unless what stands in the places of a scheduler and a scaler can be one. Local.

    Raises:
        ConfigurationError: names the keyword to use.
    """
    keywords = {LRScheduler: "scheduler", torch.amp.GradScaler: "scaler", EMA: "ema", int: "step"}
    for place, value in (("scheduler", scheduler), ("scaler", scaler)):
        if value is None:
            continue
        # A number is most often that of the step.
        keyword = next((name for kind, name in keywords.items() if isinstance(value, kind)), "NAME")
        if keyword in (place, "NAME") and hasattr(combine_states(value), "state_dict"):
            continue
        shown = value if keyword == "step" else "..."
        raise ConfigurationError(
            f"{call}: expected something with state_dict() in the place of {place}, or None, got a "
            f"{type(value).__name__}; pass it by name: {keyword}={shown}"
        )


def take_averages(objects: Tree) -> dict[str, EMA]:
    """Take each :class:`fsshard.EMA` out of ``objects``."""
    averages = {}
    for name, value in list(objects.items()):
        if isinstance(value, EMA):
            averages[name] = objects.pop(name)
    return averages


def combine_states(value: Any) -> Any:
    """Return a list or mapping in which all have state, ``scheduler=[warmup, decay]``, as one; all else as it is."""
    if hasattr(value, "state_dict") or not isinstance(value, (Mapping, list, tuple)):
        return value
    members: dict[Any, Any] = {}
    members.update(value if isinstance(value, Mapping) else enumerate(value))
    for member in members.values():
        if isinstance(member, EMA):
            raise ConfigurationError(
                "an fsshard.EMA has a keyword of its own, as in ema=ema, slow=slow_ema; got several"
            )
        # A model or an optimizer is no state, and is refused.
        ours = isinstance(member, (ShardedModule, ShardedOptimizer))
        if ours or not (hasattr(member, "state_dict") and hasattr(member, "load_state_dict")):
            return value
    if members:
        return _Several(members, named=isinstance(value, Mapping))
    return value


@dataclass(eq=False)
class _Several:
    """Several objects with state, as one with the state of all: in a list, or by name."""

    members: Mapping[Any, Any]
    named: bool

    def state_dict(self) -> Any:
        states = {}
        for key, member in self.members.items():
            states[key] = member.state_dict()
        if self.named:
            return states
        return list(states.values())

    def load_state_dict(self, state: Any) -> None:
        saved = None
        if self.named and isinstance(state, Mapping):
            saved = dict(state)
        elif not self.named and isinstance(state, (list, tuple)):
            saved = dict(enumerate(state))
        if saved is None or saved.keys() != self.members.keys():
            expected = f"a list of {len(self.members)}"
            if self.named:
                expected = str(list(self.members))
            raise ConfigurationError(f"{expected} was given, {_kind_of_state(state)} was saved")
        for key, member in self.members.items():
            member.load_state_dict(saved[key])


def _kind_of_state(state: object) -> str:
    if isinstance(state, Mapping):
        return str(list(state))
    if isinstance(state, (list, tuple)):
        return f"a {type(state).__name__} of {len(state)}"
    return f"a {type(state).__name__}"
