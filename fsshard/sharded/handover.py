"""Optimizers and schedulers passed to wrap(): checked, then rebuilt over the sharded parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fsshard.backends.base import Backend
from fsshard.backends.settings import Settings
from fsshard.complex_params.replaced import original_of
from fsshard.complex_params.slots import ParameterSlot
from fsshard.errors import ModelError, OptimizerError
from fsshard.model.ignored import Ignored
from fsshard.sharded.module import ShardedModule
from fsshard.sharded.optimizer import check_unstepped, constructor_arguments, name_groups, new_optimizer, retire
from fsshard.sharded.optimizer_checks import OptimizerRequest


@dataclass
class HandedOver:
    """The optimizers and schedulers that wrap() was given with the model: None, one, or several of each."""

    optimizer: Any
    scheduler: Any
    # Made by check(), when the model is bare.
    _requests: list[OptimizerRequest] = field(default_factory=list)

    def check(self, slots: Sequence[ParameterSlot], ignored: Ignored) -> None:
        """Raise for what cannot be rebuilt over a model with these parameters. Local.

        Raises:
            OptimizerError: an optimizer is none, has stepped, is another model's, or a scheduler drives another one.
            ModelError: the model's complex parameters were replaced before.
        """
        optimizers = _listed(self.optimizer)
        for optimizer in optimizers:
            check_unstepped(optimizer)
        _check_schedulers(optimizers, _listed(self.scheduler))
        if not optimizers:
            return
        if any(slot.kind.is_complex and slot.kind.layout is None for slot in slots):
            raise ModelError(
                "the model was tensorfied before its optimizer was handed over; hand over the bare model, or build "
                "the optimizer with fsshard.build_optimizer"
            )
        names: dict[int, str] = {}
        parameters = {}
        for slot in slots:
            parameter = slot.parameter
            is_complex = parameter.is_complex() or slot.kind.is_complex
            parameters[slot.name] = (parameter.shape, is_complex)
            original = parameter if slot.kind.layout is None else original_of(parameter)
            names.setdefault(id(original), slot.name)
        for optimizer in optimizers:
            groups = name_groups(optimizer, names, ignored)
            arguments = constructor_arguments(optimizer)
            request = OptimizerRequest(type(optimizer), groups, arguments, parameters)
            request.check_settings()
            self._requests.append(request)

    def asked(self) -> list[Any] | None:
        """Return what ranks have to ask for alike; None where nothing was handed over."""
        if not self._requests:
            return None
        facts: list[Any] = [request.asked() for request in self._requests]
        facts.append([type(scheduler).__name__ for scheduler in _listed(self.scheduler)])
        return facts

    def check_separable(self, backend: type[Backend], settings: Settings) -> None:
        """Raise for an algorithm that needs more than its rank's part. Local."""
        for request in self._requests:
            request.check_separable(backend, settings)

    def given_back(self, model: ShardedModule) -> Any:
        """Return what wrap() returns: the model, and what replaces the old optimizers, which raise from then on."""
        if self.optimizer is None:
            return model
        successors = [new_optimizer(model, request) for request in self._requests]
        pairs = list(zip(_listed(self.optimizer), successors, strict=True))
        schedulers = _listed(self.scheduler)
        point_at(schedulers, pairs)
        for old, successor in pairs:
            retire(old, successor)
        optimizer = _as_given(self.optimizer, successors)
        if self.scheduler is None:
            return model, optimizer
        return model, optimizer, _as_given(self.scheduler, schedulers)


def _as_given(given: Any, items: list[Any]) -> Any:
    return items if isinstance(given, (list, tuple)) else items[0]


def _listed(given: Any) -> list[Any]:
    """Return as a list what was given as one, several or None."""
    if given is None:
        return []
    if isinstance(given, (list, tuple)):
        return list(given)
    return [given]


# ------------------------------------------------------------------------------------------------ schedulers


def _check_schedulers(optimizers: Sequence[Optimizer], schedulers: Sequence[object]) -> None:
    """Raise unless ``schedulers`` drive ``optimizers`` and nothing else."""
    ids = set(map(id, optimizers))
    for scheduler in schedulers:
        driven = [id(members[key]) for members, key in _places(scheduler, set())]
        if not driven or not ids.issuperset(driven):
            which = "another one" if driven else "none"
            raise OptimizerError(
                "scheduler: expected LR schedulers over the optimizers that are handed over, got a "
                f"{type(scheduler).__name__} over {which}; pass it to fsshard.wrap, too: "
                "wrap(model, [optimizer, other], [scheduler, ...])"
            )


def point_at(schedulers: Iterable[object], replaced: Sequence[tuple[Optimizer, Optimizer]]) -> None:
    """Let the schedulers drive the new ones of (old, new) optimizers, at the step where they are."""
    for scheduler in schedulers:
        for members, key in list(_places(scheduler, set())):
            driven = members[key]
            for old, new in replaced:
                # A scheduler of no old optimizer is one that the user has pointed elsewhere.
                if old is driven:
                    members[key] = new


def _places(scheduler: object, seen: set[int]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield (attributes, name) where a scheduler, or one that it calls (SequentialLR's), holds an optimizer."""
    if id(scheduler) in seen or not hasattr(scheduler, "__dict__") or isinstance(scheduler, Optimizer):
        return
    seen.add(id(scheduler))
    members = vars(scheduler)
    for key, value in members.items():
        if isinstance(value, Optimizer):
            yield members, key
        if isinstance(value, Mapping):
            value = list(value.values())
        for item in _listed(value):
            attributes = getattr(item, "__dict__", {})
            if isinstance(item, LRScheduler) or isinstance(attributes.get("optimizer"), Optimizer):
                yield from _places(item, seen)
