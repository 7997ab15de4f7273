"""Warns where all ranks train on the same batches, as with a loader that has no DistributedSampler."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsshard.backends.base import Backend
from fsshard.comm.agreement import fingerprint, has_numbers
from fsshard.nested import leaves
from fsshard.torch_private.autograd import functorch_transforms_active
from fsshard.torch_private.dispatch import disable_current_modes


class SameInputs:
    """Compares the inputs of the first two training forwards of a model that are looked at."""

    def __init__(self, backend: Backend) -> None:
        # Along other mesh dimensions than data ranks are given the same; those of a domain may all be given it whole.
        sharding = sys.modules.get("fsshard.parallel.domain.sharding")
        has_domain = sharding is not None and sharding.domain_of(backend.module.modules()) is not None
        group = backend.settings.group
        alone = group is None or group.size() == 1 or dist.get_backend(group) == "fake"
        self._group = None if alone or has_domain else group
        self._device = backend.settings.device
        # The digest of the first forward's inputs.
        self._first: Tensor | None = None

    def look(self, inputs: Any) -> None:
        """Note the inputs the first time; the second time compare with the other ranks. Collective then, but once."""
        group = self._group
        if group is None or functorch_transforms_active() or type(torch.empty(0)) is not Tensor:
            # In an estimate there are no numbers, and no other ranks.
            return
        with disable_current_modes():
            digest = self._digest(inputs, group.rank())
            if self._first is None:
                self._first = digest
                return
            self._group = None
            mine = torch.stack([self._first, digest])
            both = torch.stack([mine, -mine])
            dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
        largest, smallest = both.tolist()
        if largest == [-number for number in smallest] and group.rank() == 0:
            warnings.warn(
                "all ranks are given the same inputs, twice in a row, and so train as one rank would: give each a part "
                "of the data, DataLoader(dataset, sampler=torch.utils.data.DistributedSampler(dataset)). If it is "
                "meant, as in training on a full batch, say so: warnings.filterwarnings('ignore', 'all ranks are given "
                "the same inputs')",
                stacklevel=6,
            )

    def _digest(self, inputs: Any, rank: int) -> Tensor:
        """Return a number that ranks share if their tensors are the same; the rank's own where nothing can be told."""
        tensors = [leaf for leaf in leaves(inputs) if isinstance(leaf, Tensor)]
        if not tensors or not all(map(has_numbers, tensors)):
            return torch.tensor(rank, device=self._device)
        return fingerprint(torch.stack([fingerprint(tensor).to(self._device) for tensor in tensors]))
