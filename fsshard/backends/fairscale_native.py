"""fsshard's own OSS and its reduction (:mod:`fsshard.oss`), driven by backend="fairscale".

The backend tells them when a backward starts and when gradients must be final, runs step hooks once, and names ranks
that are lost; what :mod:`fsshard.oss` has for scripts that do not is left out here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsshard.comm.watchdog import taking_part
from fsshard.oss.collectives import average, used_anywhere
from fsshard.oss.optimizer import OSS
from fsshard.oss.partitioned import step_under_hooks_of_another
from fsshard.oss.reduction import EVERYWHERE, Reduction, owners_of
from fsshard.torch_private.autograd import current_graph_task_id


class NativeOSS(OSS):
    """An OSS whose gradients, buffers and step hooks are the backend's care."""

    about = "fsshard's own OSS and ShardedDDP"
    step = step_under_hooks_of_another(OSS)  # ShardedOptimizer runs them

    def _refresh_buckets(self) -> None:
        """Do nothing: parameters move where the backend knows of it, and what it shows moves with them."""

    def _current_pointers(self) -> list[tuple[Tensor, bool, int]]:
        return [(parameter, parameter.requires_grad, 0) for parameter in self._parameters()]


@dataclass(frozen=True)
class Replicas:
    """Several groups that divide the optimizer among their ranks, each in the same way.

    Attributes:
        everyone: the ranks of all these groups.
        same_part: the ranks, one of each group, that own what this one owns.
    """

    everyone: dist.ProcessGroup
    same_part: dist.ProcessGroup


class EngineReduction(Reduction):
    """Reduces at the end of each backward that has begun, whether or not this rank has a gradient.

    Attributes:
        seen: ids of the parameters that a backward of any rank has reached since their gradients were dropped; as of
            the last :meth:`finish`.

    Args:
        parameters: the model's.
        optimizers: the OSS that update them.
        group: the ranks that these divide them among.
        reduce_dtypes: by parameter the dtype in which its gradient travels.
        replicas: the groups, where there are several.
        before: the reduction whose place this one takes.
    """

    rounds_first = True  # as DDP does

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        optimizers: Sequence[Any],
        group: Any,
        reduce_dtypes: Mapping[nn.Parameter, torch.dtype | None],
        replicas: Replicas | None,
        before: EngineReduction | None = None,
    ) -> None:
        self.seen: set[int] = set() if before is None else before.seen
        # Those that a backward of this rank has reached since all ranks have told each other.
        self._reached: set[int] = set() if before is None else before._reached
        # A backward has begun since the last finish, on all ranks alike.
        self._is_unfinished = True
        self._replicas = replicas
        trainable = [parameter for parameter in parameters if parameter.requires_grad]
        super().__init__(trainable, owners_of(trainable, optimizers), group, 0, reduce_dtypes, before)
        self._everyone: dist.ProcessGroup = self.group if replicas is None else replicas.everyone

    def begins(self) -> None:
        self._is_unfinished = True
        super().begins()

    def _came(self, i: int) -> None:
        if self._task is None:  # a loss of derivatives alone, which does not come through the model's output
            self.begins()
        super()._came(i)

    def _ends(self) -> None:
        if self.silenced:
            self._task = None
            return
        with taking_part(self._everyone, "the gradient reduction of FairScale, in backward"):
            self._flush()
        self._learning = False

    def _all_reduced(self) -> None:
        """Average over the groups: each has its own mean, and the same owners.

        What was a mean before, and was added to, is the same in all of them and stays what it is.
        """
        self._reached.update([id(self.parameters[i]) for i in self._arrived])
        if self._replicas is None or not self.parameters:
            return
        flags = [i in self._arrived for i in range(len(self.parameters))]
        means = []
        used = used_anywhere(flags, self._everyone, self.parameters[0].device)
        for i in itertools.compress(range(len(flags)), used):
            parameter = self.parameters[i]
            if self.owners[i] == EVERYWHERE:
                means.append(parameter)
            elif self.owners[i] == self.group.rank():
                means.append(parameter)
                if i not in self._reduced and self._reduce_dtypes.get(parameter) is not None:
                    # No rank of this group has used it, and what is here is an earlier mean.
                    mean = self._take_mean(i)
                    if mean is not None:
                        self._unrounded[i] = mean
                self._means.add(parameter)
        average(means, self._replicas.same_part, self._reduce_dtypes)

    def finish(self) -> None:
        """Reduce what waits on any rank, and learn what was reached on any. Collective."""
        if self.group.size() == 1:
            self.seen.update([id(parameter) for parameter in self.parameters if parameter.grad is not None])
            return
        # Two questions in one message. Nobody has to know before what others have used: owners are given zeros for it.
        # At a step after clipping both have been answered.
        while self._is_unfinished and self.parameters:
            ids = list(map(id, self.parameters))
            flags = [bool(self.waiting), *(key in self._reached for key in ids)]
            waits, *reached = used_anywhere(flags, self._everyone, self.parameters[0].device)
            self.seen.update(itertools.compress(ids, reached))
            self._reached.clear()
            if waits:
                self._flush()
            else:
                self._is_unfinished = False

    def check_ended(self) -> None:
        if self._task is not None and not self._launched and current_graph_task_id() == -1:
            for i in tuple(self._aside):  # it has sent nothing: what came before the error is kept, as under DDP
                self._put_back(i)
            self._task = None
        super().check_ended()

    def discard(self, parameters: Iterable[nn.Parameter], *, dropped: bool = False) -> None:
        parameters = list(parameters)
        super().discard(parameters)
        if dropped:  # zeros are a gradient, as they are for DDP
            ids = list(map(id, parameters))
            self.seen.difference_update(ids)
            self._reached.difference_update(ids)
