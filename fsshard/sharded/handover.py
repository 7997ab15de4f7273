"""Optimizers and schedulers passed to wrap(): checked, then rebuilt over the sharded parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

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
from fsshard.sharded.optimizer_checks import asked_of, check_fused, check_matrices, check_separable
from fsshard.sharded.optimizer_probe import ProbedGroup
from fsshard.sharded.schedulers import check_schedulers, point_at
from fsshard.torch_private.tensors import LOCAL_TENSOR

__all__ = ["HandedOver", "listed"]


class _Given(NamedTuple):
    """One optimizer: with names in place of parameters in its groups, and with what its constructor takes."""

    optimizer: Any
    groups: list[dict[str, Any]]
    arguments: dict[str, Any]


@dataclass
class HandedOver:
    """The optimizers and schedulers that wrap() was given beside the model.

    Attributes:
        optimizer: as it was given: None, one, or several.
        scheduler: the same.
    """

    optimizer: Any
    scheduler: Any
    _given: list[_Given] = field(default_factory=list)  # filled by check(), as is
    _probed: list[list[ProbedGroup]] = field(default_factory=list)

    def check(self, slots: Sequence[ParameterSlot]) -> None:
        """Raise for what cannot be rebuilt over a model with these parameters. Local.

        Raises:
            OptimizerError: an optimizer is none, has stepped, is another model's, or has a scheduler that stays behind.
            ModelError: the model's complex parameters were replaced before.
        """
        optimizers, schedulers = listed(self.optimizer), listed(self.scheduler)
        if schedulers and not optimizers:
            raise OptimizerError("scheduler: hand over its optimizer, too: fsshard.wrap(model, optimizer, scheduler)")
        if self.optimizer is not None and not optimizers:
            raise OptimizerError("optimizer is an empty list; leave it out, and build one with fsshard.build_optimizer")
        for optimizer in optimizers:
            check_unstepped(optimizer)
        check_schedulers(optimizers, schedulers)
        if not optimizers:
            return
        if any(slot.kind.is_complex and slot.kind.layout is None for slot in slots):
            raise ModelError(
                "the model was tensorfied before its optimizer was handed over; hand over the bare model, or build "
                "the optimizer with fsshard.build_optimizer"
            )
        names: dict[int, str] = {}
        for slot in slots:
            held = slot.parameter if slot.kind.layout is None else original_of(slot.parameter)
            names.setdefault(id(held), slot.name)
        self._given = [_Given(o, name_groups(o, names), constructor_arguments(o)) for o in optimizers]
        has_complex = any(slot.parameter.is_complex() or slot.kind.is_complex for slot in slots)
        for optimizer, _, arguments in self._given:
            check_fused(arguments, has_complex=has_complex, see_complex=True)
            parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
            check_matrices(type(optimizer), ((names[id(p)], p.shape, p.is_complex()) for p in parameters))
        self._probed = [[_probed(group) for group in optimizer.param_groups] for optimizer in optimizers]

    def asked(self) -> list[Any] | None:
        """Return what ranks have to ask for alike; None where nothing was handed over."""
        found = [asked_of(type(optimizer), groups, arguments) for optimizer, groups, arguments in self._given]
        return [*found, [type(scheduler).__name__ for scheduler in listed(self.scheduler)]] if found else None

    def check_separable(self, backend: type[Backend], settings: Settings) -> None:
        """Raise for an algorithm that needs more than its rank's part. Local.

        Raises:
            UnsupportedByBackend: names the nearest backend that works.
        """
        for (optimizer, _, arguments), groups in zip(self._given, self._probed, strict=True):
            check_separable(backend, settings, type(optimizer), groups, arguments, None)

    def given_back(self, model: ShardedModule) -> Any:
        """Return what wrap() returns: the model, and what replaces the old optimizers, which raise from then on."""
        if self.optimizer is None:
            return model
        pairs = [
            (old, new_optimizer(model, type(old), resolve_groups(model, groups), arguments))
            for old, groups, arguments in self._given
        ]
        schedulers = listed(self.scheduler)
        point_at(schedulers, pairs)
        for old, new in pairs:
            retire(old, new)
        rebuilt = [new for _, new in pairs]
        found: tuple[Any, ...] = (model, rebuilt if isinstance(self.optimizer, (list, tuple)) else rebuilt[0])
        if self.scheduler is None:
            return found
        return (*found, schedulers if isinstance(self.scheduler, (list, tuple)) else self.scheduler)


def listed(given: Any) -> list[Any]:
    """Return as a list what was given as one, several or None."""
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _probed(group: dict[str, Any]) -> ProbedGroup:
    options = {key: value for key, value in group.items() if key != "params"}
    parameters = [getattr(parameter, LOCAL_TENSOR, parameter) for parameter in group["params"]]
    return ProbedGroup(options, [(p.shape, p.is_complex()) for p in parameters])
