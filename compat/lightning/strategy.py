"""Lightning's strategy: its own DDP strategy for processes and loaders, and ``fsshard.wrap`` for the model."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.pytorch import callbacks
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torchmetrics import Metric

import fsshard
from fsshard.backends.registry import backend_class
from fsshard.errors import ConfigurationError, StateDictError, UnsupportedByBackend
from fsshard.model.checks import is_managed
from fsshard.sharded.module import ShardedModule
from fsshard.sharded.unwrapping import ModelBeforeWrap

from ..trainers import State, by_name, clip_by_value, name_calls, sampler_arguments, scaler_like, wrapped_model_of
from .after_fit import WrappedLightningModule, divided, lacking, named_after, plain_scaler
from .averaging import AVERAGING, OverParts, average_parts
from .fabric import FabricStrategy
from .manual import ThroughEngine
from .plugins import (
    Autocast,
    DividedState,
    WholeLauncher,
    check_place,
    lightnings,
    load_divided,
    plugin_for,
    read_others,
    save_divided,
)

Checkpoint = Mapping[str, Any]

log = logging.getLogger(__name__)

ENGINES = ("fsdp2", "fsdp", "fairscale", "ddp")
# Names of Lightning 1.x, over FairScale's OSS and ShardedDDP, which Lightning 2.0 left out -> how ranks start.
FORMER = {"ddp_sharded": "popen", "ddp_sharded_spawn": "spawn"}

SAVE = "on every rank call trainer.save_checkpoint(file)"
LOAD = "load it before fit(), or call fit(module, ckpt_path=file)"

StartMethod = Literal["popen", "spawn", "fork", "forkserver"]


class Strategy(DDPStrategy):
    """``Trainer(strategy=Strategy("fsdp2"))``: the engine is one word, on CPU and GPU, complex weights welcome.

    Args:
        backend: of :func:`fsshard.wrap`.
        start_method: how ranks start: ``"popen"`` runs the script again, the others call the Trainer's method.
        save_distributed_checkpoint: write a directory, in which each rank's parts are its own files, in place of a file
            that rank 0 writes whole. Either kind is read whatever is said here.
        **settings: ``accelerator``, ``parallel_devices``, ``cluster_environment`` (None: the ranks that
            :func:`fsshard.launch` has started, if there are any), ``checkpoint_io``, ``precision_plugin``,
            ``process_group_backend`` and ``timeout`` as for Lightning's DDPStrategy; all others go to
            :func:`fsshard.wrap`.

    Raises:
        ConfigurationError: a precision or a callback that is not served.
    """

    strategy_name = "fsshard"

    def __init__(
        self,
        backend: str = "fsdp2",
        *,
        start_method: StartMethod = "popen",
        save_distributed_checkpoint: bool = False,
        **settings: Any,
    ) -> None:
        self.backend = backend
        self.settings = settings
        self.divides_files = save_distributed_checkpoint
        self.starts_by = start_method
        self._wrapped_model: WrappedLightningModule | None = None  # what an engine has
        self._manual: ThroughEngine | None = None  # what its own steps go through
        self._waiting: tuple[Checkpoint, bool] | None = None  # a checkpoint for what an engine will have
        self._restored = False  # whether weights of a checkpoint were loaded before an engine had the module
        super().__init__(start_method=start_method, **lightnings(settings))

    # ------------------------------------------------------------------------------------ the model and its optimizers

    @property
    def precision_plugin(self) -> Any:
        """Lightning's plugin, with gradients clipped by us."""
        if self._precision_plugin is None:
            return plugin_for(self, None)
        return self._precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, asked: Any) -> None:
        # None until the Trainer has read its precision=, which a strategy's own plugin would overrule.
        self._precision_plugin = None if asked is None else plugin_for(self, asked)

    @property
    def _sharded(self) -> ShardedModule | None:
        """Return the wrapper of the Trainer's module; None where no engine has it."""
        module = self._lightning_module
        wrapped_model = self._wrapped_model
        if wrapped_model is None or module is None or wrapped_model_of(module) is not wrapped_model:
            return None
        return wrapped_model.wrapped

    @property
    def distributed_sampler_kwargs(self) -> Any:
        """Return Lightning's, but give ranks that share samples, by ``device_mesh=`` or a domain, the same ones."""
        return sampler_arguments(self.settings, self._lightning_module, super().distributed_sampler_kwargs)

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if self.starts_by != "popen":
            self._launcher = WholeLauncher(self, start_method=self.starts_by)

    def setup_environment(self) -> None:
        """Set up as Lightning does, and hand a module that is trained again back before any hook sees it."""
        super().setup_environment()
        # They may be of a fit that has failed.
        self._waiting, self._restored = None, False
        module: Any = self._lightning_module
        if module is None or module.trainer.state.fn != TrainerFn.FITTING:
            return
        wrapped_model = wrapped_model_of(module)
        if wrapped_model is not None:
            missing = lacking(wrapped_model, with_states=False)
            if missing:
                raise ConfigurationError(
                    f"fit(): the module has been trained, and each rank has its part: {missing}; load a checkpoint "
                    "into a new module and fit that"
                )
            wrapped_model.come_back()
        self._wrapped_model = None

    def setup(self, trainer: Any) -> None:
        """Let the optimizers be made on the bare module, as the user wrote it; then wrap both."""
        module: Any = self._lightning_module
        wrapped_model = wrapped_model_of(module)
        fits = trainer.state.fn == TrainerFn.FITTING
        if fits:
            self._check_fit(trainer)
        if not fits and (wrapped_model is not None or (self._divides and module in divided)):
            accelerator: Any = self.accelerator
            accelerator.setup(trainer)
            self._wrapped_model = wrapped_model or self._wrap_to_evaluate(module)
            self.model = self._sharded
        else:
            super().setup(trainer)
        for callback in trainer.callbacks if self._wrapped_model is not None else ():
            if isinstance(callback, AVERAGING):
                average_parts(callback, lambda: self._sharded, restored=self._restored or not fits)
        if self._waiting is not None:
            self._load_weights(*self._waiting)
        self._waiting = None

    @property
    def _divides(self) -> bool:
        return backend_class(self.backend, self.world_size).facts.divides == "elements"

    def _wrap_to_evaluate(self, module: Any) -> WrappedLightningModule:
        """Wrap a module of which a device has had parts, and may have no room for the whole. Collective."""
        self._move_all_else(module)
        bare = ModelBeforeWrap(module)
        settings = {name: value for name, value in self.settings.items() if name != "param_init_fn"}
        wrapped = fsshard.wrap(module, backend=self.backend, device=self.root_device, **settings)
        return WrappedLightningModule(wrapped, bare)

    def _check_fit(self, trainer: Any) -> None:
        module = trainer.lightning_module
        if is_managed(module):
            raise ConfigurationError(
                "fit() of a module that fsshard.wrap, or Fabric, has put under an engine; pass the bare module, or "
                "take a new one and its checkpoint, ckpt_path=..."
            )
        for callback in trainer.callbacks:
            name = type(callback).__name__
            whole = not self._divides and not any(parameter.is_complex() for parameter in module.parameters())
            if isinstance(callback, callbacks.StochasticWeightAveraging) and not whole:
                raise ConfigurationError(
                    f"callback {name} averages whole real parameters, of which an engine keeps parts, or pairs of "
                    "reals; use EMAWeightAveraging or WeightAveraging, or, without complex weights, backend='ddp'"
                )
            facts = backend_class(self.backend, self.world_size).facts
            if isinstance(callback, callbacks.BaseFinetuning) and self._divides and not facts.has_dtensors:
                # It leaves out parameters equal to one that is trained (2.6), and of some a rank has no element.
                raise UnsupportedByBackend(f"{name}, which compares parts", self.backend, "use 'fsdp2' or 'ddp'")
            if isinstance(callback, AVERAGING) and self.divides_files:
                raise ConfigurationError(
                    f"callback {name} replaces the weights of a checkpoint by the average, and a directory has the "
                    "shards of the model's own weights; leave out save_distributed_checkpoint=True"
                )

    def model_to_device(self) -> None:
        """Move a module that is not trained; else ``fsshard.wrap`` moves, or makes, the parts that this rank keeps."""
        module: Any = self.model
        if module.trainer.state.fn != TrainerFn.FITTING:
            super().model_to_device()
            return
        self._move_all_else(module)

    def _move_all_else(self, module: Any) -> None:
        # From here on module.device says so.
        _update_properties(module, device=self.root_device)
        # Metrics have states that are neither parameters nor buffers.
        for part in module.modules():
            if isinstance(part, Metric):
                part.to(self.root_device)

    def configure_ddp(self) -> None:
        """Do nothing yet: optimizers come first."""

    def setup_optimizers(self, trainer: Any) -> None:
        """Let ``configure_optimizers`` see the user's parameters, and hand its optimizers over. Collective."""
        module: Any = self.lightning_module
        super().setup_optimizers(trainer)
        kinds = [type(optimizer).__name__ for optimizer in self.optimizers]
        if "_MockOptimizer" in kinds:  # Lightning's
            raise ConfigurationError(
                "configure_optimizers returned no optimizer, so fit() would change nothing; return one, or run the "
                "module with validate(), test() or predict()"
            )
        configs = self.lr_scheduler_configs
        schedulers = [config.scheduler for config in configs]
        given = {"backend": self.backend, "device": self.root_device, **self.settings}
        bare = ModelBeforeWrap(module)
        wrapped: Any = fsshard.wrap(module, list(self.optimizers), schedulers, **given)
        model, optimizers, schedulers = wrapped
        name_calls(model, SAVE, LOAD)
        self.optimizers = optimizers
        for optimizer, kind in zip(self.optimizers, kinds, strict=True):
            named_after(optimizer, kind)
        for config, scheduler in zip(configs, schedulers, strict=True):
            config.scheduler = scheduler
        self.model = model
        self._manual = None if module.automatic_optimization else ThroughEngine(module, model, optimizers)
        self._wrapped_model = WrappedLightningModule(model, bare, optimizers, schedulers, self.divides_files)
        if isinstance(self.precision_plugin, Autocast) and self.precision_plugin.scaler is not None:
            self.precision_plugin.scaler = scaler_like(self.precision_plugin.scaler, model)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's training step through the engine."""
        model = self._sharded
        inner = self.lightning_module
        # After a validation Lightning gives the inner module its mode back, and the wrappers need it too: FairScale's
        # reduce gradients in training mode only.
        if model is not None and inner is not None and model.training != inner.training:
            model.training = inner.training
        if self._manual is None or model is None:
            return super().training_step(*args, **kwargs)
        module: Any = inner
        with self.precision_plugin.train_step_context(), self._manual.step():
            return module.training_step(*args, **kwargs)

    def optimizer_step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Step as Lightning does, unless another optimizer is toggled."""
        if self._manual is not None:
            self._manual.check_may_step(optimizer)
        return super().optimizer_step(optimizer, *args, **kwargs)

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate without communication."""
        with self._sharded.no_sync() if self._sharded is not None else contextlib.nullcontext():
            yield

    def clip_gradients(self, limit: float, *, by_value: bool) -> None:
        """Clip the final gradients of all parameters, which one optimizer has. Collective."""
        if self._manual is not None and len(self.optimizers) > 1:
            raise ConfigurationError(
                "self.clip_gradients(optimizer) with several optimizers: the strategy clips the gradients of all; call "
                "torch.nn.utils.clip_grad_norm_(parameters of this optimizer, max_norm)"
            )
        model = self._sharded
        assert model is not None, "gradients come after setup"
        if by_value:
            clip_by_value(model, limit)
        else:
            model.clip_grad_norm_(limit)

    # ------------------------------------------------------------------------------------ checkpoints

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Return False, as Lightning's DDP does."""
        # So callbacks have their states in on_fit_start (2.6). Weights that only an engine can take wait for it.
        return False

    def _load_weights(self, checkpoint: Checkpoint, strict: bool) -> None:
        if isinstance(checkpoint, DividedState):
            load_divided(checkpoint.path, self._sharded, None)
        elif self._sharded is None:
            super().load_model_state_dict(checkpoint, strict=strict)
        else:
            self._sharded.load_state_dict(checkpoint["state_dict"], strict=strict)

    def lightning_module_state_dict(self) -> State:
        """Return whole tensors by the module's names, on rank 0; none where each rank writes its own. Collective."""
        if self._sharded is None:
            return super().lightning_module_state_dict()
        if self.divides_files:
            return {}
        return self._sharded.state_dict(rank0_only=True, offload_to_cpu=True)

    def load_model_state_dict(self, checkpoint: Checkpoint, strict: bool = True) -> None:
        """Load the file of any engine and any number of ranks. Collective where an engine has the module."""
        module: Any = self._lightning_module
        # The module is bare before a fit, and under its engine in the midst of one (LearningRateFinder). What only an
        # engine can take waits until one has the module.
        on_meta = any(each.is_meta for each in (*module.parameters(), *module.buffers()))
        waits = isinstance(checkpoint, DividedState) or on_meta or wrapped_model_of(module) is not None
        if self._sharded is None and waits:
            self._waiting = checkpoint, strict
        else:
            self._load_weights(checkpoint, strict)
        self._restored = True

    def optimizer_state(self, optimizer: Any) -> State:
        """Return whole tensors by parameter name, on rank 0; none where each rank writes its own. Collective."""
        if self.divides_files:
            return {}
        inner: Any = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        # Another Trainer may have given the module back.
        if self._wrapped_model is not None:
            inner = self._wrapped_model.left.get(id(inner), inner)
        state: State = inner.state_dict(rank0_only=True)
        return state

    def load_optimizer_state_dict(self, checkpoint: Checkpoint) -> None:
        """Load the optimizers' states of any engine and any number of ranks. Collective.

        Raises:
            StateDictError: the checkpoint has another number of optimizers, or of parameters in a group.
        """
        # Only now: callbacks have put groups of their own back.
        if isinstance(checkpoint, DividedState):
            load_divided(checkpoint.path, self._sharded, list(self.optimizers))
            return
        states = checkpoint["optimizer_states"]
        if len(states) != len(self.optimizers):
            raise StateDictError(
                f"the checkpoint has states of {len(states)} optimizers, and configure_optimizers gave "
                f"{len(self.optimizers)}; trainer.save_checkpoint(path, weights_only=True) is for weights alone, which "
                "module.load_state_dict takes before fit()"
            )
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(by_name(state, optimizer))  # type: ignore[arg-type]

    def save_checkpoint(self, checkpoint: State, filepath: Any, storage_options: Any = None) -> None:
        """Write a file as Lightning does, or a directory (``save_distributed_checkpoint``). Collective.

        Raises:
            CheckpointError: what is there is of the other kind; nothing is written.
        """
        if self._sharded is None or not self.divides_files:
            check_place(filepath, self)
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        save_divided(filepath, self._sharded, list(self.optimizers), self.broadcast(checkpoint))

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> State:
        """Read a file as Lightning does, or of a directory what is neither weights nor optimizers."""
        if Path(checkpoint_path).is_dir():
            return read_others(checkpoint_path)
        checkpoint: State = super().load_checkpoint(checkpoint_path, weights_only)
        return checkpoint

    def teardown(self) -> None:
        """Hand the module back whole, and keep what a checkpoint needs of the optimizers. Collective."""
        # It stays with its engine where each rank has parts in its own files, where the hosts have no room, and where
        # something has failed, which the other ranks need not know of: the next fit takes it from there.
        if self._wrapped_model is not None and self._comes_back(self._wrapped_model):
            self._hand_back(self._wrapped_model)
        module = self._lightning_module
        optimizers = self.optimizers
        # Another Trainer's strategy may manage it, too.
        kept = module is not None and is_managed(module)
        self.optimizers = []
        # Without it the parent does not move it to the CPU.
        self._lightning_module = None if kept else module
        try:
            super().teardown()
        finally:
            self._lightning_module = module
            self.optimizers = optimizers

    def _comes_back(self, wrapped_model: WrappedLightningModule) -> bool:
        module: Any = self._lightning_module
        wrapped_model.failed |= module is not None and module.trainer.state.status == TrainerStatus.INTERRUPTED
        if wrapped_model.failed or self._sharded is None:
            return self._sharded is not None and self.world_size == 1
        if wrapped_model.stays or wrapped_model.wrapped.backend.settings.model_mesh is not None:
            return False
        missing = lacking(wrapped_model, with_states=True)
        if missing and wrapped_model.wrapped.backend.settings.is_first:
            log.warning(
                "fit() has ended, and the module stays with its engine, each rank with its part: %s. This Trainer, "
                "and others over fsshard, test it as it is; for anything else load a checkpoint into a new module",
                missing,
            )
        return not missing

    def _hand_back(self, wrapped_model: WrappedLightningModule) -> None:
        module: Any = wrapped_model.wrapped.module
        callbacks = [each for each in module.trainer.callbacks if isinstance(each, OverParts) and each.engine(module)]
        averages = [None if each.copied else each.whole(wrapped_model.wrapped) for each in callbacks]
        wrapped_model.come_back_with_states()
        for callback, average in zip(callbacks, averages, strict=True):
            callback.ended(module, average)
        self.model = module
        self._manual = None
        self.optimizers = [wrapped_model.left.get(id(optimizer), optimizer) for optimizer in self.optimizers]
        self._wrapped_model = None
        plugin = self.precision_plugin
        if isinstance(plugin, Autocast) and plugin.scaler is not None:
            plugin.scaler = plain_scaler(plugin.scaler, self.root_device)


def register() -> None:
    """Put ``"fsshard_fsdp2"`` and the like into Lightning's and Fabric's registries, and the names of Lightning 1.x."""
    registries = [(StrategyRegistry, Strategy), (STRATEGY_REGISTRY, FabricStrategy)]
    for registry, kind in registries:
        for engine in ENGINES:
            registry.register(
                f"fsshard_{engine}", kind, f"fsshard.wrap(backend={engine!r})", override=True, backend=engine
            )
    for name, start in FORMER.items():
        if name not in StrategyRegistry:
            told = "FairScale's OSS and ShardedDDP, by fsshard"
            StrategyRegistry.register(name, Strategy, told, backend="fairscale", start_method=start)
