"""Lightning's plugins over an engine: ranks that run already, precision, and checkpoints as directories."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.utilities import GradClipAlgorithmType

import fsshard
from fsshard.checkpoint.reader import Reader
from fsshard.errors import CheckpointError, ConfigurationError
from fsshard.sharded.module import ShardedModule

from ..trainers import Arguments, State, check_scaler

# ------------------------------------------------------------------------------------------------ ranks

# Arguments of Lightning's DDP strategies; the others of ours are those of wrap.
LIGHTNINGS = (
    *("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision", "precision_plugin"),
    *("process_group_backend", "timeout"),
)


class Launched(TorchElasticEnvironment):
    """The ranks of the process group that there is, such as :func:`fsshard.launch`'s; Lightning checks ``devices=``."""

    @staticmethod
    def detect() -> bool:
        return dist.is_initialized()

    def world_size(self) -> int:
        return dist.get_world_size()

    def global_rank(self) -> int:
        return dist.get_rank()

    def local_rank(self) -> int:
        """Return the launcher's local rank; on one machine the rank."""
        return int(os.environ.get("LOCAL_RANK", dist.get_rank()))

    def node_rank(self) -> int:
        return int(os.environ.get("GROUP_RANK", os.environ.get("NODE_RANK", "0")))


def lightnings(settings: State) -> State:
    """Take Lightning's own arguments out of ``settings``; ranks that run already are its environment."""
    found = {name: settings.pop(name) for name in LIGHTNINGS if name in settings}
    # torchrun is a launcher that Lightning knows itself.
    if found.get("cluster_environment") is None and Launched.detect() and "TORCHELASTIC_RUN_ID" not in os.environ:
        found["cluster_environment"] = Launched()
    return found


class WholeLauncher(_MultiProcessingLauncher):
    """Gives the process that has started the ranks whole weights back."""

    def _collect_rank_zero_results(self, trainer: Any, results: Any) -> Any:
        sharded = trainer.strategy._sharded
        module = trainer.lightning_module
        if sharded is None:
            return super()._collect_rank_zero_results(trainer, results)
        # Lightning would ask the module, which has parts.
        whole = sharded.state_dict(rank0_only=True, offload_to_cpu=True)
        module.state_dict = lambda: whole
        try:
            return super()._collect_rank_zero_results(trainer, results)
        finally:
            del module.state_dict


# ------------------------------------------------------------------------------------------------ precision


class _Clips(Precision):
    """``"32-true"``: clips by the norm, or value by value, what the strategy's model has."""

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy

    def clip_gradients(
        self,
        optimizer: Any,
        clip_val: float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Clip the final gradients, of all parameters. Collective."""
        if clip_val > 0:
            by_value = gradient_clip_algorithm == GradClipAlgorithmType.VALUE
            self.strategy.clip_gradients(float(clip_val), by_value=by_value)


class Autocast(_Clips, MixedPrecision):
    """``"bf16-mixed"`` and ``"16-mixed"``, the latter with one loss scale for all ranks."""

    def __init__(
        self,
        strategy: Any,
        precision: Literal["16-mixed", "bf16-mixed"],
        device: str,
        scaler: Any = None,
    ) -> None:
        MixedPrecision.__init__(self, precision, device, scaler)
        self.strategy = strategy

    def optimizer_step(  # type: ignore[override]
        self,
        optimizer: Any,
        model: Any,
        closure: Any,
        **kwargs: Any,
    ) -> Any:
        """Step as Lightning does, which asks the optimizer whether it unscales: the scaler is that of all ranks."""
        with optimizer.under_scaler() if self.scaler is not None else contextlib.nullcontext():
            return super().optimizer_step(optimizer, model, closure, **kwargs)


def plugin_for(strategy: Any, asked: Any) -> Any:
    """Return ours for the plugin that the Trainer has made of ``precision=``, or raise ConfigurationError."""
    if asked is None or type(asked) is Precision:
        return _Clips(strategy)
    if type(asked) is MixedPrecision:
        check_scaler(asked.scaler)
        kind: Any = asked.precision
        return Autocast(strategy, kind, torch.device(asked.device).type, asked.scaler)
    if isinstance(asked, _Clips):
        return asked
    return refuse_precision(asked)


def refuse_precision(asked: Any) -> NoReturn:
    """Raise the error for a precision plugin, of the Trainer or of Fabric, that is not served."""
    raise ConfigurationError(
        f"precision plugin {type(asked).__name__}: fsshard's strategy takes precision='32-true', 'bf16-mixed' and "
        "'16-mixed'; for parameters in another dtype pass mixed_precision= to the strategy, which fsshard.wrap gets"
    )


# ------------------------------------------------------------------------------------------------ directories

MODEL = "state_dict"
OPTIMIZERS = "optimizer_states"
OTHERS = "lightning"


class DividedState(dict[str, Any]):
    """Lightning's part of the checkpoint in directory ``path``: engines load weights and optimizers from the files."""

    path: Path


def check_place(path: Any, strategy: Any) -> None:
    """Raise CheckpointError on every rank if ``path`` is a directory, where a file is to come. Collective."""
    # Lightning would move the file into it.
    if strategy.broadcast(Path(path).is_dir()):
        raise CheckpointError(
            f"{path} is a directory, such as a checkpoint in parts, and a whole checkpoint is a file; remove it, save "
            "under another name, or take save_distributed_checkpoint=True, which replaces a checkpoint in parts"
        )


def save_divided(
    path: Any,
    model: ShardedModule,
    optimizers: list[Any],
    checkpoint: Arguments,
) -> None:
    """Write rank 0's checkpoint, and every rank's parts, in fsshard's own format. Collective.

    Raises:
        CheckpointError: names the value that is something else (``hparams`` of a user's own class, say).
    """
    others = {name: value for name, value in checkpoint.items() if name not in (MODEL, OPTIMIZERS)}
    fsshard.save(path, model, optimizers if OPTIMIZERS in checkpoint else None, rng=False, lightning=others)


def read_others(path: Any) -> DividedState:
    """Read what such a directory has for callbacks, loops and the like; CheckpointError if it is none. Local."""
    with Reader.at(path) as reader:
        saved = reader.index.objects.get(OTHERS, {})
        if "all" not in saved:
            raise CheckpointError(
                f"{path} was not written by Lightning's Trainer, so fit() cannot resume from it: export its "
                "weights to a file (fsshard export), which module.load_state_dict takes before fit()"
            )
        found = DividedState({**reader.tree(saved["all"]), MODEL: {}, OPTIMIZERS: []})
    found.path = Path(path)
    return found


def load_divided(path: Any, model: ShardedModule | None, optimizers: list[Any] | None) -> None:
    """Load weights of such a directory, and optimizers if there are any, of any engine and number of ranks. Collective.

    Raises:
        CheckpointError: optimizers are to go on, and the checkpoint has weights only.
        ConfigurationError: no engine has the module.
    """
    if model is None:
        raise ConfigurationError(
            f"{path} is a sharded checkpoint, which goes into a module in fit(ckpt_path=...), or that fit() has "
            "wrapped; for a bare module make one file of it, fsshard export"
        )
    try:
        fsshard.load(path, model, optimizers, rng=False)
    except CheckpointError as error:
        if "no optimizer was saved" not in str(error):
            raise
        raise CheckpointError(
            f"fit(ckpt_path={str(path)!r}): the checkpoint has weights only "
            "(ModelCheckpoint(save_weights_only=True)), and fit() needs those of the optimizers, too; continue from "
            "a checkpoint that has them, or make one file of the weights (fsshard export), which "
            "module.load_state_dict takes before fit()"
        ) from error
