"""neuralop's Trainers, correct on several ranks and under every backend; the second one has modes that grow."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import neuralop
import torch
import torch.distributed as dist
from neuralop.losses import LpLoss
from neuralop.models import FNO
from neuralop.training.incremental import IncrementalFNOTrainer as Parent
from torch import Tensor

from fsshard.comm.agreement import per_rank
from fsshard.errors import ConfigurationError, ModelError, OptimizerError, RankMismatch
from fsshard.model.checks import agree
from fsshard.parallel.domain.sharding import domain_of
from fsshard.sharded.module import ShardedModule
from fsshard.sharded.optimizer import ShardedOptimizer

from .batches import EvaluationLoader, Reduction, loss_reduction, set_epoch, undivided
from .training_state import load_training_state, save_training_state

# Errors, times and learning rates, by name.
Metrics = dict[str, Any]

log = logging.getLogger("fsshard")


class Trainer(neuralop.Trainer):
    """``neuralop.Trainer`` for a model that :func:`fsshard.wrap` returned.

    Everything that the parent takes and returns, and these differences, all against neuraloperator 2.0.0:

    * N ranks that share a global batch make the updates that one process makes with all of it. Ranks average their
      gradients, so a loss that sums over the batch (neuralop's default) counts ``world_size`` times on each rank;
      the parent would train with ``1 / world_size`` of the gradient. One that averages counts by the rank's share of
      the samples. A regularizer is taken as it is.
    * ``train_err``, ``avg_loss`` and the evaluation metrics are those of the global batch, the same on every rank
      (so that ``ReduceLROnPlateau`` and ``save_best`` decide alike). The loaders may have a ``DistributedSampler``;
      a test loader may also give every rank all samples.
    * Samplers get the epoch.
    * Checkpoints are whole, under the parent's file names, and readable without fsshard:
      ``TFNO.from_checkpoint(save_dir, "model")``. ``resume_from_dir`` takes them under any backend and number of
      ranks, takes those of the parent as well, and continues with the epoch after the saved one (the parent repeats
      it). ``save_best`` remembers the best value over a resume.
    * Only rank 0 prints and logs.

    A data processor with ``MultigridPatching2D`` works where each rank makes all patches of its samples.

    Args:
        model: what :func:`fsshard.wrap` returned.
        n_epochs: number of epochs in all, those before a resume included.
        device: where data goes; None is the model's device.
        mixed_precision: as in the parent: forward and training loss under ``torch.autocast`` with its default dtype
            (bfloat16 on the CPU; float16 on CUDA, where the parent scales no gradients). Parameters, gradients and
            what ranks exchange stay float32.
        use_distributed: ignored; the model is distributed as it was wrapped (the parent would wrap it in DDP again).
        global_loss_reduction: ``"sum"`` or ``"mean"``: what the training loss does over the batch. None reads it from
            the loss; one that does not say raises on several ranks.
        verbose: print on rank 0.
        wandb_log: log to wandb on rank 0.
        **options: the parent's other arguments: ``data_processor``, ``eval_interval``, ``log_output``.

    Raises:
        ModelError: the model is not wrapped.
        ConfigurationError: ``global_loss_reduction`` is neither, or patches are divided over ranks.
    """

    def __init__(
        self,
        *,
        model: ShardedModule,
        n_epochs: int,
        device: torch.device | str | None = None,
        mixed_precision: bool = False,
        use_distributed: bool = False,
        global_loss_reduction: Reduction | None = None,
        verbose: bool = False,
        wandb_log: bool = False,
        **options: Any,
    ) -> None:
        if not isinstance(model, ShardedModule):
            raise ModelError(
                f"expected a model that fsshard.wrap returned, got {type(model).__name__}; wrap it first: "
                "model = fsshard.wrap(model, backend=...)"
            )
        if domain_of(model.modules()) is not None:
            raise ModelError(
                "the model is split by shard_domain, and the Trainer gives whole fields to models and losses; write "
                "the loop (docs/domain.md), or train the whole model"
            )
        if global_loss_reduction not in (None, "sum", "mean"):
            raise ConfigurationError(f"global_loss_reduction: 'sum', 'mean' or None, got {global_loss_reduction!r}")
        patcher = getattr(options.get("data_processor"), "patcher", None)
        if getattr(patcher, "use_distributed", False):
            raise ConfigurationError(
                "MultigridPatching2D(use_distributed=True) gives ranks different patches of a sample, and corrects "
                "DDP's average with hooks on the bare model's parameters; pass use_distributed=False, where each "
                "rank has all patches of its own samples, or split fields by shard_domain (docs/domain.md)"
            )
        settings = model.backend.settings
        first = settings.rank == 0
        super().__init__(
            model=model,
            n_epochs=n_epochs,
            device=settings.device if device is None else device,
            mixed_precision=mixed_precision,
            # With it the parent calls DDP(model, device_ids=[rank]), a ValueError on the CPU.
            use_distributed=False,
            verbose=verbose and first,
            wandb_log=wandb_log and first,
            **options,
        )
        self.global_loss_reduction = global_loss_reduction
        # A number; within a training epoch it is one on the device.
        self.n_samples: Any = 0
        self._group = settings.group
        self._rank = settings.rank
        self._world_size = settings.world_size
        self._best = float("inf")
        self._eval_metrics: Metrics = {}
        self._eval_loader: EvaluationLoader | None = None

    # ------------------------------------------------------------------------------------------ training

    def train(
        self,
        train_loader: Any,
        test_loaders: Mapping[Any, Any],
        optimizer: ShardedOptimizer,
        scheduler: Any,
        regularizer: Any = None,
        training_loss: Callable[..., Any] | None = None,
        *args: Any,
        **options: Any,
    ) -> Metrics:
        """Train; arguments and result are the parent's. Collective.

        Raises:
            OptimizerError: the optimizer, or the one that the scheduler drives, is not this model's.
            ConfigurationError: the loss does not say how it reduces, or there is no epoch left after a resume.
            RankMismatch: the loaders have other lengths on other ranks.
        """
        loss = LpLoss(d=2) if training_loss is None else training_loss
        lengths = agree(self._group, lambda: self._check(train_loader, test_loaders, optimizer, scheduler, loss))
        self._check_lengths(lengths)
        if self._world_size > 1 and undivided(train_loader) and self._rank == 0:
            log.warning("the train loader has no DistributedSampler: every rank may train on the same samples")
        self._best = float("inf")
        metrics: Metrics = super().train(
            train_loader, test_loaders, optimizer, scheduler, regularizer, loss, *args, **options
        )
        return metrics

    def _check(
        self,
        train_loader: Any,
        tests: Mapping[Any, Any],
        optimizer: Any,
        scheduler: Any,
        loss: Any,
    ) -> Any:
        """Raise what can be known to be wrong before the first step. Local; return the loaders' lengths."""
        if not isinstance(optimizer, ShardedOptimizer) or optimizer.model is not self.model:
            raise OptimizerError(
                f"expected this model's optimizer, got {type(optimizer).__name__}; build it with "
                "fsshard.build_optimizer(model, torch.optim.AdamW, lr=...)"
            )
        if getattr(scheduler, "optimizer", optimizer) is not optimizer:
            raise OptimizerError("the scheduler drives another optimizer; make it from the one that is handed to train")
        if self._world_size > 1 and self._reduction(loss) is None:
            raise ConfigurationError(
                f"{type(loss).__name__} does not say whether it sums or averages over the batch, and ranks average "
                "gradients; pass global_loss_reduction='sum' or 'mean' to Trainer"
            )
        return {"train_loader": len(train_loader), **{f"test_loaders[{k!r}]": len(v) for k, v in tests.items()}}

    def _check_lengths(self, lengths: dict[str, int]) -> None:
        """Raise if the loaders have other lengths on other ranks."""
        # Forward and backward are collective: a rank with a batch more would wait for the others forever.
        if self._world_size == 1:
            return
        tables = per_rank(self._group, lengths)  # type: ignore[arg-type]
        for rank, table in enumerate(tables):
            if table != tables[0]:
                raise RankMismatch(
                    f"numbers of batches differ: {tables[0]} on rank 0, {table} on rank {rank}; give the loaders a "
                    "DistributedSampler, or every rank the same samples"
                )

    def _reduction(self, loss: Any) -> Reduction | None:
        return self.global_loss_reduction or loss_reduction(loss)

    def train_one_epoch(self, epoch: int, train_loader: Any, training_loss: Any) -> tuple[Any, ...]:
        """Train the parent's epoch; ``train_err`` and ``avg_loss`` are those of the global batches."""
        set_epoch(train_loader, epoch)
        train_err, avg_loss, avg_lasso_loss, seconds = super().train_one_epoch(epoch, train_loader, training_loss)
        self.n_samples = int(self.n_samples)
        lasso = avg_lasso_loss if avg_lasso_loss is None else float(avg_lasso_loss)
        return train_err, float(avg_loss), lasso, seconds

    def train_one_batch(self, idx: int, sample: Metrics, training_loss: Any) -> Tensor:
        """Return the loss to call backward on, whose value is that of the global batch. Collective."""
        counted = self.n_samples
        self.n_samples = 0

        def weighed(*args: Any, **kwargs: Any) -> Any:
            return training_loss(*args, **kwargs) * self._weight(self._reduction(training_loss))

        loss: Tensor = super().train_one_batch(idx, sample, weighed)
        # One exchange per batch and no wait for the device: the parent adds these up, shows them to the scheduler
        # and prints them within its epoch, so they must be right by then.
        local = torch.stack([loss.detach().double(), loss.new_tensor(self.n_samples, dtype=torch.float64)])
        total = self._sum(local)
        self.n_samples = counted + total[1]
        # Backward sees this rank's loss, and whoever reads the number that of the global batch.
        return loss - loss.detach() + (total[0] / self._world_size).to(loss.dtype).reshape(loss.shape)

    def _weight(self, reduction: Reduction | None) -> Any:
        """Return this rank's weight, by which the average of the ranks' gradients is that of the global batch."""
        if self._world_size == 1:
            return 1
        if reduction == "sum":
            return self._world_size
        mine = torch.tensor(float(self.n_samples), device=self.model.backend.settings.device)
        return self._world_size * mine / self._sum(mine.clone())

    def _sum(self, values: Tensor) -> Tensor:
        """Sum over the ranks, in place."""
        if self._world_size > 1:
            dist.all_reduce(values, group=self._group)
        return values

    # ------------------------------------------------------------------------------------------ evaluation

    def evaluate_all(self, *args: Any, **kwargs: Any) -> Metrics:
        """Compute the parent's metrics of every test loader, over all ranks. Collective."""
        self._eval_metrics = super().evaluate_all(*args, **kwargs)
        return self._eval_metrics

    def evaluate(
        self,
        loss_dict: Mapping[str, Any],
        data_loader: Any,
        log_prefix: Any = "",
        *args: Any,
        **kwargs: Any,
    ) -> Metrics:
        """Compute the parent's metrics of one loader: sums of losses over all ranks' samples. Collective."""
        self._eval_loader = loader = EvaluationLoader(data_loader)
        try:
            errors: Metrics = super().evaluate(loss_dict, loader, log_prefix, *args, **kwargs)
        finally:
            self._eval_loader = None
        names = {f"{log_prefix}_{name}": loss for name, loss in loss_dict.items()}
        sums = [float(errors[key]) * self.n_samples if self.n_samples else 0.0 for key in names]
        device = self.model.backend.settings.device
        *totals, count = self._sum(torch.tensor([*sums, self.n_samples], dtype=torch.float64, device=device)).tolist()
        for (key, loss), total in zip(names.items(), totals, strict=True):
            # The parent adds up batch means as they are. One process would add as many as each rank, not as all do.
            averages = loader.divided and self._reduction(loss) == "mean"
            value = total / count / (self._world_size if averages else 1)
            errors[key] = errors[key].new_tensor(value) if isinstance(errors[key], Tensor) else value
        self.n_samples = int(count)
        return errors

    def eval_one_batch(self, *args: Any, **kwargs: Any) -> tuple[Metrics, Any]:
        """Evaluate a batch; one of nothing but a repeated sample runs and does not count."""
        return self._counting(super().eval_one_batch, *args, **kwargs)

    def eval_one_batch_autoreg(self, *args: Any, **kwargs: Any) -> tuple[Metrics, Any]:
        """Evaluate as :meth:`eval_one_batch`."""
        return self._counting(super().eval_one_batch_autoreg, *args, **kwargs)

    def _counting(self, evaluate: Any, *args: Any, **kwargs: Any) -> tuple[Metrics, Any]:
        counted = self.n_samples
        losses, output = evaluate(*args, **kwargs)
        if self._eval_loader is not None and self._eval_loader.void:
            self.n_samples = counted
            losses = {name: torch.zeros((), device=self.model.backend.settings.device) for name in losses}
        return losses, output

    # ------------------------------------------------------------------------------------------ checkpoints

    def checkpoint(self, save_dir: str | Path) -> None:
        """Save the training state under the parent's file names. Collective.

        With ``save_best`` nothing is written unless the metric is the best so far, over resumes too.
        """
        manifest = {"epoch": self.epoch}
        if self.save_best is not None and self._eval_metrics:
            value = float(self._eval_metrics[self.save_best])
            # The parent forgets it at a resume, and overwrites the best model with a worse one.
            if not value < self._best:
                return
            self._best = value
            manifest |= {"best_metric": self.save_best, "best_value": value}
        save_training_state(
            save_dir,
            "model" if self.save_best is None else "best_model",
            self.model,
            manifest,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            regularizer=self.regularizer,
        )
        if self.verbose:
            print(f"[Rank 0]: saved training state to {save_dir}")

    def resume_state_from_dir(self, save_dir: str | Path) -> None:
        """Load a training state, of any backend and number of ranks; continue with the next epoch. Collective."""
        name = agree(self._group, lambda: _saved_name(Path(save_dir)))
        manifest = load_training_state(
            save_dir,
            name,
            self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            regularizer=self.regularizer,
        )
        if manifest.get("best_metric", "") == self.save_best:
            self._best = manifest["best_value"]
        if manifest.get("epoch") is None:
            return
        # It is saved at the end of its epoch, which the parent trains again.
        self.start_epoch = manifest["epoch"] + 1
        if self.start_epoch >= self.n_epochs:
            raise ConfigurationError(
                f"nothing left to train: {save_dir} holds the state after {self.start_epoch} epochs, and "
                f"n_epochs={self.n_epochs}"
            )
        if self.verbose:
            print(f"Trainer resuming from epoch {self.start_epoch}")


def _saved_name(folder: Path) -> str:
    for name in ("best_model", "model"):
        if (folder / f"{name}_state_dict.pt").exists():
            return name
    raise ConfigurationError(
        f"resume_from_dir={str(folder)!r} holds neither best_model_state_dict.pt nor model_state_dict.pt"
    )


class IncrementalFNOTrainer(Trainer):
    """``neuralop.training.incremental.IncrementalFNOTrainer`` for a model that :func:`fsshard.wrap` returned.

    The weights are there for all modes from the start (``max_n_modes``), and an engine divides them once; that some are
    not used yet changes nothing for it. Every rank counts alike: the loss is that of the global batches, and the
    weights are looked at whole.

    Args:
        incremental_loss_gap: one mode more when the loss changes by less than ``incremental_loss_eps``.
        incremental_grad: one mode more when the modes explain too little, by neuralop's rule (2.0 sums weights, not
            gradients, and looks at them after ``incremental_grad_max_iter`` epochs).
        **options: ``incremental_grad_eps``, ``incremental_buffer``, ``incremental_grad_max_iter`` and
            ``incremental_loss_eps`` as in neuralop, all others as for :class:`Trainer`.

    Raises:
        ModelError: the wrapped model is not an FNO.
        ConfigurationError: not exactly one of the two rules is asked for.
    """

    _loss_gap = Parent.loss_gap
    _grad_explained = Parent.grad_explained

    def __init__(
        self,
        *,
        incremental_loss_gap: bool = False,
        incremental_grad: bool = False,
        **options: Any,
    ) -> None:
        defaults = {name: each.default for name, each in inspect.signature(Parent).parameters.items()}
        rules = {name: options.pop(name, value) for name, value in defaults.items() if name.startswith("incremental_")}
        super().__init__(**options)
        if not isinstance(self.model.module, FNO):
            raise ModelError(
                f"expected a wrapped FNO or TFNO, whose modes can grow; got {type(self.model.module).__name__}"
            )
        if incremental_loss_gap is incremental_grad:
            raise ConfigurationError(
                f"incremental_loss_gap={incremental_loss_gap}, incremental_grad={incremental_grad}: choose one of them"
            )
        self.__dict__.update(
            rules | {"incremental_loss_gap": incremental_loss_gap, "incremental_grad": incremental_grad}
        )
        self.loss_list: list[float] = []

    def train(self, *args: Any, resume_from_dir: Any = None, **options: Any) -> Metrics:
        """Train as the parent does. Collective.

        Raises:
            ConfigurationError: ``resume_from_dir``: neuralop's checkpoint has no number of modes and no earlier losses.
        """
        if resume_from_dir is not None:
            raise ConfigurationError(
                f"resume_from_dir={str(resume_from_dir)!r}: neuralop's files say neither how many modes were reached "
                "nor the losses so far; load the weights, set model.fno_blocks.convs[0].n_modes and train without it"
            )
        return super().train(*args, **options)

    def train_one_epoch(self, epoch: int, train_loader: Any, training_loss: Any) -> tuple[Any, ...]:
        """Train an epoch, and then perhaps add one mode. Collective."""
        if self.data_processor:
            self.data_processor.epoch = epoch
        found = super().train_one_epoch(epoch, train_loader, training_loss)
        if self.incremental_loss_gap:
            self._loss_gap(found[1])
            return found
        with self.model.full_parameters(), torch.no_grad():
            self._grad_explained()
        return found
