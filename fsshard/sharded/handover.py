"""Optimizers and schedulers passed to wrap(): checked, then rebuilt over the sharded parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

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
    retire,
)
from fsshard.sharded.optimizer_checks import asked_of, check_fused, check_matrices, check_separable
from fsshard.sharded.optimizer_probe import ProbedGroup
from fsshard.sharded.schedulers import check_schedulers, point_at
from fsshard.torch_private.tensors import LOCAL_TENSOR

__all__ = ["HandedOver", "listed"]


@dataclass
class HandedOver:
    """What wrap() was given beside the model.

    Attributes:
        optimizer: as it was given: None, one, or several.
        scheduler: the same.
        groups: of each optimizer, with names in place of parameters; filled by :meth:`check`.
    """

    optimizer: Any
    scheduler: Any
    groups: list[list[dict[str, Any]]] = field(default_factory=list)
    _probed: list[list[ProbedGroup]] = field(default_factory=list)

    @property
    def optimizers(self) -> list[Any]:
        """All of them."""
        return listed(self.optimizer)

    @property
    def schedulers(self) -> list[Any]:
        """All of them."""
        return listed(self.scheduler)

    def check(self, slots: Sequence[ParameterSlot]) -> None:
        """Raise for what cannot be rebuilt over a model with these parameters. Local.

        Raises:
            OptimizerError: an optimizer is none, has stepped, is another model's, or has a scheduler that stays behind.
            ModelError: the model's complex parameters were replaced before.
        """
        if self.schedulers and not self.optimizers:
            raise OptimizerError("scheduler: hand over its optimizer, too: fsshard.wrap(model, optimizer, scheduler)")
        if self.optimizer is not None and not self.optimizers:
            raise OptimizerError("optimizer is an empty list; leave it out, and build one with fsshard.build_optimizer")
        for optimizer in self.optimizers:
            check_unstepped(optimizer)
        check_schedulers(self.optimizers, self.schedulers)
        if not self.optimizers:
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
        self.groups = [name_groups(optimizer, names) for optimizer in self.optimizers]
        has_complex = any(slot.parameter.is_complex() or slot.kind.is_complex for slot in slots)
        for optimizer in self.optimizers:
            check_fused(constructor_arguments(optimizer), has_complex=has_complex, see_complex=True)
            parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
            check_matrices(type(optimizer), ((names[id(p)], p.shape, p.is_complex()) for p in parameters))
        self._probed = [[_probed(group) for group in optimizer.param_groups] for optimizer in self.optimizers]

    def asked(self) -> list[Any] | None:
        """What ranks have to ask for alike."""
        found = [
            asked_of(type(optimizer), groups, constructor_arguments(optimizer))
            for optimizer, groups in zip(self.optimizers, self.groups, strict=True)
        ]
        return [*found, [type(scheduler).__name__ for scheduler in self.schedulers]] if found else None

    def check_separable(self, backend: type[Backend], settings: Settings) -> None:
        """Raise for an algorithm that needs more than its rank's part. Local.

        Raises:
            UnsupportedByBackend: names the nearest backend that works.
        """
        for optimizer, groups in zip(self.optimizers, self._probed, strict=True):
            check_separable(backend, settings, type(optimizer), groups, constructor_arguments(optimizer), None)

    def given_back(self, model: ShardedModule) -> Any:
        """What wrap() returns: the model, and what takes the old ones' places, which raise from then on."""
        if self.optimizer is None:
            return model
        rebuilt = [
            new_optimizer(model, type(old), _resolved(model, groups), constructor_arguments(old))
            for old, groups in zip(self.optimizers, self.groups, strict=True)
        ]
        point_at(self.schedulers, list(zip(self.optimizers, rebuilt, strict=True)))
        for old, new in zip(self.optimizers, rebuilt, strict=True):
            retire(old, new)
        found: tuple[Any, ...] = (model, rebuilt if isinstance(self.optimizer, (list, tuple)) else rebuilt[0])
        if self.scheduler is None:
            return found
        several = isinstance(self.scheduler, (list, tuple))
        return (*found, self.schedulers if several else self.scheduler)


def listed(given: Any) -> list[Any]:
    """What was given as one, several or None, as a list."""
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _probed(group: dict[str, Any]) -> ProbedGroup:
    options = {key: value for key, value in group.items() if key != "params"}
    parameters = [getattr(parameter, LOCAL_TENSOR, parameter) for parameter in group["params"]]
    return ProbedGroup(options, [(p.shape, p.is_complex()) for p in parameters])


def _resolved(model: ShardedModule, groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**g, "params": [model.find_entry(name).parameter for name in g["params"]]} for g in groups]
