"""backend="fsdp2": torch's fully_shard. Parameters, gradients and optimizer state are DTensors sharded on dim 0.

FSDP2 gives every rank room for as many rows as the first one, so that 206 rows take the room of 256 on 64 ranks. Where
that would pad a complex weight, it is stored as a list of its numbers: no rank has room for one more than its share.
Real parameters are cut by rows, as torch does it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsshard.backends.cost import CALLS
from fsshard.backends.facts import EngineFacts, Joining, Tunable
from fsshard.backends.forward_guards import (
    READS_SHARD,
    GatheredWeights,
    LooksAtForwards,
    Place,
    check_places,
    refuse_shards_in_graph,
    written,
)
from fsshard.backends.fsdp2_gathers import ForwardPrefetch, KeptGathered, abandon, gather_ahead
from fsshard.backends.part_guards import refuse_numbers_of_parts, refuse_parameter
from fsshard.backends.registry import register_backend
from fsshard.backends.settings import Settings
from fsshard.backends.step_state import Stage
from fsshard.backends.torch_sharded import DIVIDED, TorchShardedBackend, UsageTracker
from fsshard.complex_params.flattened import class_in_front, has_own_layout, stored_in
from fsshard.complex_params.pairs import Form, real_dtype
from fsshard.complex_params.parameter_records import mark_stale, new_record
from fsshard.complex_params.replaced import attributes_of
from fsshard.complex_params.shard_tensors import shard_tensor
from fsshard.complex_params.shown import held_dtensor
from fsshard.complex_params.slots import all_places
from fsshard.complex_params.tensorfy import store_as_pairs
from fsshard.errors import ConfigurationError, ModelError, OptimizerError, StaleParameter, UnsupportedByBackend
from fsshard.model.outputs import hook_views_too
from fsshard.model.unit_inputs import mark_unit_inputs
from fsshard.nested import grad_tensors
from fsshard.planning.entries import Cut, Entry
from fsshard.planning.plan import Plan, Unit
from fsshard.planning.text import is_count
from fsshard.planning.torch_settings import KEEP_GATHERED
from fsshard.torch_private.autograd import current_graph_task_id, queue_callback
from fsshard.torch_private.fsdp2 import (
    UNSHARDED_PARAM,
    abandon_forward,
    accumulated,
    broken_off,
    cut_by,
    drop_accumulated,
    forward_goes_on,
    groups_of,
    make_gradients,
    param_groups,
    place_of,
    prepare_class,
    sharded_data,
    state_of,
)
from fsshard.torch_private.modules import call_hooks, load_state_dict_post_hooks
from fsshard.torch_private.tensors import version_of

MERGE_BELOW = 2**20
"""Bytes below which waiting for a unit takes longer than sending it: the default on gloo."""
FIRST_STEPS = 2
"""Steps whose graphs and gradients are looked through: the first ones tell."""
MANY_RANKS = 16
"""More of them gather at once in a simulation."""
MERGED_BYTES = 16 * 2**20
"""Bytes that may be merged into one unit: it is gathered from the unit's forward to its backward."""


def grouped(plan: Plan, merge_below: int, ranks: int) -> dict[str, tuple[str, ...]]:
    """Return names of the units that are gathered by themselves -> the parameters that are sent with each.

    A unit of fewer than ``merge_below`` bytes is gathered with the nearest unit around it that is not smaller: for a
    small one, waiting for collectives takes longer than its bytes. The plan and what is computed stay as they are. Not
    merged are units of other dtypes, those under mixed precision, what would leave a complex gradient at an odd place,
    and more than :data:`MERGED_BYTES`.
    """
    units = {unit.name: unit for unit in plan.units}
    small = {unit.name for unit in plan.units[1:] if unit.nbytes < merge_below}
    together: dict[str, list[Unit]] = {}
    for name, unit in units.items():
        together.setdefault(_owner(name, units, small), []).append(unit)
    places = {name: place for place, name in enumerate(plan.parameters)}
    groups: dict[str, tuple[str, ...]] = {}
    for target, members in together.items():
        merged = sum(unit.nbytes for unit in members if unit.name != target)
        if len(members) > 1 and (merged > MERGED_BYTES or not _may_merge(plan, members, places, ranks)):
            groups |= {unit.name: unit.parameters for unit in members}
        else:
            groups[target] = tuple(itertools.chain.from_iterable(unit.parameters for unit in members))
    return {name: groups[name] for name in units if name in groups}


def _may_merge(plan: Plan, members: list[Unit], places: Mapping[str, int], ranks: int) -> bool:
    if any(unit.compute is not None for unit in members):
        return False
    dtypes: set[torch.dtype] = set()
    names: list[str] = []
    for unit in members:
        dtypes.update(real_dtype(dtype) for dtype in unit.dtypes)
        names += unit.parameters
    if len(dtypes) > 1:
        return False
    # A unit's gradients are views of one tensor, one after the other, each a multiple of its rows per rank. Those that
    # lie before a complex one must be even ("Tensor must have a storage_offset divisible by 2"), in any selection of
    # them, since those without gradient are left out.
    odd = False
    for name in sorted(names, key=places.__getitem__):
        info = plan.parameters[name]
        if info.dtype.is_complex:
            if odd:
                return False
            continue
        length, *rest = [info.shape[dim] for dim in info.order] or info.shape or (1,)
        rows_of_rank = -(-length // ranks)
        odd |= bool(rows_of_rank * torch.Size(rest).numel() & 1)
    return True


def _owner(name: str, units: Mapping[str, Unit], small: Collection[str]) -> str:
    while name in small or name not in units:
        name = name.rpartition(".")[0]
    return name


# Of torch's record of a parameter. A function of Python would be a call for each parameter and step.
_TAKES_GRADIENT = operator.attrgetter("sharded_param.requires_grad")
_WHOLE_TAKES_GRADIENT = operator.attrgetter(f"{UNSHARDED_PARAM}.requires_grad")


@register_backend
class FSDP2Backend(TorchShardedBackend):
    """``fully_shard`` on every unit of the plan, children first, then on the root."""

    name: ClassVar[str] = "fsdp2"
    facts: ClassVar[EngineFacts] = replace(
        DIVIDED,
        option_names=(
            "reshard_after_forward",
            "fast_collectives",
            "merge_below",
        ),
        marks_unit_inputs=True,
        gathers_narrower=True,
        stores_contiguous=True,  # "FSDP does not support non-contiguous parameters yet" (torch 2.13)
        has_dtensors=True,
        tunable=Tunable(
            kept_gathered={"reshard_after_forward": False},
            root_stays=True,
            joining=Joining(option="merge_below", value=MERGE_BELOW, travelling=grouped),
        ),
    )

    @classmethod
    def check(cls, settings: Settings) -> Settings:
        settings = super().check(settings)
        fast = settings.options.get("fast_collectives", True)
        if not isinstance(fast, bool):
            raise ConfigurationError(f"fast_collectives={fast!r}: expected a bool")
        merge = settings.options.get("merge_below", 0)
        if not is_count(merge, least=0):
            raise ConfigurationError(f"merge_below={merge!r}: expected a number of bytes; 0 merges nothing")
        order = settings.options.get("backward_prefetch", "BACKWARD_PRE")
        if getattr(order, "name", order) != "BACKWARD_PRE":
            raise UnsupportedByBackend(
                f"backward_prefetch={order!r}",
                cls.name,
                "leave it out: it gathers a unit while another computes (BACKWARD_PRE); or use backend='fsdp'",
            )
        if "reshard_after_forward" in settings.options and settings.sharding_strategy is not None:
            raise UnsupportedByBackend(
                "reshard_after_forward together with sharding_strategy", cls.name, "give one of the two"
            )
        return settings

    def shard(self) -> nn.Module:
        from torch.distributed.device_mesh import DeviceMesh

        settings = self.settings
        for entry in self.entries.values():  # of those with gaps; the order of dims is taken care of by tensorfy
            entry.parameter.data = entry.parameter.data.contiguous()
        self.mesh = settings.mesh
        if self.mesh is None:
            assert settings.group is not None  # wrap() makes one where there is none
            self.mesh = DeviceMesh.from_group(settings.group, settings.device.type)
        self.shard_group = self.mesh.get_group(self.mesh.ndim - 1)
        modules = dict(all_places(self.module))
        self._planned = {unit.name: unit for unit in settings.plan.units}
        self._adds_in_one_order = bool(settings.options.get("fast_collectives", True))
        self._fast = self._adds_in_one_order and self._on_gloo()
        # On NCCL nothing is merged: the host runs ahead of the device.
        merge = settings.options.get("merge_below", MERGE_BELOW if self._fast else 0)
        self.groups = grouped(settings.plan, merge, self.shard_group.size())
        self._unit_modules: dict[str, Any] = {}
        self._shard_units(modules)
        self._units = list(self._unit_modules.values())
        self._add_in_one_order()
        self._adopt(modules)
        self._kept = KeptGathered(self._units, weakref.WeakMethod(self._gradients_come))
        self._watch()
        self._root_parts = [self._torchs[name] for name in self.groups.get("", ())]
        # That of a unit that stays gathered behind a forward: the root, or all.
        self._kept_state = self._state
        if self._keeps_gathered:
            self._kept_state = state_of(self._units[0])
        self._let_the_root_be_first({unit: modules[unit] for unit in self.groups if unit})
        self._choose_gathers()
        return self.module

    def _shard_units(self, modules: Mapping[str, nn.Module]) -> None:
        """Put FSDP2 on the modules of all units that it gathers by themselves."""
        from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

        settings = self.settings
        reshard = settings.options.get("reshard_after_forward")
        if settings.sharding_strategy in KEEP_GATHERED:
            reshard = False
        self._keeps_gathered = reshard is False
        offload = CPUOffloadPolicy() if settings.cpu_offload else OffloadPolicy()
        for unit in settings.plan.children_first:
            module = modules[unit.name]
            self._make_real(unit)
            if unit.name not in self.groups:
                # As FSDP2 does for the units that it gathers by themselves.
                mark_unit_inputs(module)
                continue
            self._unit_modules[unit.name] = module
            entries = [self.entries[parameter] for parameter in self.groups[unit.name]]
            self._store_as_pairs(entries)
            _prepare(type(module))
            policy = self._mixed(unit)
            # An empty tensor for each of thousands of ranks that gets nothing takes long in an estimate.
            with cut_by(_parts_of) if self.shard_group.size() > MANY_RANKS else contextlib.nullcontext():
                fully_shard(
                    module, mesh=self.mesh, reshard_after_forward=reshard, mp_policy=policy, offload_policy=offload
                )
            # torch's own is an AssertionError.
            module.__dict__["__deepcopy__"] = refuse_parameter
            hook_views_too(module)
            if settings.source is not None:
                # The whole parameters go before the next unit is made.
                for entry in entries:
                    attributes = attributes_of(entry.parameter)
                    entry.parameter = entry.slots[0].parameter
                    entry.parameter.__dict__.update(attributes)

    def _choose_gathers(self) -> None:
        """Choose how weights are gathered, and which gathers begin ahead of their unit."""
        gather_class: Callable[[], Any] | None = None
        if self._fast:
            from fsshard.comm.gloo.collectives import Gather

            gather_class = Gather
        self._gather_by(gather_class)
        if self._fast:
            if self.settings.compilation is None:
                ForwardPrefetch([self.module, *self._units[:-1]])
        elif self.shard_group.size() > 1:
            self.module.register_forward_pre_hook(gather_ahead, prepend=True)

    def _store_as_pairs(self, entries: Iterable[Entry]) -> None:
        """Let complex weights whose rows the ranks cannot share evenly be cut between any two numbers instead."""
        for entry in entries:
            # tltorch's ComplexFactorList reads its storage itself, in its shape: a plain parameter to us.
            paired = entry.kind.form in (Form.COMPLEX, Form.RENAMED)
            if not paired or len(entry.stored_shape) < 3 or entry.stored_shape[0] % self.shard_group.size() == 0:
                continue
            old, entry.parameter = entry.parameter, store_as_pairs(entry.slots)
            mark_stale(old, _stale(entry))

    def _mixed(self, unit: Unit) -> Any:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        # Left out, reduce_dtype is param_dtype in torch 2.13 and the weights' own dtype in 2.15, silently.
        reduce = self.settings.precision.reduce or unit.send or unit.compute
        if reduce is not None and self._adds_in_one_order:
            # Micro-batches are added in it, and our reduction rounds.
            reduce = torch.float32
        # Inputs are cast by fsshard.model.precision, under every backend alike.
        return MixedPrecisionPolicy(param_dtype=unit.compute, reduce_dtype=reduce, cast_forward_inputs=False)

    def _gather_by(self, gather_class: Callable[[], Any] | None) -> None:
        """Let units be gathered by ``gather_class`` or torch's own collective, in the dtype of each one's ``send``."""
        from fsshard.comm.narrow_gather import NarrowGather

        for name, unit in self._unit_modules.items():
            gather = None
            if gather_class is not None:
                gather = gather_class()
            dtype = self._planned[name].send
            # A rank that has all of a unit rounds nothing here: its forward does.
            if dtype is not None and self.shard_group.size() > 1:
                gather = NarrowGather(dtype, gather)
            if gather is not None:
                unit.set_custom_all_gather(gather)

    def _add_in_one_order(self) -> None:
        """Let gradients be reduced in the order of :mod:`fsshard.comm.tree`."""
        if not self._adds_in_one_order:
            return
        from fsshard.comm.unit_reduction import Reduce

        assert self.mesh is not None
        replicas = self.mesh.get_group(0) if self.mesh.ndim > 1 else None
        has_one_order = not self._fast and self.settings.world_size <= 2
        for name, unit in self._unit_modules.items():
            narrow = self._planned[name].reduce_dtype
            if has_one_order and narrow is None:
                continue
            reduce = Reduce(replicas, narrow)
            unit.set_custom_reduce_scatter(reduce)
            # Each rank's part is divided before anything is added, as under DDP. FSDP2 by itself divides float16 before
            # and after, by the root of the number of ranks (torch 2.13).
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)

    def _on_gloo(self) -> bool:
        group = self.shard_group
        return self.settings.device.type == "cpu" and group.size() > 1 and dist.get_backend(group) == "gloo"

    def _adopt(self, modules: dict[str, nn.Module]) -> None:
        """Learn the DTensor parameters that replaced the old ones, and mark the old ones as stale."""
        for entry in self.entries.values():
            old, entry.parameter = entry.parameter, entry.slots[0].parameter
            # FSDP2 replaces Parameter objects and drops their Python attributes (torch 2.13).
            entry.parameter.__dict__.update(old.__dict__)
            entry.parameter.__class__ = cast(Any, held_dtensor())
            new_record(entry.parameter).drops = self.step.dropped, entry.name
            make_gradients(self._torchs[entry.name], shard_tensor())
            # FSDP2 shards as torch.chunk does, so that the last ranks can have fewer rows, or none.
            rows, *row = entry.parameter.shape
            entry.group = self.shard_group
            rows_of_rank = -(-rows // self.shard_group.size())
            entry.cut = Cut(stride=rows_of_rank * torch.Size(row).numel())
            if old is not entry.parameter:
                mark_stale(old, _stale(entry))
                if old.requires_grad:  # a list made before fully_shard has weights that silently never train
                    cast(Any, old).register_hook(functools.partial(_refuse_gradient, entry.name))
        refuse_numbers_of_parts(self)
        self.usage = None
        if self.settings.find_unused_parameters:
            self.usage = UsageTracker(self.settings, self.entries, modules)
            self.module.set_reduce_scatter_unused_params(True)  # type: ignore[operator]

    def _watch(self) -> None:
        """Install the guards: a unit's forward begins with the engine's parameters, and may not write them."""
        names_of = {id(part): name for name, part in self._torchs.items()}
        modules: list[tuple[nn.Module, list[Place]]] = []
        for unit_name, unit in self._unit_modules.items():
            parts = []
            for group in param_groups(unit):
                parts += group.fsdp_params
            names = [names_of[id(part)] for part in parts]
            check = _before_gather(parts, names, self._planned[unit_name].send)
            unit.register_forward_pre_hook(check, prepend=True)
            places: list[Place] = []
            for part, name in zip(parts, names, strict=True):
                place = place_of(part)
                places.append((stored_in(place.module), place.param_name, name))
            modules.append((unit, places))
        self._looks = LooksAtForwards()
        self._gathered = GatheredWeights(modules)
        self._versions: list[int] = []  # of the shards before a forward that is looked at
        self._state = state_of(self.module)
        # A method that runs in place of the forward may call it.
        self.module.register_forward_hook(lambda *_: forward_goes_on(self._state), prepend=True)
        self.module.register_forward_hook(self._look)

    def _look(self, root: Any, args: Any, output: Any) -> None:
        """Raise if the forward that ends computed with shards, or wrote weights."""
        if not self._versions:
            return
        if any(getattr(leaf, "device_mesh", None) == self.mesh for leaf in grad_tensors(output)):
            raise ModelError(READS_SHARD)
        if self.step.finished <= FIRST_STEPS and torch.is_grad_enabled():
            refuse_shards_in_graph(grad_tensors(output))
        before, self._versions = self._versions, []
        names = self._gathered.changed()
        for entry, version in zip(self.all, before, strict=True):
            if version_of(entry.parameter) != version:
                names.append(entry.name)
        if names:
            raise written(names)

    def _let_the_root_be_first(self, units: Mapping[str, nn.Module]) -> None:
        """Refuse a unit's forward before the root's: it would be FSDP2's root, for good (torch 2.13)."""
        names = {module: name for name, module in units.items()}

        def refuse(unit: nn.Module, _: Any) -> None:
            raise ModelError(
                f"sharding unit {names[unit]!r} runs before the first forward of what fsshard.wrap returned, by a call "
                "of the model within it, of a part, or of a method; call what wrap returned, and let a method run "
                "under the engine: fsshard.register_forward_method(model, name)"
            )

        def let_go(*_: Any) -> None:
            for handle in handles:
                handle.remove()

        handles = [unit.register_forward_pre_hook(refuse, prepend=True) for unit in names]
        handles.append(self.module.register_forward_pre_hook(let_go, prepend=True))

    def finish_backward(self, entries: Iterable[Entry]) -> None:
        super().finish_backward(entries)
        self.step.finished += 1
        if self.step.finished > FIRST_STEPS:
            return
        for name, part in self._torchs.items():
            whole = getattr(part, UNSHARDED_PARAM, None)
            if whole is not None and whole.grad is not None:
                raise OptimizerError(
                    f"the gradient of {name!r} was not reduced: the engine did not notice the start of the backward, "
                    "since the forward did not return the loss's tensors in a dict, list, tuple, dataclass or "
                    "attribute of an object (but in a closure or a generator, or kept them in the model); return them"
                )

    def simulate(self) -> None:
        """Over many ranks, stand for the broadcasts of our all-gather on gloo, one per rank, by a single one."""
        self._gathered.enabled = False
        if self.settings.world_size <= MANY_RANKS:
            return
        from fsshard.comm.gloo.collectives import Gather

        class AtOnce(Gather):
            def __call__(
                self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
            ) -> Any:
                whole = output_tensor.detach()
                setattr(whole, CALLS, group.size())
                return dist.broadcast(whole, group=group, group_src=0, async_op=True)

        if self._fast:
            self._gather_by(AtOnce)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self.module.set_requires_gradient_sync(False)  # type: ignore[operator]
        try:
            yield
        finally:
            is_derived = self.step.stage is Stage.DERIVED
            self.module.set_requires_gradient_sync(not self.step.is_silent and not is_derived)  # type: ignore[operator]

    def zero_grad(self, entries: Iterable[Entry], *, set_to_none: bool) -> None:
        entries = list(entries)
        super().zero_grad(entries, set_to_none=set_to_none)
        for entry in entries:
            if set_to_none:
                self.step.dropped.add(entry.name)
            if entry.name not in self.step.local:
                continue
            # The last backward was under no_sync, whose sums are whole.
            if set_to_none:
                drop_accumulated(self._torchs[entry.name])
            for gradient in accumulated(self._torchs[entry.name]):
                gradient.detach().zero_()

    def leaves(self) -> Iterator[Tensor]:
        for part in self._torchs.values():
            whole = getattr(part, UNSHARDED_PARAM, None)
            if whole is not None and whole.requires_grad:
                yield whole

    def before_forward(self, *, training: bool) -> None:
        self._versions = []
        if self._looks.begin():
            self._versions = [version_of(entry.parameter) for entry in self.all]
            self._gathered.watch()
        deviated = self._deviates
        self._hear_gathered()
        super().before_forward(training=training)
        if deviated or self._deviates:
            self._freeze_gathered()
        if self.step.stage is Stage.DERIVED and not self._kept.keeps:  # by a derivative of which nothing is left
            self._reduce_again()
        if broken_off(self._state) and current_graph_task_id() == -1:
            # FSDP2 would take the next backward for the one that has raised, and reduce none of its gradients, silently
            # (torch 2.13). Those of the broken one are lost.
            self._reduce_again()
            self._kept.let_go()
            self.module.reset_iter_state()  # type: ignore[operator]
            for part in self._torchs.values():
                drop_accumulated(part)

    def _hear_gathered(self) -> None:
        """Freeze or thaw shards as users have done it to gathered parameters: modules hold these behind a forward.

        FSDP2 itself hears nothing of it (torch 2.13): the weights go on to be trained, silently.
        """
        groups = groups_of(self._kept_state)
        if not (groups and groups[0].is_unsharded):
            return
        for entry, flag in zip(self.all, self._flags_of_forward, strict=True):
            held = entry.slots[0].parameter
            if held.requires_grad != flag and self.shows(entry, held):
                entry.parameter.requires_grad_(held.requires_grad)

    def _freeze_gathered(self) -> None:
        """Freeze gathered parameters as their shards are. FSDP2 does so when it gathers a unit only (torch 2.13)."""
        for part in self._torchs.values():
            whole = getattr(part, UNSHARDED_PARAM, None)
            if whole is not None and whole.requires_grad != part.sharded_param.requires_grad:
                whole.requires_grad_(part.sharded_param.requires_grad)

    def accumulates(self) -> bool:
        # The root is gathered from its forward to its backward.
        gathered = list(map(_WHOLE_TAKES_GRADIENT, self._root_parts))
        if self._deviates or gathered != list(map(_TAKES_GRADIENT, self._root_parts)):
            self._hear_gathered()
        if self._deviates:  # in a reference pass since the forward whose backward begins
            self._freeze_gathered()
        return super().accumulates()

    def derivative_starts(self) -> None:
        # FSDP2 would reduce what no_sync has left to the backward that follows, and the sums be others (torch 2.13).
        if not self.step.is_silent and self.step.stage is not Stage.DERIVED:
            self.step.move(Stage.DERIVED)
            self.module.set_requires_gradient_sync(False)  # type: ignore[operator]
            if not torch.is_grad_enabled():
                queue_callback(self._reduce_again)
            # Else until gradients come: a derivative of this one need not pass the outputs of a forward.

    def derivatives_of(self, output: Tensor) -> list[Tensor]:
        # A term of derivatives alone does not pass the outputs of a forward, and derivative_starts is not called.
        with self.no_sync(), self.step.silenced():
            return super().derivatives_of(output)

    def backward_starts(self, *, synchronised: bool) -> None:
        if self.step.stage is Stage.DERIVED:
            self._reduce_again()
        super().backward_starts(synchronised=synchronised)

    def _gradients_come(self) -> None:
        """Learn that the backward of a loss of derivatives has begun, which need not pass the outputs of a forward."""
        if self.step.stage is Stage.DERIVED:
            self._reduce_again()

    def _reduce_again(self) -> None:
        if self.step.stage is Stage.DERIVED:
            self.step.stage = Stage.PENDING
        self.module.set_requires_gradient_sync(not self.step.is_silent)  # type: ignore[operator]

    def forward_failed(self) -> None:
        # The root stays gathered from its forward on, and does not let itself be resharded while it believes to be in
        # one: what is written to the shards then no later forward would see, silently (torch 2.13). Not torch's own
        # reset_iter_state, which waits for gathers under way: another rank may have failed before it took part.
        self._gathered.stop()
        for unit in self._units:
            abandon_forward(unit)

    def shows(self, entry: Entry, found: object) -> bool:
        # The root stays gathered after a forward without backward.
        return found is not None and found is getattr(self._torchs.get(entry.name), UNSHARDED_PARAM, None)

    @functools.cached_property
    def _torchs(self) -> dict[str, Any]:
        """FSDP2's own record of each parameter."""
        names = {}
        for entry in self.all:
            for slot in entry.slots:
                names[id(slot.owner), slot.stored] = entry.name
        parts = {}
        for unit in self._units:
            for group in param_groups(unit):
                for part in group.fsdp_params:
                    place = place_of(part)
                    parts[names[id(place.module), place.param_name]] = part
        return parts

    @contextlib.contextmanager
    def bare(self) -> Iterator[nn.Module]:
        # FSDP2's own hook on state_dict() puts shards back into modules.
        self._hear_gathered()
        with super().bare() as module:
            yield module

    def reshard(self) -> None:
        self._hear_gathered()
        self._kept.let_go()
        for unit in self._units:
            abandon(unit)
            unit.reshard()

    @contextlib.contextmanager
    def whole_parameters(self, whole: Mapping[str, Tensor]) -> Iterator[None]:
        # A forward within it leaves the root gathered; told so, FSDP2 would not gather for the next one, which would
        # meet the DTensors that are put back here ("mixed torch.Tensor and DTensor", torch 2.13).
        with _without_hooks(self._units), super().whole_parameters(whole):
            try:
                yield
            finally:
                self.reshard()

    def held_by_engine(self) -> dict[str, list[Tensor]]:
        # torch 2.13 has no public way to ask: gradients that no_sync leaves whole, and units that a forward left whole.
        found: dict[str, list[Tensor]] = {"parameters": [], "gradients": [], "gathered units": []}
        for part in self._torchs.values():
            whole = getattr(part, UNSHARDED_PARAM, None)  # made by the first gather
            found["parameters"].append(sharded_data(part))
            found["gathered units"] += part.all_gather_outputs if whole is None else [*part.all_gather_outputs, whole]
            found["gradients"] += accumulated(part)
        return found

    def _gathers(self, unit: Unit) -> tuple[int, ...]:
        reshard = self.settings.options.get("reshard_after_forward")
        stays = reshard is False or self.settings.sharding_strategy in KEEP_GATHERED
        ranks = self.shard_group.size()
        if stays or (reshard is None and not self._gathered_with[unit.parameters[0]]):
            return (ranks,)
        return (ranks, ranks if reshard in (None, True) else int(reshard))

    @functools.cached_property
    def _gathered_with(self) -> dict[str, str]:
        """Parameter -> the unit with which it is gathered."""
        units = {}
        for unit, parameters in self.groups.items():
            units.update(dict.fromkeys(parameters, unit))
        return units


def _refuse_gradient(name: str, _: Tensor) -> None:
    raise StaleParameter(
        f"{name!r} is read through a reference taken before fsshard.wrap (in a list, a closure, ...), but the engine "
        "trains another parameter in its place; read it as an attribute of its module, and build the optimizer with "
        "fsshard.build_optimizer"
    )


def _before_gather(parts: list[Any], names: list[str], send: torch.dtype | None) -> Any:
    """Return a hook at the start of a unit's forward that raises where modules hold other tensors than the engine's."""
    module_places = list(map(place_of, parts))
    places = [stored_in(place.module) for place in module_places], [place.param_name for place in module_places]

    def others() -> Iterator[list[Any]]:
        for part, tensors, key in zip(parts, *places, strict=True):
            # Between its forwards a module may hold another tensor of FSDP2's: the whole, or a shard among fewer ranks.
            known = list(vars(part).values())
            shard = part.sharded_param.to_local()
            # On one rank a method such as generate() shows rounded copies to the forward that it calls.
            if send is not None and torch.equal(tensors[key], shard.to(send).to(shard.dtype)):
                known.append(tensors[key])
            yield known

    def check(*_: Any) -> None:
        check_places(places, names, [part.sharded_param for part in parts], others)

    return check


def _prepare(kind: type[nn.Module]) -> None:
    """Else "object layout differs" where ``kind`` inherits from ``typing.Generic`` first (torch 2.13)."""
    if has_own_layout(kind):
        prepare_class(kind, lambda front, members: class_in_front(front, kind, f"FSDP{kind.__name__}", members))


@contextlib.contextmanager
def _without_hooks(units: Iterable[Any]) -> Iterator[None]:
    """Take out FSDP2's hooks while modules hold whole parameters."""
    # They would gather, and look for shards after a load: "no attribute '_local_tensor'" (torch 2.13).
    distinct = {}
    tables_of_calls = []
    for unit in units:
        tables_of_calls += call_hooks(unit)
        for module in unit.modules():
            table = load_state_dict_post_hooks(module)
            distinct[id(table)] = table
    tables = [*distinct.values(), *tables_of_calls]
    before = list(map(dict, tables))
    for table, hooks in zip(tables, before, strict=True):
        for key, hook in hooks.items():
            if str(getattr(hook, "__module__", "")).startswith(("torch.distributed", "fsshard.backends")):
                del table[key]
    try:
        yield
    finally:
        for table, hooks in zip(tables, before, strict=True):
            added = {key: hook for key, hook in table.items() if key not in hooks}
            table.clear()
            table.update({**hooks, **added})


def _stale(entry: Entry) -> str:
    return (
        f"parameter {entry.name!r} was replaced by its shard when the model was wrapped, and this optimizer is older; "
        "after fsshard.wrap build the optimizer with fsshard.build_optimizer"
    )


def _parts_of(whole: Tensor, ranks: int, dim: int) -> list[Tensor]:
    """Return what torch's own cut does, with one empty tensor for all ranks that get nothing."""
    parts = whole.chunk(ranks, dim)
    return [*parts, *[whole.new_empty(0)] * (ranks - len(parts))]
