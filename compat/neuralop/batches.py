"""Losses and data loaders of ranks that each see a part of the batch: how they reduce, and samples that come twice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from neuralop.losses.data_losses import MSELoss
from torch import Tensor
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

Reduction = Literal["sum", "mean"]


def loss_reduction(loss: Any) -> Reduction | None:
    """Return whether ``loss`` sums or averages over the batch; None if it does not say, or its parts disagree.

    Known are losses with a ``reduction`` attribute (neuralop's and torch's), their bound methods (``LpLoss().abs``),
    neuralop's ``MSELoss`` and its aggregates of losses.
    """
    loss = getattr(loss, "__self__", loss)
    # neuraloperator 2.0.0: it sums over the batch, and has no attribute that says so.
    if isinstance(loss, MSELoss):
        return "sum"
    reduction: Reduction | None = getattr(loss, "reduction", None)
    if reduction in ("sum", "mean"):
        return reduction
    parts = getattr(loss, "losses", None) or ()
    if isinstance(parts, Mapping):
        parts = parts.values()
    kinds = set()
    for part in parts:
        member = part[0] if isinstance(part, tuple) else part
        kinds.add(loss_reduction(member))
    if len(kinds) == 1:
        return kinds.pop()
    return None


def _samplers(loader: Any) -> list[Any]:
    batches = getattr(loader, "batch_sampler", None)
    return [getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None)]


def distributed_sampler(loader: Any) -> DistributedSampler[Any] | None:
    """Return the loader's ``DistributedSampler``, or None."""
    for sampler in _samplers(loader):
        if isinstance(sampler, DistributedSampler):
            return sampler
    return None


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell the loader's samplers the epoch; without it a ``DistributedSampler`` shuffles alike in every epoch."""
    distinct = {id(sampler): sampler for sampler in _samplers(loader)}
    for sampler in distinct.values():
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)


def undivided(loader: Any) -> bool:
    """Return whether the loader surely gives every rank all of its dataset."""
    batches = getattr(loader, "batch_sampler", None)
    return type(batches) is BatchSampler and type(batches.sampler) in (SequentialSampler, RandomSampler)


class EvaluationLoader:
    """A loader without the sample that ``DistributedSampler`` repeats where ranks do not divide the dataset.

    Attributes:
        divided: each rank sees a part of the dataset.
        void: the batch given out last holds nothing but the repeated sample. It must run, because the forward is
            collective, and must not count.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.void = False
        sampler = distributed_sampler(loader)
        self.divided = sampler is not None and sampler.num_replicas > 1
        self._padded = sampler is not None and self._repeats(sampler)

    def _repeats(self, sampler: DistributedSampler[Any]) -> bool:
        """Return whether this rank's last sample is a repeated one, and is given out."""
        batches = getattr(self.loader, "batch_sampler", None)
        if sampler.drop_last or batches is None:
            return False
        cut_off = getattr(batches, "drop_last", False) and len(sampler) % batches.batch_size
        repeated = sampler.total_size - len(sampler.dataset)  # type: ignore[arg-type]
        return not cut_off and sampler.rank >= sampler.num_replicas - repeated

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        self.void = False
        last = len(self) - 1
        # A repeated sample would count twice in a metric. There is at most one per rank, always its last one.
        for index, sample in enumerate(self.loader):
            if self._padded and index == last:
                sample = self._without_last(sample)
            yield sample

    def _without_last(self, sample: Mapping[str, Any]) -> Mapping[str, Any]:
        rows = len(sample["y"])
        self.void = rows == 1
        if self.void:
            return sample
        shortened = {}
        for key, value in sample.items():
            shortened[key] = value[:-1] if _has_rows(value, rows) else value
        return shortened


def _has_rows(value: Any, rows: int) -> bool:
    if isinstance(value, Tensor):
        return value.dim() > 0 and len(value) == rows
    return isinstance(value, (list, tuple)) and len(value) == rows
