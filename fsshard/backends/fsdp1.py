"""backend="fsdp": torch's FullyShardedDataParallel (FSDP1). Each unit is one flat parameter in equal shards."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsshard.backends.facts import EngineFacts, Tunable
from fsshard.backends.forward_guards import (
    GatheredWeights,
    LooksAtForwards,
    Place,
    ReadsGuard,
    Watched,
    check_places,
    refuse_losses,
    written,
)
from fsshard.backends.registry import register_backend
from fsshard.backends.settings import Settings
from fsshard.backends.step_state import WEIGHTS_ARE_FREED, Stage
from fsshard.backends.torch_sharded import DIVIDED, TorchShardedBackend, UsageTracker
from fsshard.comm import tree
from fsshard.comm.watchdog import taking_part
from fsshard.complex_params.flattened import stored_in
from fsshard.complex_params.shard_tensors import FlatShard
from fsshard.complex_params.slots import all_places
from fsshard.errors import ModelError, UnsupportedByBackend
from fsshard.model.memory_layout import Order, memory_order, packed
from fsshard.model.outputs import forward_begins, hook_bases
from fsshard.model.unit_inputs import without_leaves
from fsshard.planning.entries import Cut, Entry
from fsshard.planning.plan import Unit
from fsshard.planning.torch_settings import HYBRIDS, KEEP_GATHERED
from fsshard.torch_private.autograd import (
    current_graph_task_id,
    functorch_transforms_active,
    keeps_graph,
    queue_callback,
)
from fsshard.torch_private.fsdp1 import (
    WRAPPED,
    abandon,
    be_idle,
    drop_whole,
    even_shards,
    free_with_its_handle,
    handle_of,
    held_by,
    infos_of,
    is_idle,
    is_padding,
    let_go,
    offsets_of,
    params_of,
    pass_without_gradients_ends,
    pre_backward_hook,
    reduce_by,
    reduce_unheard,
    sharded_size,
    show,
    show_frozen,
    tensors_of,
    trains_now,
    wrapped_by,
)

log = logging.getLogger("fsshard")


@register_backend
class FSDP1Backend(TorchShardedBackend):
    """``FullyShardedDataParallel(use_orig_params=True)`` on every unit of the plan, children first, then the root."""

    _has_logged = False
    name: ClassVar[str] = "fsdp"
    facts: ClassVar[EngineFacts] = replace(
        DIVIDED,
        option_names=("backward_prefetch", "forward_prefetch", "limit_all_gathers"),
        shards_integers=False,  # "Cannot flatten integer dtype tensors" (torch 2.13)
        # When a pass through a unit ends that keeps no graph, FSDP1 frees the memory and takes away its hooks, whatever
        # its sharding strategy: "setStorage ... out of bounds for storage of size 0" comes next (torch 2.13).
        transitions=WEIGHTS_ARE_FREED,
        tunable=Tunable(kept_gathered={"sharding_strategy": "SHARD_GRAD_OP"}),
    )

    @classmethod
    def check(cls, settings: Settings) -> Settings:
        settings = super().check(settings)
        if settings.precision.send is not None:
            # Its flat parameters are gathered in the dtype that they compute in (torch 2.13).
            raise UnsupportedByBackend(
                f"Precision(send={settings.precision.send})",
                cls.name,
                "use backend='fsdp2'; or Precision(reduce=...), by which gradients alone are sent narrower",
            )
        if settings.has_replicas and settings.sharding_strategy not in (None, *HYBRIDS):
            # torch takes a 2-D mesh with FULL_SHARD silently and shards over its first dimension only (2.13).
            raise UnsupportedByBackend(
                f"sharding_strategy={settings.sharding_strategy!r} with a 2-D device_mesh",
                cls.name,
                f"use {' or '.join(map(repr, HYBRIDS))}, or leave it out, with a mesh of replicas and shards",
            )
        # The mesh says by itself what it is for.
        if settings.sharding_strategy is None and settings.has_replicas:
            return replace(settings, sharding_strategy=HYBRIDS[0])
        return settings

    def shard(self) -> nn.Module:
        self._modules = dict(all_places(self.module))
        self._arguments = self._make_arguments()
        self._is_mixed = not self.settings.precision.is_full
        # Units in which something was frozen after wrap.
        self._frozen_since: set[str] = set()
        # Units with a flat parameter of what is frozen and one of what is not.
        self._split_units: set[str] = set()
        # Strides of parameters that are not contiguous, 1x1 kernels among them.
        self._strides: dict[str, tuple[int, ...]] = {}
        # The order of their dims in their flat parameter.
        self._orders: dict[str, Order | None] = {}
        self._passes = _DerivativePasses(self)
        root = self._wrap_units()
        root._passes = self._passes
        self._note_places(root)
        self._watch(root)
        if self.settings.compilation is not None:
            for unit in self.settings.plan.units:
                entries = self._entries_of(unit)
                self._show([entry for entry in entries if entry.slots[0].is_complex], unit.name, _without_base)
        self._gather_before_recomputing()
        self.usage = UsageTracker(self.settings, self.entries, self._modules)
        return root  # type: ignore[no-any-return]

    def _wrap_units(self) -> Any:
        """Put FSDP1 around the modules of all units, in all their places; return what is around the root."""
        # (parent, child's name, wrapper, the child)
        self._wrappers: list[tuple[nn.Module, str, nn.Module, nn.Module]] = []
        # A module has several places where it is shared.
        places = defaultdict(list)
        for parent in dict.fromkeys(self._modules.values()):
            for key, child in parent._modules.items():
                places[id(child)].append((parent, key))
        wrapper = None
        with warnings.catch_warnings(), even_shards(self._passes):
            # Says that one rank means NO_SHARD, which is what is wanted there; and that FSDP1 is in maintenance.
            warnings.filterwarnings("ignore", message=".*NO_SHARD.*")
            warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed.fsdp")
            for unit in self.settings.plan.children_first:
                module = self._modules[unit.name]
                wrapper = self._wrap_unit(unit, module)
                for parent, key in places[id(module)]:
                    parent._modules[key] = wrapper
                    self._wrappers.append((parent, key, wrapper, module))
        return wrapper

    def _gather_before_recomputing(self) -> None:
        """Let each block that is recomputed begin with its unit's weights."""
        for name in self.settings.plan.recomputed:
            block: Any = self._modules[name].forward
            # A block's own weights are gathered with the innermost unit around it.
            unit = name
            while unit not in self.groups:
                unit = unit.rpartition(".")[0]
            show_weights = self._passes.whole_again(unit)
            block.original = functools.partial(_forward_behind, show_weights, block.forward)

    def _entries_of(self, unit: Unit) -> list[Entry]:
        return list(map(self.entries.__getitem__, unit.parameters))

    def _show(self, entries: list[Entry], unit: str, change: Callable[[Tensor, Entry], Tensor]) -> None:
        """Register the hook of :func:`_showing` before the forward of a unit, if there are entries to show."""
        if entries:
            places = [self._place[entry.name] for entry in entries]
            self._modules[unit].register_forward_pre_hook(_showing(entries, places, change))

    def _wrap_unit(self, planned: Unit, module: nn.Module) -> nn.Module:
        """Give memory to a unit that has none, and put FSDP1 around it; twice where a part of it is frozen."""
        # A flat parameter has one gradient as long as itself, which is held and sent for what is frozen in it, too.
        # Wrapped twice, the unit has two: what is trainable, and around it what is frozen and has no gradient.
        self._make_real(planned)
        frozen = []
        for entry in self._entries_of(planned):
            parameter = entry.parameter
            if not parameter.requires_grad:
                frozen.append(entry)
            contiguous = torch.empty(parameter.shape, device="meta")
            if parameter.stride() == contiguous.stride():
                continue
            parameter.data = packed(parameter.data)
            self._strides[entry.name] = parameter.stride()
            self._orders[entry.name] = memory_order(parameter)
        if 0 < len(frozen) < len(planned.parameters):
            self._split_units.add(planned.name)
            with _hidden(frozen):
                module = self._make_fsdp(planned, module)
        return self._make_fsdp(planned, module)

    def _make_arguments(self) -> dict[str, Any]:
        """Return what the constructors of all units are given."""
        from torch.distributed.fsdp import CPUOffload, ShardingStrategy

        settings = self.settings
        group: Any = settings.group
        if settings.sharding_strategy in HYBRIDS:
            group = (settings.mesh.get_group(1), settings.mesh.get_group(0))
        return {
            "process_group": group,
            "sharding_strategy": ShardingStrategy[settings.sharding_strategy or "FULL_SHARD"],
            "cpu_offload": CPUOffload(offload_params=True) if settings.cpu_offload else None,
            # It aligns parameters to 16 bytes, without which complex views fail, and keeps the objects.
            "use_orig_params": True,
            # Without it torch 2.13 raises "FSDP needs a non-CPU accelerator device" on the CPU.
            "device_id": settings.device,
            **settings.options,
        }

    def _mixed_precision(self, planned: Unit) -> Any:
        from torch.distributed.fsdp import MixedPrecision

        return MixedPrecision(
            param_dtype=planned.compute,
            reduce_dtype=self.settings.precision.reduce or planned.compute,
            # fsshard.model.precision casts inputs, under every backend alike.
            cast_root_forward_inputs=False,
            # The plan has made BatchNorms float32 units.
            _module_classes_to_ignore=(),
        )

    def _make_fsdp(self, planned: Unit, module: nn.Module) -> nn.Module:
        """Put FSDP1 around a module: the parameters in it that no flat parameter has yet become one."""
        arguments = self._arguments
        if self._is_mixed:
            arguments = {**arguments, "mixed_precision": self._mixed_precision(planned)}
        new_class, final_class = _unit_classes()
        unit: Any = new_class(module, **arguments)
        unit.__class__ = final_class
        settings = self.settings
        shards = unit.process_group
        # gloo's collectives raise on the ranks that are left when one dies, in backward from inside of FSDP1's hooks
        # (torch 2.13). NCCL's never raise there; of two ranks it adds up in the one order that there is.
        if shards.size() > 1 and (settings.device.type == "cpu" or settings.world_size > 2):
            reduce_by(unit, functools.partial(_reduce, settings, shards))
        return unit  # type: ignore[no-any-return]

    def _note_places(self, root: nn.Module) -> None:
        """Learn where each parameter lies in its unit's flat parameter."""
        from torch.distributed.fsdp import FullyShardedDataParallel

        by_parameter = {id(entry.parameter): entry for entry in self.entries.values()}
        # Name of a parameter -> its flat parameter, and its index in it.
        self._place: dict[str, tuple[Any, int]] = {}
        self.shard_group = cast(Any, root).process_group
        # Each unit with the handle of its flat parameter.
        self._handles: list[tuple[Any, Any]] = []
        flats: list[Any] = []
        # At the end of the process models are still in use.
        weakref.finalize(self, _break_cycles, flats).atexit = False
        for unit in FullyShardedDataParallel.fsdp_modules(root):
            handle = handle_of(unit)
            if handle is None:
                continue
            self._handles.append((unit, handle))
            flat = handle.flat_param
            flats.append(flat)
            free_with_its_handle(flat, handle)
            starts = []
            for (start, _), pad in zip(offsets_of(handle), is_padding(flat), strict=True):
                if not pad:
                    starts.append(start)
            width = sharded_size(flat).numel()
            # FSDP1 does not shard on one rank (NO_SHARD).
            divides = self.shard_group.size() > 1
            assert not divides or width % 2 == 0, "a shard boundary cuts a complex number"
            inside = [by_parameter[id(parameter)] for parameter in params_of(flat)]
            for index, entry in enumerate(inside):
                name = entry.name
                self._place[name] = (flat, index)
                entry.group = self.shard_group
                if not divides:
                    continue
                if type(entry.parameter) is nn.Parameter:
                    entry.parameter.__class__ = FlatShard
                entry.cut = Cut(
                    stride=width,
                    offset=starts[index],
                    buffer=inside[0].name,
                    order=self._orders.get(name),
                    strides=self._strides.get(name),
                )

    def _watch(self, root: Any) -> None:
        """Install the guards: a forward may not read shards, nor write weights."""
        watched: list[tuple[Tensor, Watched]] = []
        names = {}
        for unit in self.settings.plan.units:
            for entry in self._entries_of(unit):
                parameter = entry.parameter
                names[id(parameter)] = entry.name
                first = entry.slots[0]
                is_shown = first.stored != first.attribute
                refuse_losses(parameter, entry.name)
                watched.append((parameter, Watched(entry.name, unit.name, is_shown)))
        units: list[tuple[nn.Module, list[Place]]] = []
        for wrapper, handle in self._handles:
            flat = handle.flat_param
            own = [names[id(parameter)] for parameter in params_of(flat)]
            places: list[Place] = []
            for (stored, owner, _), name in zip(infos_of(flat), own, strict=True):
                places.append((stored_in(owner), stored, name))
            units.append((wrapped_by(wrapper), places))
            wrapper.register_forward_pre_hook(_before_gather(flat, own))
        root._looks = LooksAtForwards()
        root._written = _WrittenGuard(GatheredWeights(units))
        # Each compiled frame would be compiled once more for the guard.
        if self.settings.compilation is None:
            root._reads = ReadsGuard(watched)
        for shard, each in watched:
            if not each.unit:
                # One weight of the root tells whether it is gathered.
                slot = self.entries[each.name].slots[0]
                check = _GatheredGuard(stored_in(slot.owner), slot.stored, shard, each)
                self.module.register_forward_pre_hook(check, prepend=True)
                break

    def _change_trainable(self, flags: list[bool]) -> None:
        infos = self.settings.plan.parameters
        self._check_accumulation(flags)
        for entry, now, before in zip(self.all, flags, self._flags, strict=True):
            unit = infos[entry.name].unit
            if now or not before or unit in self._frozen_since:
                continue
            # FSDP1 shows frozen ones as views that take a gradient while the rest of their flat parameter trains.
            self._frozen_since.add(unit)
            own = [each for each in self.all if infos[each.name].unit == unit]
            self._show(own, unit, _frozen_detached)
        super()._change_trainable(flags)

    def _check_accumulation(self, flags: list[bool]) -> None:
        """Refuse to freeze or thaw a part of a flat parameter that holds a gradient of ``no_sync()``."""
        # On several ranks FSDP1 ends in errors of sizes, on one the gradient of what is frozen is lost (torch 2.13).
        flats = [self._place[entry.name][0] for entry in self.all]
        trained = set(map(id, itertools.compress(flats, flags)))
        for entry, flat, now, before in zip(self.all, flats, flags, self._flags, strict=True):
            holds_local = entry.name in self.step.local and flat.grad is not None
            if now != before and holds_local and id(flat) in trained:
                raise ModelError(
                    f"{entry.name}: requires_grad has changed after a backward under no_sync(), whose gradients "
                    "backend 'fsdp' holds together: change it between two steps, or use backend='fsdp2'"
                )

    def on_trainable_changed(self) -> None:
        if self.usage is not None:
            self.usage.trainable_changed()
        for _, handle in self._handles:
            trains_now(handle)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        if self.settings.precision.is_full:
            self._start_afresh()
            with self.engine.no_sync():  # type: ignore[operator]
                yield
            return
        # FSDP1 would add up what it has not reduced in the units' dtype (torch 2.13), where a sum of bfloat16 numbers
        # loses what is 256 times smaller. Reduced gradients are float32, so every micro-batch is reduced.
        if not self._has_logged:
            log.info("in mixed precision backend 'fsdp' reduces every micro-batch, under no_sync too; 'fsdp2' does not")
            self._has_logged = True
        yield

    def before_forward(self, *, training: bool) -> None:
        super().before_forward(training=training)
        # torch 2.13 raises "Cannot access storage of TensorWrapper".
        if functorch_transforms_active():
            raise UnsupportedByBackend("torch.func", self.name, "use backend='ddp' or 'fairscale'")
        self._start_afresh()

    def simulate(self) -> None:
        cast(Any, self.engine)._written.gathered.enabled = False

    def forward_failed(self) -> None:
        root = cast(Any, self.engine)
        # Without this no_sync() raises "expected to be in states" (torch 2.13).
        for unit in root.fsdp_modules(root):
            be_idle(unit)
        # Modules would go on to hold views of what was gathered: "you can only change requires_grad flags of leaf
        # variables" (torch 2.13).
        self.reshard()

    def _start_afresh(self) -> None:
        """Clear what is left of a pass that has raised: FSDP1 stays in the middle of it (torch 2.13)."""
        root = cast(Any, self.engine)
        if current_graph_task_id() == -1 and (root.__dict__.get("_queued") or self._passes.has_raised()):
            # Its partial gradients are lost; FSDP1 would silently add them to the next ones.
            self._passes.forget_pass()
            root._post_backward_callback_queued = False
            for unit in root.fsdp_modules(root):
                abandon(unit)

    def backward_starts(self, *, synchronised: bool) -> None:
        # torch 2.13 raises "FSDP does not support gradients of gradients".
        if torch.is_grad_enabled():
            raise UnsupportedByBackend("backward(create_graph=True)", self.name, "use backend='fsdp2' or 'fairscale'")
        super().backward_starts(synchronised=synchronised)

    def derivative_starts(self) -> None:
        # A pass that frees its graph frees the weights, too.
        if not self._passes.in_derivative_pass():
            self.step.move(Stage.SPENT)

    @functools.cached_property
    def unit_of(self) -> dict[Any, Any]:
        """FSDP1's modules by handle; that of a root without parameters of its own is None."""
        unit_of = {handle_of(self.engine): self.engine}
        for unit, handle in self._handles:
            unit_of[handle] = unit
        return unit_of

    def handles_of(self, name: str) -> list[tuple[Any, Any]]:
        """Return FSDP1's modules of the unit ``name``, with their handles."""
        flats = {id(self._place[own][0]) for own in self.groups[name]}
        return [(unit, handle) for unit, handle in self._handles if id(handle.flat_param) in flats]

    def leaves(self) -> Iterator[Tensor]:
        return (handle.flat_param for _, handle in self._handles if handle.flat_param.requires_grad)

    def derivatives_of(self, output: Tensor) -> list[Tensor]:
        if not self.settings.precision.is_full or self.settings.cpu_offload:
            # Where a flat parameter changes its dtype or device between passes, autograd lets go of the node that its
            # graph ends in, and would silently find that nothing depends on it (torch 2.13).
            told = "term_gradients in mixed precision or with cpu_offload"
            raise UnsupportedByBackend(told, self.name, "use backend='fsdp2'")
        trained = [handle for _, handle in self._handles if handle.flat_param.requires_grad]
        derivatives = []
        for handle, derivative in zip(trained, super().derivatives_of(output), strict=True):
            _, last = offsets_of(handle)[-1]
            # What is not reached comes as zeros for this rank's shard.
            if derivative.numel() != last + 1:
                derivative = derivative.new_zeros(last + 1)
            derivatives.append(derivative)
        return derivatives

    def shows(self, entry: Entry, found: object) -> bool:
        # It is a view of a gathered unit.
        return found is not None and not isinstance(found, nn.Parameter)

    def reshard(self) -> None:
        # FSDP1 keeps the root (SHARD_GRAD_OP: every unit) whole after a forward without backward, and the next forward
        # would use those values, whatever has been written to the shards since (torch 2.13).
        self._passes.free_gathered()

    def free_gathered(self) -> None:
        """Free what is gathered."""
        for unit, handle in self._handles:
            drop_whole(unit, handle)

    def held_by_engine(self) -> dict[str, list[Tensor]]:
        # While a unit is gathered, its parameters and their gradients are views of the gathered ones (torch 2.13).
        by_kind: dict[str, list[Tensor]] = {}
        for _, handle in self._handles:
            for kind, tensors in held_by(handle.flat_param).items():
                by_kind.setdefault(kind, []).extend(tensors)
        return by_kind

    def _gathers(self, unit: Unit) -> tuple[int, ...]:
        ranks = self.shard_group.size()
        # From forward to backward.
        if not unit.name or self.settings.sharding_strategy in KEEP_GATHERED:
            return (ranks,)
        return ranks, ranks

    def _gathered_again(self, unit: Unit) -> list[Entry]:
        # The frozen root stays gathered; within it what is trainable is a unit as any other.
        if unit.name or "" not in self._split_units or self.settings.sharding_strategy in KEEP_GATHERED:
            return []
        return [entry for entry in self._entries_of(unit) if entry.parameter.requires_grad]

    @contextlib.contextmanager
    def bare(self) -> Iterator[nn.Module]:
        # FSDP1's state-dict hooks sit on its wrappers, expect its own names, and after an exception leave the module
        # unsharded (torch 2.13); with offload_to_cpu they crash on CPU (pytorch issue #188989). Without the wrappers
        # in the tree, no hook runs.
        for parent, name, _, module in self._wrappers:
            parent._modules[name] = module
        try:
            with super().bare() as bare:
                yield bare
        finally:
            for parent, name, wrapper, _ in self._wrappers:
                parent._modules[name] = wrapper


class _DerivativePasses:
    """Keeps units gathered from a first derivative until the loss's backward ends, or something is written to shards.

    At the end of every pass through its root, ``torch.autograd.grad``'s too, FSDP1 frees what it has gathered and takes
    its hooks away: "setStorage ... out of bounds for storage of size 0" (torch 2.13). For a pass that keeps its graph,
    this class makes the root believe that the end is queued already, and puts the units back itself (``_put_back``),
    their memory as it is. Models with such losses take the memory of ``SHARD_GRAD_OP``. FSDP1's handles hold this
    object, so it holds no engine.
    """

    def __init__(self, backend: FSDP1Backend) -> None:
        self._backend = weakref.ref(backend)
        self._around_gather = taking_part(backend.settings.group, "FSDP's gather, in backward")
        # Whether the memory of units stays.
        self.keeps = False
        # The graph task of the pass that takes a derivative.
        self._task: int | None = None
        # The graph task at whose end memory is freed.
        self._freeing_task: int | None = None
        # Each unit that the pass has gone through, with its handle.
        self._passed: list[tuple[Any, Any]] = []
        # Handles to whose flat parameter a hook was added.
        self._followed: weakref.WeakSet[Any] = weakref.WeakSet()

    def gather(self, unshard: Callable[[], None]) -> None:
        """Gather a unit, and name the rank that a gather in a backward has lost; a forward does so as a whole."""
        if current_graph_task_id() == -1:
            unshard()
            return
        with self._around_gather:
            unshard()

    def in_derivative_pass(self) -> bool:
        """Return whether the pass under way takes a derivative, and keeps its graph."""
        return self._task is not None and self._task == current_graph_task_id()

    def note_derivative_pass(self, handle: Any) -> bool:
        """Note a unit that a pass goes through, and return whether that takes a derivative and keeps its graph."""
        backend = self._backend()
        task = current_graph_task_id()
        if backend is None or task == -1:
            return False
        if self._task != task:
            if not (self.keeps or keeps_graph()) or backend.accumulates():
                return False
            self._task = task
            self.keeps = True
            self._passed.clear()
            # A pass that raises does not call it, which has_raised() tells.
            queue_callback(self._put_back)
        # The root asks first, and comes again where it has a handle.
        if handle in backend.unit_of:
            self._passed.append((backend.unit_of[handle], handle))
        return True

    def whole_again(self, name: str) -> Callable[[], None]:
        """Return what a block runs before it is computed again: it shows a unit's weights, if no output has done so.

        A second derivative need not pass the outputs of the forward, by which FSDP1 learns of a backward (torch 2.13).
        """
        passes = weakref.ref(self)

        def show_weights() -> None:
            known = passes()
            backend = None if known is None else known._backend()
            if known is None or backend is None or not known.keeps or current_graph_task_id() == -1:
                return
            for unit, handle in backend.handles_of(name):
                if is_idle(unit):
                    pre_backward_hook()(unit, unit, handle, None)

        return show_weights

    def has_raised(self) -> bool:
        """Return whether an exception has ended the last pass that takes a derivative; asked outside of one."""
        return self._task is not None

    def forget_pass(self) -> None:
        """Keep nothing of a pass that has raised."""
        self.keeps = False
        self._task = None
        self._freeing_task = None
        self._passed.clear()

    def _put_back(self) -> None:
        """Let units be as before the pass."""
        self._task = None
        for unit, handle in self._passed:
            pass_without_gradients_ends(unit, handle)
            if handle is not None and handle not in self._followed and handle.flat_param.requires_grad:
                handle.flat_param.register_hook(_arrives(weakref.ref(self), handle))
                self._followed.add(handle)
        self._passed.clear()

    def gradient_arrives(self, handle: Any, gradient: Tensor) -> None:
        """Begin FSDP1's backward where a loss of derivatives alone has not touched the outputs of the forward."""
        backend = self._backend()
        # torch.autograd.grad runs this hook, too: then nothing is reduced.
        if not self.keeps or backend is None or self.note_derivative_pass(None):
            return
        root = backend.engine
        if not root._post_backward_callback_queued:
            pre_backward_hook()(root, root, handle_of(root), gradient)
        unit = backend.unit_of[handle]
        if is_idle(unit):
            pre_backward_hook()(unit, unit, handle, gradient)
        task = current_graph_task_id()
        if task != self._freeing_task:
            self._freeing_task = task
            queue_callback(self.free_gathered)

    def reduce_the_rest(self) -> None:
        """Reduce gradients of whose arrival FSDP1 has not heard."""
        if (backend := self._backend()) is not None:
            for unit, _ in backend._handles:
                reduce_unheard(unit)

    def backward_ends(self) -> None:
        """Show the parameters of frozen units in their modules, on one rank."""
        backend = self._backend()
        if backend is not None and backend.shard_group.size() == 1:
            for _, handle in backend._handles:
                show_frozen(handle)

    def free_gathered(self) -> None:
        """Free what is gathered, and keep nothing from here on."""
        self.keeps = False
        self._freeing_task = None
        if (backend := self._backend()) is not None:
            backend.free_gathered()


def _arrives(passes: weakref.ref[_DerivativePasses], handle: Any) -> Callable[[Tensor], None]:
    """Return a hook of a flat parameter, which C++ holds, and which so may hold neither engine nor model."""
    handle = weakref.ref(handle)

    def arrives(gradient: Tensor) -> None:
        if (known := passes()) is not None and (own := handle()) is not None:
            known.gradient_arrives(own, gradient)

    return arrives


def _reduce(settings: Settings, shards: dist.ProcessGroup, gradient: Tensor, output: Tensor) -> None:
    """Reduce a unit's gradient to this rank's part of the mean, and name the rank that this has lost."""
    with taking_part(settings.group, "FSDP's gradient reduction, in backward"):
        # FSDP1 itself divides before and after, by the root of the number of ranks (torch 2.13).
        tree.reduce_scatter(output, gradient, shards, 1.0 / shards.size())
        if settings.sharding_strategy in HYBRIDS:
            replicas = settings.mesh.get_group(0)
            factor = 1.0 / replicas.size()
            tree.all_reduce(output, replicas, factor)


def _forward_behind(prepare: Callable[[], None], forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    prepare()
    return forward(*args, **kwargs)


# The message of torch 2.13 where one of FSDP1's views of a flat parameter is used after another was written.
WRITTEN_VIEW = "is a view and its base or another view of its base has been modified inplace"


def _before_gather(flat: Any, names: list[str]) -> Any:
    """Return a hook at the start of a unit's forward that raises where modules hold other tensors than the engine's."""
    keys, owners, _ = zip(*infos_of(flat), strict=True)
    places = list(map(stored_in, owners)), keys

    def check(*_: Any) -> None:
        check_places(places, names, params_of(flat), lambda: zip(tensors_of(flat), itertools.repeat(None)))

    return check


class _WrittenGuard:
    """Context around a forward of the model that is looked at, which may not write to what was gathered for it."""

    def __init__(self, gathered: GatheredWeights) -> None:
        self.gathered = gathered

    def __enter__(self) -> None:
        self.gathered.watch()

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is None or WRITTEN_VIEW in str(error):
            if names := self.gathered.changed():
                raise written(names) from error
        else:
            self.gathered.stop()


def _break_cycles(flats: list[Any]) -> None:
    for flat in flats:
        let_go(flat)


class _GatheredGuard:
    """Hook of the user's own module: raises where that is called, and not the FSDP1 module that gathers for it."""

    def __init__(self, held: dict[str, Any], stored: str, shard: Tensor, watched: Watched) -> None:
        self._held = held
        self._stored = stored
        self._shard = shard
        self._watched = watched

    def __call__(self, *_: Any) -> None:
        if self._held.get(self._stored) is self._shard:
            raise self._watched.error()

    def __reduce__(self) -> Any:
        # A hook goes along into copies of a module.
        return functools.partial, (_ignore,)


def _ignore(*_: Any) -> None:
    """Do nothing."""


@contextlib.contextmanager
def _hidden(entries: list[Entry]) -> Iterator[None]:
    """Context in which modules do not hold these parameters."""
    places = {}
    for entry in entries:
        for slot in entry.slots:
            # Slots of modules that are used twice are one place.
            places[id(slot.owner), slot.stored] = slot, entry
    for slot, _ in places.values():
        del stored_in(slot.owner)[slot.stored]
    try:
        yield
    finally:
        for slot, entry in places.values():
            stored_in(slot.owner)[slot.stored] = entry.parameter


def _showing(entries: list[Entry], places: list[tuple[Any, int]], change: Callable[[Tensor, Entry], Tensor]) -> Any:
    """Return a hook at the start of a unit's forward that shows it ``change(view)`` in place of FSDP1's views."""

    def before_forward(*_: Any) -> None:
        for entry, (flat, index) in zip(entries, places, strict=True):
            first = entry.slots[0]
            shown = getattr(first.owner, first.stored)
            changed = change(shown, entry)
            if changed is shown:
                continue
            # FSDP1 compares by identity what it finds later with what it showed.
            show(flat, index, changed)
            for slot in entry.slots:
                stored_in(slot.owner)[slot.stored] = changed

    return before_forward


def _frozen_detached(shown: Tensor, entry: Entry) -> Tensor:
    # FSDP1 shows a frozen parameter that shares a flat parameter with trainable ones as a view that takes a gradient,
    # and throws the gradient away (torch 2.13). It costs a backward up to the input, and attention over a frozen bias
    # then takes another kernel than it does natively, with other last bits.
    if shown.requires_grad and not entry.parameter.requires_grad:
        return shown.detach()
    return shown


def _without_base(shown: Tensor, _: Entry) -> Tensor:
    # A complex view that crosses a graph break is an input of the next graph, and dynamo makes its stand-in by
    # view_as_complex of the *base* of all views: "Tensor must have a last dimension of size 2" (torch 2.13).
    return _AliasNode.apply(shown)  # type: ignore[no-any-return, no-untyped-call]


class _AliasNode(torch.autograd.Function):
    """The same memory as a tensor of its own, to autograd no view."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _of_wrapped(dictionary: str) -> property:
    """Make a property that is a dict of the module which a unit wraps: empty while there is none yet."""
    return property(lambda unit: getattr(unit._modules.get(WRAPPED), dictionary, {}), lambda unit, value: None)


class _Unit(nn.Module):
    """FSDP1's module with the wrapped one's names, and with hooks on what outputs are views of."""

    _modules: dict[str, Any]
    # Set on the root alone, as the next three.
    _looks: LooksAtForwards | None = None
    _written: _WrittenGuard
    _reads: ReadsGuard | None = None
    _passes: _DerivativePasses | None = None
    # Who goes through the model by name finds what a unit wraps, under the user's name, and not
    # "_fsdp_wrapped_module" (PEFT saves an adapter without its weights otherwise). torch's own walks, in
    # no_sync() and fsdp_modules() (2.13), call modules() of the root and children().
    _parameters: Any = _of_wrapped("_parameters")
    _buffers: Any = _of_wrapped("_buffers")

    @property
    def _post_backward_callback_queued(self) -> bool:
        """True in a derivative pass, too: FSDP1 then leaves its end to :class:`_DerivativePasses`."""
        if self.__dict__.get("_queued"):
            return True
        return self._passes is not None and self._passes.note_derivative_pass(None)

    @_post_backward_callback_queued.setter
    def _post_backward_callback_queued(self, queued: bool) -> None:
        # FSDP1 sets True when a backward begins, and False as the last thing in it.
        self.__dict__["_queued"] = queued
        # It queues what ends the backward right after.
        if self._passes is not None and queued:
            queue_callback(self._passes.reduce_the_rest)
        elif self._passes is not None:
            self._passes.backward_ends()

    def named_modules(self, memo: Any = None, prefix: str = "", remove_duplicate: bool = True) -> Any:
        return self._modules[WRAPPED].named_modules(memo, prefix, remove_duplicate)

    def modules(self, remove_duplicate: bool = True) -> Iterator[nn.Module]:
        unit = cast(Any, self)
        yield from unit.fsdp_modules(unit)
        yield from super().modules(remove_duplicate)

    def named_children(self) -> Any:
        return self._modules[WRAPPED].named_children()

    def children(self) -> Iterator[nn.Module]:
        return iter((self._modules[WRAPPED],))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        since = forward_begins()
        handle = handle_of(self)
        if handle is not None and not handle.flat_param.requires_grad and torch.is_grad_enabled():
            # FSDP1 frees what is frozen when the gradients of inputs have come, of which autograd.grad by one
            # of them does not tell: "A leaf node was passed to _will_engine_execute_node" (torch 2.13).
            args, kwargs = without_leaves(args, kwargs)
        if self._looks is not None and self._looks.begin():
            with self._written, self._reads or contextlib.nullcontext():
                output = super().forward(*args, **kwargs)
        else:
            output = super().forward(*args, **kwargs)
        hook_bases(self, output, since)
        return output


@functools.cache
def _unit_classes() -> tuple[type[nn.Module], type[nn.Module]]:
    """Return the class that units are made as, and the one that they have from then on."""
    # It takes a second to import, and is imported when an engine is asked for.
    from torch.distributed.fsdp import FullyShardedDataParallel

    class NewUnit(_Unit, FullyShardedDataParallel):
        """In this order, since methods of _Unit win over FSDP1's."""

    class FSDPUnit(NewUnit):
        """A unit with attribute writes reaching the wrapped module, but for those of FSDP1's own constructor."""

        def __setattr__(self, name: str, value: Any) -> None:
            # FSDP1 forwards reads but not writes: fno_blocks.n_modes = ..., whose setter writes convs[i].n_modes, would
            # change the wrapper and not the convolution, silently (torch 2.13).
            if not (name.startswith("_") or name in self.__dict__ or hasattr(type(self), name)):
                inner = self.__dict__.get("_modules", {}).get(WRAPPED)
                if inner is not None and hasattr(inner, name):
                    setattr(inner, name, value)
                    return
            super().__setattr__(name, value)

    return NewUnit, FSDPUnit
