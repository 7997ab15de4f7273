"""Optimizers and schedulers passed to wrap(): checked, then rebuilt over the sharded parameters."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fsshard.backends.base import Backend
from fsshard.backends.settings import Settings
from fsshard.complex_params.replaced import original_of
from fsshard.complex_params.slots import ParameterSlot
from fsshard.errors import ModelError, OptimizerError
from fsshard.sharded.module import ShardedModule
from fsshard.sharded.optimizer import (
    check_unstepped,
    constructor_arguments,
    name_groups,
    new_optimizer,
    resolve_groups,
    retire,
)
from fsshard.sharded.optimizer_checks import ProbedGroup, asked_of, check_separable, check_settings
from fsshard.torch_private.optimizers import mark_stepped, mark_tracked, steps_are_tracked

__all__ = ["HandedOver", "point_at"]


class _Given(NamedTuple):
    """One optimizer, its groups with names in place of parameters, its constructor's arguments, and its shapes."""

    optimizer: Any
    groups: list[dict[str, Any]]
    arguments: dict[str, Any]
    probed: list[ProbedGroup]


@dataclass
class HandedOver:
    """The optimizers and schedulers that wrap() was given beside the model: None, one, or several of each."""

    optimizer: Any
    scheduler: Any
    _given: list[_Given] = field(default_factory=list)  # filled by check(), as the model is bare then

    def check(self, slots: Sequence[ParameterSlot]) -> None:
        """Raise for what cannot be rebuilt over a model with these parameters. Local.

        Raises:
            OptimizerError: an optimizer is none, has stepped, is another model's, or a scheduler drives another one.
            ModelError: the model's complex parameters were replaced before.
        """
        optimizers, schedulers = _listed(self.optimizer), _listed(self.scheduler)
        if schedulers and not optimizers:
            raise OptimizerError("scheduler: hand over its optimizer, too: fsshard.wrap(model, optimizer, scheduler)")
        if self.optimizer is not None and not optimizers:
            raise OptimizerError("optimizer is an empty list; leave it out, and build one with fsshard.build_optimizer")
        for optimizer in optimizers:
            check_unstepped(optimizer)
        _check_schedulers(optimizers, schedulers)
        if optimizers and any(slot.kind.is_complex and slot.kind.layout is None for slot in slots):
            raise ModelError(
                "the model was tensorfied before its optimizer was handed over; hand over the bare model, or build "
                "the optimizer with fsshard.build_optimizer"
            )
        names: dict[int, str] = {}
        for slot in slots if optimizers else ():
            held = slot.parameter if slot.kind.layout is None else original_of(slot.parameter)
            names.setdefault(id(held), slot.name)
        has_complex = any(slot.parameter.is_complex() or slot.kind.is_complex for slot in slots)
        for optimizer in optimizers:
            groups, arguments = name_groups(optimizer, names), constructor_arguments(optimizer)
            parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
            shapes = ((names[id(p)], p.shape, p.is_complex()) for p in parameters)
            check_settings(type(optimizer), arguments, shapes, has_complex=has_complex)
            probed = [
                ProbedGroup.of(g, ((p.dim(), p.is_complex()) for p in g["params"])) for g in optimizer.param_groups
            ]
            self._given.append(_Given(optimizer, groups, arguments, probed))

    def asked(self) -> list[Any] | None:
        """Return what ranks have to ask for alike; None where nothing was handed over."""
        asked = [asked_of(type(given.optimizer), given.groups, given.arguments) for given in self._given]
        return [*asked, [type(scheduler).__name__ for scheduler in _listed(self.scheduler)]] if asked else None

    def check_separable(self, backend: type[Backend], settings: Settings) -> None:
        """Raise for an algorithm that needs more than its rank's part. Local."""
        for given in self._given:
            check_separable(backend, settings, type(given.optimizer), given.probed, given.arguments, None)

    def given_back(self, model: ShardedModule) -> Any:
        """Return what wrap() returns: the model, and what replaces the old optimizers, which raise from then on."""
        if self.optimizer is None:
            return model
        pairs = []
        for given in self._given:
            groups = resolve_groups(model, given.groups)
            new = new_optimizer(model, type(given.optimizer), groups, given.arguments)
            pairs.append((given.optimizer, new))
        schedulers = _listed(self.scheduler)
        point_at(schedulers, pairs)
        for old, new in pairs:
            retire(old, new)
        result: tuple[Any, ...] = (model, _as_given(self.optimizer, [new for _, new in pairs]))
        return result if self.scheduler is None else (*result, _as_given(self.scheduler, schedulers))


def _as_given(given: Any, items: list[Any]) -> Any:
    return items if isinstance(given, (list, tuple)) else items[0]


def _listed(given: Any) -> list[Any]:
    """Return as a list what was given as one, several or None."""
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) else [given]


# ------------------------------------------------------------------------------------------------ schedulers


def _check_schedulers(optimizers: Sequence[Optimizer], schedulers: Sequence[object]) -> None:
    """Raise unless ``schedulers`` drive ``optimizers`` and nothing else."""
    known = {id(optimizer) for optimizer in optimizers}
    for scheduler in schedulers:
        driven = [value for _, _, value in _places(scheduler, set())]
        name = type(scheduler).__name__
        if not driven:
            raise OptimizerError(f"scheduler: expected an LR scheduler over the optimizer, got {name}")
        if any(id(value) not in known for value in driven):
            raise OptimizerError(
                f"the {name} drives an optimizer that was not handed over; pass it to fsshard.wrap, too: "
                "wrap(model, [optimizer, other], [scheduler, ...])"
            )


def point_at(schedulers: Iterable[object], replaced: Sequence[tuple[Optimizer, Optimizer]]) -> None:
    """Let the schedulers drive the new ones of (old, new) optimizers, at the step where they are."""
    for scheduler in schedulers:
        for holder, key, old in list(_places(scheduler, set())):
            for new in [new for one, new in replaced if one is old]:  # none: the user has pointed it elsewhere since
                holder[key] = new
                _track_steps(new)


def _places(scheduler: object, seen: set[int]) -> Iterator[tuple[dict[str, Any], str, Optimizer]]:
    """Yield the places where a scheduler, and those within it, hold an optimizer."""
    for held in _nested(scheduler, seen):
        members = vars(held)
        for key, value in members.items():
            if isinstance(value, Optimizer):
                yield members, key, value


def _nested(scheduler: object, seen: set[int]) -> Iterator[object]:
    """Yield the scheduler, and those that it calls: SequentialLR's, ChainedScheduler's, and users' own warm-ups."""
    if id(scheduler) in seen or not hasattr(scheduler, "__dict__") or isinstance(scheduler, Optimizer):
        return
    seen.add(id(scheduler))
    yield scheduler
    for value in vars(scheduler).values():
        items = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else [value]
        for item in items:
            if isinstance(item, LRScheduler) or isinstance(getattr(item, "__dict__", {}).get("optimizer"), Optimizer):
                yield from _nested(item, seen)


def _track_steps(optimizer: Any) -> None:
    """Note steps where schedulers look for it: they warn of an order of calls that is none (torch 2.13).

    What ``LRScheduler.__init__`` does to the optimizer that it is given, in torch/optim/lr_scheduler.py.
    """
    if steps_are_tracked(optimizer.step):
        return
    stepped, reference = type(optimizer).step, weakref.ref(optimizer)

    @functools.wraps(stepped)
    def step(*args: Any, **kwargs: Any) -> Any:
        found = reference()
        assert found is not None, "its own method is called"
        mark_stepped(found)
        return stepped(found, *args, **kwargs)

    mark_tracked(step)
    optimizer.step = step
