"""One step of several micro-batches ("leaves") that has the same bits on any number of ranks.

Gradients of the leaves are added up in one aligned binary tree, whoever holds them: pairs of leaves on a rank, those of
the ranks as in :mod:`fsshard.comm.tree`, and the sums of such rounds here.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsshard.backends.base import Backend
from fsshard.comm.watchdog import taking_part
from fsshard.errors import ConfigurationError, ModelError, OptimizerError, RankMismatch
from fsshard.planning.text import is_count

LOOKS = 2
"""Loops in which buffers are compared before and after."""


class LeafLoops:
    """The loops over leaves of one model; at most one is under way.

    Args:
        controller: of the model.
    """

    def __init__(self, controller: Any) -> None:
        self._controller = controller
        self._looks = LOOKS

    def run(self, leaves: int, seed: int | None) -> Iterator[int]:
        """Yield this rank's leaves of one step, and leave the mean of all ranks' gradients. Collective."""
        controller = self._controller
        backend = controller.backend
        call = f"model.leaves({leaves})"
        controller.step.check_complete(call)
        seed = _agreed(backend, leaves, seed, call)
        for entry in backend.all:
            gradient = entry.grad()
            if gradient is not None and bool(gradient.any()):
                raise OptimizerError(f"{call}: there are gradients already; call optimizer.zero_grad() before the loop")
        device = backend.settings.device
        # Those of the CPU are put back in any case.
        devices = [device] if device.type == "cuda" else []
        with (
            controller.step.leaves(call),
            torch.random.fork_rng(devices),
            self._unchanged_buffers(backend, call),
        ):
            yield from self._rounds(leaves, seed)

    def _rounds(self, leaves: int, seed: int) -> Iterator[int]:
        """Yield this rank's leaves, and add up the gradients of each round of two per rank."""
        controller = self._controller
        backend = controller.backend
        ranks = backend.settings.world_size
        own = leaves // ranks
        # A rank has two neighbouring leaves of each round, whose sum has one order; of an odd number it has one.
        pair = 1 if own % 2 else 2
        sums = _PartialSums(backend)
        for begin in range(0, leaves, pair * ranks):
            if begin:
                sums.set_aside()
            first = begin + pair * backend.settings.rank
            last = first + pair - 1
            if first < last:
                _seed_leaf(seed, first)
                with controller.no_sync():
                    yield first
            _seed_leaf(seed, last)
            yield last
            controller.finish_backward(backend.all)
        sums.complete(1.0 / own)

    @contextlib.contextmanager
    def _unchanged_buffers(self, backend: Backend, call: str) -> Iterator[None]:
        """Raise where a forward writes buffers, which would be those of the leaves that rank 0 happens to have."""
        if not self._looks:
            yield
            return
        self._looks -= 1
        before = {name: buffer.clone() for name, buffer in backend.module.named_buffers()}
        yield
        after = dict(backend.module.named_buffers())
        changed = []
        for name, value in before.items():
            if name in after and not torch.equal(value, after[name]):
                changed.append(name)
        if changed:
            raise ModelError(
                f"{call}: the forward writes {', '.join(changed[:3])}, and what is written would depend on how leaves "
                "are divided among ranks; use layers without running statistics (GroupNorm, LayerNorm, or "
                "track_running_stats=False), or keep those in evaluation mode"
            )


class _PartialSums:
    """Sums over complete rounds of leaves: one for each size, a power of two, at most log2(rounds) at once.

    Added up from the smallest on they make :mod:`fsshard.comm.tree`'s tree of any number of rounds.
    """

    def __init__(self, backend: Backend) -> None:
        self._entries = [entry for entry in backend.all if entry.parameter.requires_grad]
        self._backend = backend
        self._kept: list[tuple[int, list[Tensor | None]]] = []

    @torch.no_grad()
    def set_aside(self) -> None:
        """Take the gradients of a round out of ``grad``, which is zero after it."""
        rounds = 1
        total = []
        for entry in self._entries:
            gradient = entry.grad()
            total.append(None if gradient is None else gradient.clone())
        # Zeros, not None: a parameter that no later leaf reaches keeps what it has.
        self._backend.zero_grad(self._entries, set_to_none=False)
        # Two sums over as many rounds make one over twice as many, the earlier on the left.
        while self._kept and self._kept[-1][0] == rounds:
            _, earlier = self._kept.pop()
            total = [_added(one, other) for one, other in zip(earlier, total, strict=True)]
            rounds *= 2
        self._kept.append((rounds, total))

    @torch.no_grad()
    def complete(self, scale: float) -> None:
        """Add the sums of earlier rounds to the gradients, and multiply them by ``scale``."""
        while self._kept:
            _, earlier = self._kept.pop()
            for entry, value in zip(self._entries, earlier, strict=True):
                gradient = entry.grad()
                if gradient is not None and value is not None:
                    gradient.add_(value)
        if scale == 1.0:
            return
        for entry in self._entries:
            gradient = entry.grad()
            if gradient is not None:
                gradient.mul_(scale)


def _added(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one.add_(other)


def check_leaves(leaves: object, ranks: int) -> None:
    """Raise ConfigurationError unless a step of so many leaves has one tree on this number of ranks."""
    if not is_count(leaves):
        raise ConfigurationError(f"model.leaves({leaves!r}): expected a number of micro-batches, such as 8")
    if ranks & (ranks - 1):
        lower = 1 << ranks.bit_length() - 1
        # A round of three ranks is no part of the tree that two ranks add up, whoever has which leaves.
        raise ConfigurationError(
            f"model.leaves({leaves}): expected 1, 2, 4, 8, ... ranks, got {ranks}, whose sums have no place in the "
            f"others' tree; start {lower} or {2 * lower} ranks"
        )
    if leaves % ranks:
        raise ConfigurationError(
            f"model.leaves({leaves}): {ranks} ranks cannot share {leaves} leaves evenly; start a number of ranks that "
            f"divides {leaves}, or use more leaves"
        )


def _agreed(backend: Backend, leaves: int, seed: int | None, call: str) -> int:
    """Return the seed of this step, rank 0's, or raise on every rank where they ask for other leaves. Collective."""
    group = backend.settings.group
    if seed is None:
        seed = int(torch.randint(2**62, ()))
    if group is None or group.size() == 1:
        return seed
    own = torch.tensor([leaves, seed], dtype=torch.int64, device=backend.settings.device)
    answers = own.new_empty(group.size() * 2)
    with taking_part(group, call):
        dist.all_gather_single(answers, own, group=group)
    counts = answers.view(-1, 2)[:, 0].tolist()
    if len(set(counts)) > 1:
        listed = ", ".join(f"rank {rank} {count}" for rank, count in enumerate(counts))
        raise RankMismatch(f"model.leaves: expected as many leaves on every rank, got {listed}")
    return int(answers[1])


def _seed_leaf(seed: int, leaf: int) -> None:
    """Let random numbers from now on be those of a leaf, on whatever rank it is."""
    digest = hashlib.sha256(f"{seed} {leaf}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def leaf_samples(length: int, size: int, *, leaves: int, step: int, leaf: int, seed: int | None = 0) -> list[int]:
    """Return which samples a leaf of a step has: the same on any number of ranks, and none twice in an epoch.

    Args:
        length: samples of the data set.
        size: samples of a leaf.
        leaves: of a step, as for ``model.leaves``.
        step: counted from 0 over all epochs. That is all that a resumed training has to know.
        leaf: what ``model.leaves`` yields.
        seed: of each epoch's order, together with the epoch's number; None for the order of the data set.

    Returns:
        ``size`` indices. What is left at an epoch's end and does not fill a step is left out.

    Raises:
        ConfigurationError: the data set has fewer samples than a step needs.
    """
    steps = length // (leaves * size)
    if steps < 1:
        raise ConfigurationError(
            f"leaf_samples: {leaves} leaves of {size} samples need more than the {length} samples there are"
        )
    epoch, place = divmod(step, steps)
    begin = (place * leaves + leaf) * size
    if seed is None:
        return list(range(begin, begin + size))
    generator = torch.Generator().manual_seed(seed + epoch)
    order = torch.randperm(length, generator=generator)
    return order[begin : begin + size].tolist()
