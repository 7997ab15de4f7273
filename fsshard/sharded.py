"""ShardedModule: the same object under every backend."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

from fsshard.backends.base import Backend, Entry, per_rank
from fsshard.backends.borders import is_border
from fsshard.backends.clipping import count_all_ranks
from fsshard.backends.outputs import bases, check_output, forward_begins, grad_tensors, hidden_tensors
from fsshard.comm.forks import check_not_inherited
from fsshard.comm.presence import lost_ranks, speaks_of_a_lost_rank, taking_part
from fsshard.complex_params import public_name, viewable
from fsshard.errors import (
    ConfigurationError,
    FsshardError,
    ModelError,
    OptimizerError,
    PrecisionError,
    RankMismatch,
    StateDictError,
    UnsupportedByBackend,
)
from fsshard.foreign_trainers import check_trainer
from fsshard.memory_report import MemoryReport, memory_report
from fsshard.model.changes import ModelWatch
from fsshard.parameter_views import ParameterViews
from fsshard.plan import Plan
from fsshard.precision import explain_mismatch

if TYPE_CHECKING:
    from fsshard.estimate.result import Estimate

__all__ = ["ShardedModule", "broadcast_tensors", "live_optimizers"]

log = logging.getLogger("fsshard")
MIXED_UP = ("same dtype", "should be the same", "does not match weight dtype")
"""What torch 2.13 says of operands in two dtypes: linear, convolution, RNN."""
NO_HOOKS = "don't yet support saved tensor hooks"
"""What torch.func's reverse transforms of torch 2.13 say of checkpoints."""
NO_TANGENTS = ("but the jvp is not returning a view", "You must implement the jvp function")
"""What torch 2.13 says where dual numbers come to a node of FSDP2's or DDP's."""
NORM_CHUNK = 2**20
BROADCAST_BYTES = 250 * 2**20

Method = TypeVar("Method", bound=Callable[..., Any])


def _takes_part(what: str) -> Callable[[Method], Method]:
    """Of methods that are collective."""

    def decorated(method: Method) -> Method:
        @functools.wraps(method)
        def call(self: ShardedModule, *args: Any, **kwargs: Any) -> Any:
            with taking_part(self.backend.settings.group, what):
                return method(self, *args, **kwargs)

        return cast("Method", call)

    return decorated


class ShardedModule(nn.Module):
    """A model under an engine; made by :func:`fsshard.wrap`.

    Calling it runs the engine; every other attribute is the user's model's, and so are ``model[0]``, ``len(model)`` and
    iteration. ``isinstance`` is asked of ``model.module``. Parameters, state dicts and norms are those of the original
    model: names, shapes, complex dtypes.

    Attributes:
        module: the user's model.
        plan: what was decided.
        backend: the :class:`~fsshard.backends.base.Backend` that executes it; ``backend.name`` is its name.
    """

    module: nn.Module

    def __init__(
        self,
        backend: Backend,
        *,
        broadcast_buffers: bool = True,
        buffer_dtypes: Mapping[str, torch.dtype] | None = None,
    ) -> None:
        super().__init__()
        self.module = backend.module
        self.__class__ = _class_over(cast(Any, type(backend.module)))
        object.__setattr__(self, "_backend", backend)
        self._broadcast_buffers = broadcast_buffers
        self._buffer_dtypes = dict(buffer_dtypes or {})  # of the buffers that mixed precision holds in another one
        self._buffers_differ = False
        source = backend.settings.source
        self._unfilled = set() if source is None else source.unfilled  # names of what has memory and no numbers yet
        self.scaled = False  # a GradScaler was made for it
        self._whole: dict[str, Tensor] | None = None
        self._silenced = 0  # how many no_sync contexts are open
        self._unsynchronised = False  # the latest backward was inside one
        self._views = ParameterViews(backend, self)
        backend.follower = weakref.WeakMethod(self._views.moving)
        self._optimizers: list[weakref.ref[Any]] = []
        if any(backend.counts_all_ranks(entry) for entry in backend.entries.values()):
            count_all_ranks(weakref.ref(self))
        object.__setattr__(self, "_watch", ModelWatch(self, backend))
        for entry in backend.entries.values():
            if not backend.differentiates_parameters:
                entry.parameter._fsshard_cut = backend.name  # type: ignore[attr-defined]
            if entry.kind.is_complex or backend.owns_optimizer:
                entry.parameter._fsshard_managed = (  # type: ignore[attr-defined]
                    f"parameter {entry.name!r} is managed by fsshard (backend {backend.name!r}); "
                    "build the optimizer with fsshard.build_optimizer"
                )
        backend.user_works()

    # ------------------------------------------------------------------------------------------ what it is

    @property
    def backend(self) -> Backend:
        """The backend."""
        backend: Backend = self.__dict__["_backend"]
        return backend

    @property
    def plan(self) -> Plan:
        """The plan that the backend executes."""
        return self.backend.settings.plan

    def explain(self, estimate: Estimate | None = None) -> str:
        """The plan as a table, and what each unit costs beside the least that it could. Local; nothing is run.

        Per unit: what this rank holds of it between steps; how often a step gathers it, and its size then; what a rank
        sends for it in a step, on average over the ranks; the bound of that, which is the same without padding; and
        the ratio. Below: the sums, beside what no implementation of the engine can go below, where another unit may be
        the one that stays gathered from forward to backward. A step has one forward and one backward, and calls
        every unit once.

        Args:
            estimate: what :func:`fsshard.estimate` gave for this training, which is shown below: peak by kind.

        Raises:
            ConfigurationError: the estimate is of another model, backend or mesh.
        """
        from fsshard.explaining import explain

        return explain(self.backend, estimate)

    def memory_report(self, *, all_ranks: bool = False) -> MemoryReport:
        """Bytes of parameters, buffers, gradients and optimizer states that this rank holds now, on its host too.

        Storages are counted, each once and whole: padding is memory, and FSDP1 lets gradients go at the next forward
        only, whenever they were dropped. What an engine keeps beside these (DDP's buckets, say) and what a step needs
        on its way :class:`fsshard.MemoryTracker` sees.

        Args:
            all_ranks: report every rank's; collective then, else local.
        """
        return memory_report(self.backend, live_optimizers(self), (self._whole or {}).values(), all_ranks=all_ranks)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            value = getattr(self.module, name)
            return self._refusing(name) if name in self.backend.needs_whole and self._whole is None else value

    def _refusing(self, name: str) -> Any:
        def refuse(*_: Any, **__: Any) -> None:
            raise FsshardError(
                f"{name}() of {type(self.module).__name__} would see this rank's part of the weights only; call it "
                f"inside `with model.full_parameters():` (entered on every rank), or use model.state_dict()"
            )

        return refuse

    def __setattr__(self, name: str, value: Any) -> None:
        module = self.__dict__.get("_modules", {}).get("module")
        mine = name in self.__dict__ or name == "training" or hasattr(type(self), name) or name == "module"
        if module is not None and not mine and hasattr(module, name):
            setattr(module, name, value)  # a write must reach what a read would give
        else:
            super().__setattr__(name, value)

    def __repr__(self) -> str:
        return f"ShardedModule(backend={self.backend.name!r}, {self.module!r})"

    def __deepcopy__(self, memo: Any) -> Any:
        return self.__reduce_ex__(0)

    def __reduce_ex__(self, protocol: Any) -> Any:
        before = "copy the model before fsshard.wrap"
        instead = before if self.backend.shards_within_parameters else f"copy model.module, or {before}"
        raise FsshardError(
            "a ShardedModule belongs to its process group and cannot be copied (deepcopy, AveragedModel) or pickled; "
            f"keep model.state_dict(), or {instead}"
        )

    # ------------------------------------------------------------------------------------------ training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The user's forward, under the engine."""
        try:
            return self._forward(args, kwargs)
        except RuntimeError as error:
            group = self.backend.settings.group
            if group is None or not speaks_of_a_lost_rank(error):
                raise
            raise lost_ranks(group, error, "the forward of a wrapped model") from error

    def _forward(self, args: Any, kwargs: Any) -> Any:
        if self._whole is not None:
            raise FsshardError("forward inside full_parameters(); leave the context first")
        self.check_filled()
        backend, training = self.backend, self.module.training
        if training or torch.is_grad_enabled() or backend.shards_within_parameters:  # DDP's second one is collective
            check_not_inherited(backend.settings.group, "the forward of a wrapped model")
        if backend.shards_within_parameters and torch.is_grad_enabled():
            backend.step_counts.forward_begins()
        backend.engine_works()
        self._views.adopt()
        backend.before_forward(training=training)
        self._sync_buffers(then_differ=training or backend.trains_buffers())
        if backend.engine.training != training:
            backend.engine.training = training  # some frameworks set the mode of the inner module only
        since = forward_begins()
        try:
            output = self._run(args, kwargs)
        except BaseException:
            backend.forward_failed()
            raise
        if torch.is_grad_enabled():
            if backend.hooks_outputs:
                check_output(output, "the model")
            self._watch_backward(output, since)
        backend.user_works()
        return output

    def check_filled(self) -> None:
        """Raise while anything of a model from the meta device has memory and no numbers, or is not what was wrapped.

        Raises:
            ModelError: names it, and says where its numbers can come from; or what was added, replaced or removed.
        """
        if self._whole is None:
            watch: ModelWatch = self.__dict__["_watch"]
            watch.check()
        if not self._unfilled:
            return
        known = {*self.backend.key_order, *self.backend.entries}
        awaited, constants = sorted(self._unfilled & known), sorted(self._unfilled - known)
        told = []
        if awaited:
            told.append(
                f"no numbers yet for {', '.join(awaited[:5])}: the model was built on the meta device; load a state "
                "dict that has them, or wrap with a param_init_fn that gives them"
            )
        if constants:
            told.append(
                f"no numbers yet for {', '.join(constants[:5])}, non-persistent buffers, which no state dict has: wrap "
                "with a param_init_fn that gives them (what it leaves alone can come from a state dict; for a model "
                "of transformers: param_init_fn=model._init_weights), or build the model really on rank 0"
            )
        raise ModelError(". And ".join(told))

    def _watch_backward(self, output: Any, since: int) -> None:
        """Learn when the backward of this forward starts, and whether its gradients will be reduced."""
        silent = self._silenced > 0

        def backward_starts(_: Tensor) -> None:
            if not self.backend.accumulates():  # a penalty's inner derivative: nothing to reduce
                self.backend.derivative_starts()
                if torch.is_grad_enabled():  # the backward of a loss of derivatives alone does not come through here
                    self._unsynchronised = self._silenced > 0
                return
            if (self._silenced > 0) != silent:
                raise ModelError(
                    "a forward and its backward must both be inside no_sync(), or both outside of it: some engines "
                    "decide at the one, some at the other"
                )
            self.backend.backward_starts(synchronised=not silent)
            self._unsynchronised = silent

        outputs = [*grad_tensors(output), *hidden_tensors(output, since)]
        for tensor in (*outputs, *bases(outputs, since)):
            tensor.register_hook(backward_starts)

    def _run(self, args: Any, kwargs: Any) -> Any:
        if torch.is_inference_mode_enabled():
            # Engines keep what they allocate in the first forward; made in inference mode, it could never be trained.
            with torch.inference_mode(False), torch.no_grad():
                return self.backend.engine(*args, **kwargs)
        try:
            return self.backend.engine(*args, **kwargs)
        except RuntimeError as error:
            if NO_HOOKS in str(error):
                raise ConfigurationError(
                    "torch.func.grad and its kin through recomputed blocks, which torch does not support; use "
                    "torch.autograd.grad(..., create_graph=True), or leave activation_checkpointing off"
                ) from error
            if any(text in str(error) for text in NO_TANGENTS):
                raise UnsupportedByBackend(
                    "torch.autograd.forward_ad through its units",
                    self.backend.name,
                    "use torch.func.jvp, or backend='fairscale'",
                ) from error
            param = self.plan.precision.param
            if param not in (None, torch.float32) and any(text in str(error) for text in MIXED_UP):
                raise PrecisionError(f"{error}: {explain_mismatch(error, param)}") from error
            if not (is_border(str(error)) or "RegisterPostBackwardFunction" in str(error)):
                raise
            raise FsshardError(
                "a sharding unit changes its input in place, which no unit may do (FSDP2 has this limit, and fsshard "
                "holds every backend to the same units); make it out of place, or leave it out of auto_wrap_policy"
            ) from error

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, backward accumulates local gradients; the first backward after it reduces them all."""
        self._silenced += 1
        try:
            with self.backend.no_sync():
                yield
        finally:
            self._silenced -= 1

    @property
    def has_local_gradients(self) -> bool:
        """Whether the latest backward passes were under :meth:`no_sync`, so that ranks hold different gradients."""
        return self._unsynchronised

    def check_synchronised(self) -> None:
        """Raise if the latest backward passes were under :meth:`no_sync`, so that ranks hold different gradients."""
        if self._unsynchronised:
            raise OptimizerError(
                "the gradients are local: every backward since the last step ran under no_sync(); run the last "
                "micro-batch outside of it (also in an incomplete last round of accumulation)"
            )

    def autocast(self) -> AbstractContextManager[Any]:
        """The autocast context of the mixed-precision policy: nothing, in float32.

        Not needed where every floating-point tensor of the forward comes from a unit's inputs or parameters; a forward
        that makes float32 tensors of its own and multiplies them with weights needs it. Islands leave it.
        """
        settings = self.backend.settings
        dtype = settings.precision.param
        if dtype in (None, torch.float32):
            return contextlib.nullcontext()
        return torch.autocast(settings.device.type, dtype=dtype)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of all parameters, or zero them."""
        self.backend.zero_grad(self.backend.entries.values(), set_to_none=set_to_none)
        self.forget_gradients()

    def forget_gradients(self) -> None:
        """Gradients were dropped."""
        self._unsynchronised = False

    def requires_grad_(self, requires_grad: bool = True) -> ShardedModule:
        """Freeze or unfreeze all parameters."""
        self._views.require_grad(requires_grad)
        return self

    @torch.no_grad()
    @_takes_part("clip_grad_norm_()")
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Scale all gradients so that their norm is at most ``max_norm``. Collective.

        The norm is over the original numbers: a complex one counts by its modulus, not by its halves. Powers are
        summed in float64 and the result is rounded to float32, so that the order in which shards are summed does not
        show: every backend gives the same norm and the same clipped gradients.

        Args:
            max_norm: the largest norm allowed, as in ``torch.nn.utils.clip_grad_norm_``.
            norm_type: p of the p-norm, > 0; ``inf`` for the largest modulus.
            error_if_nonfinite: raise if the norm is NaN or infinite.

        Returns:
            The norm before clipping: 0-dim float32, the same on every rank.
        """
        if not norm_type > 0:
            raise ConfigurationError(f"norm_type must be positive or inf, got {norm_type}")
        backend = self.backend
        self.finish_gradients(backend.entries.values())
        graded = [(e, g) for e in backend.entries.values() if (g := backend.local_grad(e)) is not None]
        norm = self.norm_of(backend.entries.values(), float(norm_type))
        if error_if_nonfinite and not bool(torch.isfinite(norm)):
            raise FsshardError(f"the gradients' norm of order {norm_type} is {norm.item()}; nothing was clipped")
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for _, gradient in graded:
            gradient.mul_(scale.to(gradient.device, gradient.dtype))
        return norm

    def finish_gradients(self, entries: Iterable[Entry]) -> None:
        """Make the gradients of ``entries`` final. Collective.

        Raises:
            OptimizerError: every backward pass since the last step ran under :meth:`no_sync`.
        """
        self.check_synchronised()
        self.backend.finish_backward(entries)

    def norm_of(self, entries: Iterable[Entry], norm_type: float) -> Tensor:
        """The norm of the gradients of ``entries`` as in :meth:`clip_grad_norm_`, once they are final. Collective."""
        backend = self.backend
        graded = [(e, _numbers(g)) for e in entries if backend.owned(e) and (g := backend.local_grad(e)) is not None]
        return self._norm(graded, norm_type)

    def _norm(self, graded: list[tuple[Entry, Tensor]], p: float) -> Tensor:
        device = self.backend.settings.device
        if math.isinf(p):
            parts = [_moduli(e, g, p).max().double() for e, g in graded if g.numel()]
            top = torch.stack([part.to(device) for part in parts]).max() if parts else torch.zeros((), device=device)
            return self.backend.reduce_norm(top.double(), dist.ReduceOp.MAX).float()
        total = torch.zeros((), dtype=torch.float64, device=device)
        for entry, gradient in graded:
            total += _power_sum(_moduli(entry, gradient, p), p).to(device)
        return self.backend.reduce_norm(total, dist.ReduceOp.SUM).pow(1.0 / p).float()

    def _sync_buffers(self, *, then_differ: bool = False) -> None:
        """Rank 0's buffers to all, where a training forward may have made them differ (as DDP does)."""
        group = self.backend.settings.group
        if self._buffers_differ and self._broadcast_buffers and group is not None and group.size() > 1:
            broadcast_tensors(self.backend.buffers(), group)
        if self._buffers_differ != then_differ:  # to write is dear in an nn.Module
            self._buffers_differ = then_differ

    # ------------------------------------------------------------------------------------------ optimizers

    def register_optimizer(self, optimizer: Any) -> None:
        """Remember an optimizer built over this model."""
        self._optimizers = [ref for ref in self._optimizers if ref() is not None]
        self._optimizers.append(weakref.ref(optimizer))

    def warn_of_uncovered(self) -> None:
        """Log the trainable parameters that no optimizer updates."""
        covered = {id(p) for ref in self._optimizers if (o := ref()) for g in o.param_groups for p in g["params"]}
        entries = self.backend.entries.values()
        left = [e.name for e in entries if e.parameter.requires_grad and id(e.parameter) not in covered]
        if left:
            log.warning("trainable parameters in no optimizer: %s", ", ".join(left))

    def find_entry(self, item: Any) -> Entry:
        """The parameter that ``item`` means: a name, a parameter or view of this model, or a (name, parameter) pair."""
        entries = self.backend.entries
        if isinstance(item, tuple) and len(item) == 2:
            item = item[0]
        if isinstance(item, str):
            found = entries.get(item) or entries.get(self._aliases.get(item, ""))
            if found is None:
                raise OptimizerError(f"the model has no parameter {item!r}")
            return found
        owner = getattr(item, "_fsshard_view_of", None)
        if owner is not None and owner[0]() is self:
            return entries[owner[1]]
        for entry in entries.values():
            if entry.parameter is item:
                return entry
        stale = getattr(item, "_fsshard_stale", None)
        shape = tuple(item.shape) if isinstance(item, Tensor) else type(item).__name__
        raise OptimizerError(str(stale) if stale else f"not a parameter of this model: {shape}; pass its name instead")

    @property
    def _aliases(self) -> dict[str, str]:
        return {slot.name: entry.name for entry in self.backend.entries.values() for slot in entry.slots}

    # ------------------------------------------------------------------------------------------ parameters

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Original names with parameters of the original shape and dtype.

        Where the engine keeps a parameter whole and real it is that parameter; a complex one is a view that shares
        memory and gradient; under ``fsdp2`` it is a DTensor. What an engine cuts elsewhere than between rows has no
        shape on a rank and is on the meta device (use :meth:`full_parameters` for values): all parameters under
        ``fsdp``; complex ones under ``fsdp2`` whose rows the ranks cannot share evenly, with a DTensor of one dimension
        as their gradient. Gradients are the engine's, as they are when they are asked for, and can be changed in place
        or dropped; freezing a parameter holds from the next forward on. Each can be handed to
        :func:`~fsshard.build_optimizer`; a plain torch optimizer over views raises at its first step, and so does the
        backward of a loss that was computed with a view, whose gradient would be lost.
        """
        if not recurse:
            return
        self.backend.before_showing()
        for entry in self.backend.entries.values():
            names = [entry.name] if remove_duplicate else [slot.name for slot in entry.slots]
            shown = self._shown(entry)
            yield from ((f"{prefix}.{name}" if prefix else name, shown) for name in names)

    def _shown(self, entry: Entry) -> nn.Parameter:
        if self._whole is not None:
            return nn.Parameter(self._whole[entry.name], requires_grad=entry.parameter.requires_grad)
        return self._views.show(entry)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """The user's model's buffers under their original names."""
        with self.backend.bare() as module:
            found = list(module.named_buffers(prefix, recurse, remove_duplicate))
        yield from ((public_name(name), buffer) for name, buffer in found)

    @contextlib.contextmanager
    def full_parameters(self, writeback: bool = False) -> Iterator[dict[str, Tensor]]:
        """Within it the user's modules hold whole parameters; collective at both ends.

        Args:
            writeback: keep what is changed within (each rank keeps its own part of its own values, so every rank must
                make the same change).

        Yields:
            ``{original name: whole tensor}``, complex where the model is; the modules' attributes show the same memory.

        Raises:
            ModelError: the model was built on the meta device, and some of it has no numbers yet.
        """
        self.check_filled()
        backend = self.backend
        with taking_part(backend.settings.group, "full_parameters()"):
            backend.settle()
            parts = ((entry, backend.local_value(entry)) for entry in backend.entries.values())
            stored = dict(zip(backend.entries, backend.gather_all(parts), strict=True))
        self._whole = {name: backend.entries[name].kind.to_user(value) for name, value in stored.items()}
        try:
            with backend.bare(), backend.whole_parameters(stored):
                yield dict(self._whole)
        finally:
            self._whole = None
        if writeback:
            with torch.no_grad():
                for name, entry in backend.entries.items():
                    backend.load_parameter(entry, stored[name])

    # ------------------------------------------------------------------------------------------ state dicts

    @_takes_part("state_dict()")
    def state_dict(  # type: ignore[override]
        self, *args: Any, rank0_only: bool = False, offload_to_cpu: bool = False, config: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        """The original model's state dict: names, order, shapes, complex dtypes, whole tensors. Collective.

        Parameters are put together one at a time. With ``rank0_only`` rank 0 receives the parts where they stay and
        needs one copy of the model for it (on a GPU with ``offload_to_cpu``: one parameter there, the copy in host
        memory), the others need nothing; without it every rank needs a copy and two of the largest parameter.

        Args:
            *args: not supported (torch's ``destination``).
            rank0_only: the other ranks take part and get ``{}``.
            offload_to_cpu: every tensor moves to host memory as soon as it is whole.
            config: torch's ``FullStateDictConfig`` in place of the two; under ``fsdp`` also what a
                ``FSDP.state_dict_type(...)`` around the call says.
            **kwargs: not supported (torch's ``prefix`` and ``keep_vars``).

        Raises:
            ConfigurationError: an argument that is not supported.
            ModelError: the model was built on the meta device, and some of it has no numbers yet.
            RankMismatch: the ranks asked for different things, or have not taken the same steps.
        """
        if args or kwargs:
            raise ConfigurationError("ShardedModule.state_dict takes rank0_only, offload_to_cpu and config only")
        config = self.backend.requested_state_dict() if config is None else config
        if config is not None:
            rank0_only, offload_to_cpu = _of_config(config, rank0_only, offload_to_cpu)
        self.check_filled()
        self._check_alike(rank0_only, offload_to_cpu)
        self.backend.step_counts.compare()
        self._sync_buffers()
        keep = not (rank0_only and self.backend.settings.rank)
        device = torch.device("cpu") if offload_to_cpu else self.backend.settings.device
        others = {key: value for key, value in self.backend.raw_state_dict().items() if key not in self.backend.keys}
        order = [key for key in self.backend.key_order if key in self.backend.keys or key in others]
        whole: dict[str, Tensor | None] = {}
        result: dict[str, Any] = {}
        for key in order + [key for key in others if key not in self.backend.key_order]:
            name = self.backend.keys.get(key)
            if name is not None and name not in whole:  # tied keys share one tensor, as they do natively
                entry = self.backend.entries[name]
                stored = self.backend.stream(entry, rank0_only=rank0_only, device=device)
                whole[name] = None if stored is None else entry.kind.to_user(stored)
            if keep:
                result[key] = self._other_for_user(key, others[key], offload_to_cpu) if name is None else whole[name]
        return result

    def _other_for_user(self, key: str, value: Any, offload_to_cpu: bool) -> Any:
        kept = _kept(value, offload_to_cpu)
        return kept.to(self._buffer_dtypes[key]) if key in self._buffer_dtypes else kept

    def _check_alike(self, *flags: bool) -> None:
        """Raise where ranks ask for different things; they would wait for each other."""
        group = self.backend.settings.group
        if group is None or group.size() == 1:
            return
        wanted = torch.tensor([bit for flag in flags for bit in (flag, not flag)], dtype=torch.uint8)
        least = wanted.to(self.backend.settings.device, copy=True)
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
        if not torch.equal(least.cpu(), wanted):
            raise RankMismatch(
                "state_dict: the ranks disagree on rank0_only or offload_to_cpu; pass the same everywhere"
            )

    @_takes_part("load_state_dict()")
    def load_state_dict(
        self,
        state_dict: Mapping[str, Any] | None,
        strict: bool = True,
        assign: bool = False,
        *,
        broadcast_from_rank0: bool = False,
    ) -> _IncompatibleKeys:
        """Load whole tensors under the original names. All or nothing.

        Args:
            state_dict: what :meth:`state_dict`, or the unwrapped model, gave; the same on every rank.
            strict: raise on missing and unexpected keys. Another shape raises in any case.
            assign: not supported: the engine owns the memory.
            broadcast_from_rank0: only rank 0 has the dict, the others pass None; it travels tensor by tensor.
                Collective.

        Raises:
            StateDictError: names every missing, unexpected or wrongly shaped key.
        """
        if assign:
            raise ConfigurationError("load_state_dict(assign=True): the engine owns the memory; use assign=False")
        self.backend.settle()
        raw = self.backend.raw_state_dict()
        missing, unexpected, given = self._agree(state_dict, raw, strict, broadcast_from_rank0)
        with torch.no_grad():
            for key, name in self.backend.keys.items():
                if key in given:
                    value = None if state_dict is None else state_dict[key]
                    self._load_entry(self.backend.entries[name], value, broadcast_from_rank0)
        others = {k: v for k, v in (state_dict or {}).items() if k in raw and k not in self.backend.keys}
        if others:
            with self.backend.bare() as module:
                module.load_state_dict(others, strict=False)
        if broadcast_from_rank0 and self._group_size() > 1:
            broadcast_tensors([buffer for buffer in self.module.buffers() if not buffer.is_meta], self._group())
        self._unfilled -= given | {name for key, name in self.backend.keys.items() if key in given}
        return _IncompatibleKeys(missing, unexpected)

    def _agree(
        self, state_dict: Mapping[str, Any] | None, raw: Mapping[str, Any], strict: bool, from_rank0: bool
    ) -> tuple[list[str], list[str], set[str]]:
        """Missing and unexpected keys, and those that are there: rank 0's where only it has the dict."""
        found: Any = None
        if not from_rank0 or self.backend.settings.rank == 0:
            try:
                if not isinstance(state_dict, Mapping):
                    raise StateDictError(f"a {type(state_dict).__name__} (expected a mapping)")
                found = (*self._compare(state_dict, raw, strict), set(state_dict))
            except StateDictError as error:
                if not from_rank0 or self._group_size() == 1:
                    raise
                found = error
        if from_rank0 and self._group_size() > 1:
            found = per_rank(self._group(), found)[0]
        if isinstance(found, StateDictError):
            raise found
        missing, unexpected, given = found
        return missing, unexpected, given

    def _group(self) -> dist.ProcessGroup:
        group = self.backend.settings.group
        assert group is not None
        return group

    def _group_size(self) -> int:
        return self.backend.settings.world_size

    def _load_entry(self, entry: Entry, value: Any, from_rank0: bool) -> None:
        device = self.backend.settings.device
        if from_rank0 and self._group_size() > 1:
            if self.backend.settings.rank == 0:
                stored = (
                    _as_stored(entry, value, device).to(entry.parameter.dtype).reshape(entry.stored_shape).contiguous()
                )
            else:
                stored = torch.empty(entry.stored_shape, dtype=entry.parameter.dtype, device=device)
            if stored.numel():
                dist.broadcast(stored, group=self._group(), group_src=0)
        else:
            stored = _as_stored(entry, value, device)
        self.backend.load_parameter(entry, stored)

    def _compare(self, given: Mapping[str, Any], raw: Mapping[str, Any], strict: bool) -> tuple[list[str], list[str]]:
        expected = {**raw, **dict.fromkeys(self.backend.keys)}
        # neuralop's BaseModel adds "_metadata" (its constructor's arguments) to its own state dict; not a weight.
        missing = [key for key in expected if key not in given and key != "_metadata"]
        unexpected = [key for key in given if key not in expected and key != "_metadata"]
        wrong: dict[str, tuple[object, object]] = {}
        for key, value in given.items():
            want = (
                self.backend.entries[self.backend.keys[key]].shape
                if key in self.backend.keys
                else getattr(raw.get(key), "shape", None)
            )
            got = value.shape if isinstance(value, Tensor) else None
            if want is not None and got != want:
                wrong[key] = (tuple(want), tuple(got) if got is not None else type(value).__name__)
        if wrong or (strict and (missing or unexpected)):
            raise StateDictError("the state dict", missing, unexpected, wrong)
        return missing, unexpected

    # ------------------------------------------------------------------------------------------ moves

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """As of any module, where it is a no-op; and the moment to look at who trains.

        Raises:
            FsshardError: it would move or cast the model.
            ConfigurationError: a trainer asks that would put the model into a second engine.
        """
        check_trainer(sys._getframe(1), self.backend.settings.world_size)
        return super().to(*args, **kwargs)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Moves and casts: a no-op is allowed, anything else would pull the engine's memory from under it."""
        probe = torch.empty(1, device=self.backend.settings.device)
        moved = fn(probe)
        if moved.device != probe.device or moved.dtype != probe.dtype:
            raise FsshardError(
                f"the model is on {probe.device} in its own dtype under backend {self.backend.name!r}; "
                f"move or cast it (here: to {moved.device}, {moved.dtype}) before fsshard.wrap"
            )
        for dims in (4, 5):  # channels_last is for tensors of so many
            image = torch.empty([2] * dims, device=probe.device)
            if fn(image).stride() != image.stride():
                raise FsshardError(
                    f"the memory format of a model under backend {self.backend.name!r} stays as it is; call "
                    "model.to(memory_format=...) before fsshard.wrap"
                )
        return self


CONTAINERS = ("__getitem__", "__setitem__", "__delitem__", "__len__", "__iter__", "__contains__", "__reversed__")
"""What Python looks up on the type of an object, and not through ``__getattr__``."""


@functools.cache
def _class_over(wrapped: type[nn.Module]) -> type[ShardedModule]:
    """ShardedModule with those of :data:`CONTAINERS` that the user's class has, so that ``model[0]`` is its ``[0]``.

    On all of them they would say that any model is iterable and has a length, and so may be false.
    """

    def forwarded(name: str) -> Any:
        def method(self: ShardedModule, *args: Any) -> Any:
            return getattr(self.module, name)(*args)

        method.__name__ = name
        return method

    # A class without __contains__, and a Sequential is one, is searched by iteration.
    found = {name: forwarded(name) for name in CONTAINERS if hasattr(wrapped, name)}
    return type("ShardedModule", (ShardedModule,), {"__module__": __name__, **found}) if found else ShardedModule


def live_optimizers(model: ShardedModule) -> list[Any]:
    """The optimizers that were built over ``model`` and are still used."""
    return [optimizer for reference in model._optimizers if (optimizer := reference()) is not None]


def _of_config(config: Any, rank0_only: bool, offload_to_cpu: bool) -> tuple[bool, bool]:
    """What torch's ``FullStateDictConfig`` asks for."""
    if not (hasattr(config, "rank0_only") and hasattr(config, "offload_to_cpu")):
        raise ConfigurationError(
            f"state_dict with {config!r}: expected torch's FullStateDictConfig, for there are whole tensors only (of "
            "get_model_state_dict: StateDictOptions(full_state_dict=True)); fsshard.save writes shards"
        )
    if rank0_only or offload_to_cpu:
        raise ConfigurationError(
            "state_dict with a config (an argument, or FSDP.state_dict_type around it) together with rank0_only or "
            "offload_to_cpu: give one of them"
        )
    return bool(config.rank0_only), bool(config.offload_to_cpu)


def _kept(value: Any, offload_to_cpu: bool) -> Any:
    """A buffer or extra state as the state dict holds it."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().to("cpu" if offload_to_cpu else value.device, copy=True)


def _as_stored(entry: Entry, value: Tensor, device: torch.device) -> Tensor:
    if value.is_complex() and not entry.kind.is_complex:
        raise StateDictError("the state dict", mismatched={entry.name: (entry.dtype, value.dtype)})
    return entry.kind.to_stored(value.detach().to(device))


def _numbers(gradient: Tensor) -> Tensor:
    """The gradient, or of a sparse one what is not zero: an embedding's with ``sparse=True``."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _moduli(entry: Entry, gradient: Tensor, p: float) -> Tensor:
    """|g| (or g itself for p = 2 of pairs, whose squares add up the same) of this rank's part, flat."""
    if not entry.kind.is_complex or p == 2:
        return gradient.abs().reshape(-1) if p != 2 else gradient.reshape(-1)
    pairs = gradient if gradient.dim() > 1 else gradient.view(gradient.numel() // 2, 2)
    real = pairs.double()
    return torch.sqrt(viewable(real)[..., 0] ** 2 + real[..., 1] ** 2).reshape(-1)


def _power_sum(values: Tensor, p: float) -> Tensor:
    """Sum of |x|^p in float64, a bounded chunk at a time."""
    total = torch.zeros((), dtype=torch.float64, device=values.device)
    for chunk in values.split(NORM_CHUNK):
        wide = chunk.double()
        total += (wide * wide if p == 2 else wide if p == 1 else wide.pow(p)).sum()
    return total


@torch.no_grad()
def broadcast_tensors(tensors: list[Tensor], group: dist.ProcessGroup) -> None:
    """Rank 0's values to every rank of the group, coalesced by dtype. Collective."""
    real = [torch.view_as_real(t.detach()) if t.is_complex() else t.detach() for t in tensors if t.numel()]
    if real:
        dist._broadcast_coalesced(group, real, BROADCAST_BYTES, 0)
