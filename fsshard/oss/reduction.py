"""Decide when gradients are sent to their owners: hooks, and the state of a backward pass.

Hooks count what arrived; buckets leave in one order on all ranks once they are complete, and the rest of them when the
outermost backward ends. FairScale 0.4.13 reduces in a hook at each gradient, in place, and ends with the graph task in
which the first gradient came: silently wrong where gradients are dropped, accumulate or come below a reentrant
checkpoint (torch 2.13; FairScale issue #354).
"""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from fsshard.complex_params.pairs import real_dtype
from fsshard.errors import GradientError
from fsshard.oss.collectives import average, runs, share_means, used_anywhere
from fsshard.oss.gradient_buckets import GradientBucket, share_memory
from fsshard.torch_private.autograd import current_graph_task_id, queue_callback, will_execute

log = logging.getLogger("fsshard")

# Buckets in flight.
SLOTS = 4
# In place of an owner: all ranks have the gradient.
EVERYWHERE = -1
# Who reduces a parameter's gradient. No attribute of the parameter: torch.save would pickle it.
_reducing: Any = WeakTensorKeyDictionary()


class Reduction:
    """Reduces the gradients of some parameters to their owners: the mean is at the owner, and None elsewhere.

    Sparse gradients are reduced as dense ones, as in FairScale's buckets.

    A later backward adds to that mean. Under DDP all ranks have it, and each adds its part to it before the next
    reduction; here the owner sets it aside (``_aside``) while its own part comes, and adds it to the part of each rank.

    Attributes:
        rounds_first: where gradients are added up in another dtype, whether they are rounded to it before they are
            divided by the number of ranks.
        parameters: in the reverse order of that in which their gradients are expected, the same on all ranks.
        silenced: how many ``no_sync`` contexts are open.
        local: gradients have come in one, and none were reduced since.

    Args:
        parameters: the trainable ones.
        owners: for each of them its owner's rank in the group, or ``EVERYWHERE``.
        group: the ranks.
        bucket_elements: at most so many numbers a bucket; 0 for no limit but that in bytes.
        reduce_dtypes: by parameter the dtype in which its gradient travels and is added up; else its own.
        before: the reduction whose place this one takes.
    """

    rounds_first = False

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        owners: Sequence[int],
        group: dist.ProcessGroup,
        bucket_elements: int,
        reduce_dtypes: Mapping[nn.Parameter, torch.dtype | None],
        before: Reduction | None = None,
    ) -> None:
        self.parameters = list(parameters)
        self.group = group
        self.owners = list(owners)
        self._reduce_dtypes = reduce_dtypes
        self.silenced: int = 0 if before is None else before.silenced
        self._index: dict[Tensor, int] = dict(zip(self.parameters, itertools.count()))
        self._everywhere: list[int] = []
        owned = []
        for index in reversed(range(len(self.parameters))):
            if owners[index] == EVERYWHERE:
                self._everywhere.append(index)
            else:
                owned.append(index)
        self._buckets: list[GradientBucket] = []
        if group.size() > 1:
            self._buckets = self._new_buckets(owned, bucket_elements)
        self._bucket_of: dict[int, GradientBucket] = {}
        for bucket in self._buckets:
            self._bucket_of.update(dict.fromkeys(bucket.indices, bucket))
        # Parameters whose gradient here is a mean. What is frozen is among them, too: it may be thawed with its mean.
        self._means: set[Tensor] = set() if before is None else before._means
        # Whether owners may have some that nobody has dropped; the same on all ranks.
        self._has_means = False
        # Means that are set aside while the backward adds to them.
        self._aside: dict[int, Tensor] = {}
        # Means, while what is added to them is reduced in another dtype.
        self._unrounded: dict[int, Tensor] = {}
        # Gradients whose mean over the group this flush has found.
        self._reduced: set[int] = set()
        # Gradients that have not been reduced.
        self._arrived: set[int] = set()
        if before is not None:
            self._note_thawed(before)
        # Gradients that come in parts, or at the end of an inner backward.
        self._deferred: set[int] = set()
        self._learning = True
        # The graph task of the outermost backward that runs.
        self._task: int | None = None
        # Whether it began under no_sync.
        self._quiet = False
        self._launched = 0
        # A module on several GPUs has several threads in its backward.
        self._lock = threading.RLock()
        # Gradients that came after their bucket had left.
        self._late: set[int] = set()
        self.local = False
        self._warned = False
        self._hooks: list[Any] = []
        if group.size() > 1:
            self._take_over()
            return
        if before is not None:
            before.detach()
        # Nothing is sent, and every engine rounds all the same.
        for index, parameter in enumerate(self.parameters):
            if reduce_dtypes.get(parameter) is not None and parameter.requires_grad:
                self._hooks.append(parameter.register_post_accumulate_grad_hook(_weakly(self._round, index)))

    def _note_thawed(self, before: Reduction) -> None:
        """Count the gradients of thawed parameters, which are no means, as not reduced."""
        for index, parameter in enumerate(self.parameters):
            is_thawed = parameter.grad is not None and parameter not in before._index
            if is_thawed and parameter not in self._means:
                self._arrived.add(index)

    def _new_buckets(self, indices: Sequence[int], elements: int) -> list[GradientBucket]:
        """Return buckets of one dtype on the way each, in the order in which they are complete."""
        kinds = defaultdict(list)
        for index in indices:
            parameter = self.parameters[index]
            reduce_dtype = self._reduce_dtypes.get(parameter)
            kinds[reduce_dtype, reduce_dtype or real_dtype(parameter.dtype)].append(parameter)
        buckets = []
        for (reduce_dtype, _), parameters in kinds.items():
            for run in runs(parameters, elements):
                bucket = GradientBucket(
                    [self._index[parameter] for parameter in run],
                    self.owners,
                    self.parameters,
                    self.group,
                    reduce_dtype,
                    self.rounds_first,
                )
                buckets.append(bucket)
        buckets.sort(key=lambda bucket: -min(bucket.indices))
        by_device = defaultdict(list)
        for bucket in buckets:
            device = self.parameters[bucket.indices[0]].device
            by_device[device].append(bucket)
        for device, of_device in by_device.items():
            for turn in range(min(SLOTS, len(of_device))):
                share_memory(of_device[turn::SLOTS], device)
        return buckets

    # ------------------------------------------------------------------------------------------ hooks

    def _take_over(self) -> None:
        """Watch the parameters, in place of whoever has done so before."""
        for i, parameter in enumerate(self.parameters):
            if self.owners[i] == self.group.rank():
                self._hooks.append(parameter.register_hook(_weakly(self._comes, i)))
            self._hooks.append(parameter.register_post_accumulate_grad_hook(_weakly(self._came, i)))
            before = _reducing.get(parameter, lambda: None)()
            if before is not None and parameter in before._index:
                before.detach()
                self._has_means |= before._has_means
                if parameter in before._means:
                    self._means.add(parameter)
                if before._index[parameter] in before._arrived:
                    self._arrived.add(i)
            _reducing[parameter] = weakref.ref(self)

    @property
    def is_detached(self) -> bool:
        """Tell whether another wrapper has taken over a parameter."""
        return self.group.size() > 1 and not self._hooks and bool(self.parameters)

    def detach(self) -> None:
        """Stop watching."""
        while self._hooks:
            self._hooks.pop().remove()

    def _comes(self, i: int) -> None:
        """Set a mean aside when the backward is about to add to it."""
        parameter = self.parameters[i]
        # A look at the set first: hashing a tensor takes its time.
        if not self._means or parameter not in self._means:
            return
        if parameter.grad is None or _accumulates(parameter):
            mean = self._take_mean(i)
            if mean is not None:
                self._aside[i] = mean

    def _take_mean(self, i: int) -> Tensor | None:
        """Return the mean that gradient ``i`` is added to, if there is one, and leave this rank's part in ``grad``."""
        parameter = self.parameters[i]
        # A look at the set first: hashing a tensor takes its time.
        if not self._means or parameter not in self._means:
            return self._aside.pop(i, None)
        self._means.discard(parameter)
        mean = parameter.grad
        parameter.grad = None
        return mean

    @torch.no_grad()
    def _put_back(self, i: int) -> None:
        """End the backward for a mean that was set aside, where no reduction follows."""
        mean = self._aside.pop(i)
        parameter = self.parameters[i]
        if parameter.grad is None:
            parameter.grad = mean
            self._means.add(parameter)
        else:
            # The owner's part becomes what, added up and divided by the number of ranks, gives the mean with all.
            parameter.grad = mean * self.group.size() + parameter.grad.detach()

    def _came(self, i: int) -> None:
        """Note that a gradient was accumulated."""
        self._arrived.add(i)
        if i in self._aside and (self.silenced or self._task is None):
            self._put_back(i)
        if self.silenced:
            self.local = True
            return
        if self._task is None or i not in self._bucket_of:
            return
        bucket = self._bucket_of[i]
        if self._task != current_graph_task_id():
            # It comes from an inner backward, and others may add to it again.
            self._deferred.add(i)
            if bucket in self._buckets[: self._launched]:
                self._late.add(i)
        elif not self._learning and i not in self._deferred:
            bucket.waiting -= 1
            if not bucket.waiting:
                self._launch_complete()

    @torch.no_grad()
    def _round(self, i: int) -> None:
        parameter = self.parameters[i]
        if not self.silenced and parameter.grad is not None:
            parameter.grad.copy_(parameter.grad.to(self._reduce_dtypes[parameter]))

    # ------------------------------------------------------------------------------------------ a backward pass

    def begins(self) -> None:
        """Begin the outermost backward; called in its graph task, before any gradient arrives."""
        if self._task is not None or self.group.size() == 1:
            return
        self._task = current_graph_task_id()
        self._quiet = self.silenced > 0
        self._forget_dropped()
        for bucket in self._buckets:
            bucket.waiting = len(bucket.indices)
        queue_callback(self._ends)
        if self.silenced and self._has_means:
            self._has_means = False
            indices = list(self._bucket_of)
            parameters = [self.parameters[index] for index in indices]
            owners = [self.owners[index] for index in indices]
            has_mean = [parameter in self._means and parameter.grad is not None for parameter in parameters]
            share_means(parameters, owners, has_mean, self.group)
            # All ranks have them now, as under DDP.
            self._means.difference_update(parameters)

    def check_ended(self) -> None:
        """Raise if a backward never ended."""
        if self._task is None or current_graph_task_id() != -1:
            return
        if self._quiet:
            # Nothing was sent: as under DDP, what came before the error is kept.
            self._task = None
        else:
            raise GradientError(
                "an earlier backward raised an error before it ended, so that this rank has sent some of its gradients "
                "and other ranks wait for the rest; end the process group, or build OSS and ShardedDataParallel anew "
                "on all ranks"
            )

    def _ends(self) -> None:
        if self.silenced:
            self._task = None
        elif self._arrived:
            self._flush()
            self._learning = False
        else:
            # No gradient came: it was torch.autograd.grad.
            self._task = None

    def _launch_complete(self) -> None:
        # The last bucket stays for the end of the backward.
        with self._lock:
            while self._launched < len(self._buckets) - 1 and not self._buckets[self._launched].waiting:
                self._launch()

    @torch.no_grad()
    def _launch(self) -> None:
        """Send the next bucket, in the memory of an earlier one."""
        if self._launched >= SLOTS:
            self._finish(self._buckets[self._launched - SLOTS])
        self._buckets[self._launched].launch(self._arrived)
        self._launched += 1

    def _forget_dropped(self) -> None:
        """Count a gradient that was dropped (``grad = None``) as one that never came."""
        for index in list(self._arrived):
            if self.parameters[index].grad is None:
                self._arrived.discard(index)

    def _finish(self, bucket: GradientBucket) -> None:
        reduced = bucket.finish(self._take_mean, self._unrounded)
        self._reduced.update(reduced)
        self._means.update(self.parameters[i] for i in reduced)

    @torch.no_grad()
    def _flush(self) -> None:
        """Reduce all that has not been yet. Collective."""
        if self._task is None:
            self._forget_dropped()
        while self._launched < len(self._buckets):
            self._launch()
        for bucket in self._buckets:
            self._finish(bucket)
        if self._everywhere:
            self._average_everywhere()
        self._all_reduced()
        for i, mean in self._unrounded.items():
            gradient = self.parameters[i].grad
            assert gradient is not None
            gradient.add_(mean)
        self._unrounded = {}
        self._reduced = set()
        self._task = None
        self._launched = 0
        self.local = False
        self._has_means = True
        self._arrived = self._late
        self._late = set()
        # From the next backward on their buckets wait for them.
        if self._arrived:
            self._flush()

    def _average_everywhere(self) -> None:
        """Give all ranks the means of what no optimizer has. Collective."""
        flags = [index in self._arrived for index in self._everywhere]
        used = used_anywhere(flags, self.group, self.parameters[0].device)
        indices = itertools.compress(self._everywhere, used)
        average([self.parameters[index] for index in indices], self.group, {})

    # Does nothing: for subclasses, called on all ranks alike where owners have the means over the group.
    def _all_reduced(self) -> None: ...

    # ------------------------------------------------------------------------------------------ asked from outside

    @property
    def waiting(self) -> list[nn.Parameter]:
        """Return the parameters whose gradients have not been reduced."""
        parameters = self.parameters
        # With one rank nothing is, and nobody looks.
        if self.group.size() > 1:
            parameters = [self.parameters[index] for index in sorted(self._arrived)]
        return [parameter for parameter in parameters if parameter.grad is not None]

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
        if not self.waiting:
            return
        if self.local and not self._warned:
            self._warned = True
            log.warning(
                "gradients that were accumulated under no_sync() are reduced at the optimizer's step: no backward "
                "outside of it came after them"
            )
        self._flush()

    def discard(self, parameters: Iterable[nn.Parameter]) -> None:
        """Take note that gradients are set to zero or dropped, on all ranks."""
        self._has_means = False
        self._means.difference_update(parameters)


def _weakly(method: Any, i: int) -> Callable[[Tensor], None]:
    """Make a hook that does not keep its owner alive."""
    # The collector cannot see through a parameter's hooks while C++ holds the parameter, and the model, the reduction
    # and the process group with its threads would live forever (torch 2.13). WeakMethod is slower, for each gradient.
    reference = weakref.ref(method.__self__)
    function = method.__func__

    def hook(_: Tensor) -> None:
        reduction = reference()
        if reduction is not None:
            function(reduction, i)

    return hook


def _accumulates(parameter: nn.Parameter) -> bool:
    """Tell whether this backward adds a gradient; ``torch.autograd.grad`` runs the hooks and adds none."""
    try:
        return will_execute(torch.autograd.graph.get_gradient_edge(parameter).node)
    except RuntimeError:
        # "A leaf node was passed to _will_engine_execute_node but we are currently running" it.
        return False


def reduction_of(parameter: Tensor) -> Reduction | None:
    """Return the reduction that a parameter's gradient goes through, if there is one."""
    reduction: Reduction | None = _reducing.get(parameter, lambda: None)()
    if reduction is None or reduction.group.size() == 1 or reduction.is_detached:
        return None
    return reduction


def owners_of(parameters: Iterable[nn.Parameter], optimizers: Iterable[Any]) -> list[int]:
    """Return the rank that updates each parameter; ``EVERYWHERE`` for those that no optimizer has."""
    owners = {}
    for optimizer in optimizers:
        owners.update(optimizer._param_to_rank)
    return [owners.get(parameter, EVERYWHERE) for parameter in parameters]
