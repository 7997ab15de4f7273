"""FairScale's ``FullyShardedDataParallel``, served by torch's FSDP1.

FSDP1 descends from FairScale's: a wrapper's parameters are one flat vector, cut by ``torch.chunk`` with the last parts
padded, and divided by the same factors around a reduction. FairScale's files of shards, and optimizer states over flat
shards, fit element by element. FSDP2 has DTensors of single parameters, and knows no wrapper to nest.

A wrapper is two levels deep, as FairScale's is: ``wrapper.module`` is the engine, ``wrapper.module.module`` the user's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from enum import Enum, auto
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsshard.comm import watchdog
from fsshard.complex_params.parameter_records import mark_stale
from fsshard.errors import ConfigurationError, StateDictError
from fsshard.model.checks import agree
from fsshard.nested import map_leaves
from fsshard.oss.collectives import come_together
from fsshard.oss.norm_and_scaling import count_owners
from fsshard.sharded.optimizer import refuse_foreign_optimizers
from fsshard.torch_private import fsdp1
from fsshard.torch_private.autograd import current_graph_task_id
from fsshard.torch_private.modules import BatchNorm

from ....errors import MisuseError
from ....not_served import missing_from
from ....report import called
from ..wrap import auto_wrap, config_auto_wrap_policy, enable_wrap
from . import _fsdp_state
from ._fsdp_state import INNER, NotAllowed, ProcessGroupName, State, UnsupportedHere, clean

Named = tuple[str, nn.Parameter]

__all__ = [
    "FullyShardedDataParallel",
    "ProcessGroupName",
    "TrainingState",
    "auto_wrap_bn",
    "get_fsdp_instances",
    "no_pre_load_state_dict_hook",
]

__getattr__ = missing_from(__name__)


class TrainingState(Enum):
    """The state of a wrapper."""

    IDLE = auto()
    FORWARD = auto()
    BACKWARD_PRE = auto()
    BACKWARD_POST = auto()
    SUMMON_FULL_PARAMS = auto()


_NOT_WHOLE: list[TrainingState] = [state for state in TrainingState if state is not TrainingState.SUMMON_FULL_PARAMS]


def _divide_factor(when: str) -> Any:
    """Make the attribute by which gradients are divided before or after their reduction."""

    def get(self: Any) -> float:
        return fsdp1.divide_factors(self._fsdp_wrapped_module)[when == "after"]

    return property(get, lambda self, factor: fsdp1.set_divide_factors(self._fsdp_wrapped_module, **{when: factor}))


class FullyShardedDataParallel(nn.Module):
    """A module whose parameters are divided among ranks, and whole only while they are computed with.

    Wrappers nest; each shards what no wrapper inside of it does. Build the optimizer afterwards, over ``parameters()``.
    All ranks must hold the same values: nothing is sent at the start.

    Args:
        module: what is wrapped, changed in place.
        process_group: None is all ranks. An object with ``rank()`` and ``size()`` is enough to build a wrapper.
        reshard_after_forward: free the whole parameters after a forward, and gather them again for the backward.
        disable_reshard_on_root: not for the outermost wrapper.
        mixed_precision: compute and reduce in ``compute_dtype``; parameters and optimizer stay float32.
        fp32_reduce_scatter: reduce in float32, with ``mixed_precision``.
        flatten_parameters: optimizers see one flat parameter; else a flat part of each, under its own name.
        move_params_to_cpu, cpu_offload: keep shards in host memory, where they are anyway on the CPU.
        compute_dtype: None is float16 with ``mixed_precision``, else float32.
        buffer_dtype: of floating buffers; None is ``compute_dtype`` with ``mixed_precision``, else they stay.
        move_grads_to_cpu: None is as ``move_params_to_cpu``; refused where it differs and computation is on a GPU.
        process_group_reduce_scatter, bucket_cap_mb: accepted; FSDP1 reduces each wrapper's gradients at once.
        compute_device: None is where the parameters are, or the current GPU of an NCCL group; they are moved there.
        no_broadcast_optim_state: leave this wrapper's part out of :meth:`gather_full_optim_state_dict`.
        state_dict_device: of tensors in state dicts, by type; None is ``compute_device``.
        clear_autocast_cache: clear autocast's cache of cast weights after each forward.
        force_input_to_fp32: cast 16-bit floating inputs to float32, without ``mixed_precision``.
        verbose: say more in ``repr``.
        state_dict_on_rank_0_only: state dicts are empty elsewhere.
        gradient_predivide_factor: divide gradients by it before their reduction, by the rest of the ranks after.
        allow_reset_parameters: let :meth:`reset_parameters` through.

    Raises:
        NotAllowed: there is no process group yet.
        MisuseError: parameters cannot be sharded in one unit; see the text.
        ConfigurationError: options that contradict each other, or parameters of another dtype.
        UnsupportedHere: an option that FSDP1 cannot honour.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: Any = None,
        process_group_reduce_scatter: Any = ProcessGroupName.reduce_scatter,
        reshard_after_forward: bool = True,
        disable_reshard_on_root: bool = True,
        mixed_precision: bool = False,
        fp32_reduce_scatter: bool = False,
        flatten_parameters: bool = True,
        move_params_to_cpu: bool = False,
        compute_dtype: torch.dtype | None = None,
        buffer_dtype: torch.dtype | None = None,
        move_grads_to_cpu: bool | None = None,
        bucket_cap_mb: int = 25,
        compute_device: torch.device | None = None,
        no_broadcast_optim_state: bool | None = False,
        state_dict_device: torch.device | None = None,
        clear_autocast_cache: bool = False,
        force_input_to_fp32: bool = False,
        verbose: bool = False,
        cpu_offload: bool = False,
        state_dict_on_rank_0_only: bool = False,
        gradient_predivide_factor: float | None = None,
        allow_reset_parameters: bool = False,
    ) -> None:
        super().__init__()
        called("fairscale.nn.data_parallel.FullyShardedDataParallel", "torch.distributed.fsdp (FSDP1)")
        if process_group is None and not dist.is_initialized():
            raise NotAllowed(
                "torch.distributed is not yet initialized but process_group is None; call init_process_group first"
            )
        group: Any = process_group or dist.group.WORLD
        self.process_group = self.process_group_reduce_scatter = group
        if isinstance(self.process_group, dist.ProcessGroup):
            # Ranks that wait for this one can find out where it is.
            watchdog.join()
        self.rank: int = self.process_group.rank()
        self.world_size: int = self.process_group.size()
        self.reshard_after_forward = self._orig_reshard_after_forward = reshard_after_forward
        self.disable_reshard_on_root = disable_reshard_on_root
        self.mixed_precision = mixed_precision
        self.fp32_reduce_scatter = fp32_reduce_scatter
        self.flatten_parameters = flatten_parameters
        self.compute_dtype = compute_dtype or (torch.float16 if mixed_precision else torch.float32)
        self.buffer_dtype = buffer_dtype or self.compute_dtype
        self.bucket_cap_mb = bucket_cap_mb
        self.no_broadcast_optim_state = bool(no_broadcast_optim_state)
        self.clear_autocast_cache = clear_autocast_cache
        self.force_input_to_fp32 = force_input_to_fp32
        self.verbose = verbose
        self.state_dict_on_rank_0_only = state_dict_on_rank_0_only
        self.allow_reset_parameters = allow_reset_parameters
        self.children_share_process_group = True
        self._return_full_state_dict = True
        self.is_exporting = False
        self._loading: ExitStack | None = None

        if fp32_reduce_scatter and not mixed_precision:
            raise ConfigurationError("fp32_reduce_scatter requires mixed_precision=True")
        own = _own_parameters(module)
        _check_parameters(own, torch.float32 if mixed_precision else self.compute_dtype)
        self.compute_device = _compute_device(compute_device, module, self.process_group)
        self.move_params_to_cpu = self.cpu_offload = move_params_to_cpu or cpu_offload
        self.move_grads_to_cpu = self.move_params_to_cpu if move_grads_to_cpu is None else move_grads_to_cpu
        if self.move_grads_to_cpu != self.move_params_to_cpu and self.compute_device.type != "cpu":
            raise UnsupportedHere(
                f"move_grads_to_cpu={move_grads_to_cpu} with move_params_to_cpu={self.move_params_to_cpu}",
                "FSDP1 keeps shards of parameters and of gradients in one place; leave move_grads_to_cpu=None",
            )
        self.state_dict_device = torch.device(state_dict_device or self.compute_device)
        self._build(module, own, buffer_dtype)
        if gradient_predivide_factor:
            self.gradient_predivide_factor = gradient_predivide_factor
            self.gradient_postdivide_factor = self.world_size / gradient_predivide_factor

    def _build(
        self,
        module: nn.Module,
        own: list[Named],
        buffer_dtype: Any,
    ) -> None:
        from ._fsdp_engine import InnerFSDP  # not at the top: see there

        self._fsdp_wrapped_module: Any = InnerFSDP(module, self, buffer_dtype)
        for _, parameter in own:
            parameter._fsshard_in_unit = True  # type: ignore[attr-defined]
        _mark(self, own)
        nn.Module.register_load_state_dict_post_hook(self, _loaded)
        if self._has_params:
            flat = self._fsdp_wrapped_module.flat
            weakref.finalize(self, fsdp1.let_go, flat).atexit = False
            fsdp1.free_with_its_handle(flat, fsdp1.handle_of(self._fsdp_wrapped_module))

    # ---------------------------------------------------------------------------------------- what it is

    @property
    def module(self) -> Any:
        """Return the engine around the wrapped module; what it has not, the wrapped module is asked for."""
        return self._fsdp_wrapped_module

    @property
    def params(self) -> list[nn.Parameter]:
        """Return what optimizers see of this wrapper: its flat parameter, or a flat part of each."""
        flat = self._fsdp_wrapped_module.flat
        if flat is None:
            return []
        if self.flatten_parameters:
            return [flat]
        return list(fsdp1.params_of(flat))

    @property
    def _has_params(self) -> bool:
        return self._fsdp_wrapped_module.flat is not None

    @property
    def numel_padded_per_param(self) -> list[int]:
        """Return how many elements of each of :attr:`params` on this rank are padding, as FairScale cuts them."""
        return _fsdp_state.padded_lengths(self)

    @property
    def _is_root(self) -> bool | None:
        return fsdp1.is_root(self._fsdp_wrapped_module)

    @property
    def training_state(self) -> TrainingState:
        """Return what this wrapper is doing."""
        engine = self._fsdp_wrapped_module
        state = engine.training_state.name
        if state == "SUMMON_FULL_PARAMS":
            return TrainingState.SUMMON_FULL_PARAMS
        if fsdp1.handle_of(engine) is not None:
            return TrainingState[fsdp1.training_state_of(fsdp1.handle_of(engine))]
        return TrainingState.IDLE if state == "IDLE" else TrainingState.FORWARD

    def assert_state(self, state: TrainingState | list[TrainingState]) -> None:
        """Raise a ConfigurationError unless the wrapper is doing what is expected."""
        expected = [state] if isinstance(state, TrainingState) else list(state)
        if self.training_state not in expected:
            raise ConfigurationError(f"expected to be in states {expected} but current state is {self.training_state}")

    gradient_predivide_factor = _divide_factor("before")
    gradient_postdivide_factor = _divide_factor("after")

    def set_gradient_divide_factors(self, pre: float, post: float, recursive: bool) -> None:
        """Set what gradients are divided by before and after their reduction, or ``recursive`` in those inside."""
        self.assert_state(TrainingState.IDLE)
        for instance in get_fsdp_instances(self) if recursive else [self]:
            instance.gradient_predivide_factor = pre
            instance.gradient_postdivide_factor = post

    def extra_repr(self) -> str:
        """Return what ``repr`` says of the wrapper itself."""
        shown = ["world_size", "flatten_parameters", "mixed_precision"]
        if self.verbose:
            shown += ["rank", "reshard_after_forward", "compute_dtype", "buffer_dtype", "fp32_reduce_scatter"]
            shown += ["compute_device", "move_params_to_cpu", "move_grads_to_cpu", "bucket_cap_mb"]
        return ", ".join(f"{name}={getattr(self, name)}" for name in shown) + ", "

    def __getattr__(self, name: str) -> Any:
        """Look in the wrapped module for what is not here."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == INNER:
                raise
            return getattr(self._fsdp_wrapped_module.wrapped, name)

    def __getitem__(self, key: int) -> Any:
        """Index the wrapped module."""
        return self._fsdp_wrapped_module.wrapped.__getitem__(key)

    def __getstate__(self) -> State:
        """Raise NotAllowed for copies and pickles, which would share the collectives of the original."""
        raise NotAllowed(
            "a FullyShardedDataParallel cannot be copied or pickled; save its state_dict(), or build the module again, "
            "wrap it and load that"
        )

    # ---------------------------------------------------------------------------------------- as a module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on its whole parameters."""
        engine = self._fsdp_wrapped_module
        self._lazy_init()
        # A recomputation in a backward is no forward of the outermost one.
        outermost = self._is_root and current_graph_task_id() == -1
        if outermost:
            self._start_afresh()
        if self.force_input_to_fp32 and not self.mixed_precision:
            args = map_leaves(_to_float32, args)
            kwargs = map_leaves(_to_float32, kwargs)
        try:
            output = engine(*args, **kwargs)
        except Exception:
            if outermost:
                self._start_afresh()
            raise
        if outermost and self.reshard_after_forward and not self.disable_reshard_on_root:
            engine.drop_whole()  # FSDP1 keeps the root's without being asked
        if self.clear_autocast_cache:
            torch.clear_autocast_cache()
        return output

    def _start_afresh(self) -> None:
        """Before the outermost forward: leave what an exception broke off, and whole parameters from before."""
        engines = [instance._fsdp_wrapped_module for instance in get_fsdp_instances(self)]
        if any(engine.broken_off for engine in engines):
            for engine in engines:
                engine.abandon()
        if fsdp1.reduces_gradients(engines[0]):
            # What a backward without reduction has left whole may be older than the shards; FairScale computes with it.
            for engine in engines:
                engine.drop_whole()

    def _lazy_init(self) -> None:
        if self._is_root is not None:
            return
        self._fsdp_wrapped_module.lazy_init()
        for instance in get_fsdp_instances(self)[1:]:
            if instance.process_group != self.process_group:
                self.children_share_process_group = False
                # a wrapper of one rank alone is there to save memory, which gathering its state would cost
                instance.no_broadcast_optim_state |= instance.world_size == 1 < self.world_size

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[Named]:
        """Give names and parameters: original ones where they are whole or not flattened, else FairScale's."""
        whole = self.training_state is TrainingState.SUMMON_FULL_PARAMS
        for name, parameter in super().named_parameters(*args, **kwargs):
            flat = self.flatten_parameters and not whole
            yield (_fsdp_state.flat_name(name) if flat else clean(name)), parameter

    @property
    def params_with_grad(self) -> list[nn.Parameter]:
        """Return the parameters that have a gradient, of all wrappers inside."""
        return [parameter for parameter in self.parameters() if parameter.grad is not None]

    def apply(self, fn: Callable[[nn.Module], None]) -> FullyShardedDataParallel:
        """Call a function with every module inside, each with its parameters whole; changes to them are kept."""
        self.assert_state(TrainingState.IDLE)
        with self.summon_full_params(recurse=False):
            return super().apply(fn)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.assert_state(TrainingState.IDLE)
        self._fsdp_wrapped_module.drop_whole()
        before = [parameter.dtype for parameter in self.params]
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        after = [parameter.dtype for parameter in self.params]
        if before != after and not self.mixed_precision:
            self.compute_dtype = after[0]
        handle: Any = fsdp1.handle_of(self._fsdp_wrapped_module)
        if self._is_root is not None and handle is not None:
            handle.init_flat_param_attributes()
        return self

    def reset_parameters(self) -> None:
        """Call the module's ``reset_parameters`` on its whole parameters, if ``allow_reset_parameters`` was set."""
        if not self.allow_reset_parameters:
            raise NotAllowed("reset parameters after FSDP wrapping is not allowed; see allow_reset_parameters=")
        shown = self.training_state is TrainingState.SUMMON_FULL_PARAMS
        with nullcontext() if shown else self.summon_full_params(recurse=False):
            self._fsdp_wrapped_module.wrapped.reset_parameters()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave gradients unreduced and whole, until the first backward outside of this; on the outermost wrapper."""
        self._lazy_init()
        if not self._is_root:
            raise MisuseError("no_sync on inner FSDP is not supported; call it on the outermost wrapper")
        self.assert_state(TrainingState.IDLE)
        with self._fsdp_wrapped_module.no_sync():
            yield

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale gradients so that their norm over all is at most ``max_norm``; return the norm before."""
        self._lazy_init()
        if not self._is_root:
            raise MisuseError("clip_grad_norm_ should only be called on the outermost wrapper")
        self.assert_state(TrainingState.IDLE)
        if not self.children_share_process_group:
            raise UnsupportedHere(
                "clip_grad_norm_ where wrappers inside have other process groups",
                "use torch.nn.utils.clip_grad_value_, or one group",
            )
        total = self._norm(float(norm_type))
        total = total.cpu() if self.move_grads_to_cpu else total
        factor = max_norm / (total + 1e-6)
        if factor < 1:
            for parameter in self.params_with_grad:
                assert parameter.grad is not None
                parameter.grad.detach().mul_(factor.to(parameter.grad.device))
        return total

    def _norm(self, norm_type: float) -> Tensor:
        # of parameters, not gradients: the same on all ranks, also where one has no gradient
        wide = any(p.dtype is torch.float64 for p in self.parameters())
        dtype = torch.float64 if wide else torch.float32
        norms = []
        for parameter in self.params_with_grad:
            # An unflattened parameter can lie on other ranks altogether.
            if parameter.grad is not None and parameter.grad.numel():
                norm = torch.linalg.vector_norm(parameter.grad.detach(), norm_type, dtype=dtype)
                norms.append(norm.to(self.compute_device))
        zero = torch.zeros((), dtype=dtype, device=self.compute_device)
        local = torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else zero
        if norm_type == torch.inf:
            dist.all_reduce(local, dist.ReduceOp.MAX, self.process_group)
            return local
        total = local**norm_type
        dist.all_reduce(total, dist.ReduceOp.SUM, self.process_group)
        return total ** (1.0 / norm_type)

    @contextmanager
    def summon_full_params(self, recurse: bool = True, volatile: bool = False) -> Iterator[None]:
        """Show whole parameters, in full precision and under their own names. Collective.

        Every rank keeps its own part of what is changed inside, all wrappers' with ``recurse``; with ``volatile`` it
        need not. This cannot be used inside of a forward or backward, nor these inside of it.

        Raises:
            NotTogether: other ranks are in another call; on all of them.
        """
        instances = get_fsdp_instances(self) if recurse else [self]
        for instance in instances:
            instance._lazy_init()
            instance.assert_state(TrainingState.IDLE)
        if recurse:  # else it is a part of another call
            come_together(self.process_group, "FullyShardedDataParallel.summon_full_params()")
        with ExitStack() as stack:
            for instance in instances:
                keep = stack.enter_context(instance._fsdp_wrapped_module.whole())
                if not volatile:
                    stack.callback(keep)
            yield

    # ---------------------------------------------------------------------------------------- state dicts

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Give the whole state under the module's own names, copied. Collective.

        Returns:
            The same on all ranks; empty on others than the first with ``state_dict_on_rank_0_only``.

        Raises:
            NotTogether: other ranks are in another call; on all of them.
        """
        outermost = not self.is_exporting
        local = not self._return_full_state_dict
        with self._set_inside("is_exporting", True), ExitStack() as stack:
            shown = self.training_state is TrainingState.SUMMON_FULL_PARAMS or (local and self.flatten_parameters)
            if not shown:
                if outermost:
                    come_together(self.process_group, "FullyShardedDataParallel.state_dict()")
                stack.enter_context(self.summon_full_params(recurse=False, volatile=True))
            found = super().state_dict(*args, **kwargs)
            prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
            _fsdp_state.export(self, _wrappers(self), found, prefix, local)
        if self.state_dict_on_rank_0_only and dist.get_rank() != 0:
            for key in [key for key in found if key.startswith(prefix)]:
                del found[key]
        return found

    def local_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Give this rank's part of the state, as FairScale writes it.

        Collective where a wrapper does not flatten.
        """
        self.assert_state(_NOT_WHOLE)
        with self._set_inside("_return_full_state_dict", False):
            # not self.state_dict: subclasses choose between the two there
            return FullyShardedDataParallel.state_dict(self, *args, **kwargs)

    @contextmanager
    def _set_inside(self, name: str, value: bool) -> Iterator[None]:
        """Set an attribute of this wrapper and of those inside for a while."""
        before = [(instance, getattr(instance, name)) for instance in get_fsdp_instances(self)]
        for instance, _ in before:
            setattr(instance, name, value)
        try:
            yield
        finally:
            for instance, old in before:
                setattr(instance, name, old)

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
        """Load a whole state. Collective; every rank must have it.

        Returns:
            torch's named tuple of missing and unexpected keys.

        Raises:
            StateDictError: names or shapes do not fit, on every rank; it names them, and nothing was loaded.
        """
        come_together(self.process_group, "FullyShardedDataParallel.load_state_dict()")
        instances = get_fsdp_instances(self)
        buffers = [(buffer, buffer.clone()) for buffer in self.buffers()]
        single = []
        for instance in instances:
            if instance.world_size == 1:
                single += [(parameter, parameter.detach().clone()) for parameter in instance.params]
        try:
            with ExitStack() as stack:
                for instance in instances:
                    instance._lazy_init()
                keeps = [stack.enter_context(instance._fsdp_wrapped_module.whole()) for instance in instances]
                found = agree(_exchange(self.process_group), lambda: self._load_whole(state_dict, strict))
                for keep in keeps:
                    keep()
        except Exception:
            with torch.no_grad():
                for value, before in [*buffers, *single]:
                    value.copy_(before)
            raise
        return found

    def _load_whole(self, state_dict: Any, strict: bool) -> Any:
        shown = {clean(name): p for name, p in nn.Module.named_parameters(self, remove_duplicate=False)}
        expected = {name: tuple(value.shape) for name, value in {**shown, **_fsdp_state.saved_buffers(self)}.items()}
        try:
            return super().load_state_dict(state_dict, strict)
        except RuntimeError as error:
            given = {clean(key): tuple(value.shape) for key, value in state_dict.items() if isinstance(value, Tensor)}
            wrong = {}
            for key, shape in given.items():
                if expected.get(key, shape) != shape:
                    wrong[key] = (expected[key], shape)
            missing = expected.keys() - given.keys()
            unexpected = given.keys() - expected.keys()
            if not (wrong or missing or unexpected):
                raise
            raise StateDictError("the state dict", missing, unexpected, wrong) from error

    def _load_from_state_dict(self, state_dict: State, prefix: str, *args: Any, **kwargs: Any) -> None:
        # torch calls this for a part of a model that is not sharded itself too, where it does not call load_state_dict;
        # the parts of this part are loaded next, and then the hook below is called.
        if self.training_state is not TrainingState.SUMMON_FULL_PARAMS:
            self._loading = ExitStack()
            self._loading.enter_context(self.summon_full_params(recurse=False))
        _fsdp_state.lower(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def load_local_state_dict(self, state_dict: Any, strict: bool = True) -> Any:
        """Load this rank's part of a state, from as many ranks as there are now. Collective.

        Returns:
            torch's named tuple of missing and unexpected keys.

        Raises:
            StateDictError: names or shapes do not fit, on every rank; it names them, and nothing was loaded.
        """
        self.assert_state(_NOT_WHOLE)
        self._lazy_init()
        come_together(self.process_group, "FullyShardedDataParallel.load_local_state_dict()")
        wrappers = _wrappers(self)
        found = agree(
            _exchange(self.process_group), lambda: _fsdp_state.check_local(self, wrappers, state_dict, strict)
        )
        _fsdp_state.load_local(self, wrappers, state_dict)
        return found

    def local_metadata_dict(self) -> State:
        """Give what :meth:`consolidate_shard_weights` needs to know of this rank's part, as FairScale writes it."""
        return _fsdp_state.metadata(self, _wrappers(self))

    @staticmethod
    def consolidate_shard_weights(
        shard_weights: list[dict[str, Tensor]],
        shard_metadata: list[State],
        with_module_buffers: bool = True,
        strict: bool = True,
    ) -> dict[str, Tensor]:
        """Put a whole state together from all ranks' parts, those that FairScale wrote included.

        Args:
            shard_weights, shard_metadata: :meth:`local_state_dict` and :meth:`local_metadata_dict` of each, in order.
            with_module_buffers: take the buffers of the first.
            strict: raise StateDictError for what the metadata names and is not there; else it is left out.
        """
        # It needs the engines, so it is not imported at the top.
        from ....fairscale_checkpoints import consolidate

        return consolidate(shard_weights, shard_metadata, with_module_buffers, strict)

    # ---------------------------------------------------------------------------------------- optimizer states

    def gather_full_optim_state_dict(self, optim: Any, **ignored: Any) -> State | None:
        """Put the optimizer's whole state together, by original parameters. Collective.

        Args:
            optim: over this model's ``parameters()``, in one group; anything that has such a ``state_dict()``.
            **ignored: as in FairScale.

        Returns:
            On the first rank FairScale's form: ``state``, ``param_groups``, ``param_id_map``,
            ``uncollected_local_ids``. None on others.

        Raises:
            OptimizerError: an optimizer of something else, or a state that cannot be put together.
            NotTogether: other ranks are in another call; on all of them.
        """
        if not self.flatten_parameters:
            raise UnsupportedHere(
                "gather_full_optim_state_dict with flatten_parameters=False", "flatten the parameters"
            )
        self._lazy_init()
        come_together(self.process_group, "FullyShardedDataParallel.gather_full_optim_state_dict()")
        instances = get_fsdp_instances(self, skip_empty=True)
        return _fsdp_state.gather(self, instances, optim, _exchange(self.process_group))

    def get_shard_from_optim_state_dict(self, full_optim_state_dict: State) -> State:
        """Give what ``optim.load_state_dict`` takes on this rank.

        Args:
            full_optim_state_dict: of :meth:`gather_full_optim_state_dict`, the whole on every rank. As in FairScale it
                is changed in place, and returned, so that what else is in it stays.
        """
        return _fsdp_state.cut(self, get_fsdp_instances(self, skip_empty=True), full_optim_state_dict)


# ------------------------------------------------------------------------------------------------ parameters


def _compute_device(asked: Any, module: nn.Module, group: Any) -> torch.device:
    """Return where to compute: as asked, else where the parameters are, else on the device that the group is for."""
    found = next((p.device for p in module.parameters() if p.device.type not in ("cpu", "meta")), None)
    nccl = isinstance(group, dist.ProcessGroup) and "nccl" in str(dist.get_backend(group))
    device = torch.device(asked or found or ("cuda" if nccl else "cpu"))
    # FSDP1 compares with the devices of tensors, which have an index (torch 2.13)
    without = device.type == "cuda" and device.index is None
    if without:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _own_parameters(module: nn.Module) -> list[Named]:
    """Return the names and parameters that no inner wrapper has."""
    every = module.named_modules(remove_duplicate=False)
    inner = tuple(f"{path}." if path else "" for path, part in every if isinstance(part, FullyShardedDataParallel))
    named = nn.Module.named_parameters(module, remove_duplicate=False)
    return [(name, parameter) for name, parameter in named if not name.startswith(inner)]


def _check_parameters(own: Iterable[Named], dtype: torch.dtype) -> None:
    """Raise for parameters that no inner wrapper has and that cannot be sharded in one unit."""
    for name, parameter in own:
        if getattr(parameter, "_fsshard_in_unit", False):
            raise MisuseError(
                f"{name!r} is tied to a parameter that an inner FullyShardedDataParallel has sharded, and would not be "
                "tied any more; wrap the modules that share it in one wrapper"
            )
        if parameter.is_complex():
            raise MisuseError(
                f"{name!r} is {parameter.dtype}: FairScale shards real parameters only; use "
                'fsshard.wrap(model, backend="fsdp2"), which takes complex ones'
            )
        if parameter.dtype is not dtype:
            raise ConfigurationError(
                f"{name!r} is {parameter.dtype}, expected {dtype}: without mixed_precision=True parameters have the "
                "compute_dtype (float32 unless given), with it they are float32"
            )


def _mark(wrapper: Any, before: Iterable[Named]) -> None:
    """Let functions of torch raise that would silently be wrong with a wrapper's parameters, or with those before."""
    refuse_foreign_optimizers(wrapper)
    kept = set(map(id, wrapper.params))
    for name, parameter in before:
        # An optimizer over these would go on over tensors that nobody computes with, and train nothing.
        if id(parameter) not in kept:
            mark_stale(
                parameter,
                f"parameter {name!r} was replaced by a flat one when FullyShardedDataParallel wrapped its module, so "
                "that this optimizer would train nothing; build the optimizer after wrapping, over model.parameters(), "
                "or wrap with flatten_parameters=False",
            )
    # torch's clip_grad_norm_ would take another norm on each rank.
    if wrapper.world_size > 1:
        count_owners(wrapper)
        for parameter in wrapper.params:
            parameter._fsshard_clip_with = (
                "call fsdp.clip_grad_norm_(max_norm): the FullyShardedDataParallel's own method, on the outermost "
                "wrapper, adds up the norms of all ranks"
            )


# ------------------------------------------------------------------------------------------------ hooks and inputs


def _loaded(module: nn.Module, incompatible_keys: Any) -> None:
    assert isinstance(module, FullyShardedDataParallel)
    for keys in (incompatible_keys.missing_keys, incompatible_keys.unexpected_keys):
        keys[:] = list(map(clean, keys))
    if module._loading is not None:
        stack = module._loading
        module._loading = None
        stack.close()


def _exchange(group: Any) -> Any:
    """Return the group for exchanges of errors; what only looks like one has no other ranks."""
    return group if isinstance(group, dist.ProcessGroup) else None


def _to_float32(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16):
        return value.float()
    return value


@contextmanager
def no_pre_load_state_dict_hook() -> Iterator[None]:
    """Do nothing: names with and without the wrappers' levels are both understood, so nothing has to be turned off."""
    yield


# ------------------------------------------------------------------------------------------------ functions


def auto_wrap_bn(
    module: nn.Module,
    single_rank_pg: bool = False,
    process_group: Any = None,
    fsdp_config: State | None = None,
    wrap_it: bool = True,
    assert_on_collision: bool = True,
) -> nn.Module:
    """Wrap every BatchNorm in a full-precision, unflattened wrapper, so that the one around can do otherwise.

    Args:
        module: what to look through.
        single_rank_pg: of one rank each: parameters are not sharded, gradients not reduced. Collective.
        process_group: for these wrappers.
        fsdp_config: in place of the above, for the wrappers.
        wrap_it: else the modules are only tagged, for a later ``auto_wrap`` with ``config_auto_wrap_policy``.
        assert_on_collision: a tag that is there already is a mistake; else it is replaced.
    """
    called("fairscale.nn.data_parallel.auto_wrap_bn", "torch.distributed.fsdp (FSDP1)")
    config = fsdp_config
    if config is None:
        if single_rank_pg and dist.get_world_size() > 1:
            process_group, _ = dist.new_subgroups(group_size=1)
        config = {"process_group": process_group, "mixed_precision": False, "flatten_parameters": False}
        config.update(reshard_after_forward=False, bucket_cap_mb=0, force_input_to_fp32=False)
    for name, part in module.named_modules():
        if isinstance(part, BatchNorm):
            if assert_on_collision and hasattr(part, "wrapper_config"):
                raise MisuseError(f"{name!r} has a wrapper_config already; is it tagged by another policy?")
            part.wrapper_config = config  # type: ignore[assignment]
    if not wrap_it:
        return auto_wrap(module)
    with enable_wrap(config_auto_wrap_policy, wrapper_cls=FullyShardedDataParallel):
        return auto_wrap(module)


def get_fsdp_instances(mod: nn.Module, skip_empty: bool = False) -> list[FullyShardedDataParallel]:
    """Give the wrappers in a module, itself included, outermost first; or those that have parameters of their own."""
    instances = [module for module in mod.modules() if isinstance(module, FullyShardedDataParallel)]
    if skip_empty:
        return [instance for instance in instances if instance._has_params]
    return instances


def _wrappers(root: nn.Module) -> list[tuple[str, FullyShardedDataParallel]]:
    """Return the wrappers in a module with their clean paths, outermost first."""
    return [(clean(path), each) for path, each in root.named_modules() if isinstance(each, FullyShardedDataParallel)]
