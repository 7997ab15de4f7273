"""What a backend is: the few methods through which everything else talks to an engine.

A backend executes a :class:`~fsshard.plan.Plan` on one module. Outside this package nobody asks which backend it
is; all differences between engines are behind these methods.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from fsshard.agreement import per_rank
from fsshard.backends.borders import mark_border
from fsshard.backends.cost import UnitCost, replicated
from fsshard.backends.guards import PartsGuard
from fsshard.backends.step_counts import StepCounts
from fsshard.compiling import Compilation
from fsshard.complex_params import Kind, ParameterSlot, parameter_slots, raw_state
from fsshard.errors import ConfigurationError, OptimizerError, UnsupportedByBackend
from fsshard.meta import Source
from fsshard.plan import Plan, Unit
from fsshard.policies import Precision

__all__ = ["Backend", "Entry", "Settings", "per_rank"]

State = dict[str, Any]
log = logging.getLogger("fsshard")

OWN_FILES = frozenset({"load_checkpoint", "push_to_hub", "save_checkpoint", "save_pretrained"})
"""Methods by which models of neuraloperator and transformers read and write themselves, on one rank as a rule: on
shards they write half of the numbers under FSDP1, without an error, and wait for ever under FSDP2."""


HINTS = frozenset(
    {
        *("backward_prefetch", "forward_prefetch", "limit_all_gathers"),
        *("bucket_cap_mb", "gradient_as_bucket_view", "static_graph"),
    }
)
"""Options of torch's engines about when their gathers run and how their buckets lie. They change no number, and an
engine that has no such gathers or buckets does what they ask for by having none: every backend takes them."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What :func:`fsshard.wrap` was asked for, checked and in one form.

    Attributes:
        plan: the units and ties to execute.
        group: ranks that share the work; None on one process without a process group.
        mesh: the device mesh handed in, or None.
        device: where the model is.
        sharding_strategy: name of torch's ``ShardingStrategy``, or None for the backend's own.
        cpu_offload: keep shards in host memory between steps.
        find_unused_parameters: a parameter may stay without gradient, on all ranks or on some.
        options: what else the backend's engine takes.
        source: gives a model on the meta device its numbers; None for a real one.
        compilation: how units are compiled; None where they are not.
    """

    plan: Plan
    group: dist.ProcessGroup | None
    device: torch.device
    mesh: Any = None
    sharding_strategy: str | None = None
    cpu_offload: bool = False
    find_unused_parameters: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    source: Source | None = None
    compilation: Compilation | None = None

    @property
    def precision(self) -> Precision:
        """The mixed-precision policy."""
        return self.plan.precision

    @property
    def world_size(self) -> int:
        """Ranks that share the work."""
        return self.group.size() if self.group is not None else 1

    @property
    def rank(self) -> int:
        """This process's rank within the group."""
        return self.group.rank() if self.group is not None else 0


@dataclass(eq=False)
class Entry:
    """One distinct parameter under an engine.

    Attributes:
        name: the user's name, the first one where tied.
        kind: how storage and user's view relate.
        stored_shape: shape of the whole stored (real) tensor.
        slots: every place that holds it.
        parameter: the engine's parameter between steps: whole, a DTensor, or a flat shard.
    """

    name: str
    kind: Kind
    stored_shape: torch.Size
    slots: list[ParameterSlot]
    parameter: nn.Parameter

    @property
    def shape(self) -> torch.Size:
        """The shape that the user sees."""
        return self.kind.user_shape(self.stored_shape)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the user sees."""
        return self.kind.user_dtype(self.parameter.dtype)


def collect_entries(module: nn.Module) -> dict[str, Entry]:
    """The distinct parameters of ``module`` by first name, in the model's order."""
    found: dict[int, Entry] = {}
    for slot in parameter_slots(module):
        stored = slot.parameter
        if id(stored) in found:
            found[id(stored)].slots.append(slot)
        else:
            found[id(stored)] = Entry(slot.name, slot.kind, stored.shape, [slot], stored)
    return {entry.name: entry for entry in found.values()}


class Backend(ABC):
    """One engine executing one plan.

    Attributes:
        name: what the user writes in ``backend=``.
        module: the user's model, tensorfied.
        keys: state-dict key of each parameter -> its name; ``key_order`` has all keys in order.
        engine: what forward calls: the user's model, or the engine's wrapper around it.
        entries: the distinct parameters by name; ``all`` is the list of them.
        step_counts: the steps that optimizers over this model have taken on this rank.
        follower: a weak reference to the method that makes the context of :meth:`moving`, or None.
    """

    name: ClassVar[str]
    strategies: ClassVar[tuple[str, ...]] = ()
    option_names: ClassVar[tuple[str, ...]] = ()
    stores_scalars_as_vectors: ClassVar[bool] = False  # the engine refuses 0-dim parameters
    stores_contiguous: ClassVar[bool] = False  # the engine holds contiguous parameters only, or permutes others
    shards_within_parameters: ClassVar[bool] = False  # a rank can hold a part of a parameter
    partitions_optimizer: ClassVar[bool] = False  # a rank's optimizer sees other numbers than another rank's
    needs_whole: ClassVar[frozenset[str]] = frozenset()  # methods of user models that cannot work on parts
    marks_borders: ClassVar[bool] = False  # the engine itself puts an autograd node at the inputs of each unit
    presents_parameters: ClassVar[bool] = False  # the engine itself shows a unit its parameters in the unit's dtype
    takes_sparse_gradients: ClassVar[bool] = True  # of embeddings, in float32
    has_dtensors: ClassVar[bool] = False  # parts are DTensors, which torch.distributed.checkpoint knows
    differentiates_parameters: ClassVar[bool] = True  # its parameters themselves are in the graph of a forward
    hooks_outputs: ClassVar[bool] = False  # the engine learns of a backward by the outputs of the forward
    owns_optimizer: ClassVar[bool] = False  # a plain torch optimizer over the engine's parameters would be wrong

    def __init__(self, module: nn.Module, settings: Settings) -> None:
        self.module = module
        self.settings = self._without_hints(settings)
        self.step_counts = StepCounts(settings.group, settings.device)
        self.requested: Any = None  # the config for state dicts that torch's FSDP.state_dict_type was given
        self.entries = collect_entries(module)
        self.trainable = {name: entry.parameter.requires_grad for name, entry in self.entries.items()}
        self.key_order, self.keys = self._name_keys()
        if not self.marks_borders:
            modules = dict(module.named_modules())
            for name in settings.plan.unit_names:
                mark_border(modules[name])
        self._regions = self._unit_modules() if settings.source is not None else {}
        if not self.shards_within_parameters:
            units = {unit.name: unit for unit in settings.plan.units}
            for name in (*settings.plan.unit_names, ""):  # as where each is sharded before the next is made
                self.make_real(units[name])
        self.all = list(self.entries.values())
        self.follower: weakref.WeakMethod[Callable[[], contextlib.AbstractContextManager[None]]] | None = None
        self._flags = [entry.parameter.requires_grad for entry in self.all]
        self._parts = list(module.modules())
        self.engine = self._shard()
        parts = [entry.parameter for entry in self.all]
        self.guard = PartsGuard(module, parts, torchs_own=self.has_dtensors) if self.holds_parts else None

    def _without_hints(self, settings: Settings) -> Settings:
        """``settings`` with the options that this engine has; rank 0 names the others."""
        others = sorted(settings.options.keys() - set(self.option_names))
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

    # ------------------------------------------------------------------------------------------ before sharding

    @classmethod
    def check(cls, settings: Settings) -> None:
        """Raise for every setting that this backend cannot honour. Local: runs before any collective."""
        for name in sorted(set(settings.options) - set(cls.option_names) - HINTS):
            others = [repr(other.name) for other in _all_backends() if name in other.option_names]
            known = ", ".join(cls.option_names) or "none"
            whose = f"backend={' or '.join(others)} has; leave it out" if others else "no backend has"
            raise ConfigurationError(f"backend {cls.name!r} has no option {name}, which {whose}. Its options: {known}")
        if settings.sharding_strategy not in (None, *cls.strategies):
            offer = _offered(cast(str, settings.sharding_strategy))
            raise UnsupportedByBackend(f"sharding_strategy={settings.sharding_strategy!r}", cls.name, offer)
        if settings.cpu_offload:
            cls._check_offload(settings)
        if settings.mesh is not None and settings.mesh.ndim == 2 and "HYBRID_SHARD" not in cls.strategies:
            raise UnsupportedByBackend(
                "a 2-D device_mesh", cls.name, "pass a 1-D slice such as mesh['data'], or use backend='fsdp2' or 'fsdp'"
            )

    @classmethod
    def _check_offload(cls, settings: Settings) -> None:
        raise UnsupportedByBackend("cpu_offload=True", cls.name, "use backend='fsdp2' or 'fsdp' on a GPU")

    def _unit_modules(self) -> dict[str, list[nn.Module]]:
        """The modules of each unit, children before their parents, without those of the units below it."""
        modules = dict(self.module.named_modules())
        units = {modules[name] for name in self.settings.plan.unit_names}
        return {unit.name: _region(modules[unit.name], units) for unit in self.settings.plan.units}

    def make_real(self, unit: Unit) -> None:
        """Give memory and numbers to a unit of a model on the meta device. Before it is sharded; collective.

        Every backend calls it for the same units in the same order, so that they draw the same random numbers.
        """
        source = self.settings.source
        if source is None:
            return
        entries = [self.entries[name] for name in unit.parameters]
        region = self._regions[unit.name]
        for entry, parameter in zip(entries, source.make_real(region, [e.slots for e in entries]), strict=True):
            entry.parameter = parameter

    @abstractmethod
    def _shard(self) -> nn.Module:
        """Execute the plan on ``self.module``; update ``entries[...].parameter``; return the engine."""

    # ------------------------------------------------------------------------------------------ training

    def before_forward(self, *, training: bool) -> None:
        """Called before each forward through :class:`~fsshard.sharded.ShardedModule`."""
        flags = [entry.parameter.requires_grad for entry in self.all]
        if flags != self._flags:
            self._on_trainable_changed(
                [e.name for e in self.all if e.parameter.requires_grad != self.trainable[e.name]]
            )
            self.trainable = {entry.name: entry.parameter.requires_grad for entry in self.all}
            self._flags = flags

    def shows(self, entry: Entry, found: object) -> bool:
        """Whether the engine itself shows ``found`` to a module, in place of the parameter of ``entry``."""
        return False

    def look_again(self) -> None:
        """Modules without trainable parameters have come or gone."""
        self._parts = list(self.module.modules())

    def buffers(self) -> list[Tensor]:
        """The distinct buffers of the model's modules as they are now, without a walk through the modules."""
        found = {id(buffer): buffer for part in self._parts for buffer in part._buffers.values()}
        return [buffer for buffer in found.values() if buffer is not None]

    def trains_buffers(self) -> bool:
        """Whether a module that has buffers is in training mode, whatever mode the model is in."""
        return any(part.training and part._buffers for part in self._parts)

    def _on_trainable_changed(self, changed: list[str]) -> None:
        """Parameters were frozen or unfrozen since the last forward."""

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes within accumulate local gradients without communication."""
        yield

    def finish_backward(self, entries: Iterable[Entry]) -> None:
        """Make the gradients of ``entries`` final. Collective and idempotent; before a step and before clipping."""

    def accumulates(self) -> bool:
        """Whether the graph task that runs adds to parameters' gradients; ``torch.autograd.grad`` does not."""
        # Below a transform of torch.func nothing has a gradient of its own.
        return not torch._C._are_functorch_transforms_active() and any(map(_is_accumulated, self._leaves()))

    def _leaves(self) -> Iterator[Tensor]:
        """The tensors to which autograd adds gradients."""
        return (entry.parameter for entry in self.all if entry.parameter.requires_grad)

    def backward_starts(self, *, synchronised: bool) -> None:
        """The backward of a forward through :class:`~fsshard.sharded.ShardedModule` begins (in its graph task)."""

    def derivative_starts(self) -> None:
        """``torch.autograd.grad`` begins to pass through such a forward (in its graph task)."""

    def moving(self) -> contextlib.AbstractContextManager[None]:
        """The context in which an engine puts parameters elsewhere: nobody keeps the memory that they leave."""
        follow = None if self.follower is None else self.follower()
        return contextlib.nullcontext() if follow is None else follow()

    @property
    def has_no_shapes(self) -> bool:
        """Whether what a rank holds of a parameter has no shape of its own, on this rank or on another."""
        return False

    @property
    def holds_parts(self) -> bool:
        """Whether the user's modules hold parts of their parameters, so that their state dicts are no model's."""
        return False

    def before_showing(self) -> None:
        """Parameters are about to be handed to the user, who may write to them."""

    def engine_works(self) -> None:
        """What follows is the engine's and ours, and may read the parts of parameters that ranks hold."""

    def user_works(self) -> None:
        """What follows is neither a forward nor the engine's: losses, penalties, logs."""

    def forward_failed(self) -> None:
        """A forward has raised; what it left half done must not be seen by the next one."""

    def settle(self) -> None:
        """Put parameters that a forward left whole back to their shards, so that the next one sees what is written."""

    def unused(self, names: Iterable[str]) -> list[str]:
        """Those of ``names`` that are trainable and received no gradient on this rank."""
        chosen = (self.entries[name] for name in names)
        return [e.name for e in chosen if e.parameter.requires_grad and e.parameter.grad is None]

    def zero_grad(self, entries: Iterable[Entry], *, set_to_none: bool) -> None:
        """Drop (or zero) the gradients of ``entries``."""
        for entry in entries:
            parameter = entry.parameter
            if parameter.grad is None:
                continue
            if set_to_none:
                parameter.grad = None
            else:
                parameter.grad.detach().zero_()

    def wires(self) -> dict[nn.Parameter, torch.dtype | None]:
        """In which dtype each parameter's gradient travels, by the plan's units; None is its own."""
        units = {unit.name: unit.wire for unit in self.settings.plan.units}
        infos = self.settings.plan.parameters
        return {entry.parameter: units[infos[name].unit] for name, entry in self.entries.items()}

    # ------------------------------------------------------------------------------------------ what it costs

    @property
    def divided_among(self) -> int:
        """How many ranks share one copy of what the engine divides."""
        return self.settings.world_size

    @property
    def together(self) -> Mapping[str, tuple[str, ...]]:
        """Unit -> names of the parameters that travel with it; units that travel with another are left out."""
        return {unit.name: unit.parameters for unit in self.settings.plan.units}

    def unit_cost(self, unit: Unit) -> UnitCost:
        """What ``unit`` costs on this rank, by arithmetic. Local."""
        return replicated(unit.nbytes, self._reduced(unit), self.settings.world_size)

    def _reduced(self, unit: Unit) -> int:
        """Bytes of the gradients of ``unit`` as they travel."""
        return sum(e.stored_shape.numel() * (unit.wire or e.parameter.dtype).itemsize for e in self._trained(unit))

    def _trained(self, unit: Unit) -> list[Entry]:
        entries = (self.entries[name] for name in unit.parameters)
        return [entry for entry in entries if entry.parameter.requires_grad]

    # ------------------------------------------------------------------------------------------ local views

    def local_value(self, entry: Entry) -> Tensor:
        """This rank's part of the stored parameter as a plain tensor (no copy)."""
        return entry.parameter.detach()

    def local_grad(self, entry: Entry) -> Tensor | None:
        """This rank's part of the stored gradient as a plain tensor, or None."""
        return entry.parameter.grad

    def local_range(self, entry: Entry) -> tuple[int, int]:
        """[start, stop) of this rank's part among the elements of the whole stored tensor, flattened.

        In the order in which the engine flattens it: see :meth:`has_ranges`.
        """
        return 0, entry.stored_shape.numel()

    def has_ranges(self, entry: Entry) -> bool:
        """Whether the engine divides ``entry`` in the order of its indices, so that a part is a range of elements.

        The same on every rank.
        """
        return not entry.kind.order or not self.shards_within_parameters or self.divided_among == 1

    def held_by_engine(self) -> dict[str, list[Tensor]]:
        """What the engine keeps out of the entries' sight, for reports of memory: kind -> tensors.

        The kinds are ``"parameters"``, ``"gradients"`` and ``"gathered units"``. A tensor whose storage was freed
        may be among them.
        """
        return {}

    def owned(self, entry: Entry) -> bool:
        """Whether this rank's gradient of ``entry`` counts in a norm (each element must count on one rank)."""
        return True

    @property
    def gradients_on_owners(self) -> bool:
        """Whether each gradient is whole and on one rank."""
        divided = self.partitions_optimizer and self.settings.world_size > 1
        return divided and not self.shards_within_parameters

    def counts_all_ranks(self, entry: Entry) -> bool:
        """Whether a norm of this rank's stored gradient of ``entry`` is not what the user means by its norm."""
        return entry.kind.is_complex or (self.partitions_optimizer and self.settings.world_size > 1)

    def reduce_norm(self, value: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        """Combine a scalar over the ranks among which gradients are divided."""
        return value

    # ------------------------------------------------------------------------------------------ optimizer

    @classmethod
    def cut_in_two(cls, whole: Tensor, *, in_order: bool = True) -> tuple[Tensor, Tensor] | None:
        """The parts of a parameter as the optimizers of two ranks see them; None where it stays whole. Local.

        For trying an optimizer: cut at a multiple of 64 numbers, as :mod:`fsshard.optimizer_probe` says. Not
        ``in_order`` are parameters whose dims lie in another order in memory.
        """
        return None

    def new_optimizer(
        self, optimizer_class: type[Optimizer], groups: list[dict[str, Any]], defaults: dict[str, Any]
    ) -> Optimizer:
        """An optimizer over ``entries[...].parameter``; its class comes already able to see complex numbers."""
        return optimizer_class(groups, **defaults)

    def before_closure(self, optimizer: Optimizer) -> None:
        """A closure of ``step`` is about to run forwards, which must see what ``optimizer`` has changed. Collective.

        Args:
            optimizer: over this rank's parts; whether it has changed any is not known.
        """
        self.settle()

    def optimizer_state(self, optimizer: Optimizer, entry: Entry) -> State:
        """The state of ``entry`` on this rank (tensors shaped as the stored local part, or not per element)."""
        return dict(optimizer.state.get(entry.parameter, {}))

    def set_optimizer_state(self, optimizer: Optimizer, entry: Entry, state: State) -> None:
        """Replace the state of ``entry`` on this rank."""
        if state:
            optimizer.state[entry.parameter] = state
        else:
            optimizer.state.pop(entry.parameter, None)

    def gather_states(self, optimizer: Optimizer, entries: list[Entry]) -> Iterator[tuple[Entry, State]]:
        """Entry by entry the whole state, tensors as stored (real). Collective, so run it to its end on every rank.

        A rank can hold no part of a parameter, and then no state for it; so the ranks first tell each other what
        there is, in one exchange.
        """
        states = [self.optimizer_state(optimizer, entry) for entry in entries]
        mine = [self._describe(entry, state) for entry, state in zip(entries, states, strict=True)]
        tables = per_rank(self.settings.group, mine) if self.settings.group is not None else [mine]
        described: list[dict[str, Any]] = [
            {key: value for found in reversed(column) for key, value in found.items()}
            for column in zip(*tables, strict=True)
        ]
        travelling = (
            (entry, state.get(key), item)
            for entry, state, items in zip(entries, states, described, strict=True)
            for key, item in items.items()
            if isinstance(item, _Travels)
        )
        whole = self._gather_items(travelling)
        for entry, items in zip(entries, described, strict=True):
            yield (
                entry,
                {key: next(whole) if isinstance(item, _Travels) else _unpacked(item) for key, item in items.items()},
            )

    def _describe(self, entry: Entry, state: State) -> dict[str, Any]:
        """Per key either the value itself, or what the others need to know of a tensor that must travel."""
        local = self.local_value(entry)
        if self.shards_within_parameters and not local.numel():
            return {}  # what a rank without elements counts (Adagrad's step stays 0 there) means nothing
        found: dict[str, Any] = {}
        for key, value in state.items():
            if _is_per_element(value, local):
                found[key] = _Travels(tuple(value.shape), value.dtype)
            elif isinstance(value, Tensor) and value.dim() and self.shards_within_parameters:
                raise OptimizerError(
                    f"state {key!r} of {entry.name!r} has shape {tuple(value.shape)}, its local part has "
                    f"{tuple(local.shape)}: it cannot be put together from the ranks' parts"
                )
            else:
                found[key] = _packed(value)
        return found

    def _gather_items(self, items: Iterable[tuple[Entry, Tensor | None, _Travels]]) -> Iterator[Tensor]:
        """The whole tensors of parts of the state, None where this rank has no part."""
        return self.gather_all(
            (entry, torch.zeros_like(self.local_value(entry), dtype=item.dtype) if value is None else value)
            for entry, value, item in items
        )

    def scatter_state(self, optimizer: Optimizer, entry: Entry, state: State) -> None:
        """Inverse of :meth:`gather_states`: keep this rank's part of the whole state. No communication."""
        whole = entry.stored_shape
        part = {
            key: self.scatter(entry, value).to(self.local_value(entry).device, copy=True)
            if isinstance(value, Tensor) and value.shape == whole
            else _copied(value)
            for key, value in state.items()
        }
        self.set_optimizer_state(optimizer, entry, part)

    # ------------------------------------------------------------------------------------------ whole tensors

    def gather(self, entry: Entry, local: Tensor) -> Tensor:
        """The whole stored tensor from every rank's part of it: a new tensor on every rank. Collective."""
        return local.detach().clone()

    def gather_all(self, parts: Iterable[tuple[Entry, Tensor]]) -> Iterator[Tensor]:
        """:meth:`gather` of many. Collective, so run it to its end on every rank."""
        for entry, local in parts:
            yield self.gather(entry, local)

    def stream(self, entry: Entry, *, rank0_only: bool, device: torch.device) -> Tensor | None:
        """The whole stored parameter as a new tensor on ``device``; None where it is not kept. Collective."""
        if rank0_only and self.settings.rank:
            return None
        return self.local_value(entry).to(device, copy=True)

    def gather_grads(self) -> Iterator[tuple[Entry, Tensor | None]]:
        """Entry by entry the whole stored gradient on every rank, or None where no rank has one.

        Collective, so run it to its end on every rank.
        """
        mine = [(entry, self.local_grad(entry)) for entry in self.entries.values()]
        present = torch.tensor([g is not None for _, g in mine], dtype=torch.uint8, device=self.settings.device)
        if self.settings.group is not None:
            dist.all_reduce(present, op=dist.ReduceOp.MAX, group=self.settings.group)
        flags: list[int] = present.tolist()
        whole = self._gather_gradients(
            (entry, torch.zeros_like(self.local_value(entry)) if gradient is None else gradient)
            for (entry, gradient), flag in zip(mine, flags, strict=True)
            if flag
        )
        for (entry, _), flag in zip(mine, flags, strict=True):
            yield entry, next(whole) if flag else None

    def _gather_gradients(self, parts: Iterable[tuple[Entry, Tensor]]) -> Iterator[Tensor]:
        return self.gather_all(parts)

    def scatter(self, entry: Entry, whole: Tensor) -> Tensor:
        """This rank's part of a whole stored tensor. No communication."""
        return whole

    def load_parameter(self, entry: Entry, whole: Tensor) -> None:
        """Copy this rank's part of ``whole`` into the parameter."""
        local = self.local_value(entry)
        local.copy_(self.scatter(entry, whole.to(dtype=local.dtype)).view(local.shape))

    @property
    def hears_state_dict_type(self) -> bool:
        """Whether torch's ``FSDP.state_dict_type`` finds wrappers of its own in the model, and tells them."""
        return False

    def requested_state_dict(self) -> Any:
        """The config that torch's own context for state dicts has set around the model, or None."""
        return self.requested

    @contextlib.contextmanager
    def bare(self) -> Iterator[nn.Module]:
        """The user's model without the engine's wrappers, so that its own state-dict methods run as written."""
        with contextlib.nullcontext() if self.guard is None else self.guard.lifted():
            yield self.module

    def raw_state_dict(self) -> dict[str, Any]:
        """The user's keys; stored parameters as they are now, everything else as the model gives it."""
        with self.bare() as module, raw_state():
            return dict(module.state_dict(keep_vars=True))

    @contextlib.contextmanager
    def whole_parameters(self, whole: Mapping[str, Tensor]) -> Iterator[None]:
        """Let the user's modules hold ``whole`` in place of their shards."""
        replacements = {name: nn.Parameter(value, self.trainable[name]) for name, value in whole.items()}
        before = [(slot, slot.owner._parameters[slot.stored]) for e in self.entries.values() for slot in e.slots]
        for entry in self.entries.values():
            for slot in entry.slots:
                slot.owner._parameters[slot.stored] = replacements[entry.name]
        try:
            with contextlib.nullcontext() if self.guard is None else self.guard.whole():
                yield
        finally:
            for slot, parameter in before:
                slot.owner._parameters[slot.stored] = parameter


def _all_backends() -> list[type[Backend]]:
    from fsshard.backends import BACKENDS, backend_class

    return [backend_class(name, 1) for name in BACKENDS]


def _offered(strategy: str) -> str:
    """Who has a sharding strategy, and what each has."""
    has = [
        repr(backend.name) for backend in _all_backends() if strategy in backend.strategies and backend.name != "none"
    ]
    use = f"use backend={' or '.join(reversed(has))}" if has else "the nearest is 'HYBRID_SHARD' of 'fsdp2' and 'fsdp'"
    each = "; ".join(f"{backend.name} {', '.join(backend.strategies)}" for backend in _all_backends())
    return f"{use}, or leave it out, and each backend takes its own. They have: {each}"


def _is_accumulated(leaf: Tensor) -> bool:
    """Whether the graph task that runs adds to the gradient of ``leaf``."""
    try:
        return torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(leaf).node)
    except RuntimeError as error:
        if "running autograd.grad()" not in str(error):  # which captures this very leaf (torch 2.13)
            raise
        return False


def _region(unit: nn.Module, others: Collection[nn.Module]) -> list[nn.Module]:
    """The modules below ``unit`` that are in no other unit, and ``unit``: in the order of ``nn.Module.apply``."""
    found: list[nn.Module] = []
    for child in unit.children():
        if child not in others:
            found += _region(child, others)
    return list(dict.fromkeys([*found, unit]))


class _Travels(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)


class _Number(NamedTuple):
    value: Any
    dtype: torch.dtype


def _packed(value: Any) -> Any:
    """A value of the state, to be sent whole; tensors of one number as that, since tensors take long to pickle."""
    if not isinstance(value, Tensor):
        return value
    return _Number(value.item(), value.dtype) if not value.dim() else value.detach().cpu().clone()


def _unpacked(value: Any) -> Any:
    return torch.tensor(value.value, dtype=value.dtype) if isinstance(value, _Number) else value


def _is_per_element(value: object, local: Tensor) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == local.shape


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def unhooked_step(optimizer_class: type[Optimizer]) -> Any:
    """``optimizer_class.step`` without the wrapper that runs step hooks, which the outermost optimizer runs once."""
    step: Any = optimizer_class.step
    return step.__wrapped__ if getattr(step, "hooked", False) and hasattr(step, "__wrapped__") else step
