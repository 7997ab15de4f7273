"""Faster collectives for FSDP2 over gloo, through hooks that FSDP2 offers.

gloo's reduce-scatter is an all-reduce whose other parts are thrown away (torch 2.13), twice the bytes of what it is
asked for, and both it and the all-gather take longer than the same work by other primitives. Here a unit is gathered by
one broadcast per rank, and reduced by an all-to-all whose parts are summed where they arrive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsshard.comm.watchdog import taking_part
from fsshard.errors import GradientError
from fsshard.torch_private.autograd import current_graph_task_id, queue_callback
from fsshard.torch_private.fsdp2 import has_all_reduce_hook
from fsshard.torch_private.fsdp2_collectives import AllGather, ReduceScatter
from fsshard.torch_private.tensors import POST_ACCUMULATE_HOOKS, local_tensor, storage_key, version_of

__all__ = ["Gather", "Pending", "Reduce"]


class _Broadcasts(dist.Work):
    """One per rank, waited for together."""

    def __init__(self, works: list[Any], lent: list[Tensor]) -> None:
        super().__init__()
        self._works, self._lent = works, lent

    def wait(self, timeout: Any = None) -> bool:
        while self._works:
            self._works[0].wait()
            del self._works[0]  # not before: who waits again after an error must not find numbers that never arrived
        _let_go(self._lent)
        return True


# gloo's threads hold on to the arguments of their last collective until after Work.wait has returned, for as long as
# they are not scheduled or wait for Python's lock (torch 2.13): a unit's buffers would live longer on some steps than
# on others. So gloo is given tensors of its own over them, which let go of the memory when it has arrived.
def _lend(*buffers: Tensor) -> list[Tensor]:
    """Return tensors over the memory of ``buffers``; detached, since a view would keep its base alive."""
    return [buffer.detach() for buffer in buffers if buffer.numel()]


def _let_go(lent: list[Tensor]) -> None:
    """Leave the memory to its other holders, whoever still has the tensors themselves."""
    while lent:
        tensor = lent.pop()
        tensor.data = tensor.new_empty(0)


class Gather(AllGather):
    """An all-gather as broadcasts, every rank's part from its rank."""

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a buffer for the whole unit."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work:
        """Fill ``output_tensor`` with every rank's ``input_tensor``; asynchronous whatever ``async_op`` says."""
        # FSDP2 waits for any Work that it is given where it needs the numbers, so that the gather that it starts ahead
        # in backward runs beside the computation; and then lets go of the gathered buffer at once.
        parts = output_tensor.chunk(group.size())
        mine = parts[group.rank()]
        if mine.data_ptr() != input_tensor.data_ptr():
            mine.copy_(input_tensor)
        lent = _lend(*parts)  # as large all of them
        works = [dist.broadcast(part, group=group, group_src=rank, async_op=True) for rank, part in enumerate(lent)]
        return _Broadcasts(works, lent)


def _check_unread(output: Tensor, version: int, entries: Sequence[Any]) -> None:
    """Raise if a gradient is something else than a view of the sum, which is made only now, or was written since."""
    memory = storage_key(output.untyped_storage())
    gradients = {entry.name: entry.parameter.grad for entry in entries if entry.parameter.grad is not None}
    copied = [n for n, grad in gradients.items() if storage_key(local_tensor(grad).untyped_storage()) != memory]
    # What is done to a DTensor counts in its own version, of a new one 0; to its local part, in the version of the sum.
    written = any(map(version_of, gradients.values())) or version_of(output) != version
    if copied or (gradients and written):
        raise GradientError(
            f"the gradients of {', '.join(map(repr, copied or gradients))} were read before they were reduced, by a "
            f"hook or by fully_shard of torch {torch.__version__}; wrap the model with fast_collectives=False"
        )


REDUCTION = "FSDP2's gradient reduction, in backward"


class Pending:
    """The reduction under way, of all units at most one, so that no more than one unit's gradients wait for it."""

    def __init__(self) -> None:
        self._task: int | None = None  # the graph task at whose end the last one is finished
        # gloo's work, the tensors that are lent to it, what arrives, where its sum goes, whether that is a mean
        self._begun: tuple[Any, list[Tensor], Tensor, Tensor, bool] | None = None
        self._group: dist.ProcessGroup | None = None  # of that
        self._unread: tuple[int, Sequence[Any]] | None = None  # version, entries, where the engine goes on before it

    def begin(self, output: Tensor, given: Tensor, group: dist.ProcessGroup, *, mean: bool) -> None:
        """Send each rank its part of ``given``; :meth:`finish` sums what arrives into ``output``."""
        self.finish()
        with taking_part(group, REDUCTION):
            arrived = torch.empty_like(given)
            lent = [arrived.detach(), given.detach()]
            work: Any = dist.all_to_all_single(lent[0], lent[1], group=group, async_op=True)
        self._begun, self._group = (work, lent, arrived, output, mean), group

    def finish_with_backward(self, entries: Sequence[Any]) -> None:
        """Let the next reduction, or the end of this backward, finish what is under way: gradients of ``entries``."""
        task = current_graph_task_id()
        if task == -1 or self._begun is None:  # no backward
            self.finish()
            return
        self._unread = version_of(self._begun[3]), entries
        if task != self._task:
            self._task = task
            queue_callback(self._backward_ends)

    def _backward_ends(self) -> None:
        self._task = None
        self.finish()

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for what is under way, and sum it in the order of ranks."""
        with taking_part(self._group, REDUCTION):
            self._finish()

    def _finish(self) -> None:
        unread, self._unread = self._unread, None
        if self._begun is None:
            return
        (work, lent, arrived, output, mean), self._begun = self._begun, None
        if unread is not None:
            _check_unread(output, *unread)
        # Each gradient is divided by the number of ranks and then added in the order of ranks, as DDP divides before it
        # adds. For two ranks that is DDP's own sum, bit by bit; for more the terms are DDP's and the order is this one,
        # where gloo's depends on where a number lies in its bucket. DDP's reducer multiplies too.
        work.wait()
        _let_go(lent)
        size = arrived.numel() // max(output.numel(), 1)
        scale = 1 / size if mean else 1.0
        if size & (size - 1):  # by a power of two a product is exact, and may be taken with the sum
            arrived.mul_(scale)
            scale = 1.0
        first, *others = arrived.view(size, -1)
        torch.mul(first, scale, out=output.view(-1))
        for part in others:
            output.view(-1).add_(part, alpha=scale)


class Reduce(ReduceScatter):
    """A reduce-scatter as an all-to-all and sums; one object per unit."""

    def __init__(self, pending: Pending, entries: list[Any], groups: Sequence[Any], *, last: bool) -> None:
        self._pending = pending  # shared by the units of a model
        self._entries, self._groups = entries, groups  # the unit's, and FSDP2's own records of them
        self._last = last  # nothing is reduced again after it (a 2-D mesh sums over its replicas too)

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a buffer for a unit's gradients, once those of the unit before are gone."""
        self._pending.finish()
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Sum or average every rank's part of ``input_tensor`` into ``output_tensor``."""
        mean = op == dist.ReduceOp.AVG
        if not mean and op != dist.ReduceOp.SUM:
            work: Any = dist.reduce_scatter_single(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
            return work  # type: ignore[no-any-return]
        self._pending.begin(output_tensor, input_tensor, group, mean=mean)
        if self._last and mean and self._left_alone(output_tensor.dtype):
            self._pending.finish_with_backward(self._entries)
        else:
            self._pending.finish()
        return None

    def _left_alone(self, dtype: torch.dtype) -> bool:
        """Tell whether FSDP2 only takes views of the result now. (It divides once more where it asks for a sum.)"""
        return not any(map(has_all_reduce_hook, self._groups)) and all(
            _takes_views(entry.parameter, dtype) for entry in self._entries
        )


def _takes_views(parameter: nn.Parameter, dtype: torch.dtype) -> bool:
    """Tell whether a gradient of ``dtype`` becomes this parameter's as it is: not added, cast, nor shown to a hook."""
    if parameter.grad is not None or getattr(parameter, POST_ACCUMULATE_HOOKS, None):
        return False
    # torch 2.13 casts to the parameter's dtype, 2.15 to its grad_dtype, of which None takes any.
    return parameter.dtype == dtype and parameter.grad_dtype in (None, dtype)
