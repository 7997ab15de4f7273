"""Training on ranks whose batches end at different times: the average is over the ranks that go on.

torch's ``Join`` lets a rank without batches shadow the collectives of DDP. Where ranks hold parts of the weights it
must take the optimizer's steps, too, and whatever else the script does on all ranks. So here it runs through the
script's own loop, on the last batch that it had, and its gradients are zeros.
"""

from __future__ import annotations

import itertools
from collections import UserDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fsshard.comm.watchdog import taking_part, wait
from fsshard.errors import ConfigurationError, RankMismatch
from fsshard.sharded.module import ShardedModule, wrapped_models

Batch = TypeVar("Batch")
WHAT = "fsshard.join()"


class Joined:
    """Ranks that train together although their batches end at different times; made by :func:`join`.

    Attributes:
        active: whether this rank has a batch of its own now; where it has none, its loss means nothing.
        ranks: how many ranks have one.
    """

    def __init__(self, models: Sequence[ShardedModule]) -> None:
        settings = models[0].backend.settings
        self._models = models
        self._group = settings.group
        self._device = settings.device
        self.ranks = settings.world_size
        self.active = True
        self._open = False
        self._loops = False
        # The models' buffers when this rank's batches had ended.
        self._kept: list[dict[str, torch.Tensor]] = []

    def __enter__(self) -> Joined:
        """Let loops begin."""
        self._open = True
        return self

    def __exit__(self, *_: object) -> None:
        """Let no further loop begin."""
        self._open = False

    def __call__(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield this rank's batches, and then the last one again, until all ranks are through with theirs.

        Each batch is a small collective of all ranks: where one leaves the loop early, all do.

        Args:
            batches: this rank's, at least one.

        Raises:
            ConfigurationError: it is not within the ``with``, or within another loop.
            RankMismatch: a rank has no batch at all, or has left the loop.
        """
        if not self._open or self._loops:
            raise ConfigurationError(
                "fsshard.join: expected one loop at a time, and within its context: "
                "`with fsshard.join(model) as joined: for batch in joined(loader): ...`"
            )
        self._loops = True
        try:
            yield from self._until_all_end(iter(batches))
        finally:
            self._put_back_buffers()
            self._loops = False
            self.active = True
            self._kept = []
            self.ranks = self._models[0].backend.settings.world_size
            for model in self._models:
                model._fsshard.weigh_gradients(None)
                model._fsshard.buffers.next_source = 0

    def _until_all_end(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        # An earlier loop may have been left in its middle.
        self._send_buffers()
        last: list[Batch] = []
        while True:
            batch = []
            if self.active:
                batch = list(itertools.islice(batches, 1))
                if not batch:
                    self._kept = list(map(_own_buffers, self._models))
            self.active = bool(batch)
            # The loop may take keys out of its batch, and a rank whose batches have ended gets it again.
            last = _copy_containers(batch) or last
            going_on, empty = self._tell(has_one=self.active, had_one=bool(last))
            if not going_on:
                self._send_buffers()
                return
            if empty:
                ranks = ", ".join(map(str, empty))
                raise RankMismatch(
                    f"{WHAT}: rank {ranks} has no batch at all, so it cannot go through the loop "
                    "while others train; give every rank at least one"
                )
            self.ranks = len(going_on)
            self._weigh()
            # The last round's buffers are sent before that, by the rank that counted in it.
            for model in self._models:
                model._fsshard.buffers.next_source = going_on[0]
            yield batch[0] if self.active else _copy_containers(last[0])
            self._put_back_buffers()

    def _tell(self, *, has_one: bool, had_one: bool) -> tuple[list[int], list[int]]:
        """Return which ranks have a batch now, and which have never had one. Collective."""
        if self._group is None or self._group.size() == 1:
            return ([0], []) if has_one else ([], [])
        flags = torch.zeros(self._group.size(), 2, dtype=torch.int64, device=self._device)
        flags[self._group.rank()] = torch.tensor([has_one, had_one])
        with taking_part(self._group, WHAT):
            work = dist.all_reduce(flags, group=self._group, async_op=True)
            wait(work, self._group, WHAT, on_cpu=self._device.type == "cpu")
        going_on = []
        empty = []
        for rank, (has_batch, had_batch) in enumerate(flags.tolist()):
            if has_batch:
                going_on.append(rank)
            if not had_batch:
                empty.append(rank)
        return going_on, empty

    def _weigh(self) -> None:
        """Let the mean over all ranks, which engines compute, be the mean over those that go on."""
        size = 1 if self._group is None else self._group.size()
        weight = None
        if self.ranks != size:
            weight = size / self.ranks if self.active else 0.0
        for model in self._models:
            model._fsshard.weigh_gradients(weight)

    def _send_buffers(self) -> None:
        """Send the buffers of the rank that has gone on, where ranks' are not to differ; rank 0's count again."""
        for model in self._models:
            model._fsshard.buffers.next_source = 0
            model._fsshard.buffers.sync()

    @torch.no_grad()
    def _put_back_buffers(self) -> None:
        """Undo what a batch that does not count has done to this rank's own buffers. Local."""
        for model, kept in zip(self._models, self._kept, strict=False):
            for name, buffer in model.named_buffers():
                if name in kept and kept[name].shape == buffer.shape:
                    buffer.data.copy_(kept[name])


def _own_buffers(model: ShardedModule) -> dict[str, torch.Tensor]:
    """Copy the buffers that are this rank's own; none where those of a rank that goes on are sent to all."""
    if model._fsshard.buffers.broadcast:
        return {}
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def _copy_containers(batch: Any) -> Any:
    """Return a batch in new dicts, lists and tuples, at any depth, with the same tensors and other objects."""
    # Tokenizers of transformers return a UserDict.
    if isinstance(batch, dict | UserDict):
        copied = copy(batch)
        copied.update({key: _copy_containers(value) for key, value in batch.items()})
        return copied
    if type(batch) in (list, tuple):
        return type(batch)(map(_copy_containers, batch))
    return batch


def join(models: ShardedModule | Iterable[ShardedModule] | Mapping[str, ShardedModule]) -> Joined:
    """Train on ranks whose batches end at different times: ``with fsshard.join(model) as joined:``.

    Within it ``for batch in joined(loader):`` runs equally often on all ranks. A rank whose batches have ended gets its
    last one again: it goes through the script's loop with the others, its gradients count as zeros, and the average is
    over the ranks that still have batches, as with ``torch.distributed.algorithms.Join`` and
    ``divide_by_initial_world_size=False`` under DDP. Everything that the loop does on all ranks (clipping, steps,
    schedulers, averages, checkpoints) stays as it is. Buffers are those of a rank that still has batches.
    ``joined.active`` tells whether the batch counts.

    Args:
        models: what :func:`fsshard.wrap` returned, or several that are trained in one loop, also by name.

    Returns:
        A context; calling it with the loader gives the batches.

    Raises:
        ConfigurationError: something else than wrapped models, or models of different ranks.
    """
    members = wrapped_models(models, "fsshard.join")
    ranks_of_models = set()
    for model in members:
        group = model.backend.settings.group
        ranks = () if group is None else tuple(dist.get_process_group_ranks(group))
        ranks_of_models.add(ranks)
    if len(ranks_of_models) > 1:
        raise ConfigurationError("fsshard.join: the models are trained by different ranks; join each by itself")
    return Joined(members)
