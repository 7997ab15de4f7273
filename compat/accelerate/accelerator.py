"""Accelerate's ``Accelerator`` with ``fsshard.wrap`` where it would put a model into DDP."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

import fsshard as library
from fsshard.comm.agreement import agree
from fsshard.complex_params.shown import stored_of
from fsshard.errors import ConfigurationError
from fsshard.planning.entries import Entry
from fsshard.sharded.controller import controller_of
from fsshard.sharded.handover import point_at
from fsshard.sharded.module import ShardedModule
from fsshard.sharded.optimizer import ShardedOptimizer, constructor_arguments, retire
from fsshard.torch_private.modules import compiled_within
from fsshard.wrapping import check_wrap

from ..trainers import Arguments, State, check_scaler, clip_by_value, name_calls, scaler_like
from .arguments import check_arguments, check_batches, check_samples, check_state, wrap_settings
from .files import StateFiles, world
from .preparing import PreparedOptimizer, late, shares_of

SAVE = "on every rank call accelerator.get_state_dict(model), or accelerator.save_model(model, folder)"
LOAD = "load it before prepare(), or on every rank call accelerator.load_state(folder)"


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
        ConfigurationError: an argument, or a variable of ``accelerate launch``, that no engine can honour.
    """

    scaler: Any

    def __init__(self, *args: Any, fsshard: Arguments, **arguments: Any) -> None:
        parents = check_arguments(args, arguments, fsshard)
        self._former = WeakIdKeyDictionary()
        # Id of what prepare() was given -> what it gives.
        self._ready: dict[int, Any] = {}
        # Pairs of the user's optimizer and the engine's.
        self._replaced: list[tuple[Optimizer, Optimizer]] = []
        parents["cpu"] = bool(parents.get("cpu")) or not torch.accelerator.is_available()
        super().__init__(settings=dict(fsshard), **parents)
        check_state(self)

    # ------------------------------------------------------------------------------------------ preparing

    def prepare(self, *args: Any, device_placement: list[bool | None] | None = None) -> Any:
        """Prepare as the parent does, in any order; models come under the engine, their optimizers over it. Collective.

        Raises:
            ConfigurationError: an optimizer of several models, or of none; models that share a parameter.
            FsshardError: what :func:`fsshard.wrap` refuses.
        """
        if device_placement is not None and len(device_placement) != len(args):
            raise ConfigurationError(
                f"device_placement={device_placement}: expected one for each of the {len(args)} objects"
            )
        models = []
        optimizers = []
        for each in args:
            if getattr(each, "_is_accelerate_prepared", False):
                continue
            if isinstance(each, nn.Module):
                models.append(each)
            elif isinstance(each, Optimizer):
                optimizers.append(each)
        placed = dict(zip(map(id, args), device_placement or (), strict=False))
        try:
            if models or optimizers:
                self._take(models, optimizers, placed)
            return super().prepare(*args, device_placement=device_placement)
        finally:
            self._ready.clear()

    def _take(
        self,
        models: list[nn.Module],
        optimizers: list[Optimizer],
        placed: Mapping[int, bool | None],
    ) -> None:
        def checked() -> Any:
            check_samples(self._settings, self.num_processes)
            check_scaler(self.scaler)
            shares, others = shares_of(models, optimizers)
            return shares, [late(each, self._models, self._former) for each in others]

        shares, others = agree(world(), checked)
        calls = []
        for model, own in shares:
            place = placed.get(id(model))
            if place is None:
                place = self.device_placement
            calls.append((model, own, wrap_settings(self, self._settings, placed=place)))
        # So that none is changed where another is refused.
        if len(calls) > 1:
            for model, own, settings in calls:
                check_wrap(model, own or None, **settings)
        for model, own, settings in calls:
            self._wrap(model, own, settings)
        for old, sharded, groups in others:
            new = library.build_optimizer(sharded, type(old), groups, **constructor_arguments(old))
            retire(old, new)
            self._replace(old, new)

    def _wrap(
        self,
        model: nn.Module,
        optimizers: list[Optimizer],
        settings: State,
    ) -> None:
        # wrap takes what torch.compile has put around it out, and compiles units instead.
        bare = model
        inner = compiled_within(bare)
        while inner is not None:
            bare = inner
            inner = compiled_within(bare)
        # Autocast goes around the model's forward, within the engine's wrappers, as under Accelerate's DDP.
        super().prepare_model(bare, device_placement=False, evaluation_mode=True)
        self._models.pop()
        del bare._is_accelerate_prepared
        parameters = dict(model.named_parameters())
        new_optimizers: list[Any] = []
        try:
            if optimizers:
                sharded, new_optimizers = library.wrap(model, optimizers, **settings)
            else:
                sharded = library.wrap(model, **settings)
        except BaseException:
            super().unwrap_model(bare, keep_fp32_wrapper=False)
            raise
        name_calls(sharded, SAVE, LOAD)
        for name, parameter in parameters.items():
            self._former[parameter] = (weakref.ref(sharded), name)
        if isinstance(self.scaler, library.GradScaler):
            controller_of(sharded).scaled = True
        elif self.scaler is not None:
            self.scaler = scaler_like(self.scaler, sharded)
        self._ready[id(model)] = sharded
        for old, new in zip(optimizers, new_optimizers, strict=True):
            self._replace(old, new)

    def _replace(self, old: Optimizer, new: ShardedOptimizer) -> None:
        self._ready[id(old)] = PreparedOptimizer(new, self.scaler)
        self._replaced.append((old, new))

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> nn.Module:
        """Prepare a model: in evaluation mode whole, with autocast, else under the engine. Collective."""
        if id(model) in self._ready:
            self._models.append(self._ready[id(model)])
            ready: nn.Module = self._marked(model)
            return ready
        if evaluation_mode or getattr(model, "_is_accelerate_prepared", False):
            prepared: nn.Module = super().prepare_model(model, device_placement, evaluation_mode)
            return prepared
        wrapped_model: nn.Module = self.prepare(model, device_placement=[device_placement])
        return wrapped_model

    def prepare_data_loader(
        self,
        data_loader: Any,
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Any = None,
    ) -> Any:
        """Prepare a loader as the parent does. Collective with ``even_batches=False``.

        Raises:
            ConfigurationError: the ranks would get several numbers of batches, and need one another for every forward.
        """
        loader = super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)
        if not self.even_batches and not getattr(data_loader, "_is_accelerate_prepared", False):
            check_batches(loader, self._settings)
        return loader

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
        ready = self._ready[id(given)]
        ready._is_accelerate_prepared = True  # where Accelerate looks
        return ready

    def unwrap_model(self, model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Any:
        """Return the user's model, of whose weights an engine may keep parts."""
        inner = model.module if isinstance(model, ShardedModule) else model
        return super().unwrap_model(inner, keep_fp32_wrapper, keep_torch_compile)

    def free_memory(self, *objects: Any) -> Any:
        """Release references as the parent does."""
        self._former = WeakIdKeyDictionary()
        self._replaced.clear()
        return super().free_memory(*objects)

    # ------------------------------------------------------------------------------------------ gradients

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Unscale gradients as the parent does, on all ranks alike. Collective."""
        if self.scaler is None:
            return
        optimizers = self._optimizers if optimizer is None else optimizer
        if not isinstance(optimizers, (list, tuple)):
            optimizers = [optimizers]
        for each in optimizers:
            self.scaler.unscale_(each.optimizer if isinstance(each, AcceleratedOptimizer) else each)

    def clip_grad_norm_(
        self,
        parameters: Tensor | Iterable[Tensor],
        max_norm: float,
        norm_type: float = 2,
    ) -> Tensor:
        """Clip gradients by their norm over all ranks, and return it. Collective.

        Args:
            parameters: a prepared model's, some of them, or those of several.
            max_norm: the largest norm allowed.
            norm_type: p of the p-norm.

        Raises:
            OptimizerError: gradients are those of one rank yet.
        """
        own, _ = self._unscaled(parameters)
        stored = list(map(stored_of, own))
        given = set(map(id, stored))
        for model in self._models:
            if not isinstance(model, ShardedModule) or not model.backend.facts.has_dtensors:
                continue
            # The same numbers as torch's, without its work for each DTensor.
            if given == {id(entry.parameter) for entry in model.backend.all}:
                return model.clip_grad_norm_(max_norm, norm_type)
        # Not by Accelerate's, which takes DTensors and other gradients apart: torch's own counts all ranks here. Of the
        # stored parameters: those that a wrapped model shows refuse to show shards of gradients (FSDP1).
        norm: Any = nn.utils.clip_grad_norm_(stored, float(max_norm), float(norm_type))
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # type: ignore[no-any-return]

    def clip_grad_value_(self, parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
        """Clip the numbers of the gradients that this rank has. Collective.

        Raises:
            ConfigurationError: a parameter is complex.
            OptimizerError: gradients are those of one rank yet.
        """
        tensors, owners = self._unscaled(parameters)
        for model in self._models:
            entries = {}
            for owner in owners:
                if owner is not None and owner[0] is model:
                    entries[owner[1].name] = owner[1]
            if entries:
                clip_by_value(model, float(clip_value), entries.values())
        others = [tensor for tensor, owner in zip(tensors, owners, strict=True) if owner is None]
        if others:
            nn.utils.clip_grad_value_(others, clip_value)

    def _unscaled(
        self, parameters: Tensor | Iterable[Tensor]
    ) -> tuple[list[Tensor], list[tuple[ShardedModule, Entry] | None]]:
        """Unscale the gradients of the models that have these parameters; return these, and whose they are."""
        tensors = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        owner_of = {}
        for model in self._models:
            if isinstance(model, ShardedModule):
                for entry in model.backend.entries.values():
                    owner_of[id(entry.parameter)] = (model, entry)
        owners = [owner_of.get(id(stored_of(tensor))) for tensor in tensors]
        models = set()
        for model, entry in filter(None, owners):
            controller_of(model).step.check_reduced([entry.name])
            models.add(id(model))
        # Where no parameter is a model's, the optimizers may be plain ones.
        self.unscale_gradients([each for each in self._optimizers if models and id(each.optimizer.model) in models])
        return tensors, owners
