"""ShardedDataParallel: every rank gets the mean of the gradients that its part of an OSS updates."""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsshard.comm.agreement import broadcast_tensors, per_rank
from fsshard.errors import GradientError, MisuseError, RankMismatch
from fsshard.nested import grad_tensors
from fsshard.oss.norm_and_scaling import count_owners
from fsshard.oss.optimizer import OSS
from fsshard.oss.partitioned import partitioned_within
from fsshard.oss.reduction import EVERYWHERE, Reduction, owners_of, reduction_of
from fsshard.torch_private.autograd import current_graph_task_id

log = logging.getLogger("fsshard")


class ShardedDataParallel(nn.Module):
    """Data parallelism that reduces each gradient to the rank whose optimizer uses it.

    After a backward pass a rank has the mean over all ranks in ``grad`` of the parameters that it owns, and None in
    that of the others (FairScale leaves it half reduced there). ``clip_grad_norm`` of the optimizer knows about it, and
    so does ``torch.nn.utils.clip_grad_norm_``, which becomes collective. Values are those of torch's
    DistributedDataParallel with ``find_unused_parameters=True``: to the last bit on two ranks, within the rounding of
    the sums on more.

    Sparse gradients are dense at their owner, as in FairScale's buckets; with ``torch.optim.SparseAdam`` use torch's
    DistributedDataParallel.

    Two modules of one OSS can have a wrapper each; of a module that two wrappers have, the newer one takes over.

    A copy of it (``copy.deepcopy``, pickle) has a copy of the module and no optimizers: it can be called and read, and
    its backward raises.

    Args:
        module: on one kind of device. Trainable parameters of it that no optimizer has are reduced to all ranks.
        sharded_optimizer: the OSS that updates its parameters, or several.
        process_group: the ranks; None is the optimizers'.
        broadcast_buffers: give all ranks the first one's buffers before every forward outside of :meth:`no_sync`.
        sync_models_at_startup: give all ranks the first one's parameters and buffers now.
        reduce_buffer_size: at most so many numbers are sent together; 0 leaves it to this class.
        auto_refresh_trainable: see at each forward with gradients whether parameters were frozen or unfrozen; else call
            :meth:`refresh_trainable`.
        reduce_fp16: gradients are sent, and are added up, in float16.
        warn_on_trainable_params_changed: log a warning when that happens.

    Raises:
        MisuseError: the module has no parameters or several kinds of devices; the optimizer is no OSS, or of another
            group.
        RankMismatch: the module is not the same on all ranks.
    """

    module: nn.Module

    def __init__(
        self,
        module: nn.Module,
        sharded_optimizer: Any,
        process_group: Any = None,
        broadcast_buffers: bool = True,
        sync_models_at_startup: bool = True,
        reduce_buffer_size: int = 2**23,
        auto_refresh_trainable: bool = True,
        reduce_fp16: bool = False,
        warn_on_trainable_params_changed: bool = True,
    ) -> None:
        _keep_out_of_graphs()
        super().__init__()
        count_owners(self)
        self.module = module
        optimizers = _sharded(
            sharded_optimizer if isinstance(sharded_optimizer, (list, tuple)) else [sharded_optimizer]
        )
        self._sharded_optimizers = optimizers
        self._enable_broadcast_buffers = broadcast_buffers
        self._auto_refresh_trainable = auto_refresh_trainable
        self._warn_on_trainable_params_changed = warn_on_trainable_params_changed
        self._buffer_max_size = reduce_buffer_size
        self._reduce_fp16 = reduce_fp16
        self._process_group = _checked_group(optimizers, process_group)
        devices = {parameter.device for parameter in module.parameters()}
        kinds = sorted({device.type for device in devices})
        if len(kinds) != 1:
            devices_text = ", ".join(kinds) or "no parameters"
            raise MisuseError(
                f"ShardedDataParallel needs a module with parameters on one kind of device, got {devices_text}"
            )
        self.is_multi_device_module = len(devices) > 1
        self.device_type = kinds[0]
        self._reduction: Reduction | None = None
        # Whether no gradient has a graph of its own; FairScale looks at the first forward.
        self._checked = False
        self._build()
        for optimizer in optimizers:
            optimizer.attach(self)
        if sync_models_at_startup:
            # FairScale 0.4.13 sends state_dict().values(): a TypeError on extra state and neuraloperator's _metadata,
            # and buffers that are not persistent are left out.
            self._broadcast([*module.parameters(), *module.buffers()])

    def _broadcast(self, tensors: list[Tensor]) -> None:
        group = self._process_group
        if group is not None and group.size() > 1:
            broadcast_tensors(tensors, group)

    # ------------------------------------------------------------------------------------------ what is reduced

    def _build(self) -> None:
        before = self._reduction
        self._all_params = list(dict.fromkeys(self._find_params()))
        self._known = self._now()
        trainable = [parameter for parameter in self._all_params if parameter.requires_grad]
        owners = owners_of(trainable, self._sharded_optimizers)
        if before is not None and any(not parameter.requires_grad for parameter in before.waiting):
            before.reduce()
        if self._reduce_fp16 and any(parameter.is_complex() for parameter in trainable):
            raise MisuseError("reduce_fp16=True: the module has complex parameters; use reduce_fp16=False")
        _check_agreement(trainable, owners, self._process_group)
        reduce_dtypes = dict.fromkeys(trainable, torch.float16) if self._reduce_fp16 else {}
        size = self._buffer_max_size
        self._reduction = Reduction(trainable, owners, self._process_group, size, reduce_dtypes, before)
        self._build_others()
        left = owners.count(EVERYWHERE)
        if left and before is None:
            log.warning(
                "%d trainable parameters are in no optimizer of this ShardedDataParallel; their gradients are reduced "
                "to all ranks; freeze them (requires_grad=False) if nothing uses these",
                left,
            )

    def _now(self) -> tuple[Any, ...]:
        versions = [optimizer._partition_version for optimizer in self._sharded_optimizers]
        # Whoever moves or casts a module does it to all of it: one parameter tells.
        first = self._all_params[0]
        trained = [parameter.requires_grad for parameter in self._all_params]
        return versions, trained, first.device, first.dtype

    def _find_params(self) -> Iterator[nn.Parameter]:
        """Yield the module's, and what the optimizers have besides it and no other wrapper reduces."""
        yield from self.module.parameters()
        for optimizer in self._sharded_optimizers:
            all_of_it: Iterable[Any] = optimizer._param_to_rank
            yield from (p for p in all_of_it if reduction_of(p) in (None, self._reduction))

    def _build_others(self) -> None:
        """Let other wrappers of these optimizers reduce what is left to them: each its own module's, as under DDP."""
        own = set(self.module.parameters())
        others = []
        for optimizer in self._sharded_optimizers:
            others += optimizer._attached()
        for other in dict.fromkeys(others):
            reduction = other._reduction if isinstance(other, ShardedDataParallel) else None
            if reduction is not None and reduction.is_detached and own.isdisjoint(other.module.parameters()):
                other._build()

    def refresh_trainable(self) -> None:
        """Take note that parameters were frozen or unfrozen; collective, and not needed by default."""
        self._check_attached()
        for optimizer in self._sharded_optimizers:
            optimizer.refresh_trainable()
        self._build()

    def _check_attached(self) -> Reduction:
        if self._reduction is None:
            raise GradientError(
                "this ShardedDataParallel is a copy, without optimizers, and its gradients would not be reduced; make "
                "a new OSS and ShardedDataParallel of its module to train it"
            )
        if self._reduction.is_detached:
            raise GradientError(
                "a newer ShardedDataParallel has taken over parameters of this one; call that one, or make a new one"
            )
        return self._reduction

    # ------------------------------------------------------------------------------------------ forward and backward

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module; the backward of what it gives reduces gradients."""
        if self._reduction is not None:
            self._before_forward()
        output = self.module(*inputs, **kwargs)
        for tensor in grad_tensors(output) if torch.is_grad_enabled() else ():
            # Hooks on a parameter, which a model may return, would stay.
            if tensor.grad_fn is not None:
                tensor.register_hook(self._backward_starts)
        return output

    def _before_forward(self) -> None:
        assert self._reduction is not None
        if self._reduction.is_detached and not (self.training and torch.is_grad_enabled()):
            # It can be called; a backward raises.
            return
        reduction = self._check_attached()
        if current_graph_task_id() != -1:
            # A checkpoint runs it again, in a backward.
            if torch.is_grad_enabled():
                reduction.begins()
            return
        reduction.check_ended()
        # Not where nothing is to be reduced: one rank alone may freeze the model, or cast it, to look at what it gives.
        if self._auto_refresh_trainable and torch.is_grad_enabled() and self._known != self._now():
            if self._warn_on_trainable_params_changed:
                log.warning("ShardedDataParallel: trainable parameters, or the optimizer's, have changed")
            self.refresh_trainable()
        elif not self._checked and self.training:
            self._checked = True
            if any(p.grad is not None and p.grad.requires_grad for p in reduction.parameters):
                raise GradientError(
                    "ShardedDataParallel: a parameter's grad requires grad itself; it would be reduced without its "
                    "graph; detach it, or set it to None"
                )
        if self._enable_broadcast_buffers and not self._should_accumulate_grads:
            self.sync_buffers(blocking=True)

    def _backward_starts(self, _: Tensor) -> None:
        self._check_attached().begins()

    @property
    def _should_accumulate_grads(self) -> bool:
        return self._reduction is not None and self._reduction.silenced > 0

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward accumulate local gradients inside; the first backward after it reduces them all."""
        self._check_attached().silenced += 1
        try:
            yield
        finally:
            # FairScale 0.4.13 does not do so: an error inside would leave accumulation on for good.
            self._check_attached().silenced -= 1

    def reduce(self) -> None:
        """Reduce what backward passes under :meth:`no_sync` have accumulated. Collective.

        Raises:
            MisuseError: there is nothing.
        """
        reduction = self._check_attached()
        if not reduction.waiting:
            raise MisuseError("reduce(): no gradients wait; was it called twice, or without a backward pass?")
        reduction.reduce()

    def finish_gradients(self) -> None:
        """Reduce the gradients that wait; the optimizer calls this before it uses them."""
        if self._reduction is None or self._reduction.is_detached:
            return
        if self._auto_refresh_trainable and self._known != self._now():
            self._build()
        self._reduction.finish()

    def discard_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Take note that the optimizer sets gradients to zero or drops them; it calls this."""
        if self._reduction is not None:
            self._reduction.discard(parameters)

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Set the gradients of all parameters to zero, or drop them."""
        self.discard_gradients(self._all_params)
        for parameter in self._all_params:
            if parameter.grad is not None:
                parameter.grad = None if set_to_none else parameter.grad.detach().zero_()

    # ------------------------------------------------------------------------------------------ the rest

    def sync_buffers(self, blocking: bool = False) -> None:
        """Give all ranks the first one's buffers, in the order of the device's stream in any case. Collective."""
        # .data: what is sent must not raise version counters, by which the backward of an earlier forward would fail.
        self._broadcast([buffer.data for buffer in self.module.buffers()])

    def to(self, *args: Any, **kwargs: Any) -> ShardedDataParallel:
        """Change the module's dtype; MisuseError for another kind of device: the optimizer's state would stay."""
        device = kwargs.get("device", args[0] if args else None)
        if isinstance(device, (str, int, torch.device)) and torch.device(device).type != self.device_type:
            raise MisuseError(
                f"ShardedDataParallel.to({str(device)!r}): the module is on {self.device_type!r}, and the optimizer's "
                "state would stay there; move the module before OSS is built"
            )
        self.module.to(*args, **kwargs)
        if self._reduction is not None:
            self.refresh_trainable()
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    def __getstate__(self) -> dict[str, Any]:
        # A copy trains nothing; process groups cannot be copied.
        return {**self.__dict__, "_reduction": None, "_process_group": None, "_sharded_optimizers": []}


@functools.cache
def _keep_out_of_graphs() -> None:
    """Let torch.compile trace the module alone: it would leave out the hooks on the outputs.

    With the first object and not with the class: it imports torch's compiler, which takes seconds.
    """
    forward = torch.compiler.disable(ShardedDataParallel.forward, recursive=False)
    ShardedDataParallel.forward = forward  # type: ignore[method-assign]


def _sharded(optimizers: Sequence[Any]) -> list[OSS]:
    """Return each OSS, out of what may be around it."""
    if not optimizers:
        raise MisuseError("sharded_optimizer: expected an OSS, or a list of them, got an empty list")
    within = []
    for optimizer in optimizers:
        oss = partitioned_within(optimizer)
        if not isinstance(oss, OSS):
            raise MisuseError(
                f"sharded_optimizer: expected fairscale.optim.OSS, got {type(optimizer).__name__}; "
                "use torch's DistributedDataParallel with an optimizer that is not sharded"
            )
        within.append(oss)
    return within


def _checked_group(optimizers: list[OSS], group: Any) -> dist.ProcessGroup:
    chosen = group or optimizers[0].group
    ranks = dist.get_process_group_ranks(chosen)
    for optimizer in optimizers:
        theirs = dist.get_process_group_ranks(optimizer.group)
        if theirs != ranks:
            raise MisuseError(
                f"process_group has ranks {ranks}, the optimizer's group {theirs}; give OSS(group=) and "
                "ShardedDataParallel(process_group=) the same one"
            )
    return chosen


def _check_agreement(parameters: list[nn.Parameter], owners: list[int], group: dist.ProcessGroup) -> None:
    """Raise on all ranks if they do not have the same parameters. Collective."""
    facts = [(tuple(parameter.shape), str(parameter.dtype)) for parameter in parameters]
    digest = hashlib.sha256(repr([facts, owners]).encode()).digest()
    digests = per_rank(group, (digest, len(facts)))
    others = [rank for rank, theirs in enumerate(digests) if theirs != digests[0]]
    if others:
        counts = ", ".join(f"rank {rank}: {count}" for rank, (_, count) in enumerate(digests))
        raise RankMismatch(
            f"ShardedDataParallel: trainable parameters differ between ranks (number, shape, dtype, owner): {counts}; "
            f"unlike rank 0 are {others}; build and freeze the same on all ranks"
        )
