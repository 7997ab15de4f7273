"""backend="fairscale": an OSS, FairScale's or fsshard's own, under fsshard's reduction to owners.

Parameters are whole on every rank; each belongs to one rank, which alone keeps its reduced gradient and optimizer
state, and broadcasts it after the step. FairScale 0.4.13 is the last release (2022); what is wrong with its OSS on
torch 2.13 is patched in :mod:`fsshard.backends.fairscale_patched`. Where it is not installed, or with
``implementation="native"``, that of :mod:`fsshard.oss` does the same. One reduction serves both
(:mod:`fsshard.backends.fairscale_native`): FairScale's ShardedDataParallel has too many faults to be patched.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any, ClassVar, NoReturn, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from fsshard.backends.base import Backend
from fsshard.backends.facts import EngineFacts
from fsshard.backends.fairscale_native import EngineReduction, Replicas
from fsshard.backends.registry import register_backend
from fsshard.backends.settings import Settings
from fsshard.complex_params.shown import stored_names
from fsshard.errors import ConfigurationError, MissingExtra, OptimizerError, UnsupportedByBackend
from fsshard.oss.partitioned import PartitionedOptimizer
from fsshard.parallel.meshes import shape_text
from fsshard.planning.entries import Entry
from fsshard.planning.torch_settings import KEEP_GATHERED

IMPLEMENTATIONS = {
    "real": "fsshard.backends.fairscale_patched:PatchedOSS",
    "native": "fsshard.backends.fairscale_native:NativeOSS",
}


@register_backend
class FairScaleBackend(Backend):
    """OSS partitions the optimizer, ShardedDataParallel sends each gradient to its owner."""

    name: ClassVar[str] = "fairscale"
    facts: ClassVar[EngineFacts] = EngineFacts(
        strategies=KEEP_GATHERED,  # ZeRO-2: gradients and optimizer state
        option_names=("implementation",),
        divides="owners",
        adds_in_tree=True,
        stores_contiguous=True,  # OSS packs with view(-1)
    )

    @classmethod
    def check(cls, settings: Settings) -> Settings:
        settings = super().check(settings)
        asked = settings.options.get("implementation")
        if settings.has_replicas and settings.mesh.shape[1] == 1:
            raise UnsupportedByBackend(
                f"{shape_text(settings.mesh)}, where nothing is divided", cls.name, "use backend='ddp', without a mesh"
            )
        if asked not in (None, *IMPLEMENTATIONS):
            raise ConfigurationError(
                f"backend 'fairscale', implementation={asked!r}: expected 'real' (FairScale 0.4.13, patched), 'native' "
                "(fsshard's own), or None for the first where it is installed"
            )
        name = asked or ("native" if settings.has_replicas else "real")  # the same on all ranks
        try:
            about = _implementation(name).about
        except MissingExtra:
            if asked:
                raise
            name, about = "native", _implementation("native").about
        return replace(settings, options={**settings.options, "implementation": name}, about=about)

    def shard(self) -> nn.Module:
        self._oss = _implementation(self.settings.options["implementation"])
        self._optimizers: list[PartitionedOptimizer] = []
        self._places: list[tuple[nn.Parameter, int]] = []  # where OSS has put parameters
        self._reduction: EngineReduction | None = None
        self._is_covered = False
        for entry in self.entries.values():
            entry.parameter.data = entry.parameter.data.contiguous()  # OSS flattens with view(-1)
            entry.group = self._owners_group
        return self.module

    # ------------------------------------------------------------------------------------------ training

    def before_forward(self, *, training: bool) -> None:
        if self._reduction is not None:
            self._reduction.check_ended()
        super().before_forward(training=training)
        if self._reduction is None:
            if training and torch.is_grad_enabled() and any(self._flags):
                raise OptimizerError(
                    "backend 'fairscale' shards by the optimizer's partition, and this model has no optimizer yet; "
                    "before the first training step add: optimizer = fsshard.build_optimizer(model, torch.optim.Adam)"
                )
            return
        if training and torch.is_grad_enabled() and not self._is_covered:
            self._check_covered()

    def _refresh_buffers(self) -> None:
        """Put what ``p.data = ...`` has put elsewhere into new buffers: it is these that are sent after a step."""
        # Not by copying back into the old ones, and not before a step: memory that a parameter has left belongs to
        # whoever still holds it, such as a backup of the weights while their average is evaluated.
        if any(parameter.data_ptr() != place for parameter, place in self._places):
            with self._moved(), stored_names():
                for optimizer in self._optimizers:
                    cast(Any, optimizer).refresh_trainable()

    @contextlib.contextmanager
    def _moved(self) -> Iterator[None]:
        """Enter a context in which OSS puts parameters into new buffers."""
        follow = None if self.on_move is None else self.on_move()
        with contextlib.nullcontext() if follow is None else follow():
            yield
        self._places = [(e.parameter, e.parameter.data_ptr()) for e in self.all]

    def _check_covered(self) -> None:
        left = [e.name for e in self.all if e.parameter.requires_grad and self.owner(e) is None]
        if left:
            raise OptimizerError(
                f"trainable parameters in no optimizer: {', '.join(left[:5])}; FairScale reduces only what an "
                "optimizer owns. Freeze them, or add them to build_optimizer's param_groups"
            )
        self._is_covered = True  # until other parameters are trainable, or have another optimizer

    def _holds_local(self) -> bool:
        return self._reduction is not None and self._reduction.local

    def on_trainable_changed(self) -> None:
        self._is_covered = False
        if self._reduction is not None:
            with self._moved(), stored_names():
                for optimizer in self._optimizers:
                    cast(Any, optimizer).refresh_trainable()
                self._reduction = self._reduce(self._reduction)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        if self._reduction is None:
            yield
            return
        self._reduction.silenced += 1
        try:
            yield
        finally:
            if self._reduction is not None:  # the wrapped model can be handed back inside
                self._reduction.silenced -= 1

    def backward_starts(self, *, synchronised: bool) -> None:
        super().backward_starts(synchronised=synchronised)
        if self._reduction is not None:
            self._reduction.begins()

    def retire(self) -> None:
        if self._reduction is not None:
            self._reduction.detach()
        self._reduction, self._places = None, []

    def finish_backward(self, entries: Iterable[Entry]) -> None:
        self._refresh_buffers()
        if self._reduction is not None:
            self._reduction.finish()
        super().finish_backward(entries)

    def zero_grad(self, entries: Iterable[Entry], *, set_to_none: bool) -> None:
        entries = list(entries)
        if self._reduction is not None:
            self._reduction.discard([entry.parameter for entry in entries], dropped=set_to_none)
        super().zero_grad(entries, set_to_none=set_to_none)

    def unused(self, names: Iterable[str]) -> list[str]:
        seen = self._reduction.seen if self._reduction is not None else set()
        chosen = (self.entries[name] for name in names)
        return [e.name for e in chosen if e.parameter.requires_grad and id(e.parameter) not in seen]

    @property
    def _owners_group(self) -> dist.ProcessGroup | None:
        """Return the ranks that divide the optimizer: this rank's replica, where a 2-D mesh makes several."""
        shards: dist.ProcessGroup | None = self.settings.group
        return self.settings.mesh.get_group(1) if self.settings.has_replicas else shards

    def owner(self, entry: Entry) -> int | None:
        owners = (optimizer.owner_of(entry.parameter) for optimizer in self._optimizers)
        return next((rank for rank in owners if rank is not None), None)

    # ------------------------------------------------------------------------------------------ optimizer

    def new_optimizer(
        self, optimizer_class: type[Optimizer], groups: list[dict[str, Any]], defaults: dict[str, Any]
    ) -> Optimizer:
        parameters = _parameters_of(groups)
        dtypes = {parameter.dtype for parameter in parameters}
        # FairScale packs a device's parameters into one buffer: "Different types for the bucket and the param".
        if len(dtypes) > 1 and self.settings.options["implementation"] == "real":
            names = ", ".join(sorted(str(d).removeprefix("torch.") for d in dtypes))
            raise UnsupportedByBackend(
                f"one optimizer over storage of several dtypes ({names})",
                self.name,
                "build one optimizer per dtype with build_optimizer(model, cls, param_groups=[...]), pass "
                "implementation='native' to fsshard.wrap, or use 'ddp'",
            )
        self._is_covered = False
        if self._reduction is not None:
            self._reduction.detach()
        given = set(map(id, parameters))
        self._optimizers = [optimizer for optimizer in self._optimizers if not _replaced(optimizer, given)]
        own_settings = list(map(set, groups))
        with self._moved(), stored_names():
            optimizer = self._oss(groups, optim=optimizer_class, group=self._owners_group, **defaults)
            _drop_settings_of_no_group(optimizer, own_settings, defaults)
            self._optimizers.append(optimizer)
            self._reduction = self._reduce()
        self._flags = [entry.parameter.requires_grad for entry in self.all]
        return cast(Optimizer, optimizer)

    def _reduce(self, before: EngineReduction | None = None) -> EngineReduction:
        everyone, replicas = self.settings.group, None
        if everyone is not None and self.settings.has_replicas:
            replicas = Replicas(everyone=everyone, same_part=self.settings.mesh.get_group(0))
        parameters = [each for each in self.module.parameters() if each not in self.settings.ignored]
        return EngineReduction(
            parameters, self._optimizers, self._owners_group, self._reduce_dtypes(), replicas, before
        )

    def before_closure(self, optimizer: Optimizer) -> None:
        # OSS sends once per step, after it: an algorithm that moves the weights and calls the closure again (SAM) would
        # get gradients at weights of which each rank has moved its own alone, silently.
        for sharded in self._optimizers:
            if sharded.optim is optimizer:
                sharded.send_parameters()


def _drop_settings_of_no_group(optimizer: Any, given: list[set[str]], defaults: Collection[str]) -> None:
    """Take out of the groups what the class keeps elsewhere: OSS writes all of a constructor's arguments into them."""
    others = set(defaults) - set(optimizer.optim.defaults)
    for groups in (optimizer.param_groups, optimizer.optim.param_groups):
        for before, group in zip(given, groups, strict=False):
            for key in others - before:
                group.pop(key, None)


def _implementation(name: str) -> Any:
    """Import an OSS by its name.

    Raises:
        MissingExtra: FairScale is not installed.
    """
    module, _, oss = IMPLEMENTATIONS[name].partition(":")
    try:
        return getattr(import_module(module), oss)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "fairscale":
            raise
        raise MissingExtra("fairscale", "fairscale", f"backend='fairscale', implementation={name!r}") from error


def _parameters_of(groups: Iterable[dict[str, Any]]) -> list[nn.Parameter]:
    return list(itertools.chain.from_iterable(group["params"] for group in groups))


def _replaced(optimizer: Any, given: Collection[int]) -> bool:
    """Retire an optimizer if a later one has some of its parameters (by id): it would send buffers that they left."""
    if all(id(parameter) not in given for parameter in _parameters_of(optimizer.param_groups)):
        return False

    def step(*_: Any, **__: Any) -> NoReturn:
        raise OptimizerError(
            "build_optimizer has given some of this optimizer's parameters to a later one; under backend 'fairscale' a "
            "parameter has one optimizer, whose buffers are sent. Step the later one, or use backend='ddp'"
        )

    optimizer.step = step
    return True
