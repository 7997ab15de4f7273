"""fsshard's own OSS and ShardedDataParallel (:mod:`fsshard.oss`), driven by backend="fairscale".

The backend tells them when a backward starts and when gradients must be final, runs step hooks once, and names ranks
that are lost; what :mod:`fsshard.oss` has for scripts that do not is left out here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsshard.backends.fairscale_interface import REDUCTION, Implementation, Replicas
from fsshard.comm.presence import taking_part
from fsshard.oss.gradient_buckets import in_buckets
from fsshard.oss.gradient_marks import mark_common
from fsshard.oss.inner_step import step_under_hooks_of_another
from fsshard.oss.optimizer import OSS
from fsshard.oss.reduction import EVERYWHERE, MOST_BYTES, Reduction, owners_of
from fsshard.torch_private.autograd import current_graph_task_id

__all__ = ["IMPLEMENTATION", "NativeOSS", "NativeShardedDataParallel"]


class NativeOSS(OSS):
    """An OSS whose gradients, buffers and step hooks are the backend's care."""

    step = step_under_hooks_of_another(OSS)  # ShardedOptimizer runs them

    def _check_distinct(self) -> None:
        """Nothing: ``wrap`` has done so, and tensors of a simulation have no memory."""

    def _refresh_buckets(self) -> None:
        """Nothing: parameters move where the backend knows of it, and what it shows moves with them."""

    def _current_pointers(self) -> list[tuple[Tensor, bool, int]]:
        return [(parameter, parameter.requires_grad, 0) for parameter in self._parameters()]


class _Reduction(Reduction):
    """Reduces at the end of each backward that has begun, whether or not this rank has a gradient."""

    rounds_first = True  # as DDP does

    def __init__(self, *args: Any, seen: set[nn.Parameter], replicas: Replicas | None) -> None:
        self._seen, self._replicas = seen, replicas
        self._used: list[bool] = []  # by any rank, in the backward that ends
        super().__init__(*args)
        self._everyone: dist.ProcessGroup = self.group if replicas is None else replicas.everyone

    def _came(self, i: int) -> None:
        if self._task is None:  # a loss of derivatives alone, which does not come through the model's output
            self.begins()
        super()._came(i)

    def _ends(self) -> None:
        self._put_back()
        if self.silenced:
            self._task = None
            return
        with taking_part(self._everyone, REDUCTION):
            self._flush()
        self._learning = False

    def _all_launched(self) -> None:
        """Agree on what was used: the others have been given zeros for it. Here all ranks come at the same point."""
        if not self.parameters:
            return
        flags = [i in self._arrived for i in range(len(self.parameters))]
        used = torch.tensor(flags, dtype=torch.uint8).to(self.parameters[0].device)
        dist.all_reduce(used, op=dist.ReduceOp.MAX, group=self._everyone)
        self._used = [bool(flag) for flag in used.tolist()]
        self._seen.update(p for p, flag in zip(self.parameters, self._used, strict=True) if flag)

    def _all_reduced(self) -> None:
        """Average over the groups: each has its own mean, and the same owners.

        What was a mean before, and was added to, is the same in all of them and stays what it is.
        """
        if self._replicas is None or not self.parameters:
            return
        mine = [i for i, used in enumerate(self._used) if used and self.owners[i] in (self.group.rank(), EVERYWHERE)]
        for dtype in dict.fromkeys(self.parameters[i].dtype for i in mine):
            chosen = [i for i in mine if self.parameters[i].dtype == dtype]
            for run in in_buckets(chosen, self.parameters, 0, MOST_BYTES):
                average([self.parameters[i] for i in run], self._replicas.same_part)
        self._reduced.update(mine)

    def finish(self) -> None:
        """Reduce what waits on any rank. Collective."""
        if self.group.size() == 1:
            self._seen.update(p for p in self.parameters if p.grad is not None)
            return
        if not self.parameters:
            return
        waits = torch.tensor([bool(self.waiting)], dtype=torch.uint8).to(self.parameters[0].device)
        dist.all_reduce(waits, op=dist.ReduceOp.MAX, group=self._everyone)
        if any(waits.tolist()):
            self._flush()

    def check_ended(self) -> None:
        if self._task is not None and not self._launched and current_graph_task_id() == -1:
            self._put_back()  # it has sent nothing: what came before the error is kept, as under DDP
            self._task = None
        super().check_ended()


def average(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Put the mean over a group's gradients into each rank's, zeros where there is none. Collective.

    In their own dtype, whatever they were sent in before: what they were added to would be rounded once more.

    Args:
        parameters: of one dtype and device, the same ones on all ranks.
        group: the ranks.
    """
    gradients: list[Tensor] = []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(parameter.grad)
    flat = torch.cat([gradient.detach().reshape(-1) for gradient in gradients])
    flat.mul_(1.0 / group.size())
    dist.all_reduce(flat, group=group)
    for gradient, part in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.detach().copy_(part.view(gradient.shape))
        mark_common(gradient)


class NativeShardedDataParallel(nn.Module):
    """ShardedDataParallel's reduction, with no hooks on outputs, no buffers and no looking for changes of its own."""

    def __init__(
        self,
        module: nn.Module,
        optimizers: list[Any],
        group: Any,
        reduce_dtypes: Mapping[nn.Parameter, torch.dtype | None] | None = None,
        replicas: Replicas | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self.seen: set[nn.Parameter] = set()
        self._optimizers, self._group, self._reduce_dtypes = optimizers, group, dict(reduce_dtypes or {})
        self._replicas = replicas
        self._reduction = self._made()

    def _made(self, waiting: Iterable[nn.Parameter] = ()) -> _Reduction:
        trainable = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        owners = owners_of(trainable, self._optimizers)
        # Sparse gradients are reduced as dense ones, as the real library's are here: owners' optimizers see no others.
        how = (self._group, 0, self._reduce_dtypes, False, waiting)
        return _Reduction(trainable, owners, (), *how, seen=self.seen, replicas=self._replicas)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)

    def backward_starts(self) -> None:
        self._reduction.begins()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self._reduction.silenced += 1
        try:
            yield
        finally:
            self._reduction.silenced -= 1

    def finish(self) -> None:
        self._reduction.finish()

    def discard(self, parameters: Iterable[nn.Parameter], *, dropped: bool) -> None:
        parameters = list(parameters)
        self._reduction.discard(parameters, dropped)
        if dropped:  # zeros are a gradient, as they are for DDP
            self.seen.difference_update(parameters)

    def check_ended(self) -> None:
        self._reduction.check_ended()

    def refresh_trainable(self) -> None:
        for optimizer in self._optimizers:
            optimizer.refresh_trainable()
        before = self._reduction
        self._reduction = self._made([parameter for parameter in before.waiting if parameter.requires_grad])
        self._reduction.inherit(before)

    def detach(self) -> None:
        self._reduction.detach()


IMPLEMENTATION = Implementation(
    "fsshard's own OSS and ShardedDDP",
    NativeOSS,
    takes_replicas=True,
)
