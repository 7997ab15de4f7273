"""backend="fsdp": torch's FullyShardedDataParallel (FSDP1). Each unit is one flat parameter, cut into equal shards."""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
import weakref
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsshard.backends.base import OWN_FILES, Entry, Settings
from fsshard.backends.cost import Numbers
from fsshard.backends.guarding import Guard, Watched, fingerprint, replaced, written
from fsshard.backends.memory_order import Order, flattened, memory_order, packed
from fsshard.backends.outputs import check_output, forward_begins, grad_tensors, hook_bases
from fsshard.backends.torch_sharded import TorchShardedBackend
from fsshard.backends.usage import UsageTracker
from fsshard.complex_params import original_of
from fsshard.errors import ModelError, UnsupportedByBackend
from fsshard.plan import Unit

__all__ = ["FSDP1Backend"]

log = logging.getLogger("fsshard")

GATHERED = ("_full_param_padded", "_full_prec_full_param_padded", "_mp_shard")
"""Attributes of a flat parameter: memory that FSDP1 fills while a unit is gathered, and frees afterwards."""


class FSDP1Backend(TorchShardedBackend):
    """``FullyShardedDataParallel(use_orig_params=True)`` on every unit of the plan, children first, then the root."""

    name: ClassVar[str] = "fsdp"
    option_names: ClassVar[tuple[str, ...]] = ("backward_prefetch", "forward_prefetch", "limit_all_gathers")
    # It does while it gathers, and does not within full_parameters(), where generate() and a user's forward run.
    presents_parameters: ClassVar[bool] = False
    needs_whole: ClassVar[frozenset[str]] = OWN_FILES | {"generate"}  # only the wrapper's own forward gathers the root

    @classmethod
    def check(cls, settings: Settings) -> None:
        super().check(settings)
        two_dimensional = settings.mesh is not None and settings.mesh.ndim == 2
        if two_dimensional != (settings.sharding_strategy == "HYBRID_SHARD") and (
            two_dimensional or settings.sharding_strategy == "HYBRID_SHARD"
        ):
            # torch takes a 2-D mesh with FULL_SHARD silently and shards over its first dimension only (2.13).
            raise UnsupportedByBackend(
                f"sharding_strategy={settings.sharding_strategy!r} with a {2 if two_dimensional else 1}-D device_mesh",
                cls.name,
                "use sharding_strategy='HYBRID_SHARD' with a 2-D mesh (replicas, shards), or a 1-D mesh without it",
            )

    def _shard(self) -> nn.Module:
        modules = dict(self.module.named_modules())
        self._told = False
        self._passed: int | None = None  # the graph task of the last pass backwards since the last forward
        self._wrappers: list[tuple[nn.Module, str, nn.Module]] = []  # (parent, child's name, wrapper)
        places: dict[int, list[tuple[nn.Module, str]]] = {}
        for parent in modules.values():
            for name, child in parent._modules.items():
                places.setdefault(id(child), []).append((parent, name))
        units = {unit.name: unit for unit in self.settings.plan.units}
        self._orders: dict[str, Order] = {}  # of the parameters that lie in their flat one in another order than theirs
        self._strides: dict[str, tuple[int, ...]] = {}  # of these, and of 1x1 kernels in channels_last
        with warnings.catch_warnings():
            # Says that one rank means NO_SHARD, which is what is wanted there; and that FSDP1 is in maintenance.
            warnings.filterwarnings("ignore", message=".*NO_SHARD.*")
            warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed.fsdp")
            with _even_shards():
                for name in self.settings.plan.unit_names:
                    self._prepare(units[name])
                    self._wrap_unit(name, modules[name], places[id(modules[name])])
                self._prepare(units[""])
                root = self._wrapper("", self.module)
        self._layout(root)
        self._guard = Guard()
        self._watch(root)
        self._guard.install(self.module)  # its hook in front of the root unit's
        for planned in self.settings.plan.units:
            frozen = [self.entries[name] for name in planned.parameters if not self.trainable[name]]
            if frozen and len(frozen) < len(planned.parameters):
                lies = [self._place[entry.name][:2] for entry in frozen]
                modules[planned.name].register_forward_pre_hook(_without_gradient(frozen, lies))
            numbers = [self.entries[n] for n in planned.parameters if self.entries[n].slots[0].is_complex]
            if numbers and self.settings.compilation is not None:
                lies = [self._place[entry.name][:2] for entry in numbers]
                modules[planned.name].register_forward_pre_hook(_without_base(numbers, lies))
        self.usage = UsageTracker(self.settings, self.entries, modules)
        return root

    def _prepare(self, unit: Unit) -> None:
        self.make_real(unit)
        for name in unit.parameters:
            parameter = self.entries[name].parameter
            if parameter.stride() == torch.empty(parameter.shape, device="meta").stride():
                continue
            parameter.data = packed(parameter.data)
            self._strides[name] = parameter.stride()
            if (order := memory_order(parameter)) is not None:
                self._orders[name] = order

    def _wrap_unit(self, name: str, unit: nn.Module, places: list[tuple[nn.Module, str]]) -> None:
        wrapper = self._wrapper(name, unit)
        for parent, key in places:
            parent._modules[key] = wrapper
            self._wrappers.append((parent, key, wrapper))

    def _wrapper(self, name: str, module: nn.Module) -> nn.Module:
        from torch.distributed.fsdp import CPUOffload, ShardingStrategy

        settings = self.settings
        strategy = ShardingStrategy[settings.sharding_strategy or "FULL_SHARD"]
        where: dict[str, Any] = {"process_group": settings.group}
        if strategy is ShardingStrategy.HYBRID_SHARD:
            where = {"process_group": (settings.mesh.get_group(1), settings.mesh.get_group(0))}
        return _unit_class()(
            module,
            sharding_strategy=strategy,
            cpu_offload=CPUOffload(offload_params=True) if settings.cpu_offload else None,
            use_orig_params=True,  # aligns parameters to 16 bytes, without which complex views fail; keeps the objects
            mixed_precision=self._mixed(name),
            device_id=settings.device,  # else "FSDP needs a non-CPU accelerator device" on CPU (torch 2.13)
            **where,
            **settings.options,
        )

    def _mixed(self, name: str) -> Any:
        from torch.distributed.fsdp import MixedPrecision

        precision = self.settings.precision
        (unit,) = (unit for unit in self.settings.plan.units if unit.name == name)
        if precision.is_full:
            return None
        return MixedPrecision(
            param_dtype=unit.compute,
            reduce_dtype=precision.reduce or unit.compute,
            cast_root_forward_inputs=False,  # fsshard.precision casts inputs, under every backend alike
            _module_classes_to_ignore=(),  # the plan has made BatchNorms float32 units
        )

    def _layout(self, root: nn.Module) -> None:
        """Where each parameter lies in its unit's flat parameter."""
        from torch.distributed.fsdp import FullyShardedDataParallel

        by_parameter = {id(entry.parameter): entry for entry in self.entries.values()}
        self._place: dict[str, tuple[Any, int, int]] = {}  # name -> (flat parameter, index, offset when whole)
        self._shard_group: Any = root.process_group
        self._handles: list[tuple[Any, Any]] = []  # (unit, the handle of its flat parameter)
        flats: list[Any] = []
        weakref.finalize(self, _let_go, flats)
        for unit in FullyShardedDataParallel.fsdp_modules(root):
            handle: Any = unit._handle
            if handle is None:
                continue
            self._handles.append((unit, handle))
            flat = handle.flat_param
            flats.append(flat)
            starts = [start for start, _ in handle._get_flat_param_offsets()]
            starts = [s for s, pad in zip(starts, flat._is_padding_mask, strict=True) if not pad]
            for index, parameter in enumerate(flat._params):
                self._place[by_parameter[id(parameter)].name] = (flat, index, starts[index])
            whole = handle.uses_sharded_strategy
            assert not whole or flat._sharded_size.numel() % 2 == 0, "a shard boundary cuts a complex number"

    def _watch(self, root: nn.Module) -> None:
        """Let a forward read shards nowhere, and write no weights."""
        names: dict[int, str] = {}
        unit_of: dict[str, str] = {}
        for unit in self.settings.plan.units:
            for name in unit.parameters:
                entry = self.entries[name]
                names[id(entry.parameter)], unit_of[name] = name, unit.name
                what = Watched(name, unit.name, entry.stored_shape, entry.parameter.dtype)
                self._guard.watch(entry.parameter, what)
                original = original_of(entry.parameter)
                if original is not None:
                    self._guard.watch(original, Watched(name, unit.name, original.shape, original.dtype, stale=True))
        for wrapper, handle in self._handles:
            held = [names[id(parameter)] for parameter in handle.flat_param._params]
            told = f"sharding unit {unit_of[held[0]]!r}" if unit_of[held[0]] else "the model"
            wrapper._watch = _UnitWatch(self._guard, handle, held, told, is_root=wrapper is root)
            wrapper._watch.install(wrapper._fsdp_wrapped_module)

    def _on_trainable_changed(self, changed: list[str]) -> None:
        raise UnsupportedByBackend(
            f"freezing or unfreezing after wrap ({', '.join(changed[:3])})",
            self.name,
            "set requires_grad before fsshard.wrap, or use backend='fsdp2', 'fairscale' or 'ddp'",
        )

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        if self.settings.precision.is_full:
            with self.engine.no_sync():  # type: ignore[operator]
                yield
            return
        # FSDP1 would add up what it has not reduced in the units' dtype (torch 2.13), where a sum of bfloat16 numbers
        # loses what is 256 times smaller. Reduced gradients are float32, so every micro-batch is reduced.
        if not self._told:
            log.info("backend 'fsdp' reduces every micro-batch in mixed precision, no_sync or not; 'fsdp2' need not")
            self._told = True
        yield

    def before_forward(self, *, training: bool) -> None:
        super().before_forward(training=training)
        if torch._C._are_functorch_transforms_active():  # "Cannot access storage of TensorWrapper" (torch 2.13)
            raise UnsupportedByBackend("torch.func", self.name, "use backend='ddp' or 'fairscale'")
        if torch.is_grad_enabled():
            self._passed = None

    def backward_starts(self, *, synchronised: bool) -> None:
        super().backward_starts(synchronised=synchronised)
        self._check_pass("backward(create_graph=True)", "use backend='fsdp2' or 'fairscale'", first=not synchronised)

    def derivative_starts(self) -> None:
        graph = "second derivatives (torch.autograd.grad(..., create_graph=True))"
        self._check_pass(graph, "use backend='fsdp2', 'fairscale' or 'ddp'", first=False)

    def _check_pass(self, graph: str, alternative: str, *, first: bool) -> None:
        """Refuse what needs a unit's weights after the pass that has let go of them.

        When any pass through a unit ends, torch.autograd.grad's too, FSDP1 frees the memory and takes away its hooks,
        whatever its sharding strategy: "setStorage ... out of bounds for storage of size 0" comes next (torch 2.13).
        """
        task = torch._C._current_graph_task_id()
        if torch.is_grad_enabled():
            raise UnsupportedByBackend(graph, self.name, alternative)
        if not first and self._passed not in (None, task):
            raise ModelError(
                "a second backward() since the last forward (torch.autograd.grad counts), for which backend 'fsdp' has "
                "no weights any more: add the losses and call backward() once, or use backend='fsdp2' or 'fairscale'"
            )
        if not first:
            self._passed = task

    def _leaves(self) -> Iterator[Tensor]:
        return (handle.flat_param for _, handle in self._handles if handle.flat_param.requires_grad)

    @property
    def has_no_shapes(self) -> bool:
        # One that happens to lie whole in this rank's flat shard too: what a script does must not depend on the rank.
        return any(handle.uses_sharded_strategy for _, handle in self._handles)

    @property
    def holds_parts(self) -> bool:
        return self.has_no_shapes

    def shows(self, entry: Entry, found: object) -> bool:
        # Views of a gathered unit, which it also takes out of the module's parameters.
        slot = entry.slots[0]
        return not isinstance(found, nn.Parameter) and (found is not None or slot.stored in slot.owner.__dict__)

    def settle(self) -> None:
        # FSDP1 keeps the root (SHARD_GRAD_OP: every unit) whole after a forward without backward, and the next forward
        # would use those values, whatever has been written to the shards since (torch 2.13).
        from torch.distributed.fsdp._runtime_utils import _reshard

        for unit, handle in self._handles:
            if not handle.uses_sharded_strategy:
                continue
            started = hasattr(handle.flat_param, "_full_param_padded")  # made by the first forward
            if started and not handle.needs_unshard():
                _reshard(unit, handle, True)

    def held_by_engine(self) -> dict[str, list[Tensor]]:
        # While a unit is gathered, its parameters and their gradients are views of the gathered ones (torch 2.13).
        found: dict[str, list[Tensor]] = {}
        for _, handle in self._handles:
            flat = handle.flat_param
            named = {
                "parameters": (getattr(flat, "_local_shard", None),),
                "gathered units": [getattr(flat, name, None) for name in GATHERED],
                "gradients": (flat.grad, getattr(flat, "_saved_grad_shard", None)),
            }
            for kind, tensors in named.items():
                found.setdefault(kind, []).extend(tensor for tensor in tensors if tensor is not None)
        return found

    def _numbers(self, entries: list[Entry]) -> Numbers:
        real = sum(entry.stored_shape.numel() for entry in entries)
        if not entries or self._is_whole:
            return Numbers(padded=real, real=real)
        # A flat parameter is reduced whole, what is frozen in it too.
        return Numbers(padded=self._place[entries[0].name][0]._sharded_size.numel(), real=real)

    def _gathers(self, unit: Unit) -> tuple[int, ...]:
        stays = not unit.name or self.settings.sharding_strategy == "SHARD_GRAD_OP"  # from forward to backward
        return (self.divided_among,) * (1 if stays else 2)

    def reduce_norm(self, value: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        if self._is_whole:
            return value
        dist.all_reduce(value, op=op, group=self._shard_group)
        return value

    @property
    def shard_group(self) -> dist.ProcessGroup:
        group: dist.ProcessGroup = self._shard_group
        return group

    @property
    def _is_whole(self) -> bool:
        return bool(self._shard_group.size() == 1)  # FSDP1 does not shard on one rank (NO_SHARD)

    def local_range(self, entry: Entry) -> tuple[int, int]:
        return super().local_range(entry) if self._is_whole else self.part_of(entry, self._shard_group.rank())

    def part_of(self, entry: Entry, rank: int) -> tuple[int, int]:
        flat, _, offset = self._place[entry.name]
        width, total = flat._sharded_size.numel(), entry.stored_shape.numel()
        start, stop = rank * width - offset, (rank + 1) * width - offset
        return min(max(start, 0), total), min(max(stop, 0), total)

    def gather(self, entry: Entry, local: Tensor) -> Tensor:
        if self._is_whole:
            return local.detach().clone().reshape(entry.stored_shape)
        group = self._shard_group
        ranges = [self.part_of(entry, rank) for rank in range(group.size())]
        width = max(stop - start for start, stop in ranges)
        padded = local.new_zeros(width, device=self.settings.device)
        padded[: local.numel()] = local.detach().reshape(-1)
        parts = padded.new_empty(group.size() * width)
        dist.all_gather_single(parts, padded, group=group)
        whole = torch.cat([parts[r * width : r * width + stop - start] for r, (start, stop) in enumerate(ranges)])
        return self.shaped(entry, whole)

    def shaped(self, entry: Entry, flat: Tensor) -> Tensor:
        if entry.name not in self._strides:
            return super().shaped(entry, flat)
        return flat.contiguous().as_strided(entry.stored_shape, self._strides[entry.name])

    def has_ranges(self, entry: Entry) -> bool:
        return super().has_ranges(entry) and (self._is_whole or entry.name not in self._orders)

    def scatter(self, entry: Entry, whole: Tensor) -> Tensor:
        if self._is_whole:
            return whole
        start, stop = self.part_of(entry, self._shard_group.rank())
        return flattened(whole, self._orders.get(entry.name))[start:stop]

    @property
    def hears_state_dict_type(self) -> bool:
        return bool(self._wrappers)  # all that it finds in the tree; the root's is not in it

    def requested_state_dict(self) -> Any:
        if not self.hears_state_dict_type:
            return super().requested_state_dict()
        from torch.distributed.fsdp import FullStateDictConfig, StateDictType

        configs = [wrapper._state_dict_config for _, _, wrapper in self._wrappers]
        config = next((config for config in configs if config != FullStateDictConfig()), None)
        if config is not None and not isinstance(config, FullStateDictConfig):
            # It will be refused, and torch 2.13 leaves the setting where it is when an exception leaves its context.
            for _, _, wrapper in self._wrappers:
                where: Any = wrapper
                where._state_dict_type, where._state_dict_config = StateDictType.FULL_STATE_DICT, FullStateDictConfig()
        return config

    @contextlib.contextmanager
    def bare(self) -> Iterator[nn.Module]:
        # FSDP1's state-dict hooks sit on its wrappers, expect its own names, and after an exception leave the module
        # unsharded (torch 2.13); with offload_to_cpu they crash on CPU (pytorch issue #188989). Without the wrappers
        # in the tree, no hook runs.
        for parent, name, wrapper in self._wrappers:
            parent._modules[name] = wrapper.module  # type: ignore[assignment]
        try:
            with super().bare() as module:
                yield module
        finally:
            for parent, name, wrapper in self._wrappers:
                parent._modules[name] = wrapper

    @contextlib.contextmanager
    def whole_parameters(self, whole: Any) -> Iterator[None]:
        hidden: list[tuple[dict[str, Any], str, Any]] = []
        for entry in self.entries.values():
            for slot in entry.slots:  # a view left by a forward would hide the whole parameter
                members = slot.owner.__dict__
                if slot.stored in members:
                    hidden.append((members, slot.stored, members.pop(slot.stored)))
        try:
            with super().whole_parameters(whole):
                yield
        finally:
            for members, stored, value in hidden:
                members[stored] = value


WRITTEN_VIEW = "is a view and its base or another view of its base has been modified inplace"
"""What torch 2.13 says where one of FSDP1's views of a flat parameter is used after another was written."""


def _unwraps(inner: nn.Module, name: str, value: Any) -> bool:
    """Whether a plain tensor would take a parameter's place, as ``torch.func.functional_call`` puts it there."""
    return isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and name in inner._parameters


class _UnitWatch:
    """Around the forward of one unit: the engine works, but for where it calls the unit's own code."""

    def __init__(self, guard: Guard, handle: Any, names: list[str], told: str, *, is_root: bool) -> None:
        self._guard, self._names, self.told, self._is_root = guard, names, told, is_root
        self._flat: Any = handle.flat_param
        self._version = 0
        self._before: list[int] | None = None

    def __reduce__(self) -> Any:
        return _of_nothing, ()  # hooks go along into copies of a module

    def install(self, inner: nn.Module) -> None:
        """Learn when the unit's own code begins and ends."""
        inner.register_forward_pre_hook(self._begins, prepend=True)
        inner.register_forward_hook(self._ends, always_call=True)

    def full_name(self, attribute: str) -> str:
        """The user's name of a parameter of the unit's own module."""
        names = [name for name in self._names if name.rpartition(".")[2] == attribute]
        return min(names, key=len, default=attribute)

    def __enter__(self) -> None:
        self._guard.pause()
        flat = self._flat
        for (stored, owner, _), parameter, shown, name in zip(
            flat._param_infos, flat._params, flat._tensors, self._names, strict=True
        ):
            held = owner._parameters.get(stored)
            if held is not parameter and held is not shown and held is not None:
                raise replaced(name)

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        self._guard.resume()
        if isinstance(error, RuntimeError) and WRITTEN_VIEW in str(error) and self._flat._version != self._version:
            raise written(self._names) from error

    def _begins(self, *_: Any) -> None:
        if self._guard.is_outside:
            return
        self._version = self._flat._version
        self._before = fingerprint(self._whole()) if self._guard.probes else None
        self._guard.resume()

    def _ends(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._guard.is_outside:
            return
        self._guard.pause()
        before, self._before = self._before, None
        if sys.exc_info()[0] is not None:
            return  # torch would silence what is raised here
        if self._is_root and torch.is_grad_enabled():
            for tensor in grad_tensors(output):  # before FSDP1's own hook, which reads all that is watched
                tensor.register_hook(self._backward_begins)
        if self._flat._version != self._version:
            raise written(self._names)
        if before is not None and (after := fingerprint(self._whole())) != before:
            same = len(before) == len(after) == len(self._names)
            changed = [n for n, a, b in zip(self._names, before, after, strict=False) if a != b]
            raise written(changed if same else self._names)

    def _backward_begins(self, _: Tensor) -> None:
        self._guard.pause()

    def _whole(self) -> list[Any]:
        """The weights as the unit sees them."""
        return [owner._parameters.get(stored) for stored, owner, _ in self._flat._param_infos]


def _of_nothing() -> _UnitWatch:
    """What a copy of a unit has in place of the watch over its original."""
    watch = _UnitWatch.__new__(_UnitWatch)
    watch._guard = Guard()
    watch._guard.is_lifted = True
    return watch


def _let_go(flats: list[Any]) -> None:
    """Undo cycles that pass through C++, where the collector cannot see them; a process group hangs on each.

    FSDP1 keeps on a flat parameter its views with their graph on one rank, and its hook in the graph after a forward
    without backward (torch 2.13).
    """
    for flat in flats:
        flat._tensors = [None] * len(flat._tensors or ())
        for name in ("_post_backward_hook_state", "_post_backward_hook_handle"):
            state = flat.__dict__.pop(name, None)
            if state is not None:
                (state[-1] if isinstance(state, tuple) else state).remove()


def _without_gradient(frozen: list[Entry], places: list[tuple[Any, int]]) -> Any:
    """A hook at the start of a unit's forward.

    FSDP1 shows a frozen parameter that shares a flat parameter with trainable ones as a view that takes a gradient, and
    throws the gradient away (torch 2.13). It costs a backward up to the input, and attention over a frozen bias then
    takes another kernel than it does natively, with other last bits.
    """

    def before_forward(*_: Any) -> None:
        for entry, (flat, index) in zip(frozen, places, strict=True):
            shown = getattr(entry.slots[0].owner, entry.slots[0].stored)
            if shown.requires_grad:
                _show(entry, flat, index, shown.detach())

    return before_forward


def _without_base(entries: list[Entry], places: list[tuple[Any, int]]) -> Any:
    """A hook at the start of a compiled unit's forward: its complex parameters are views of no flat parameter.

    A complex view that crosses a graph break is an input of the next graph, and dynamo makes its stand-in by
    view_as_complex of the *base* of all views: "Tensor must have a last dimension of size 2" (torch 2.13).
    """

    alias: Any = _Alias.apply

    def before_forward(*_: Any) -> None:
        for entry, (flat, index) in zip(entries, places, strict=True):
            shown = getattr(entry.slots[0].owner, entry.slots[0].stored)
            _show(entry, flat, index, alias(shown))

    return before_forward


class _Alias(torch.autograd.Function):
    """The same memory as a tensor of its own, to autograd no view."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _show(entry: Entry, flat: Any, index: int, tensor: Tensor) -> None:
    """Put ``tensor`` where FSDP1 has put the view of a flat parameter that a unit computes with."""
    flat._tensors[index] = tensor  # FSDP1 compares by identity what it finds later with what it showed
    for slot in entry.slots:
        slot.owner._parameters[slot.stored] = tensor  # type: ignore[assignment]
        object.__setattr__(slot.owner, slot.stored, tensor)  # it shows them in both places


def _unit_class() -> type[nn.Module]:
    """FSDP1 with attribute writes reaching the wrapped module, and with hooks on what outputs are views of.

    FSDP1 forwards reads but not writes: ``fno_blocks.n_modes = ...``, whose setter writes ``convs[i].n_modes``, would
    change the wrapper and not the convolution, in silence (torch 2.13).
    """
    global _cached_unit_class
    if _cached_unit_class is None:
        from torch.distributed.fsdp import FullyShardedDataParallel

        class FSDPUnit(FullyShardedDataParallel):
            _watch: _UnitWatch | None = None  # of a unit with parameters

            def forward(self, *args: Any, **kwargs: Any) -> Any:
                since, watch = forward_begins(), self._watch
                if watch is None:
                    output = super().forward(*args, **kwargs)
                else:
                    with watch:
                        output = super().forward(*args, **kwargs)
                    if torch.is_grad_enabled():
                        check_output(output, watch.told)
                hook_bases(self, output, since)
                return output

            def __setattr__(self, name: str, value: Any) -> None:
                inner = self.__dict__.get("_modules", {}).get("_fsdp_wrapped_module")
                mine = name in self.__dict__ or name.startswith("_") or hasattr(type(self), name)
                if inner is not None and not mine and hasattr(inner, name):
                    if self._watch is not None and _unwraps(inner, name, value):
                        raise replaced(self._watch.full_name(name))
                    setattr(inner, name, value)
                else:
                    super().__setattr__(name, value)

        _cached_unit_class = FSDPUnit
    return _cached_unit_class


_cached_unit_class: type[nn.Module] | None = None


@contextlib.contextmanager
def _even_shards() -> Iterator[None]:
    """While units are built: pad flat parameters so that every shard has an even number of elements.

    FSDP1 pads to a multiple of the world size only, so a shard boundary can fall between the real and the imaginary
    part of a number (torch 2.13: a TFNO with shards of 321 reals), and no optimizer could see that number. Parameters
    start at multiples of four elements, so even shards cut none.
    """
    from torch.distributed.fsdp import _init_utils
    from torch.distributed.fsdp._flat_param import FlatParamHandle

    class EvenFlatParamHandle(FlatParamHandle):
        def _init_flat_param_and_metadata(self, *args: Any, **kwargs: Any) -> None:
            true_size, self.world_size = self.world_size, 2 * self.world_size  # only used for padding in there
            try:
                super()._init_flat_param_and_metadata(*args, **kwargs)
            finally:
                self.world_size = true_size

    where: Any = _init_utils
    original, where.FlatParamHandle = where.FlatParamHandle, EvenFlatParamHandle
    try:
        yield
    finally:
        where.FlatParamHandle = original
