"""Hugging Face's Trainer with ``fsshard.wrap`` where it would hand its model to accelerate."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

import fsshard as library
from fsshard.comm.agreement import agree
from fsshard.errors import ConfigurationError
from fsshard.sharded.module import ShardedModule
from fsshard.sharded.unwrapping import ModelBeforeWrap

from ..accelerate.arguments import check_samples, wrap_settings
from ..accelerate.preparing import PreparedOptimizer
from ..trainers import Arguments, State, WrappedModel, name_calls, scaler_like, wrapped_model_of
from .arguments import check_arguments, check_launcher, check_library
from .checkpoints import PARTS, clear, load_optimizer, parts_of, save_optimizer

SAVE = "on every rank call trainer.save_model(folder)"
LOAD = "load it before train(), or call train(resume_from_checkpoint=folder)"


class Trainer(transformers.Trainer):
    """``transformers.Trainer`` under any engine, on CPU and GPU.

    Before a subclass of one's own it is a mixin: ``class Mine(fsshard.compat.transformers.Trainer, TheirTrainer)``.
    ``trainer.model`` is the user's model, whose weights an engine has divided once :meth:`train` has begun, and
    ``trainer.model_wrapped`` what ``fsshard.wrap`` returned. The optimizer is made on the whole model, so
    ``create_optimizer`` and ``optimizers=`` see its own parameters.

    Args:
        model: as for the parent, and so are the following. One that another of these Trainers has trained comes back
            from its engine, whole on every rank, which is collective; that Trainer cannot train any more.
        args: see there.
        *rest: see there.
        fsshard: arguments of :func:`fsshard.wrap`: ``{"backend": "fsdp2", ...}``. ``find_unused_parameters`` is as
            Hugging Face's DDP has it where it is not named.
        save_distributed_checkpoint: each rank writes its own parts of a checkpoint, into ``checkpoint-N/fsshard``, in
            place of one that writes them whole. Either kind is resumed from, whatever is said here.
        **arguments: see there.

    Raises:
        ConfigurationError: an argument that no engine can honour, before anything is changed.
    """

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        *rest: Any,
        fsshard: Arguments,
        save_distributed_checkpoint: bool = False,
        **arguments: Any,
    ) -> None:
        check_library()
        check_arguments(args, model, fsshard)
        wrapped_model = wrapped_model_of(model)
        if isinstance(wrapped_model, _ModelOfTrainer) and wrapped_model.wrapped.backend.settings.model_mesh is None:
            wrapped_model.come_back()
        self.divides_files = save_distributed_checkpoint
        self._settings = dict(fsshard)
        self._shows_whole = False
        self._numbers: int | None = None
        self._gave_away: Any = None  # a model, to another Trainer
        self._runs = False
        super().__init__(model, args, *rest, **arguments)
        # Hugging Face reads from the name of the model's class, which an engine may replace, that labels are shifted.
        if self.label_smoother is not None and type(self.model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
            this: Any = self
            own = self.label_smoother
            this.label_smoother = lambda output, labels, shift_labels=True, **more: own(output, labels, True, **more)

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator, which may not clip one rank's gradients, and which unwraps the user's model.

        Raises:
            ConfigurationError: ``accelerate launch`` was told to use another engine; or ranks share samples.
        """
        super().create_accelerator_and_postprocess()
        check_launcher(self)
        check_samples(self._settings, self.accelerator.num_processes)
        accelerator = self.accelerator
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            setattr(accelerator, name, functools.partial(self._refuse_to_clip, name, getattr(accelerator, name)))
        accelerator.unwrap_model = functools.partial(self._unwrap, accelerator.unwrap_model)

    def _refuse_to_clip(self, name: str, own: Any, *args: Any, **kwargs: Any) -> Any:
        if self._sharded is None:
            return own(*args, **kwargs)
        raise ConfigurationError(
            f"accelerator.{name} sees this rank's gradients only; call trainer.model_wrapped.clip_grad_norm_(max_norm)"
        )

    def _unwrap(self, own: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        if model is self._sharded is not None:
            return self.model
        return own(model, *args, **kwargs)

    # ------------------------------------------------------------------------------------------ wrapping

    @property
    def _sharded(self) -> ShardedModule | None:
        found = getattr(self, "model_wrapped", None)
        return found if isinstance(found, ShardedModule) else None

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        """Make the optimizer on the whole model, wrap both, make the schedule, and load what a checkpoint has of them.

        Raises:
            ConfigurationError: another Trainer has the model by now.
        """
        if self._gave_away is not None and self._gave_away is self.model:
            raise ConfigurationError(
                "train(): this Trainer's model has been given to another one, and its optimizer has ended with the "
                "engine; train with that one, or with a new Trainer and resume_from_checkpoint=..."
            )
        # An earlier train() has made it, for its number of steps.
        if self._created_lr_scheduler:
            self.lr_scheduler = None
            self._created_lr_scheduler = False
        if self._sharded is None:
            self._divide()
        self.create_scheduler(num_training_steps=max_steps)
        if resume_from_checkpoint is not None:
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
            self._load_scaler(resume_from_checkpoint)
        # Accelerate looks there whether a step was skipped.
        if isinstance(self.optimizer, PreparedOptimizer):
            self.optimizer._is_accelerate_prepared = True
            self.accelerator.prepare_optimizer(self.optimizer)
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = train_dataloader
        return self.model_wrapped, train_dataloader

    def _divide(self) -> None:
        self.create_optimizer()
        model: Any = self.model
        self._numbers = model.num_parameters(exclude_embeddings=True) if hasattr(model, "num_parameters") else None
        bare = ModelBeforeWrap(model)
        # Autocast goes around the model's forward, within the engine's wrappers, as under Hugging Face's DDP.
        self.accelerator.prepare_model(model, evaluation_mode=True)
        handed = [each for each in (self.optimizer, self.lr_scheduler) if each is not None]
        wrapped: Any = library.wrap(model, *handed, **wrap_settings(self.accelerator, self._settings, placed=True))
        name_calls(wrapped[0], SAVE, LOAD)
        self.model_wrapped, self.optimizer = wrapped[:2]
        if self.lr_scheduler is not None:
            self.lr_scheduler = wrapped[2]
        if self.accelerator.scaler is not None:  # one scale for all ranks
            self.accelerator.scaler = scaler_like(self.accelerator.scaler, wrapped[0])
            self.optimizer = PreparedOptimizer(wrapped[1], self.accelerator.scaler)
        if hasattr(model, "save_pretrained"):
            model.save_pretrained = functools.partial(self._save_whole, model.save_pretrained)
        _ModelOfTrainer(wrapped[0], bare, weakref.ref(self))

    def _give_away(self) -> None:
        self.optimizer = self.lr_scheduler = None
        self.callback_handler.optimizer = self.callback_handler.lr_scheduler = None
        self.accelerator.free_memory()  # its references to them
        model: Any = self.model
        self.model_wrapped = self._gave_away = model

    def _save_whole(self, own: Any, *args: Any, state_dict: Any = None, **kwargs: Any) -> Any:
        model: Any = self.model
        if state_dict is None and self._sharded is not None:
            allowed = self._sharded.save_pretrained
            if allowed is not model.save_pretrained:
                # It raises: outside of full_parameters() there is only this rank's part.
                allowed()
        if state_dict is None or self._sharded is None:
            return own(*args, state_dict=state_dict, **kwargs)
        # PEFT asks some modules for their state dicts, to have the names in them.
        with self._sharded.backend.bare():
            return own(*args, state_dict=state_dict, **kwargs)

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        if self._sharded is None:
            return super()._wrap_model(model, training, dataloader)
        return self.model if self._shows_whole else self._sharded

    @property
    def _stepped(self) -> Any:
        """Return the optimizer, without what scales its gradients."""
        if isinstance(self.optimizer, PreparedOptimizer):
            return self.optimizer.optimizer
        return self.optimizer

    # ------------------------------------------------------------------------------------------ training

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as the parent does; meanwhile no other Trainer is made of the model."""
        # is_in_train stays so where an error ends a training.
        self._runs = True
        try:
            return super().train(*args, **kwargs)
        finally:
            self._runs = False

    def _has_mixed_mesh_grads(self, model: Any) -> bool:
        return False  # the engine's matter

    def _clip_grad_norm(self, model: Any) -> Any:
        return self._clip(model, self.args.max_grad_norm)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        if grad_norm is None:
            return self._clip(model, float("inf"))
        return grad_norm

    def _clip(self, model: Any, limit: float) -> Any:
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.unscale_(self._stepped)
        return model.clip_grad_norm_(limit)

    def floating_point_ops(self, inputs: State) -> int:
        """Count operations with the number of parameters that the whole model has."""
        words = inputs.get(getattr(self.model, "main_input_name", "input_ids"))
        if self._numbers is None or words is None:
            return int(super().floating_point_ops(inputs))
        return int(6 * words.numel() * self._numbers)

    # ------------------------------------------------------------------------------------------ evaluation

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """Evaluate; where text is generated, every rank has whole weights meanwhile. Collective."""
        run = functools.partial(super().evaluation_loop, dataloader, description)
        given = (prediction_loss_only, ignore_keys, metric_key_prefix)
        loss_only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        if self._sharded is None or loss_only or not getattr(self.args, "predict_with_generate", False):
            return run(*given)
        # generate() calls parts of the model, in which no engine would gather weights.
        with self._sharded.full_parameters():
            self._shows_whole = True
            try:
                return run(*given)
            finally:
                self._shows_whole = False

    # ------------------------------------------------------------------------------------------ files

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save whole weights, which ``from_pretrained`` reads. Collective.

        Raises:
            ConfigurationError: another Trainer has the model by now, and an engine.
        """
        if self._sharded is None and wrapped_model_of(self.model) is not None:
            raise ConfigurationError("save_model(): another Trainer is training this model now; save it with that one")
        if self._sharded is None:
            super().save_model(output_dir, _internal_call)
            return
        folder = Path(output_dir or "")
        resumable = _internal_call and folder.name.startswith(PREFIX_CHECKPOINT_DIR)
        if resumable:
            clear(folder, self._sharded, whole=not self.divides_files, writes=self.args.should_save)
        if self.divides_files and resumable:
            stepped = None if self.args.save_only_model else self._stepped
            library.save(folder / PARTS, self._sharded, stepped, rng=False)
            return
        weights = self._sharded.state_dict(rank0_only=not self.args.save_on_each_node, offload_to_cpu=True)
        self._save(output_dir, state_dict=weights)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        whole = not self.divides_files
        writes = self.args.should_save
        save_optimizer(Path(output_dir), self._stepped, self.lr_scheduler, whole=whole, writes=writes)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self._sharded is not None:
            self._load(resume_from_checkpoint, functools.partial(super()._load_from_checkpoint, resume_from_checkpoint))
        elif parts_of(resume_from_checkpoint) is None:
            # With parts it is loaded with the optimizer, once an engine has the model.
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            load_optimizer(Path(checkpoint), self._stepped, self.lr_scheduler)

    def _load_scaler(self, checkpoint: str | None) -> None:
        # A file of a scaler is no reason to have one.
        if self.accelerator.scaler is not None:
            super()._load_scaler(checkpoint)

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        assert best is not None, "at the end of a training that has saved"
        self._load(best, super()._load_best_model)

    def _load(self, folder: str, own: Callable[[], None]) -> None:
        """Load weights into a model under its engine: adapters by ``own``, in PEFT's way. Collective."""
        parts = parts_of(folder)
        sharded = self._sharded
        assert sharded is not None, "a training has begun"
        if parts is not None or not hasattr(self.model, "peft_config"):
            library.load(parts or folder, sharded, rng=False)
            return
        with sharded.full_parameters(writeback=True):
            agree(sharded.backend.settings.group, own)


@dataclass
class _ModelOfTrainer(WrappedModel):
    """A model under an engine, and the Trainer that trains it."""

    trainer: weakref.ref[Trainer]

    def come_back(self) -> None:
        """Take the model back from a Trainer, to give it to another.

        Raises:
            ConfigurationError: it is in the midst of its training.
        """
        former = self.trainer()
        # model_init makes more models.
        former = former if former is not None and former.model is self.wrapped.module else None
        if former is not None and former._runs:
            raise ConfigurationError(
                "the model is being trained by another Trainer: create this one when train() has returned; in a "
                "callback, evaluate with the Trainer that trains"
            )
        super().come_back()
        if former is not None:
            former._give_away()


class Seq2SeqTrainer(Trainer, transformers.Seq2SeqTrainer):
    """``transformers.Seq2SeqTrainer`` under any engine; see :class:`Trainer`."""
