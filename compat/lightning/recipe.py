"""A LightningModule and its data as a recipe for ``fsshard parity``."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lightning.pytorch.core.optimizer import _configure_optimizers, _configure_schedulers_automatic_opt
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from fsshard.errors import RecipeError
from fsshard.parity.one_process import kept_random_numbers
from fsshard.recipes.recipe import Recipe

from ..recipes import Configured, SampledBatches, optimizer_fields

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
            f"from_lightning({taken[0]}=...): the LightningModule defines it; write a Recipe to use another"
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
        optimizers, schedules, monitor = _configure_optimizers(module.configure_optimizers())
        configs: list[Any] = _configure_schedulers_automatic_opt(schedules, monitor)
        if len(optimizers) != 1 or len(configs) > 1 or not isinstance(optimizers[0], Optimizer):
            kinds = ", ".join(type(one).__name__ for one in (*optimizers, *(config.scheduler for config in configs)))
            raise RecipeError(
                f"configure_optimizers gave {len(optimizers)} optimizers and {len(configs)} schedulers ({kinds}); a "
                "recipe has one optimizer of torch's, and one scheduler or none"
            )
        if not configs or configs[0].scheduler is None:
            return Configured(optimizers[0])
        (config,) = configs
        if config.reduce_on_plateau:
            raise RecipeError("configure_optimizers: ReduceLROnPlateau watches a metric, and a recipe has none")

        def every(world_size: int) -> int:
            if config.interval == "step":
                return int(config.frequency)
            if not isinstance(batches, _Numbered):
                raise RecipeError(
                    "from_lightning(batches=...) does not say how long an epoch is, and the schedule steps once per "
                    'epoch; give it {"interval": "step", "frequency": ...}'
                )
            return int(config.frequency) * batches.steps(world_size)

        return Configured(optimizers[0], config.scheduler, every)

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
            f"{type(module).__name__} takes its own steps (automatic_optimization = False), and a comparison takes a "
            "recipe's steps; write a Recipe with the loss alone, or compare two trainings with fsshard.parity.record"
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


def _order(
    dataset: Any, shuffle: bool, batch_size: int, drop_last: bool, seed: int, rank: int, world_size: int, epoch: int
) -> list[list[int]]:
    """Return a rank's batches as Lightning's Trainer does, by a ``DistributedSampler``."""
    options: dict[str, Any] = {"num_replicas": world_size, "rank": rank, "shuffle": shuffle, "seed": seed}
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, **options)
    sampler.set_epoch(epoch)
    return list(BatchSampler(sampler, batch_size, drop_last))


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
        raise RecipeError(f"train_dataloader(): the samples of each rank cannot be selected by index{advice}")
    shuffle = type(loader.sampler) is RandomSampler
    if not shuffle and type(loader.sampler) is not SequentialSampler:
        raise RecipeError(f"train_dataloader(): sampler {type(loader.sampler).__name__} cannot be divided{advice}")
    shuffled_by = int(os.environ.get("PL_GLOBAL_SEED", "0"))
    order = functools.partial(_order, loader.dataset, shuffle, batches.batch_size, batches.drop_last, shuffled_by)
    return SampledBatches(loader.dataset, loader.collate_fn, order, seed)
