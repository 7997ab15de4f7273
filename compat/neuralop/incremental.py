"""neuralop's trainer with modes that grow, for models under :func:`fsshard.wrap`."""

from __future__ import annotations

from typing import Any

import torch
from neuralop.models import FNO
from neuralop.training.incremental import IncrementalFNOTrainer as Parent

from fsshard.errors import ConfigurationError, ModelError

from .trainer import Trainer

__all__ = ["IncrementalFNOTrainer"]


class IncrementalFNOTrainer(Trainer):
    """``neuralop.training.incremental.IncrementalFNOTrainer`` for a model that :func:`fsshard.wrap` returned.

    The weights are there for all modes from the start (``max_n_modes``), and an engine divides them once; that some are
    not used yet changes nothing for it. Every rank counts alike: the loss is that of the global batches, and the
    weights are looked at whole.

    Args:
        incremental_loss_gap: one mode more when the loss changes by less than ``incremental_loss_eps``.
        incremental_grad: one mode more when the modes explain too little, by neuralop's rule (2.0 sums weights, not
            gradients, and looks at them after ``incremental_grad_max_iter`` epochs).
        incremental_grad_eps: as in neuralop, and so are the following.
        incremental_buffer: see there.
        incremental_grad_max_iter: see there.
        incremental_loss_eps: see there.
        **options: as for :class:`Trainer`.

    Raises:
        ModelError: the wrapped model is no FNO.
        ConfigurationError: not exactly one of the two rules is asked for.
    """

    _loss_gap, _grad_explained = Parent.loss_gap, Parent.grad_explained

    def __init__(
        self,
        *,
        incremental_loss_gap: bool = False,
        incremental_grad: bool = False,
        incremental_grad_eps: float = 0.001,
        incremental_buffer: int = 5,
        incremental_grad_max_iter: int = 10,
        incremental_loss_eps: float = 0.001,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if not isinstance(self.model.module, FNO):
            raise ModelError(
                f"expected a wrapped FNO or TFNO, whose modes can grow; got {type(self.model.module).__name__}"
            )
        if incremental_loss_gap is incremental_grad:
            raise ConfigurationError(
                f"incremental_loss_gap={incremental_loss_gap}, incremental_grad={incremental_grad}: choose one of them"
            )
        self.incremental_loss_gap, self.incremental_grad = incremental_loss_gap, incremental_grad
        self.incremental_grad_eps, self.incremental_buffer = incremental_grad_eps, incremental_buffer
        self.incremental_grad_max_iter, self.incremental_loss_eps = incremental_grad_max_iter, incremental_loss_eps
        self.loss_list: list[float] = []

    def train(self, *args: Any, resume_from_dir: Any = None, **options: Any) -> dict[str, Any]:
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
