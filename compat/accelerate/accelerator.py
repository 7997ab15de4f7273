"""Accelerate's ``Accelerator`` with ``fsshard.wrap`` where it would put a model into DDP."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer

import fsshard as library
from fsshard.comm.agreement import agree
from fsshard.complex_params.shown import stored_of
from fsshard.errors import ConfigurationError
from fsshard.planning.entries import Entry
from fsshard.sharded.handover import point_at
from fsshard.sharded.module import ShardedModule
from fsshard.sharded.optimizer import ShardedOptimizer
from fsshard.torch_private.modules import compiled_within

from ..trainers import check_scaler, clip_by_value, scaler_like
from .arguments import check_arguments, check_batches, check_samples, check_state, on_cpu, wrap_settings
from .files import StateFiles, world
from .preparing import Names, PreparedOptimizer, Share, adopted, check_shares, late, shares_of, wrapped

__all__ = ["Accelerator"]


class Accelerator(StateFiles):
    """``accelerate.Accelerator`` under any engine, on CPU and GPU, complex weights welcome.

    Loaders, schedulers, gathering and trackers are Accelerate's. :meth:`prepare` gives what :func:`fsshard.wrap` makes
    of a model and its optimizers; the latter may be made before or after, and prepared with their model or later.

    Args:
        *args: as for the parent.
        fsshard: arguments of :func:`fsshard.wrap`: ``{"backend": "fsdp2", ...}``.
        **arguments: as for the parent. Where there is no accelerator, ``cpu=True``, without which Accelerate sees no
            other ranks.

    Raises:
        ConfigurationError: an argument, or a variable of ``accelerate launch``, that no engine of ours can honour.
    """

    scaler: Any

    def __init__(self, *args: Any, fsshard: Mapping[str, Any], **arguments: Any) -> None:
        given = check_arguments(args, arguments, fsshard)
        self._names = Names()
        self._ready: dict[int, Any] = {}  # id of what prepare() was given -> what it gives
        self._replaced: list[tuple[Optimizer, Optimizer]] = []  # (the user's, the engine's)
        super().__init__(settings=dict(fsshard), **{**given, "cpu": on_cpu(given)})
        check_state(self)

    # ------------------------------------------------------------------------------------------ preparing

    def prepare(self, *args: Any, device_placement: list[bool | None] | None = None) -> Any:
        """Prepare as the parent does, in any order; models come under the engine, their optimizers over it. Collective.

        Raises:
            ConfigurationError: an optimizer of several models, or of none; models that share a parameter.
            FsshardError: what :func:`fsshard.wrap` refuses.
        """
        if device_placement is not None and len(device_placement) != len(args):
            raise ConfigurationError(f"device_placement={device_placement}: one for each of {len(args)} objects")
        new = [each for each in args if not getattr(each, "_is_accelerate_prepared", False)]
        models = [each for each in new if isinstance(each, nn.Module)]
        optimizers = [each for each in new if isinstance(each, Optimizer)]
        placed = dict(zip(map(id, args), device_placement or (), strict=False))
        try:
            if models or optimizers:
                self._take(models, optimizers, placed)
            return super().prepare(*args, device_placement=device_placement)
        finally:
            self._ready.clear()

    def _take(self, models: list[nn.Module], optimizers: list[Optimizer], placed: Mapping[int, bool | None]) -> None:
        def checked() -> Any:
            check_samples(self._settings, self.num_processes)
            check_scaler(self.scaler)
            shares, others = shares_of(models, optimizers)
            return shares, [late(each, self._models, self._names) for each in others]

        shares, others = agree(world(), checked)
        places = [placed.get(id(share.model)) for share in shares]
        settings = [
            wrap_settings(self, self._settings, placed=self.device_placement if place is None else place)
            for place in places
        ]
        check_shares(shares, settings)
        for share, given in zip(shares, settings, strict=True):
            self._wrap(share, given)
        for each in others:
            self._replace(each.optimizer, adopted(each))

    def _wrap(self, share: Share, settings: dict[str, Any]) -> None:
        bare = share.model
        while (inner := compiled_within(bare)) is not None:  # wrap takes it out, and compiles units instead
            bare = inner
        # Autocast goes around the model's forward, within the engine's wrappers, as under Accelerate's DDP.
        super().prepare_model(bare, device_placement=False, evaluation_mode=True)
        self._models.pop()
        del bare._is_accelerate_prepared
        try:
            sharded, found = wrapped(share, settings, self._names)
        except BaseException:
            super().unwrap_model(bare, keep_fp32_wrapper=False)
            raise
        if isinstance(self.scaler, library.GradScaler):
            sharded.scaled = True
        elif self.scaler is not None:
            self.scaler = scaler_like(self.scaler, sharded)
        self._ready[id(share.model)] = sharded
        for old, new in zip(share.optimizers, found, strict=True):
            self._replace(old, new)

    def _replace(self, old: Optimizer, new: ShardedOptimizer) -> None:
        self._ready[id(old)] = PreparedOptimizer(new, self.scaler)
        self._replaced.append((old, new))

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepare a model: in evaluation mode whole, with autocast, else under the engine. Collective."""
        if id(model) in self._ready:
            self._models.append(self._ready[id(model)])
            ready: nn.Module = self._marked(model)
            return ready
        if evaluation_mode or getattr(model, "_is_accelerate_prepared", False):
            found: nn.Module = super().prepare_model(model, device_placement, evaluation_mode)
            return found
        wrapped_model: nn.Module = self.prepare(model, device_placement=[device_placement])
        return wrapped_model

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """Prepare a loader as the parent does. Collective with ``even_batches=False``.

        Raises:
            ConfigurationError: the ranks would get several numbers of batches, and need one another for every forward.
        """
        found = super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)
        if not self.even_batches and not getattr(data_loader, "_is_accelerate_prepared", False):
            check_batches(found, self._settings)
        return found

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> Any:
        """Prepare an optimizer whose model is prepared. Collective."""
        if id(optimizer) in self._ready:
            self._optimizers.append(self._ready[id(optimizer)])
            return self._marked(optimizer)
        if getattr(optimizer, "_is_accelerate_prepared", False):
            return super().prepare_optimizer(optimizer, device_placement)
        return self.prepare(optimizer, device_placement=[device_placement])

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Prepare a scheduler over the optimizer that :meth:`prepare` has made of the scheduler's."""
        point_at([scheduler], self._replaced)
        return super().prepare_scheduler(scheduler)

    def _marked(self, given: Any) -> Any:
        found = self._ready[id(given)]
        found._is_accelerate_prepared = True  # where Accelerate looks
        return found

    def unwrap_model(self, model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Any:
        """Return the user's model, of whose weights an engine may keep parts."""
        inner = model.module if isinstance(model, ShardedModule) else model
        return super().unwrap_model(inner, keep_fp32_wrapper, keep_torch_compile)

    def free_memory(self, *objects: Any) -> Any:
        """Release references as the parent does."""
        self._names = Names()
        self._replaced.clear()
        return super().free_memory(*objects)

    # ------------------------------------------------------------------------------------------ gradients

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Unscale gradients as the parent does, on all ranks alike. Collective."""
        if self.scaler is None:
            return
        chosen = self._optimizers if optimizer is None else optimizer
        for each in chosen if isinstance(chosen, (list, tuple)) else [chosen]:
            self.scaler.unscale_(each.optimizer if isinstance(each, AcceleratedOptimizer) else each)

    def clip_grad_norm_(self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2) -> Tensor:
        """Clip gradients by their norm over all ranks, and return it. Collective.

        Args:
            parameters: a prepared model's, some of them, or those of several.
            max_norm: the largest norm allowed.
            norm_type: p of the p-norm.

        Raises:
            ConfigurationError: gradients are those of one rank yet, or a part belongs to no prepared model.
        """
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        chosen = self._chosen(given)
        if not chosen:
            found: Tensor = super().clip_grad_norm_(given, max_norm, norm_type)
            return found
        return _clip_norm(chosen, float(max_norm), float(norm_type))

    def clip_grad_value_(self, parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
        """Clip the numbers of the gradients that this rank has. Collective.

        Raises:
            ConfigurationError: as for :meth:`clip_grad_norm_`, or a parameter is complex.
        """
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        chosen = self._chosen(given)
        for model, entries in chosen:
            clip_by_value(model, float(clip_value), entries)
        if not chosen:
            super().clip_grad_value_(given, clip_value)

    def _chosen(self, parameters: list[Tensor]) -> Any:
        """Return what is clipped of each model, unscaled."""
        chosen = _find_chosen(parameters, self._models)
        models = [model for model, _ in chosen]
        self.unscale_gradients([each for each in self._optimizers if any(each.optimizer.model is m for m in models)])
        return chosen


# ------------------------------------------------------------------------------------------------ clipping

Chosen = list[tuple[ShardedModule, list[Entry]]]
"""The parameters of each model that are clipped."""


def _find_chosen(parameters: Sequence[Tensor], models: Iterable[Any]) -> Chosen:
    """Return whose parameters these are; nothing where they are no prepared model's.

    Args:
        parameters: as a prepared model, the user's own within it or a prepared optimizer shows them.
        models: prepared.

    Raises:
        ConfigurationError: only some of them are, or a backward without synchronisation came last.
    """
    wrapped = [model for model in models if isinstance(model, ShardedModule)]
    known: dict[int, tuple[int, Entry]] = {}
    for number, model in enumerate(wrapped):
        entries = list(model.backend.entries.values())
        known |= {id(entry.parameter): (number, entry) for entry in entries}
        known |= {id(shown): (number, e) for shown, e in zip(model.parameters(), entries, strict=True)}
    found = [known.get(id(parameter)) or known.get(id(stored_of(parameter))) for parameter in parameters]
    others = found.count(None)
    if others == len(found):
        return []
    if others:
        raise ConfigurationError(
            f"{others} of {len(found)} parameters belong to no model that prepare() gave; clip them by another call"
        )
    members: dict[int, dict[str, Entry]] = {}
    for each in found:
        if each is not None:
            members.setdefault(each[0], {})[each[1].name] = each[1]
    chosen = [(wrapped[number], list(entries.values())) for number, entries in sorted(members.items())]
    if any(model.has_local_gradients for model, _ in chosen):
        raise ConfigurationError(
            "gradients are clipped once they are those of all ranks: `if accelerator.sync_gradients:` belongs before "
            "the call"
        )
    return chosen


def _clip_norm(chosen: Chosen, max_norm: float, norm_type: float) -> Tensor:
    """Scale the gradients so that their norm is at most ``max_norm``; the norm before: 0-dim. Collective."""
    if len(chosen) == 1 and _covers(*chosen[0]):
        return chosen[0][0].clip_grad_norm_(max_norm, norm_type)
    for model, entries in chosen:
        model.check_knows_all_ranks("clip_grad_norm_")
        model.finish_gradients(entries)
    norms = torch.stack([model.norm_of(entries, norm_type) for model, entries in chosen])
    wide = norms.double()
    norm = (wide.max() if math.isinf(norm_type) else wide.pow(norm_type).sum().pow(1 / norm_type)).to(norms.dtype)
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for _, entries in chosen:
        for entry in entries:
            gradient = entry.grad()
            if gradient is not None:
                gradient.mul_(scale.to(gradient.device, gradient.dtype))
    return norm


def _covers(model: ShardedModule, entries: Sequence[Entry]) -> bool:
    """Return whether nothing else can have a gradient."""
    names = {entry.name for entry in entries}
    return all(e.name in names for e in model.backend.entries.values() if e.parameter.requires_grad)
