"""A Hugging Face model, its data and TrainingArguments as a recipe for ``fsshard parity``."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from accelerate.data_loader import BatchSamplerShard, SeedableRandomSampler
from torch import Tensor, nn
from torch.utils.data import BatchSampler, IterableDataset, SequentialSampler
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_pt_utils import LabelSmoother
from transformers.utils.generic import find_labels

from fsshard.errors import RecipeError
from fsshard.parity.one_process import kept_random_numbers
from fsshard.parity.recipe import Configured, SampledBatches, optimizer_fields
from fsshard.recipes.recipe import Recipe, join_batches

__all__ = ["from_transformers"]

INSTEAD = {
    "activation_checkpointing": "pass activation_checkpointing=True to from_transformers",
    "bf16": 'pass precision="bf16" to from_transformers, which casts units where this is autocast',
    "deepspeed": "a recipe names no engine; leave it out",
    "fp16": 'pass precision="fp16" to from_transformers',
    "fsdp": "a recipe names no engine; leave it out",
    "neftune_noise_alpha": "a recipe has no such noise; leave it out",
    "parallelism_config": "a recipe names no engine; leave it out",
    "torch_compile": 'pass settings={"compile": True} to from_transformers',
}
"""TrainingArguments that would change the training, and what to do."""


def from_transformers(
    model: Any,
    dataset: Any,
    collator: Callable[[list[Any]], Any] | None = None,
    args: transformers.TrainingArguments | None = None,
    **options: Any,
) -> Recipe:
    """Make a recipe of the training that ``transformers.Trainer`` would do: ``from_transformers(model, data)``.

    Loss, label smoothing, the number of labels that it is divided by, optimizer and its two groups (weight decay),
    schedule, clipping, accumulation, and the samples of each rank are those of transformers 5.23's Trainer.

    Args:
        model: a model, of which every training gets a copy as it is now, or a function that makes one, under the
            recipe's seed.
        dataset: samples by index.
        collator: samples -> a dict of the model's arguments; None: ``transformers.default_data_collator``.
        args: TrainingArguments; None: their defaults.
        **options: further attributes of :class:`~fsshard.parity.Recipe`: ``precision``, ``settings``, ``join`` (where
            ranks pad to different lengths), ... ``optimizer`` with ``hyper`` in place of the one of ``args``.

    Raises:
        RecipeError: an argument that a recipe cannot honour, or a dataset without indices.
    """
    args = transformers.TrainingArguments() if args is None else args
    _check(args, dataset)
    training = _Training(model)
    with kept_random_numbers():
        facts = _Facts.of(training.build(), args)
    batches = _Batches(_sampled(dataset, collator, args, facts), args, facts)
    found: dict[str, Any] = {
        "accumulate": args.gradient_accumulation_steps,
        "clip": args.max_grad_norm or None,
        "seed": args.seed,
        "join": _joined,
        "name": facts.name,
    }
    if "optimizer" not in options:
        found |= optimizer_fields(training.build, _Configure(args, batches))
    return Recipe(build=training.build, batches=batches, loss=_Loss(args, facts), **{**found, **options})


def _check(args: transformers.TrainingArguments, dataset: Any) -> None:
    for name, advice in INSTEAD.items():
        value = getattr(args, name, None)
        if value:
            raise RecipeError(f"TrainingArguments({name}={value!r}): {advice}")
    if args.train_sampling_strategy not in ("random", "sequential"):
        raise RecipeError(
            f"TrainingArguments(train_sampling_strategy={args.train_sampling_strategy!r}): a recipe has 'random' and "
            "'sequential'"
        )
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise RecipeError(
            f"from_transformers: {type(dataset).__name__} has no samples by index, which ranks need to take theirs"
        )


@dataclass(frozen=True)
class _Facts:
    """Facts that Hugging Face's Trainer reads from a model's class.

    Attributes:
        name: of the class.
        takes_count: its loss is divided by a number of labels that it is told.
        shifted: labels count from the second one on.
        shifts: label smoothing has to shift them.
        columns: arguments of ``forward``, and labels.
        smoothed: label smoothing applies.
    """

    name: str
    takes_count: bool
    shifted: bool
    shifts: bool
    columns: tuple[str, ...]
    smoothed: bool

    @classmethod
    def of(cls, model: Any, args: transformers.TrainingArguments) -> _Facts:
        parameters = inspect.signature(model.forward).parameters
        named = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
        config = getattr(model, "config", None)
        causal = LOSS_MAPPING.get(getattr(model, "loss_type", None)) is ForCausalLMLoss  # type: ignore[arg-type]
        several = getattr(config, "problem_type", None) == "multi_label_classification"
        find: Any = find_labels
        labels = args.label_names or find(type(model))
        return cls(
            name=type(model).__name__,
            takes_count=bool(getattr(model, "accepts_loss_kwargs", named)),
            shifted=causal and not getattr(config, "is_encoder_decoder", False),
            shifts=type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(),
            columns=(*parameters, "label", "label_ids", *labels),
            smoothed=bool(args.label_smoothing_factor) and not several,
        )


@dataclass(frozen=True)
class _Training:
    """Makes the model."""

    model: Any

    def build(self) -> nn.Module:
        """Make a fresh one."""
        found = copy.deepcopy(self.model) if isinstance(self.model, nn.Module) else self.model()
        if not isinstance(found, nn.Module):
            raise RecipeError(f"from_transformers: expected a model or a function that makes one, got {found!r}")
        return found.train()


@dataclass(frozen=True)
class _Configure:
    """Optimizer and schedule as ``Trainer.create_optimizer`` and ``create_scheduler`` make them."""

    args: transformers.TrainingArguments
    batches: _Batches

    def __call__(self, model: nn.Module, world_size: int) -> Configured:
        args: Any = self.args
        trainer: Any = transformers.Trainer
        decayed = set(trainer.get_decay_parameter_names(None, model))
        named = [(name, value) for name, value in model.named_parameters() if value.requires_grad]
        groups = [
            {"params": [value for name, value in named if name in decayed], "weight_decay": args.weight_decay},
            {"params": [value for name, value in named if name not in decayed], "weight_decay": 0.0},
        ]
        kind, hyper = trainer.get_optimizer_cls_and_kwargs(args, model)
        if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)) or {"params", "model"} & set(hyper):
            raise RecipeError(
                f"TrainingArguments(optim={args.optim!r}): pass optimizer= and hyper= to from_transformers"
            )
        optimizer = kind(groups, **hyper)
        return Configured(optimizer, self._scheduler(optimizer, world_size))

    def _scheduler(self, optimizer: torch.optim.Optimizer, world_size: int) -> Any:
        args: Any = self.args
        steps = (
            args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * self.batches.steps(world_size))
        )
        made = transformers.get_scheduler(
            args.lr_scheduler_type,
            optimizer=optimizer,
            num_warmup_steps=args.get_warmup_steps(steps),
            num_training_steps=steps,
            scheduler_specific_kwargs=args.lr_scheduler_kwargs,
        )
        if not isinstance(made, torch.optim.lr_scheduler.LRScheduler) or hasattr(made, "best"):
            raise RecipeError(
                f"TrainingArguments(lr_scheduler_type={args.lr_scheduler_type!r}) watches a metric; a recipe has none"
            )
        return made


# ------------------------------------------------------------------------------------------------ samples


@dataclass(frozen=True)
class _Order:
    """The order in which accelerate divides the Trainer's loader: batches in turn, shuffled by the seed."""

    dataset: Any
    args: transformers.TrainingArguments

    def __call__(self, rank: int, world_size: int, epoch: int) -> list[list[int]]:
        args = self.args
        sampler: Any = SequentialSampler(self.dataset)
        if args.train_sampling_strategy == "random":
            sampler = SeedableRandomSampler(
                self.dataset, data_seed=args.seed if args.data_seed is None else args.data_seed
            )
            sampler.set_epoch(epoch)
        batches: Any = BatchSampler(sampler, args.per_device_train_batch_size, args.dataloader_drop_last)
        if world_size > 1:
            batches = BatchSamplerShard(batches, num_processes=world_size, process_index=rank)
        return list(batches)


@dataclass(frozen=True)
class _Collate:
    """The collator, without what the model's forward does not take."""

    collator: Callable[[list[Any]], Any]
    columns: tuple[str, ...] | None

    def __call__(self, samples: list[Any]) -> Any:
        if self.columns is not None:
            known = self.columns
            samples = [
                {key: value for key, value in sample.items() if key in known} if isinstance(sample, Mapping) else sample
                for sample in samples
            ]
        return self.collator(samples)


def _sampled(dataset: Any, collator: Any, args: transformers.TrainingArguments, facts: _Facts) -> SampledBatches:
    columns = facts.columns if args.remove_unused_columns else None
    collate = _Collate(collator or transformers.default_data_collator, columns)
    return SampledBatches(dataset, collate, _Order(dataset, args), args.seed)


@dataclass(frozen=True)
class _Batches:
    """``(arguments of the model, number of labels or None, ranks that it is counted over)``."""

    sampled: SampledBatches
    args: transformers.TrainingArguments
    facts: _Facts

    def steps(self, world_size: int) -> int:
        """Return the number of steps in an epoch."""
        return self.sampled.steps(world_size, self.args.gradient_accumulation_steps, "gradient_accumulation_steps")

    def __call__(self, rank: int, world_size: int, number: int) -> tuple[Any, Tensor | None, int]:
        self.steps(world_size)
        inputs = self.sampled(rank, world_size, number)
        inputs = {**inputs} if isinstance(inputs, Mapping) else inputs
        if not self.facts.takes_count or "labels" not in inputs:
            return inputs, None, 1
        everywhere = self.args.average_tokens_across_devices
        accumulate = self.args.gradient_accumulation_steps
        first = number - number % accumulate
        counted = [
            self._labels(self.sampled(each, world_size, n))
            for each in (range(world_size) if everywhere else [rank])
            for n in range(first, first + accumulate)
        ]
        return inputs, torch.stack(counted).sum(), world_size if everywhere else 1

    def _labels(self, batch: Any) -> Tensor:
        """Count the labels of a batch."""
        labels: Tensor = batch["shift_labels"] if "shift_labels" in batch else batch["labels"]
        if self.facts.shifted and "shift_labels" not in batch:
            labels = labels[..., 1:]
        return labels.ne(-100).sum()


def _joined(batches: Sequence[Any]) -> tuple[Any, Tensor | None, int]:
    """Join the ranks' batches into one process's, whose loss is the mean of theirs."""
    inputs = join_batches([each[0] for each in batches])
    _, count, ranks = batches[0]
    if count is not None and ranks != len(batches):
        raise RecipeError(
            "average_tokens_across_devices=False: every rank divides by the number of its own labels, so there is no "
            "such loss on one process; compare with reference='ddp'"
        )
    return inputs, count, 1


# ------------------------------------------------------------------------------------------------ loss


@dataclass(frozen=True)
class _Loss:
    """``Trainer.compute_loss``."""

    args: transformers.TrainingArguments
    facts: _Facts

    def __call__(self, model: Callable[..., Any], batch: Any) -> Tensor:
        given, count, ranks = batch
        inputs = dict(given)
        smoothed = self.facts.smoothed and "labels" in inputs
        labels = inputs.pop("labels") if smoothed else None
        if count is not None:
            inputs["num_items_in_batch"] = count
        outputs = model(**inputs)
        loss: Tensor
        if smoothed:
            smoother: Any = LabelSmoother(epsilon=self.args.label_smoothing_factor)
            loss = smoother(outputs, labels, shift_labels=self.facts.shifts, num_items_in_batch=count)
        else:
            loss = self._models(outputs)
        # A recipe divides by the number of accumulated batches, which the count is over already
        return loss if count is None else loss * ranks * self.args.gradient_accumulation_steps

    def _models(self, outputs: Any) -> Any:
        if isinstance(outputs, Mapping) and "loss" not in outputs:
            raise RecipeError(
                f"{self.facts.name} returned no loss but {', '.join(outputs)}; batches need labels, or write a Recipe"
            )
        return outputs["loss"] if isinstance(outputs, Mapping) else outputs[0]
