"""A trainer's parts as parts of a recipe, a LightningModule as a whole one; scripts find ``Recipe`` here too."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from fsshard.errors import RecipeError
from fsshard.parity.one_process import kept_random_numbers
from fsshard.recipes.recipe import Recipe, RecipeLike, Split, resolve, seed_all
from fsshard.sharded.handover import point_at
from fsshard.sharded.optimizer import constructor_arguments, name_groups

__all__ = [
    "Configured",
    "FreshScheduler",
    "Recipe",
    "RecipeLike",
    "SampledBatches",
    "Split",
    "from_lightning",
    "optimizer_fields",
    "resolve",
]


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
                "divide: the trainer takes a shorter last step, and a recipe none"
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


# ---------------------------------------------------------------------------------------------------------- Lightning

HOOKS = """
    backward configure_gradient_clipping lr_scheduler_step on_after_backward on_before_backward
    on_before_optimizer_step on_before_zero_grad on_fit_start on_train_batch_end on_train_batch_start on_train_epoch_end
    on_train_epoch_start on_train_start optimizer_step optimizer_zero_grad transfer_batch_to_device
"""
"""Hooks that Lightning's Trainer calls around a step, where a recipe calls nothing."""

DERIVED = ("build", "hyper", "loss", "optimizer", "param_groups", "scheduler")


def from_lightning(module: Any, datamodule: Any = None, *, without: tuple[str, ...] = (), **options: Any) -> Recipe:
    """Make a recipe of the training of a LightningModule: ``recipe = from_lightning(MyModule(), MyData())``.

    The model is the LightningModule, whose ``training_step`` runs through the wrapped model's forward as under
    Lightning's strategies. Optimizer, groups and schedule are what ``configure_optimizers`` makes. The samples are
    those that Lightning's Trainer gives each rank, with a ``DistributedSampler`` put into the loader.

    Args:
        module: a LightningModule, of which every training gets a copy as it is now, or a function that makes one,
            under the recipe's seed. ``setup("fit")`` and ``configure_model()`` are called on it.
        datamodule: a LightningDataModule, or a ``DataLoader``; None: ``module.train_dataloader()``.
        without: hooks of the module, such as ``"on_train_epoch_end"``, that change nothing in its training and are
            left out. A hook that is overridden and not named raises.
        **options: further attributes of :class:`~fsshard.parity.Recipe`: ``accumulate``, ``clip``, ``precision``,
            ``seed``, ``settings``, ... ``batches`` in place of a loader gives ``(batch, number in its epoch)``.

    Raises:
        RecipeError: manual optimization, several optimizers, a hook that a recipe does not call, a schedule that
            watches a metric, or a loader whose samples cannot be told for every rank.
    """
    taken = [name for name in DERIVED if name in options]
    if taken:
        raise RecipeError(
            f"from_lightning({taken[0]}=...): the LightningModule says it; write a Recipe to say otherwise"
        )
    training = _Training(module, without)
    batches = options.pop("batches", None)
    if batches is None:
        sampled = _sampled(_loader(datamodule, training.build), options.get("seed", 0))
        hooks = None if isinstance(datamodule, DataLoader) else datamodule
        batches = _Numbered(sampled, options.get("accumulate", 1), hooks)
    made = optimizer_fields(training.build, functools.partial(training.configure, batches))
    name = getattr(module, "__name__", type(module).__name__)
    return Recipe(build=training.build, batches=batches, loss=training.loss, **{"name": name, **made, **options})


@dataclass(frozen=True)
class _Training:
    """The functions of a recipe that ask the LightningModule."""

    module: Any
    without: tuple[str, ...]

    def build(self) -> nn.Module:
        """Make a LightningModule, ready for its optimizer."""
        found: Any = copy.deepcopy(self.module) if isinstance(self.module, nn.Module) else self.module()
        _check(found, self.without)
        found.setup("fit")
        found.configure_model()
        found.log = found.log_dict = _log_nothing  # Lightning's would warn that there is no Trainer
        module: nn.Module = found.train()
        return module

    def configure(self, batches: Any, module: Any, world_size: int) -> Configured:
        """Ask ``configure_optimizers``, and read its answer as Lightning does."""
        given = module.configure_optimizers()
        optimizers: list[Any]
        schedules: list[Any]
        if isinstance(given, (list, tuple)) and len(given) == 2 and isinstance(given[0], (list, tuple)):
            optimizers, schedules = (list(each) if isinstance(each, (list, tuple)) else [each] for each in given)
        else:
            each = list(given) if isinstance(given, (list, tuple)) else [given]
            dicts = [one if isinstance(one, Mapping) else {"optimizer": one} for one in each]
            optimizers = [one.get("optimizer") for one in dicts]
            schedules = [one["lr_scheduler"] for one in dicts if one.get("lr_scheduler") is not None]
        if len(optimizers) != 1 or len(schedules) > 1 or not isinstance(optimizers[0], Optimizer):
            kinds = ", ".join(type(one).__name__ for one in (*optimizers, *schedules))
            raise RecipeError(
                f"configure_optimizers gave {len(optimizers)} optimizers and {len(schedules)} schedulers ({kinds}); a "
                "recipe has one optimizer of torch's, and one scheduler or none"
            )
        if not schedules:
            return Configured(optimizers[0])
        config = schedules[0] if isinstance(schedules[0], Mapping) else {"scheduler": schedules[0]}
        interval, scheduler = config.get("interval", "epoch"), config["scheduler"]
        if config.get("reduce_on_plateau") or type(scheduler).__name__ == "ReduceLROnPlateau":
            raise RecipeError("configure_optimizers: ReduceLROnPlateau watches a metric, and a recipe has none")
        if interval not in ("epoch", "step"):
            raise RecipeError(f"configure_optimizers: a scheduler's interval is 'epoch' or 'step', got {interval!r}")

        def every(world_size: int) -> int:
            steps = int(config.get("frequency", 1))
            if interval == "step":
                return steps
            if not isinstance(batches, _Numbered):
                raise RecipeError(
                    "from_lightning(batches=...) does not say how long an epoch is, and the schedule steps once per "
                    'epoch; give it {"interval": "step", "frequency": ...}'
                )
            return steps * batches.steps(world_size)

        return Configured(optimizers[0], scheduler, every)

    def loss(self, model: Callable[..., Any], batch: Any) -> Tensor:
        """Return what ``training_step`` returns, or its ``"loss"``."""
        wrapped: Any = model
        module: Any = next(part for part in wrapped.modules() if _lightnings(part) is not None)
        given, number = batch
        given = module.on_after_batch_transfer(module.on_before_batch_transfer(given, 0), 0)
        found = _through_forward(wrapped, module, given, number)
        loss: Tensor = found["loss"] if isinstance(found, Mapping) else found
        return loss


def _through_forward(wrapped: Any, module: Any, *args: Any) -> Any:
    """Run ``module.training_step(*args)`` as the forward of what wraps the module, which gathers weights there."""
    own = vars(module).get("forward")

    def restore() -> None:
        if own is None:
            vars(module).pop("forward", None)
        else:
            module.forward = own

    def step(*given: Any, **named: Any) -> Any:
        restore()  # the step may call the module itself
        return module.training_step(*given, **named)

    module.forward = step
    try:
        return wrapped(*args)
    finally:
        restore()


def _log_nothing(*args: Any, **kwargs: Any) -> None: ...


def _lightnings(module: Any) -> Any:
    """Return Lightning's own class among a module's bases, under either of its packages' names; None if none is."""
    for base in type(module).__mro__:
        if base.__name__ == "LightningModule" and base.__module__.split(".")[0] in ("lightning", "pytorch_lightning"):
            return base
    return None


def _check(module: Any, without: tuple[str, ...]) -> None:
    base = _lightnings(module)
    if base is None:
        raise RecipeError(f"from_lightning: expected a LightningModule or a function that makes one, got {module!r}")
    if not module.automatic_optimization:
        raise RecipeError(
            f"{type(module).__name__} takes its steps itself (automatic_optimization = False), and a recipe's steps "
            "are taken for it; write a Recipe with the loss alone, or compare two trainings with fsshard.parity.record"
        )
    hooks = HOOKS.split()
    unknown = [name for name in without if name not in hooks]
    if unknown:
        raise RecipeError(f"without={unknown!r}: expected hooks among {', '.join(hooks)}")
    for name in hooks:
        if name not in without and getattr(type(module), name) is not getattr(base, name):
            raise RecipeError(
                f"{type(module).__name__}.{name} is not called in a recipe; if the training is the same without it, "
                f"pass without=({name!r},), else write a Recipe"
            )


@dataclass(frozen=True)
class _Numbered:
    """Batches with their numbers in an epoch, which ``training_step`` is told."""

    sampled: SampledBatches
    accumulate: int
    datamodule: Any  # whose hooks around the transfer to a device are called; None has none

    def steps(self, world_size: int) -> int:
        """Return the steps of an epoch."""
        return self.sampled.steps(world_size, self.accumulate, "accumulate")

    def __call__(self, rank: int, world_size: int, number: int) -> tuple[Any, int]:
        self.steps(world_size)
        batch = self.sampled(rank, world_size, number)
        if self.datamodule is not None:
            batch = self.datamodule.on_before_batch_transfer(batch, 0)
            batch = self.datamodule.on_after_batch_transfer(batch, 0)
        return batch, self.sampled.place(rank, world_size, number)[1]


@dataclass(frozen=True)
class _Order:
    """Samples as Lightning's Trainer does: by a ``DistributedSampler``, which shuffles where the loader does."""

    dataset: Any
    shuffle: bool
    batch_size: int
    drop_last: bool
    seed: int = field(default_factory=lambda: int(os.environ.get("PL_GLOBAL_SEED", "0")))

    def __call__(self, rank: int, world_size: int, epoch: int) -> list[list[int]]:
        sampler: DistributedSampler[Any] = DistributedSampler(
            self.dataset, num_replicas=world_size, rank=rank, shuffle=self.shuffle, seed=self.seed
        )
        sampler.set_epoch(epoch)
        return list(BatchSampler(sampler, self.batch_size, self.drop_last))


def _loader(datamodule: Any, build: Callable[[], nn.Module]) -> Any:
    if isinstance(datamodule, DataLoader):
        return datamodule
    source: Any = datamodule
    if source is None:
        with kept_random_numbers():
            source = build()
    source.prepare_data()
    if datamodule is not None:
        source.setup("fit")
    return source.train_dataloader()


def _sampled(loader: Any, seed: int) -> SampledBatches:
    """Return a loader's batches by their numbers, or raise RecipeError if only itself can tell its samples."""
    advice = "; pass batches=, a function (rank, world_size, number) -> (batch, number in its epoch)"
    if not isinstance(loader, DataLoader):
        raise RecipeError(f"train_dataloader() gave {type(loader).__name__}, and a recipe takes a DataLoader{advice}")
    batches: Any = loader.batch_sampler
    if isinstance(loader.dataset, IterableDataset) or type(batches) is not BatchSampler:
        raise RecipeError(f"train_dataloader(): the samples of every rank cannot be told by index{advice}")
    shuffle = type(loader.sampler) is RandomSampler
    if not shuffle and type(loader.sampler) is not SequentialSampler:
        raise RecipeError(f"train_dataloader(): sampler {type(loader.sampler).__name__} cannot be divided{advice}")
    order = _Order(loader.dataset, shuffle, batches.batch_size, batches.drop_last)
    return SampledBatches(loader.dataset, loader.collate_fn, order, seed)
