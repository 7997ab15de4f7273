"""The interface of a backend: the methods through which all other rooms use an engine.

A backend executes a :class:`~fsshard.planning.plan.Plan` on one module. Outside this package nobody asks which backend
it is; all differences between engines are behind these methods. They are written in four parts, a file for each:

* :mod:`~fsshard.backends.training`: what an engine is told, and asked, in a step;
* :mod:`~fsshard.backends.user_module`: what the user's modules hold and show;
* :mod:`~fsshard.backends.engine_costs`: bytes by arithmetic, and simulations;
* :mod:`~fsshard.backends.deferred_start`: units that get their memory one at a time;

and :mod:`~fsshard.backends.engine_state` has the facts that a class states of itself. What is the same for all engines
are plain functions over the entries: :mod:`~fsshard.backends.whole`, :mod:`~fsshard.backends.optimizer_state`.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from torch import nn

from fsshard.backends.alternatives import who_has_option, who_has_strategy
from fsshard.backends.deferred_start import DeferredStart
from fsshard.backends.engine_costs import EngineCosts
from fsshard.backends.partial_state_guards import PartsGuard
from fsshard.backends.settings import HINTS, Settings
from fsshard.backends.step_counts import StepCounts
from fsshard.backends.training import Training
from fsshard.backends.user_module import UserModule
from fsshard.complex_params.flattened import raw_state
from fsshard.errors import ConfigurationError, UnsupportedByBackend
from fsshard.model.unit_inputs import mark_unit_inputs
from fsshard.parallel.meshes import shape_text
from fsshard.planning.entries import collect_entries
from fsshard.planning.torch_settings import HYBRIDS

__all__ = ["Backend"]

log = logging.getLogger("fsshard")


class Backend(DeferredStart, UserModule, EngineCosts, Training):
    """One engine executing one plan: a subclass in a file of its own, with :meth:`shard` and what differs.

    Attributes:
        name: what the user writes in ``backend=``.
        module: the user's model, tensorfied.
        keys: state-dict key of each parameter -> its name; ``key_order`` has all keys in order.
        engine: what forward calls: the user's model, or the engine's wrapper around it.
        entries: the distinct parameters by name; ``all`` is the list of them.
        step_counts: the steps that optimizers over this model have taken on this rank.
        follower: a weak reference to the method that makes the context of :meth:`relocating_storage`, or None.
    """

    def __init__(self, module: nn.Module, settings: Settings) -> None:
        self.module = module
        self.settings = self._without_hints(settings)
        self.step_counts = StepCounts(settings.group, settings.device)
        self.requested: Any = None  # the config for state dicts that torch's FSDP.state_dict_type was given
        mesh = settings.model_mesh
        self.entries = collect_entries(module, None if mesh is None else mesh.layouts)
        self.key_order, self.keys = self._name_keys()
        if not self.facts.marks_unit_inputs:
            modules = dict(module.named_modules())
            for name in settings.plan.unit_names:
                mark_unit_inputs(modules[name])
        self._regions = self._unit_modules() if settings.source is not None else {}
        if self.facts.divides != "elements":
            units = {unit.name: unit for unit in settings.plan.units}
            for name in (*settings.plan.unit_names, ""):  # as where each is sharded before the next is made
                self.make_real(units[name])
        self.all = list(self.entries.values())
        self.follower: weakref.WeakMethod[Callable[[], contextlib.AbstractContextManager[None]]] | None = None
        self._flags = [entry.parameter.requires_grad for entry in self.all]
        self.pending, self.drops = weakref.WeakSet(), set()
        self._parts = dict(module.named_modules())
        self.engine = self.shard()
        parts = [entry.parameter for entry in self.all]
        self.guard = PartsGuard(module, parts, torchs_own=self.facts.has_dtensors) if self.holds_parts else None

    def _without_hints(self, settings: Settings) -> Settings:
        """``settings`` with the options that this engine has; rank 0 names the others."""
        others = sorted(settings.options.keys() - set(self.facts.option_names))
        if not others:
            return settings
        if settings.rank == 0:
            log.info("backend %r has no use for %s", self.name, ", ".join(others))
        return replace(
            settings, options={name: settings.options[name] for name in settings.options if name not in others}
        )

    def _name_keys(self) -> tuple[list[str], dict[str, str]]:
        """The state dict's keys in order, and for those of parameters their names.

        Taken before sharding: parameters can be told by identity then, and FSDP1 registers them in another order.
        """
        by_id = {id(slot.parameter): e.name for e in self.entries.values() for slot in e.slots}
        with raw_state():
            raw = self.module.state_dict(keep_vars=True)
        return list(raw), {key: by_id[id(value)] for key, value in raw.items() if id(value) in by_id}

    @classmethod
    def check(cls, settings: Settings) -> None:
        """Raise for every setting that this backend cannot honour. Local: runs before any collective."""
        for name in sorted(set(settings.options) - set(cls.facts.option_names) - HINTS):
            others = [repr(other) for other in who_has_option(name)]
            known = ", ".join(cls.facts.option_names) or "none"
            whose = f"backend={' or '.join(others)} has; leave it out" if others else "no backend has"
            raise ConfigurationError(f"backend {cls.name!r} has no option {name}, which {whose}. Its options: {known}")
        if settings.sharding_strategy not in (None, *cls.facts.strategies):
            offer = who_has_strategy(cast(str, settings.sharding_strategy))
            raise UnsupportedByBackend(f"sharding_strategy={settings.sharding_strategy!r}", cls.name, offer)
        if settings.cpu_offload:
            cls.check_offload(settings)
        if settings.sharding_strategy in HYBRIDS and not settings.has_replicas:
            raise UnsupportedByBackend(
                f"sharding_strategy={settings.sharding_strategy!r} without a 2-D device_mesh",
                cls.name,
                "pass device_mesh=init_device_mesh(device, (replicas, shards))",
            )
        if settings.has_replicas and not set(HYBRIDS) & set(cls.facts.strategies):
            raise UnsupportedByBackend(
                f"device_mesh={shape_text(settings.mesh)}, since all of its ranks hold the whole model",
                cls.name,
                "leave device_mesh out where these are all ranks, else pass process_group=torch.distributed.new_group("
                "ranks); or use backend='fsdp2', 'fsdp' or 'fairscale'",
            )

    @classmethod
    def resolved(cls, settings: Settings) -> Settings:
        """``settings`` with what this rank decides by itself, so that ranks can tell whether they decide alike."""
        return settings

    @property
    def about(self) -> str:
        """Whose engine this is, where there are several of one name; else empty."""
        return ""

    @classmethod
    def check_offload(cls, settings: Settings) -> None:
        """Raise unless ``cpu_offload`` can be honoured. Local."""
        raise UnsupportedByBackend("cpu_offload=True", cls.name, "use backend='fsdp2' or 'fsdp' on a GPU")

    @abstractmethod
    def shard(self) -> nn.Module:
        """Execute the plan on ``self.module``; update ``entries[...].parameter``; return the engine."""
