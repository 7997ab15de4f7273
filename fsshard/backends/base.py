"""The interface of a backend: the methods through which all other rooms use an engine.

A backend executes a :class:`~fsshard.planning.plan.Plan` on one module. Outside this package nobody asks which backend
it is: all differences between engines are behind these methods, whose defaults are right for replicas, and in the
``facts`` of its class. What is the same for all engines are plain functions over the entries:
:mod:`~fsshard.backends.whole`, :mod:`~fsshard.backends.cost`.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsshard.backends.facts import EngineFacts
from fsshard.backends.part_guards import PartsGuard
from fsshard.backends.settings import Settings
from fsshard.backends.step_state import Stage, StepState
from fsshard.complex_params.flattened import forget_shown, stored_in
from fsshard.complex_params.replaced import UngatheredParameter, attributes_of
from fsshard.complex_params.shown import raw_state
from fsshard.complex_params.slots import ModuleTable, all_places
from fsshard.errors import UnsupportedByBackend
from fsshard.model.unit_inputs import mark_unit_inputs
from fsshard.oss.collectives import average, used_anywhere
from fsshard.parallel.meshes import shape_text
from fsshard.planning.entries import Entry, collect_entries
from fsshard.planning.plan import Plan, Unit
from fsshard.planning.torch_settings import HYBRIDS
from fsshard.torch_private.autograd import functorch_transforms_active, will_execute
from fsshard.torch_private.tensors import GRAD

log = logging.getLogger("fsshard")


class Backend(ABC):
    """One engine executing one plan: a subclass in a file of its own, with :meth:`shard` and what differs.

    Attributes:
        name: what the user writes in ``backend=``.
        facts: what is known of the engine without running it.
        module: the user's model, tensorfied: complex parameters are stored as pairs of reals.
        settings: what ``wrap`` was asked for.
        entries: the distinct parameters by name; ``all`` is the list of them.
        keys: state-dict key of each parameter -> its name; ``key_order`` has all keys in order.
        engine: what forward calls: the user's model, or the engine's wrapper around it.
        groups: unit -> names of the parameters that are sent with it; those sent with another unit are left out.
        step: where the model is between two optimizer steps.
        guard: refuses state dicts of a module that holds parts of parameters; None where it holds all.
        on_move: weakly, what makes the context for moving parameters, so that no view keeps the old memory; or None.
    """

    name: ClassVar[str]
    facts: ClassVar[EngineFacts] = EngineFacts()

    def __init__(self, module: nn.Module, settings: Settings) -> None:
        self.module = module
        # Of this rank's loss and gradients in the mean over ranks; None: 1, as of all.
        self.rank_weight: float | None = None
        settings = self._without_hints(settings)
        self.settings = settings
        plan = settings.plan
        layouts = None
        if settings.model_mesh is not None:
            layouts = settings.model_mesh.layouts
        table = ModuleTable(module)
        self.entries = collect_entries(table, layouts)
        self.key_order, self.keys = self._name_keys()
        if not self.facts.marks_unit_inputs:
            for name in plan.unit_names:
                mark_unit_inputs(table.modules[name])
        self._regions: dict[str, list[nn.Module]] = {}
        if settings.source is not None:
            self._regions = _unit_modules(module, plan)
        if self.facts.divides != "elements":
            # In the order in which others shard each unit before the next is made.
            for unit in plan.children_first:
                self._make_real(unit)
        self.all = list(self.entries.values())
        self.groups = {unit.name: unit.parameters for unit in plan.units}
        self.on_move: weakref.WeakMethod[Callable[[], contextlib.AbstractContextManager[None]]] | None = None
        self.step = StepState(self.name, self.facts.transitions)
        # Whether the engine trains each of them.
        self._flags = [entry.parameter.requires_grad for entry in self.all]
        # The same in the latest forward, and whether they differ.
        self._flags_of_forward = self._flags
        self._deviates = False
        self.engine = self.shard()
        self.guard: PartsGuard | None = None
        cuts = [entry.cut for entry in self.all if entry.cut is not None]
        is_flat = any(cut.buffer for cut in cuts)
        # DTensors on one rank, too: what a script may do must not depend on how many there are.
        if self.facts.has_dtensors or is_flat:
            parameters = [entry.parameter for entry in self.all]
            self.guard = PartsGuard(module, parameters, torchs_own=self.facts.has_dtensors)

    def _without_hints(self, settings: Settings) -> Settings:
        """Return the settings with the engine's own options alone."""
        own = {}
        hints = []
        for name, value in sorted(settings.options.items()):
            if name in self.facts.option_names:
                own[name] = value
            else:
                hints.append(name)
        if hints and settings.rank == 0:
            log.info("backend %r ignores %s", self.name, ", ".join(hints))
        return replace(settings, options=own)

    def _name_keys(self) -> tuple[list[str], dict[str, str]]:
        """Return the state dict's keys in order, and for those of parameters their names.

        Taken before sharding: parameters can be told by identity then, and FSDP1 registers them in another order.
        """
        names = {id(entry.parameter): entry.name for entry in self.entries.values()}
        with raw_state():
            raw = self.module.state_dict(keep_vars=True)
        keys = {}
        for key, value in raw.items():
            name = names.get(id(value))
            # What has none is a buffer, or extra state.
            if name is not None:
                keys[key] = name
        return self.settings.ignored.keys or list(raw), keys

    # ------------------------------------------------------------------------------------------ at wrap

    @classmethod
    def check(cls, settings: Settings) -> Settings:
        """Raise for every setting that this backend cannot honour. Local: runs before any collective.

        Returns:
            The settings, with what this rank decides by itself, so that ranks can tell whether they decide alike.
        """
        if settings.cpu_offload and cls.facts.divides != "elements":
            raise no_offload(cls.name)
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
        return settings

    @abstractmethod
    def shard(self) -> nn.Module:
        """Execute the plan on ``self.module``; update ``entries[...].parameter``; return the engine."""

    def _make_real(self, unit: Unit) -> None:
        """Give memory and values to a unit of a model on the meta device. Before it is sharded; collective.

        Every backend calls it for the same units in the same order, so that they draw the same random numbers.
        """
        source = self.settings.source
        if source is not None:
            entries = [self.entries[name] for name in unit.parameters]
            made = source.make_real(self._regions[unit.name], [entry.slots for entry in entries])
            for entry, parameter in zip(entries, made, strict=True):
                entry.parameter = parameter

    def simulate(self) -> None:
        """After ``wrap`` in a simulation: use collectives that return at once and send nothing."""

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let ``hook(state, bucket)`` of torch's DDP reduce gradients. Local; to be called on all ranks alike."""
        raise UnsupportedByBackend(
            f"register_comm_hook({getattr(hook, '__name__', type(hook).__name__)})",
            self.name,
            "gradients of parameters that other ranks share are summed by wrap(replicated={name: mesh['cp']}), and the "
            "dtype in which they are sent is mixed_precision=fsshard.Precision(reduce=...); or use backend='ddp'",
        )

    def retire(self) -> None:
        """Let go of the user's parameters for good, and hear of their gradients no more."""

    # ------------------------------------------------------------------------------------------ in a step

    def before_forward(self, *, training: bool) -> None:
        """Called before each forward through :class:`~fsshard.sharded.module.ShardedModule`."""
        flags = list(map(_takes_gradient, self.all))
        self._flags_of_forward = flags
        self._deviates = flags != self._flags
        # What is frozen for a reference pass without gradients (DPO) has a graph that awaits its backward.
        if self._deviates and torch.is_grad_enabled():
            self._change_trainable(flags)

    def _change_trainable(self, flags: list[bool]) -> None:
        """Let the engine train what takes a gradient now, and what a graph that awaits its backward may reach."""
        if self.step.pending:
            flags = [now or before for now, before in zip(flags, self._flags, strict=True)]
            if flags == self._flags:
                return
        for entry, now, before in zip(self.all, flags, self._flags, strict=True):
            if now:
                self.step.left.discard(entry.name)
            elif before and self._holds_local():
                self.step.left.add(entry.name)
        trained = [entry.parameter for entry in itertools.compress(self.all, flags)]
        with taking_gradients(trained):
            self.on_trainable_changed()
        self._flags = flags

    def _holds_local(self) -> bool:
        """Return whether parameters hold gradients of no_sync() that the engine forgets of those that are frozen."""
        return False

    def on_trainable_changed(self) -> None:
        """Train from now on the parameters that take gradients at this moment."""

    def forward_failed(self) -> None:
        """Undo what a forward that has raised left half done, so that the next one does not see it."""

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context in which backward passes accumulate local gradients without communication."""
        yield

    def accumulates(self) -> bool:
        """Return whether the graph task that runs adds to parameters' gradients; ``torch.autograd.grad`` does not."""
        # Below a transform of torch.func nothing has a gradient of its own.
        return not functorch_transforms_active() and any(map(_is_accumulated, self.leaves()))

    def leaves(self) -> Iterator[Tensor]:
        """Return the tensors to which autograd adds gradients."""
        return map(_parameter_of, filter(_takes_gradient, self.all))

    def derivatives_of(self, output: Tensor) -> list[Tensor]:
        """Return this rank's derivatives of a number by each whole stored parameter; nothing else changes.

        On every rank alike. Zeros stand where it does not depend on one; the graph stays for others, and for backward.
        """
        leaves = list(self.leaves())
        if not leaves:
            return []  # all are frozen
        return list(torch.autograd.grad(output, leaves, retain_graph=True, materialize_grads=True))

    def backward_starts(self, *, synchronised: bool) -> None:
        """Called when the backward of a forward through ShardedModule begins, in its graph."""
        self.step.move(Stage.SPENT if synchronised else Stage.ACCUMULATED)

    def derivative_starts(self) -> None:
        """``torch.autograd.grad`` begins to pass through such a forward (in its graph task)."""

    def finish_backward(self, entries: Iterable[Entry]) -> None:
        """Make the gradients of ``entries`` final. Collective and idempotent; before a step and before clipping."""
        if not self.step.left:
            return
        entries = list(entries)
        group = self.settings.group
        left = [entry.parameter for entry in entries if entry.name in self.step.left]
        if left and group is not None:
            has_gradient = [parameter.grad is not None for parameter in left]
            used = used_anywhere(has_gradient, group, self.settings.device)
            with torch.no_grad():
                average(list(itertools.compress(left, used)), group, {})
        self.step.left.difference_update(entry.name for entry in entries)

    def reshard(self) -> None:
        """Put parameters that a forward left whole back to their shards, so that the next one sees what is written."""

    def unused(self, names: Iterable[str]) -> list[str]:
        """Return those of ``names`` that are trainable and received no gradient on this rank."""
        unused = []
        for name in names:
            parameter = self.entries[name].parameter
            if parameter.requires_grad and parameter.grad is None:
                unused.append(name)
        return unused

    def zero_grad(self, entries: Iterable[Entry], *, set_to_none: bool) -> None:
        """Drop (or zero) the gradients of ``entries``."""
        for entry in entries:
            self.step.left.discard(entry.name)
            if set_to_none:
                # Past a setter of ours that hears what users drop.
                GRAD.__set__(entry.parameter, None)
            elif entry.parameter.grad is not None:
                entry.parameter.grad.detach().zero_()

    def _reduce_dtypes(self) -> dict[nn.Parameter, torch.dtype | None]:
        """Return in which dtype each parameter's gradient is sent, by the plan's units; None is its own."""
        dtypes = {}
        for unit in self.settings.plan.units:
            for name in unit.parameters:
                dtypes[self.entries[name].parameter] = unit.reduce_dtype
        return dtypes

    # ------------------------------------------------------------------------------------------ optimizers

    def new_optimizer(
        self, optimizer_class: type[Optimizer], groups: list[dict[str, Any]], defaults: dict[str, Any]
    ) -> Optimizer:
        """Build an optimizer over ``entries[...].parameter``; its class is able to see complex numbers already."""
        return optimizer_class(groups, **defaults)

    def before_closure(self, optimizer: Optimizer) -> None:
        """Called before a closure of ``step`` runs forwards, which must see what ``optimizer`` has changed. Collective.

        Args:
            optimizer: over this rank's parts; whether it has changed any is not known.
        """
        self.reshard()

    def owner(self, entry: Entry) -> int | None:
        """Return the rank of ``entry.group`` that alone has its final gradient and optimizer state; None: all ranks."""
        return None

    # ------------------------------------------------------------------------------------------ the user's modules

    @contextlib.contextmanager
    def bare(self) -> Iterator[nn.Module]:
        """Context with the user's model without the engine's wrappers: its own state-dict methods run as written."""
        with self._without_guard():
            yield self.module

    def shows(self, entry: Entry, found: object) -> bool:
        """Return whether the engine itself shows ``found`` to a module, in place of the parameter of ``entry``."""
        return False

    @contextlib.contextmanager
    def whole_parameters(self, whole: Mapping[str, Tensor]) -> Iterator[None]:
        """Let the user's modules hold ``whole`` in place of their shards."""
        before = []
        replacements = {}
        kind = nn.Parameter if self.settings.precision.send is None else UngatheredParameter
        for name, value in whole.items():
            shard = self.entries[name].parameter
            replacements[name] = kind(value, shard.requires_grad)
            replacements[name].__dict__.update(attributes_of(shard))
        for entry in self.entries.values():
            for slot in entry.slots:
                parameters = stored_in(slot.owner)
                before.append((slot, parameters[slot.stored]))
                parameters[slot.stored] = replacements[entry.name]
        try:
            with self._without_guard():
                yield
        finally:
            for slot, parameter in before:
                stored_in(slot.owner)[slot.stored] = parameter
                forget_shown(slot.owner)

    def _without_guard(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which state dicts of the module are not refused."""
        return contextlib.nullcontext() if self.guard is None else self.guard.lifted()

    # ------------------------------------------------------------------------------------------ costs

    def held_by_engine(self) -> dict[str, list[Tensor]]:
        """Return what the engine keeps besides the entries, for memory reports: kind -> tensors.

        The kinds are ``"parameters"``, ``"gradients"`` and ``"gathered units"``. A tensor whose storage was freed
        may be among them.
        """
        return {}

    def _gathers(self, unit: Unit) -> tuple[int, ...]:
        """Return how many ranks take part in each gather of ``unit`` in a step."""
        return ()

    def _gathered_again(self, unit: Unit) -> list[Entry]:
        """Return the parameters of ``unit`` that are gathered once more than it is."""
        return []


@contextlib.contextmanager
def taking_gradients(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Context in which those of ``parameters`` that are frozen are trainable."""
    frozen = [parameter.requires_grad_() for parameter in parameters if not parameter.requires_grad]
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def no_offload(backend: str) -> UnsupportedByBackend:
    """Return what is raised where a backend cannot keep shards in host memory."""
    return UnsupportedByBackend("cpu_offload=True", backend, "use backend='fsdp2' or 'fsdp' on a GPU")


def _unit_modules(module: nn.Module, plan: Plan) -> dict[str, list[nn.Module]]:
    """Return the modules of each unit, children before their parents, without those of the units below it."""
    modules = dict(all_places(module))
    units = {modules[name] for name in plan.unit_names}
    return {unit.name: _region(modules[unit.name], units) for unit in plan.units}


def _region(unit: nn.Module, others: Collection[nn.Module]) -> list[nn.Module]:
    """Return ``unit`` and the modules below it that are in no other unit, in the order of ``nn.Module.apply``."""
    region = {}
    for child in unit.children():
        if child not in others:
            region.update(dict.fromkeys(_region(child, others)))
    region[unit] = None
    return list(region)


# A function of Python would be a call for each parameter and step.
_parameter_of: Callable[[Entry], nn.Parameter] = attrgetter("parameter")
_takes_gradient: Callable[[Entry], bool] = attrgetter("parameter.requires_grad")


def _is_accumulated(leaf: Tensor) -> bool:
    """Return whether the graph task that runs adds to the gradient of ``leaf``."""
    node = leaf.grad_fn
    if node is None:
        # As torch's get_gradient_edge(), which makes eight calls more in each backward.
        with torch.set_grad_enabled(True):
            node = leaf.view_as(leaf).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    try:
        return will_execute(node)
    except RuntimeError as error:
        # In torch 2.13 autograd.grad says so where it captures this very leaf.
        if "running autograd.grad()" not in str(error):
            raise
        return False
