"""Parts of a recipe that do what a trainer does: its samples, optimizer, groups and schedule."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import nn
from torch.optim import Optimizer

from fsshard.errors import RecipeError
from fsshard.parity.one_process import kept_random_numbers
from fsshard.recipes.recipe import seed_all
from fsshard.sharded.handover import point_at
from fsshard.sharded.optimizer import constructor_arguments, name_groups


@dataclass(frozen=True)
class SampledBatches:
    """Batches in a trainer's order: a pure function of rank, number of ranks and number of batch.

    Attributes:
        dataset: samples by index.
        collate: samples -> batch.
        order: ``(rank, world_size, epoch) -> lists of indices``, one per batch; as many in every epoch.
        seed: of random numbers that a sample or the collator draws: others for every rank and batch.
    """

    dataset: Any
    collate: Callable[[list[Any]], Any]
    order: Callable[[int, int, int], list[list[int]]]
    seed: int = 0
    _known: dict[tuple[int, int, int], list[list[int]]] = field(default_factory=dict, repr=False)

    def indices(self, rank: int, world_size: int, epoch: int) -> list[list[int]]:
        """Return the samples of all batches of a rank in an epoch, or raise RecipeError if it has no batch."""
        asked = (rank, world_size, epoch)
        if asked not in self._known:
            self._known[asked] = [list(batch) for batch in self.order(*asked)]
        if not self._known[asked]:
            raise RecipeError(
                f"the dataset has no batch for rank {rank} of {world_size}: make it, or its batches, larger"
            )
        return self._known[asked]

    def place(self, rank: int, world_size: int, number: int) -> tuple[int, int]:
        """Return the epoch of a rank's ``number``-th batch, and its number within."""
        return divmod(number, len(self.indices(rank, world_size, 0)))

    def steps(self, world_size: int, accumulate: int, name: str) -> int:
        """Return the steps in an epoch; ``name`` is what the trainer calls ``accumulate``."""
        length = len(self.indices(0, world_size, 0))
        if length % accumulate:
            raise RecipeError(
                f"an epoch has {length} batches on each of {world_size} ranks, which {name}={accumulate} does not "
                "divide: the trainer takes a shorter last step, and a recipe cannot"
            )
        return length // accumulate

    def __call__(self, rank: int, world_size: int, number: int) -> Any:
        epoch, within = self.place(rank, world_size, number)
        chosen = self.indices(rank, world_size, epoch)[within]
        with kept_random_numbers():
            seed_all(hash((self.seed, rank, number)) % 2**63)
            return self.collate([self.dataset[index] for index in chosen])


@dataclass
class Configured:
    """The result of a trainer's set-up of a whole model.

    Attributes:
        optimizer: over its parameters, not stepped.
        scheduler: of the optimizer, or None.
        every: ``world_size -> number``: the scheduler steps after so many steps of the optimizer.
    """

    optimizer: Optimizer
    scheduler: Any = None
    every: Callable[[int], int] = lambda world_size: 1


Configure = Callable[[nn.Module, int], Configured]
"""``(model, world_size) -> what is made of it``."""


def own_groups(groups: Sequence[Mapping[str, Any]], names: list[str]) -> list[dict[str, Any]]:
    """Return the groups that the trainer has made, whatever the names: ``recipe.param_groups``."""
    return [{**group, "params": list(group["params"])} for group in groups]


@dataclass(frozen=True)
class FreshScheduler:
    """``recipe.scheduler``: one that the trainer's function makes of a model of its own, over another optimizer.

    Attributes:
        build: makes a model.
        configure: makes optimizer and scheduler of it, for a number of ranks.
    """

    build: Callable[[], nn.Module]
    configure: Configure
    takes_world_size: ClassVar = True  # an epoch has fewer steps on more ranks

    def __call__(self, optimizer: Optimizer, world_size: int = 1) -> Any:
        """Make the scheduler, whose first values the optimizer takes over."""
        with kept_random_numbers():
            found = self.configure(self.build(), world_size)
        old = found.optimizer
        if len(old.param_groups) != len(optimizer.param_groups):
            raise RecipeError(
                f"the schedule is for {len(old.param_groups)} groups of parameters, and the engine's optimizer has "
                f"{len(optimizer.param_groups)}; make it with recipe.param_groups"
            )
        for mine, theirs in zip(optimizer.param_groups, old.param_groups, strict=True):
            mine.update({key: value for key, value in theirs.items() if key != "params"})
        point_at([found.scheduler], [(old, optimizer)])
        every = found.every(world_size)
        return found.scheduler if every == 1 else _Every(found.scheduler, every)


class _Every:
    """A scheduler that steps once in a while."""

    def __init__(self, scheduler: Any, every: int) -> None:
        self.scheduler, self.every, self.calls = scheduler, every, 0

    def step(self) -> None:
        """Count one of the optimizer's steps."""
        self.calls += 1
        if self.calls % self.every == 0:
            self.scheduler.step()


def optimizer_fields(build: Callable[[], nn.Module], configure: Configure) -> dict[str, Any]:
    """Return a recipe's ``optimizer``, ``hyper``, ``param_groups`` and ``scheduler``; see :class:`FreshScheduler`."""
    with kept_random_numbers():
        module = build()
        found = configure(module, 1)
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return {
        "optimizer": type(found.optimizer),
        "hyper": constructor_arguments(found.optimizer),
        "param_groups": functools.partial(own_groups, name_groups(found.optimizer, names)),
        "scheduler": None if found.scheduler is None else FreshScheduler(build, configure),
    }
