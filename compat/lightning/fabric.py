"""Fabric's strategy: its own DDP strategy for processes and loaders, and ``fsshard.wrap`` for the model."""

from __future__ import annotations

import contextlib
from typing import Any

from lightning.fabric.plugins.precision import MixedPrecision, Precision
from lightning.fabric.strategies import DDPStrategy
from torch import Tensor, nn
from torch.optim import Optimizer

import fsshard
from fsshard.errors import ConfigurationError
from fsshard.sharded.module import ShardedModule
from fsshard.sharded.optimizer import ShardedOptimizer

from ..trainers import (
    State,
    by_name,
    check_scaler,
    clip_by_value,
    name_calls,
    sampler_arguments,
    scaler_like,
    split_over,
)
from .plugins import check_place, lightnings, refuse_precision

# The state dict of what fabric.setup() gives is that of the module within (2.6).
SAVE = "on every rank write fabric.save(file, {'model': model}), whose file has the whole weights"
LOAD = "on every rank write fabric.load(file, {'model': model})"


class FabricStrategy(DDPStrategy):
    """``Fabric(strategy=FabricStrategy("fsdp2"))``: the engine is one word, on CPU and GPU, complex weights welcome.

    Args:
        backend: of :func:`fsshard.wrap`.
        start_method: how ranks start.
        **settings: arguments of Lightning's DDPStrategy and of :func:`fsshard.wrap`, as for
            :class:`fsshard.compat.lightning.Strategy`.

    Raises:
        ConfigurationError: a precision that is not served, or an optimizer that is set up alone.
    """

    def __init__(self, backend: str = "fsdp2", *, start_method: Any = "popen", **settings: Any) -> None:
        self.backend = backend
        self.settings = settings
        super().__init__(start_method=start_method, **lightnings(settings))
        self._backward_sync_control: Any = _NoSync()
        self._model: nn.Module | None = None  # the first that is set up
        self._sampled = False  # a loader was set up before it

    @property
    def distributed_sampler_kwargs(self) -> Any:
        """Return Lightning's, but give ranks that share samples, by ``device_mesh=`` or a domain, the same ones."""
        self._sampled |= self._model is None
        return sampler_arguments(self.settings, self._model, super().distributed_sampler_kwargs)

    def _remember(self, model: nn.Module) -> None:
        if self._sampled and self.settings.get("device_mesh") is None and split_over(model) is not None:
            raise ConfigurationError(
                "fabric.setup_dataloaders() came before fabric.setup() of a model that shard_domain has split, and "
                "gave the ranks of a domain different samples; set up the model first, or give loaders samplers by "
                "fsshard.data_rank(mesh), and use_distributed_sampler=False"
            )
        self._model = self._model or model

    def setup_module_and_optimizers(
        self,
        module: nn.Module,
        optimizers: list[Optimizer],
        scheduler: Any = None,
    ) -> tuple[Any, list[Any], Any]:
        """Wrap the model, and hand its live optimizers over. Collective."""
        precision = self.precision
        if type(precision) not in (Precision, MixedPrecision):
            refuse_precision(precision)
        check_scaler(getattr(precision, "scaler", None))
        self._remember(module)
        given: Any = {"backend": self.backend, "device": self.root_device, **self.settings}
        schedulers = [] if scheduler is None else [scheduler]
        model, found, schedulers = fsshard.wrap(module, list(optimizers), schedulers, **given)
        name_calls(model, SAVE, LOAD)
        if isinstance(precision, MixedPrecision) and precision.scaler is not None:
            precision.scaler = scaler_like(precision.scaler, model)
        return model, found, schedulers[0] if schedulers else None

    def setup_module(self, module: nn.Module) -> Any:
        """Wrap a model for evaluation, or one whose optimizer :func:`fsshard.build_optimizer` makes. Collective."""
        self._remember(module)
        model = fsshard.wrap(module, backend=self.backend, device=self.root_device, **self.settings)
        name_calls(model, SAVE, LOAD)
        return model

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Raise: an optimizer needs its model."""
        raise ConfigurationError(
            "an optimizer is set up together with its model, fabric.setup(model, optimizer): it is rebuilt over what "
            "the engine keeps of the parameters"
        )

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip by the norm of all of the model's gradients, and return it. Collective."""
        self._unscale(optimizer)
        return _ours(module).clip_grad_norm_(max_norm, norm_type, error_if_nonfinite)

    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float) -> None:
        """Clip number by number. Collective."""
        self._unscale(optimizer)
        clip_by_value(_ours(module), float(clip_val))

    def _unscale(self, optimizer: Any) -> None:
        # Lightning asks the optimizer whether it unscales; what it then calls is a scaler of all ranks
        with optimizer.under_scaler() if isinstance(optimizer, ShardedOptimizer) else contextlib.nullcontext():
            self.precision.unscale_gradients(optimizer)

    def get_module_state_dict(self, module: nn.Module) -> State:
        """Return whole tensors under the model's own names, on rank 0. Collective."""
        if isinstance(module, ShardedModule):
            return module.state_dict(rank0_only=True, offload_to_cpu=True)
        return super().get_module_state_dict(module)

    def get_optimizer_state(self, optimizer: Optimizer) -> State:
        """Return whole tensors by parameter name, on rank 0. Collective."""
        if isinstance(optimizer, ShardedOptimizer):
            return optimizer.state_dict(rank0_only=True)
        return super().get_optimizer_state(optimizer)

    def save_checkpoint(self, path: Any, state: State, *args: Any, **kwargs: Any) -> None:
        """Write a checkpoint as Lightning does. Collective.

        Raises:
            CheckpointError: a directory is there; nothing is written.
        """
        check_place(path, self)
        super().save_checkpoint(path, state, *args, **kwargs)

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> State:
        """Load the file of any engine, or of Lightning's strategies, whose optimizers count parameters. Collective."""
        if isinstance(state, ShardedOptimizer):
            state.load_state_dict(by_name(self.checkpoint_io.load_checkpoint(path), state))
            return {}
        if not isinstance(state, dict):
            return super().load_checkpoint(path, state, *args, **kwargs)
        kept = {name: each for name, each in state.items() if isinstance(each, ShardedOptimizer)}
        state.update({name: _ByName(each) for name, each in kept.items()})
        try:
            return super().load_checkpoint(path, state, *args, **kwargs)
        finally:
            state.update(kept)


class _NoSync:
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> contextlib.AbstractContextManager[Any]:
        """Accumulate without communication."""
        if enabled:
            return _ours(module).no_sync()
        return contextlib.nullcontext()


class _ByName:
    """An optimizer that takes state of either kind."""

    def __init__(self, optimizer: ShardedOptimizer) -> None:
        self._optimizer = optimizer
        self.state_dict = optimizer.state_dict

    def load_state_dict(self, state: State) -> None:
        """Load it. Collective."""
        self._optimizer.load_state_dict(by_name(state, self._optimizer))


def _ours(module: nn.Module) -> ShardedModule:
    if not isinstance(module, ShardedModule):
        raise ConfigurationError(f"expected what fabric.setup(model, optimizer) gave, got {type(module).__name__}")
    return module
