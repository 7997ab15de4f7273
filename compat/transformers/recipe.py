"""A Hugging Face model, its data and TrainingArguments as a recipe for ``fsshard parity``."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
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
from fsshard.recipes.recipe import Recipe, join_batches

from ..recipes import Configured, SampledBatches, optimizer_fields

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
    training = _Training(model, dataset, collator or transformers.default_data_collator, args)
    found: dict[str, Any] = {
        "accumulate": args.gradient_accumulation_steps,
        "clip": args.max_grad_norm or None,
        "seed": args.seed,
        "join": _joined,
        "name": training.name,
    }
    if "optimizer" not in options:
        found |= optimizer_fields(training.build, training.configure)
    return Recipe(build=training.build, batches=training.batches, loss=training.loss, **{**found, **options})


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


class _Training:
    """The functions of a recipe that do what Hugging Face's Trainer does."""

    def __init__(self, model: Any, dataset: Any, collator: Any, args: transformers.TrainingArguments) -> None:
        self.model, self.dataset, self.collator, self.args = model, dataset, collator, args
        self.sampled = SampledBatches(dataset, self._collate, self._order, args.seed)
        with kept_random_numbers():
            found: Any = self.build()
        self.name = type(found).__name__
        parameters = inspect.signature(found.forward).parameters
        named = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
        self.takes_count = bool(getattr(found, "accepts_loss_kwargs", named))  # the loss is divided by what it is told
        config = getattr(found, "config", None)
        causal = LOSS_MAPPING.get(getattr(found, "loss_type", None)) is ForCausalLMLoss
        self.counts_from = 1 if causal and not getattr(config, "is_encoder_decoder", False) else 0  # of the labels
        several = getattr(config, "problem_type", None) == "multi_label_classification"
        self.smoothed = bool(args.label_smoothing_factor) and not several
        self.shifts = self.name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()  # smoothing has to shift labels
        find: Any = find_labels
        self.columns = (*parameters, "label", "label_ids", *(args.label_names or find(type(found))))

    def build(self) -> nn.Module:
        """Make a fresh model."""
        found = copy.deepcopy(self.model) if isinstance(self.model, nn.Module) else self.model()
        if not isinstance(found, nn.Module):
            raise RecipeError(f"from_transformers: expected a model or a function that makes one, got {found!r}")
        return found.train()

    # ---------------------------------------------------------------------------------------- optimizer

    def configure(self, model: nn.Module, world_size: int) -> Configured:
        """Make optimizer and schedule as ``Trainer.create_optimizer`` and ``create_scheduler`` do."""
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
        steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * self.steps(world_size))
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
        return Configured(optimizer, made)

    # ---------------------------------------------------------------------------------------- samples

    def _order(self, rank: int, world_size: int, epoch: int) -> list[list[int]]:
        """Return the batches that accelerate gives a rank of the Trainer's loader: in turn, shuffled by the seed."""
        args = self.args
        sampler: Any = SequentialSampler(self.dataset)
        if args.train_sampling_strategy == "random":
            seed = args.seed if args.data_seed is None else args.data_seed
            sampler = SeedableRandomSampler(self.dataset, data_seed=seed)
            sampler.set_epoch(epoch)
        batches: Any = BatchSampler(sampler, args.per_device_train_batch_size, args.dataloader_drop_last)
        if world_size > 1:
            batches = BatchSamplerShard(batches, num_processes=world_size, process_index=rank)
        return list(batches)

    def _collate(self, samples: list[Any]) -> Any:
        """Collate samples, without what the model's forward does not take."""
        if self.args.remove_unused_columns:
            samples = [
                {key: value for key, value in each.items() if key in self.columns}
                if isinstance(each, Mapping)
                else each
                for each in samples
            ]
        return self.collator(samples)

    def steps(self, world_size: int) -> int:
        """Return the number of steps in an epoch."""
        return self.sampled.steps(world_size, self.args.gradient_accumulation_steps, "gradient_accumulation_steps")

    def batches(self, rank: int, world_size: int, number: int) -> tuple[Any, Tensor | None, int]:
        """Return ``(arguments of the model, number of labels or None, ranks that it is counted over)``."""
        self.steps(world_size)
        inputs = self.sampled(rank, world_size, number)
        inputs = {**inputs} if isinstance(inputs, Mapping) else inputs
        if not self.takes_count or "labels" not in inputs:
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
        labels: Tensor = batch["shift_labels"] if "shift_labels" in batch else batch["labels"][..., self.counts_from :]
        return labels.ne(-100).sum()

    # ---------------------------------------------------------------------------------------- loss

    def loss(self, model: Callable[..., Any], batch: Any) -> Tensor:
        """Compute the loss as ``Trainer.compute_loss`` does."""
        given, count, ranks = batch
        inputs = dict(given)
        smoothed = self.smoothed and "labels" in inputs
        labels = inputs.pop("labels") if smoothed else None
        if count is not None:
            inputs["num_items_in_batch"] = count
        outputs = model(**inputs)
        if smoothed:
            smoother: Any = LabelSmoother(epsilon=self.args.label_smoothing_factor)
            loss = smoother(outputs, labels, shift_labels=self.shifts, num_items_in_batch=count)
        elif isinstance(outputs, Mapping) and "loss" not in outputs:
            raise RecipeError(
                f"{self.name} returned no loss but {', '.join(outputs)}; batches need labels, or write a Recipe"
            )
        else:
            loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs[0]
        # A recipe divides by the number of accumulated batches, which the count is over already
        found: Tensor = loss if count is None else loss * ranks * self.args.gradient_accumulation_steps
        return found


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
