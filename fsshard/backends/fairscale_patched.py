"""FairScale 0.4.13's OSS and ShardedDataParallel, patched to be right on torch 2.13.

Imported by :mod:`fsshard.backends.fairscale` when that backend is used; the only module that imports fairscale.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import fairscale
import torch
import torch.distributed as dist
from fairscale.nn.data_parallel import ShardedDataParallel
from fairscale.optim.oss import OSS
from torch import Tensor, nn

from fsshard.backends.fairscale_interface import REDUCTION, Implementation, Replicas
from fsshard.comm.presence import taking_part
from fsshard.oss.inner_step import step_under_hooks_of_another
from fsshard.oss.partitioned import PartitionedOptimizer
from fsshard.torch_private.autograd import current_graph_task_id, queue_callback

__all__ = ["IMPLEMENTATION", "PatchedOSS", "PatchedShardedDataParallel"]

REDUCE_BYTES = 25 * 2**20
"""Gradients travel in flat buffers of about this size, as DDP's buckets do."""


class PatchedOSS(OSS, PartitionedOptimizer):
    """OSS that packs evenly, keeps frozen layers equal on all ranks, and runs step hooks once."""

    step = step_under_hooks_of_another(OSS)  # ShardedOptimizer runs them
    _layout: list[tuple[int, bool]] | None = None

    @property
    def _per_device_params(self) -> Any:
        # OSS packs smallest first and unaligned, so behind a parameter of odd size every complex view would fail
        # ("Tensor must have a storage_offset divisible by 2"; any FNO with one output channel). Even sizes first.
        per_device = OSS._per_device_params.fget(self)
        for per_rank_params in per_device.values():
            for parameters in per_rank_params:
                parameters.sort(key=lambda p: (p.numel() & 1, p.numel()))
        return per_device

    def refresh_trainable(self) -> None:
        # OSS moves parameters into its buffers after it has built the inner optimizer, and again whenever a
        # ShardedDataParallel is made; an inner optimizer that keeps views of parameters from its constructor
        # (DistributedShampoo's blocks) trains nothing then, silently. So they move before, and only if they must.
        if not hasattr(self, "optim"):
            self._setup_flat_buffers()
        super().refresh_trainable()

    def _setup_flat_buffers(self) -> None:
        if self._layout != self._current_layout():
            super()._setup_flat_buffers()
            self._layout = self._current_layout()

    def _current_layout(self) -> list[tuple[int, bool]]:
        return [(p.data_ptr(), p.requires_grad) for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def _broadcast_params(self) -> None:
        # A frozen parameter with momentum or a leftover gradient is still moved by its owner's optimizer, but OSS
        # broadcasts trainable ones only: the ranks drift apart. Send those too.
        super()._broadcast_params()
        frozen = [
            (rank, parameter)
            for per_rank_params in self._per_device_params.values()
            for rank, parameters in enumerate(per_rank_params)
            for parameter in parameters
            if not parameter.requires_grad
        ]
        if not frozen:
            return
        moved = torch.tensor([rank == self.rank and p.grad is not None for rank, p in frozen], dtype=torch.uint8)
        moved = moved.to(frozen[0][1].device)
        dist.all_reduce(moved, op=dist.ReduceOp.MAX, group=self.group)
        for flag, (rank, parameter) in zip(moved.tolist(), frozen, strict=True):
            if flag:  # an optimizer leaves alone what has no gradient
                dist.broadcast(parameter.data, group=self.group, group_src=rank)


def _call_before(method: Any, parameter: Any, gradient: Tensor) -> None:
    called, found = method(), parameter()
    if called is not None and found is not None:
        called(found, gradient)


def _call(method: Any, parameter: nn.Parameter) -> None:
    called = method()
    if called is not None:
        called(parameter)


class PatchedShardedDataParallel(ShardedDataParallel):
    """ShardedDataParallel with a reduction of its own.

    FairScale reduces in a hook at each gradient, in place, into buckets. On torch 2.13 that is silently wrong,

    * after ``optimizer.zero_grad()``, which drops the bucket views and leaves stale ones to be reduced (FairScale
      issue #354);
    * under reentrant checkpointing, whose inner backward flushes the buckets early;
    * when a second backward accumulates without ``no_sync`` (what was averaged is averaged again);
    * on a sub-group, where it compares ranks of the group with global ones;
    * in evaluation mode, where it has no hooks;

    and it aborts the process when a parameter is used on some ranks only. Here hooks only note what arrived. What
    was reduced before is set aside when the next gradient comes in, and everything new is reduced once, in one
    order on all ranks, when the outermost backward ends: no overlap with backward, and no race with it.
    """

    _should_accumulate_grads: bool

    def __init__(
        self,
        module: nn.Module,
        optimizers: list[Any],
        group: Any,
        reduce_dtypes: Mapping[nn.Parameter, torch.dtype | None] | None = None,
        replicas: Replicas | None = None,
    ) -> None:
        assert replicas is None, "refused before"
        self._reduce_dtypes = dict(reduce_dtypes or {})  # in which dtype a gradient is sent; None is its own
        self._fresh: dict[nn.Parameter, None] = {}
        self._reduced: dict[nn.Parameter, Tensor] = {}
        self._callback_in: set[int] = set()
        self.seen: set[nn.Parameter] = set()
        super().__init__(
            module,
            optimizers,
            process_group=group,
            # It would broadcast state_dict().values(): a TypeError on neuralop's _metadata. wrap() has synced.
            sync_models_at_startup=False,
            broadcast_buffers=False,  # ShardedModule does, alike for every backend
            reduce_buffer_size=0,
            # The backend does it. FairScale would see a change at every step between train and eval, and would set up
            # hooks in training mode only: none where the inner module alone is set to training (Lightning).
            auto_refresh_trainable=False,
        )
        self.refresh_trainable()  # the hooks, which FairScale sets up at the first forward in training mode

    # -- hooks

    def _setup_backward_hooks(self) -> None:
        while self._grad_hooks:
            self._grad_hooks.pop().remove()
        # Weak both ways: the collector cannot see through the hooks of a parameter that C++ holds, and the model and
        # its process group with its threads would live forever (torch 2.13).
        before, after = weakref.WeakMethod(self._before), weakref.WeakMethod(self._after)
        for parameter in self._trainable_params:
            hook = functools.partial(_call_before, before, weakref.ref(parameter))
            self._grad_hooks.append(parameter.register_hook(hook))
            self._grad_hooks.append(parameter.register_post_accumulate_grad_hook(functools.partial(_call, after)))

    def _before(self, parameter: nn.Parameter, _: Tensor) -> None:
        """A gradient is about to be added: set aside what an earlier backward has reduced."""
        if parameter.grad is not None and getattr(parameter.grad, "_fsshard_reduced", False):
            self._reduced[parameter] = parameter.grad
            parameter.grad = None

    def _after(self, parameter: nn.Parameter) -> None:
        self._fresh[parameter] = None
        if not self._callback_in:  # a loss of derivatives alone, which does not come through the model's output
            self.backward_starts()

    # -- the outermost backward

    def backward_starts(self) -> None:
        """Called in the graph task of the outermost backward, before any parameter's gradient arrives."""
        task = current_graph_task_id()
        if task not in self._callback_in:
            self._callback_in.add(task)
            queue_callback(self._backward_ends)

    def _backward_ends(self) -> None:
        self._callback_in.clear()
        if not self._should_accumulate_grads:
            with taking_part(self._process_group, REDUCTION):
                self.finish()

    # -- reduction

    @torch.no_grad()
    def finish(self) -> None:
        """Reduce what is new, on all ranks the same; nothing to do is agreed on as well. Collective."""
        mine = [p in self._fresh and p.grad is not None for p in self._trainable_params]
        used = torch.tensor(mine, dtype=torch.uint8)
        if not self._trainable_params:
            return
        used = used.to(self._trainable_params[0].device)
        dist.all_reduce(used, op=dist.ReduceOp.MAX, group=self._process_group)
        fresh = [p for p, flag in zip(self._trainable_params, used.tolist(), strict=True) if flag]
        self.seen.update(fresh)  # by any rank: the others have been given zeros for it
        handles = [self._send(owner, part) for owner, part in self._parts(fresh)]
        for owner, parameters, buffer, work in handles:
            work.wait()
            self._receive(owner, parameters, buffer)
        for parameter, gradient in self._reduced.items():
            self._give(parameter, gradient if parameter.grad is None else parameter.grad.add_(gradient))
        self._reduced.clear()
        self._fresh.clear()

    def _parts(self, parameters: list[nn.Parameter]) -> Iterator[tuple[int, list[nn.Parameter]]]:
        lists: dict[tuple[int, torch.dtype, torch.dtype | None], list[nn.Parameter]] = {}
        for parameter in parameters:
            owner, reduce_dtype = self._trainable_param_to_rank[parameter], self._reduce_dtypes.get(parameter)
            lists.setdefault((owner, parameter.dtype, reduce_dtype), []).append(parameter)
        for (owner, _, _), group in lists.items():
            part: list[nn.Parameter] = []
            size = 0
            for parameter in group:
                part.append(parameter)
                size += parameter.numel() * parameter.element_size()
                if size >= REDUCE_BYTES:
                    yield owner, part
                    part, size = [], 0
            if part:
                yield owner, part

    def _send(self, owner: int, parameters: list[nn.Parameter]) -> Any:
        flat = [
            torch.zeros_like(p).reshape(-1) if p.grad is None else p.grad.to_dense().reshape(-1) for p in parameters
        ]
        buffer = torch.cat(flat)
        buffer = buffer.to(self._reduce_dtypes.get(parameters[0]) or buffer.dtype)
        buffer.mul_(self._world_size_scaling)
        for parameter in parameters:
            parameter.grad = None
        work = dist.reduce(buffer, group=self._process_group, group_dst=owner, async_op=True)
        return owner, parameters, buffer, work

    def _receive(self, owner: int, parameters: list[nn.Parameter], buffer: Tensor) -> None:
        if owner != self._rank:
            return
        for parameter, part in zip(parameters, buffer.split([p.numel() for p in parameters]), strict=True):
            self._give(parameter, part.view_as(parameter).to(parameter.dtype))

    @staticmethod
    def _give(parameter: nn.Parameter, gradient: Tensor) -> None:
        parameter.grad = gradient
        parameter.grad._fsshard_reduced = True  # type: ignore[attr-defined]  # travels with the tensor

    def discard(self, parameters: Iterable[nn.Parameter], *, dropped: bool) -> None:
        """Gradients are being zeroed, or ``dropped``: forget what has not been reduced of them."""
        for parameter in parameters:
            self._fresh.pop(parameter, None)
            self._reduced.pop(parameter, None)
            if dropped:  # zeros are a gradient, as they are for DDP
                self.seen.discard(parameter)

    def check_ended(self) -> None:
        """Nothing: a backward that raised has sent nothing, and leaves what it had for the next one."""

    def detach(self) -> None:
        """Another wrapper takes over."""
        while self._grad_hooks:
            self._grad_hooks.pop().remove()

    # -- FairScale's own paths that the above replaces

    def _clear_counters(self) -> None:
        self._grad_to_be_reduced: list[bool] = []  # else every refresh warns of "Grads waiting to be reduced"

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self._should_accumulate_grads = self._should_accumulate_grads, True
        try:  # FairScale has no finally: an exception inside would leave accumulation on for good
            yield
        finally:
            self._should_accumulate_grads = before

    def reduce(self) -> None:
        self.finish()


IMPLEMENTATION = Implementation(
    f"FairScale {fairscale.__version__}, patched",
    PatchedOSS,
    PatchedShardedDataParallel,
    reduces_by="reduce",
    one_dtype=True,  # OSS packs a device's parameters into one buffer: "Different types for the bucket and the param"
)
