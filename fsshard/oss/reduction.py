"""Decides when gradients are sent to their owners: hooks, and the state of a backward pass.

FairScale 0.4.13 reduces in a hook at each gradient, in place, and ends the reduction at the end of the graph task in
which the first gradient came. On torch 2.13 both are silently wrong: after ``optimizer.zero_grad()`` a stale bucket is
reduced (FairScale issue #354), a second backward averages again what was averaged, and below a reentrant checkpoint the
end is that of an inner backward. Here hooks count what arrived, buckets leave in one order on all ranks once they are
complete, and the rest of them when the outermost backward ends.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from fsshard.errors import GradientError
from fsshard.oss.gradient_buckets import GradientBucket, Slot, in_buckets
from fsshard.oss.gradient_marks import carried, carry, forget, has_note, is_common, is_sent, mark_common, mark_sent
from fsshard.oss.unbucketed import reduce_everywhere, reduce_sparse, share_means
from fsshard.torch_private.autograd import current_graph_task_id, queue_callback, will_execute
from fsshard.torch_private.tensors import sparse_values

__all__ = ["Reduction", "owners_of", "reduction_of"]

log = logging.getLogger("fsshard")

MOST_BYTES = 25 * 2**20  # of a bucket; DDP's
SLOTS = 4  # buckets in flight
EVERYWHERE = -1  # in place of an owner
# Who reduces a parameter's gradient. No attribute of the parameter: torch.save would pickle it.
_reducing: Any = WeakTensorKeyDictionary()


class Reduction:
    """Reduces the gradients of some parameters to their owners.

    Attributes:
        rounds_first: where gradients are added up in another dtype, whether they are rounded to it before they are
            divided by the number of ranks.

    The order of ``parameters`` is the reverse of that in which their gradients are expected, and the same on all ranks.

    Args:
        parameters: the trainable ones.
        owners: for each of them its owner's rank in the group, or ``EVERYWHERE``.
        sparse: those whose gradients are sparse.
        group: the ranks.
        bucket_elements: at most so many numbers a bucket; 0 for no limit but that in bytes.
        reduce_dtypes: by parameter the dtype in which its gradient travels and is added up; its own where there is
        none. keep: a rank keeps what it has sent, to be looked at, as FairScale does with buckets. arrived:
        parameters whose gradients wait to be reduced already.
    """

    rounds_first = False

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        owners: Sequence[int],
        sparse: Iterable[Tensor],
        group: dist.ProcessGroup,
        bucket_elements: int,
        reduce_dtypes: Mapping[nn.Parameter, torch.dtype | None],
        keep: bool,
        arrived: Iterable[nn.Parameter] = (),
    ) -> None:
        self.parameters, self.group = list(parameters), group
        self.silenced = 0  # how many no_sync contexts are open
        self.owners, self.keep = list(owners), keep
        self._index: dict[Tensor, int] = {p: i for i, p in enumerate(self.parameters)}
        backwards = range(len(self.parameters) - 1, -1, -1)
        aside = {self._index[p] for p in sparse if p in self._index}
        self._everywhere = [i for i in backwards if owners[i] == EVERYWHERE]
        self._sparse = [i for i in backwards if i in aside and owners[i] != EVERYWHERE]
        rest = [i for i in backwards if i not in aside and owners[i] != EVERYWHERE]
        self._buckets = self._made_of(rest if group.size() > 1 else [], reduce_dtypes, bucket_elements)
        self._bucket_of = {i: bucket for bucket in self._buckets for i in bucket.indices}
        self._give_slots()
        self._arrived = {self._index[p] for p in arrived if p in self._index}
        self._aside: dict[int, Tensor] = {}  # means, while the backward adds to them
        self._deferred: set[int] = set()  # gradients that come in parts, or at the end of an inner backward
        self._learning = True
        self._task: int | None = None  # the graph task of the outermost backward that runs
        self._quiet = False  # it began under no_sync
        self._launched = 0
        self._lock = threading.RLock()  # a module on several GPUs has several threads in its backward
        self._late: set[int] = set()  # came after their bucket had left
        self._local = self._warned = self._warned_replaced = False
        self._reduced: set[int] = set()  # have, or had, a gradient that was reduced; whoever put another in its place
        self._has_means = False  # owners may have some that nobody has dropped
        self._hooks: list[Any] = []
        if group.size() > 1:
            self._add_hooks()

    def _made_of(
        self, indices: Sequence[int], reduce_dtypes: Mapping[nn.Parameter, torch.dtype | None], elements: int
    ) -> list[GradientBucket]:
        """Buckets, of one dtype on the way each: narrow ones behind those that travel as they are."""
        lists: dict[torch.dtype | None, list[int]] = {}
        for i in indices:
            lists.setdefault(reduce_dtypes.get(self.parameters[i]), []).append(i)
        return [
            GradientBucket(run, self.owners, self.parameters, self.group, reduce_dtype, self.keep, self.rounds_first)
            for reduce_dtype, some in sorted(lists.items(), key=lambda item: item[0] is not None)
            for run in in_buckets(some, self.parameters, elements, MOST_BYTES)
        ]

    def _give_slots(self) -> None:
        devices = {bucket: self.parameters[bucket.indices[0]].device for bucket in self._buckets}
        for device in dict.fromkeys(devices.values()):
            buckets = [bucket for bucket in self._buckets if devices[bucket] == device]
            for turn in range(min(SLOTS, len(buckets))):
                users = buckets[turn::SLOTS]
                sizes = max(b.sent_bytes for b in users), max(b.received_bytes for b in users)
                slot = Slot(*sizes, device)
                for bucket in users:
                    bucket.use(slot)

    # ------------------------------------------------------------------------------------------ hooks

    def _add_hooks(self) -> None:
        # Weak: the collector cannot see through a parameter's hooks while C++ holds the parameter, and the model, this
        # and the process group with its threads would live forever (torch 2.13).
        this = weakref.ref(self)
        rank = self.group.rank()
        for i, parameter in enumerate(self.parameters):
            if self.owners[i] == rank or self.keep:
                self._hooks.append(parameter.register_hook(_before(this, i)))
            self._hooks.append(parameter.register_post_accumulate_grad_hook(_after(this, i)))
            before = _reducing.get(parameter, lambda: None)()
            if before is not None:
                before.detach()
            _reducing[parameter] = this

    @property
    def is_detached(self) -> bool:
        """Whether another wrapper has taken over a parameter."""
        return self.group.size() > 1 and not self._hooks and bool(self.parameters)

    def detach(self) -> None:
        """Stop watching."""
        while self._hooks:
            self._hooks.pop().remove()

    def _comes(self, i: int) -> None:
        """A gradient is about to be added to what there is."""
        parameter = self.parameters[i]
        gradient = parameter.grad
        if gradient is None:
            self._reduced.discard(i)
            return
        if i in self._reduced:
            self._recognize(i)
        if is_sent(gradient):
            if _accumulates(parameter):
                parameter.grad = None
                self._reduced.discard(i)
        elif is_common(gradient):
            if _accumulates(parameter):
                self._aside[i] = gradient
                parameter.grad = None
        else:
            common = carried(gradient)
            if common is not None:
                self._aside[i] = common
            else:
                self._reduced.discard(i)

    def _recognize(self, i: int) -> None:
        """Take another tensor in place of a reduced gradient (``p.grad = p.grad * 0.5``) for one that comes of it."""
        gradient = self.parameters[i].grad
        if gradient is None or has_note(gradient):
            return
        if not bool((sparse_values(gradient) if gradient.is_sparse else gradient).any()):
            self._reduced.discard(i)
            return
        if i in self._arrived:
            raise GradientError(
                "a gradient was replaced between backward passes and their reduction, after an earlier one was "
                "reduced; replace it after the reduction, or set it to None before"
            )
        if self.owners[i] == self.group.rank():
            mark_common(gradient)
        else:
            mark_sent(gradient)
        if not self._warned_replaced:
            self._warned_replaced = True
            log.warning(
                "gradients were replaced (p.grad = ...) between backward passes, after they were reduced; they are "
                "treated as derived from the mean, the same on all ranks, not as this rank's own part"
            )

    def _came(self, i: int) -> None:
        """It has been added."""
        if self._aside:
            common = self._aside.pop(i, None)
            gradient = self.parameters[i].grad
            if common is not None and gradient is not None:
                carry(gradient, common)
        self._arrived.add(i)
        if self.silenced:
            self._local = True
            return
        if self._task is None or i not in self._bucket_of:
            return
        bucket = self._bucket_of[i]
        if self._task != current_graph_task_id():
            self._deferred.add(i)  # an inner backward, and others may add to it again
            if bucket in self._buckets[: self._launched]:
                self._late.add(i)
        elif not self._learning and i not in self._deferred:
            bucket.waiting -= 1
            if not bucket.waiting:
                self._launch_complete()

    # ------------------------------------------------------------------------------------------ a backward pass

    def begins(self) -> None:
        """The outermost backward begins; called in its graph task, before any gradient arrives."""
        task = current_graph_task_id()
        if self._task is None and self.group.size() > 1:
            self._task, self._quiet = task, self.silenced > 0
            for bucket in self._buckets:
                bucket.waiting = len(bucket.indices)
            queue_callback(self._ends)
            if self.silenced and self._has_means:
                self._has_means = False
                for i in tuple(self._reduced):
                    self._recognize(i)
                dense = [i for bucket in self._buckets for i in bucket.indices]
                share_means([self.parameters[i] for i in dense], [self.owners[i] for i in dense], self.group)
                # All ranks have these now, as under DDP.
                self._reduced.difference_update(i for i in dense if i not in self._arrived)

    def check_ended(self) -> None:
        """Raise if a backward never ended."""
        if self._task is None or current_graph_task_id() != -1:
            return
        if self._quiet:  # under no_sync, where nothing is sent: as under DDP, what came before the error is kept
            self._put_back()
            self._task = None
        else:
            raise GradientError(
                "an earlier backward raised an error before it ended, so that this rank has sent some of its gradients "
                "and other ranks wait for the rest; end the process group, or build OSS and ShardedDataParallel anew "
                "on all ranks"
            )

    def _ends(self) -> None:
        self._put_back()
        if self.silenced:
            self._task = None
        elif self._arrived:
            self._flush()
            self._learning = False
        else:  # torch.autograd.grad
            self._task = None

    def _put_back(self) -> None:
        for i, common in self._aside.items():
            if self.parameters[i].grad is None:
                self.parameters[i].grad = common
        self._aside.clear()

    def _launch_complete(self) -> None:
        with self._lock:  # the last one stays for the end
            while self._launched < len(self._buckets) - 1 and not self._buckets[self._launched].waiting:
                self._launch()

    @torch.no_grad()
    def _launch(self) -> None:
        """Send the next bucket, in the memory of an earlier one."""
        if self._launched >= SLOTS:
            self._buckets[self._launched - SLOTS].finish()
        self._buckets[self._launched].launch(self._arrived)
        self._launched += 1

    @torch.no_grad()
    def _flush(self) -> None:
        """Reduce all that has not been yet. Collective."""
        for i in tuple(self._reduced):  # before this backward; most often none
            self._recognize(i)
        while self._launched < len(self._buckets):
            self._launch()
        self._all_launched()
        for bucket in self._buckets:
            bucket.finish()
        for i in self._sparse:
            arrived = i in self._arrived
            reduce_sparse(self.parameters[i], self.owners[i], arrived, self.group, self.keep)
        for device in dict.fromkeys(self.parameters[i].device for i in self._everywhere):
            here = [i for i in self._everywhere if self.parameters[i].device == device]
            parameters, flags = [self.parameters[i] for i in here], [i in self._arrived for i in here]
            reduce_everywhere(parameters, flags, self.group)
        self._all_reduced()
        self._reduced.update(*(bucket.reduced for bucket in self._buckets))
        for i in self._sparse:
            gradient = self.parameters[i].grad
            if gradient is not None and has_note(gradient):
                self._reduced.add(i)
        self._reduced -= self._late  # their next part is there already
        self._task, self._launched, self._local, self._has_means = None, 0, False, True
        self._arrived, self._late = self._late, set()
        if self._arrived:  # from the next backward on their buckets wait for them
            self._flush()

    def _all_launched(self) -> None:
        """Every bucket of this backward is on its way; all ranks come here at the same point."""

    def _all_reduced(self) -> None:
        """Owners have the means over the group; all ranks come here at the same point."""

    # ------------------------------------------------------------------------------------------ asked from outside

    @property
    def waiting(self) -> list[nn.Parameter]:
        """Parameters with gradients that have not been reduced."""
        if self.group.size() == 1:  # nothing is, and nobody looks
            return [parameter for parameter in self.parameters if parameter.grad is not None]
        return [self.parameters[i] for i in sorted(self._arrived) if self.parameters[i].grad is not None]

    def reduce(self) -> None:
        """Reduce what waits, now. Collective."""
        self.check_ended()
        if self.group.size() > 1:
            self._flush()

    def finish(self) -> None:
        """Reduce what waits, if anything does."""
        if self.group.size() == 1:
            return
        self.check_ended()
        if self._local and self.waiting and not self._warned:
            self._warned = True
            log.warning(
                "gradients that were accumulated under no_sync() are reduced at the optimizer's step: no backward "
                "outside of it came after them"
            )
        if self.waiting:
            self._flush()

    def inherit(self, before: Reduction) -> None:
        """Take the place of another one."""
        before.detach()
        self.silenced, self._has_means = before.silenced, before._has_means
        known = (before.parameters[i] for i in before._reduced)
        self._reduced = {self._index[parameter] for parameter in known if parameter in self._index}

    def discard(self, parameters: Iterable[nn.Parameter], dropped: bool) -> None:
        """Gradients are set to zero, or dropped."""
        self._has_means = False
        for parameter in parameters:
            if parameter.grad is not None:
                forget(parameter.grad)
            i = self._index.get(parameter)
            if i is not None:
                self._aside.pop(i, None)
                self._reduced.discard(i)
                if dropped:
                    self._arrived.discard(i)


def _before(this: weakref.ref[Reduction], i: int) -> Callable[[Tensor], None]:
    def hook(_: Tensor) -> None:
        reduction = this()
        if reduction is not None:
            reduction._comes(i)

    return hook


def _after(this: weakref.ref[Reduction], i: int) -> Callable[[nn.Parameter], None]:
    def hook(_: nn.Parameter) -> None:
        reduction = this()
        if reduction is not None:
            reduction._came(i)

    return hook


def _accumulates(parameter: nn.Parameter) -> bool:
    """Whether the engine will add a gradient; ``torch.autograd.grad`` runs the hooks and adds none."""
    try:
        return will_execute(torch.autograd.graph.get_gradient_edge(parameter).node)
    except RuntimeError:  # "A leaf node was passed to _will_engine_execute_node but we are currently running" it
        return False


def reduction_of(parameter: Tensor) -> Reduction | None:
    """Who reduces a parameter's gradient to its owner, if anybody does."""
    if not isinstance(parameter, nn.Parameter):
        return None
    found: Reduction | None = _reducing.get(parameter, lambda: None)()
    return None if found is None or found.group.size() == 1 or found.is_detached else found


def owners_of(parameters: Iterable[nn.Parameter], optimizers: Iterable[Any]) -> list[int]:
    """The rank that updates each parameter; ``EVERYWHERE`` for those that no optimizer has."""
    owner: dict[nn.Parameter, int] = {}
    for optimizer in optimizers:
        found: Mapping[nn.Parameter, int] = optimizer._param_to_rank
        owner.update(found)
    return [owner.get(parameter, EVERYWHERE) for parameter in parameters]
