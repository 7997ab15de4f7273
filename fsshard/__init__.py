"""fsshard: one line shards the model; one word swaps the engine."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fsshard.checkpoint.format.version import __version__
from fsshard.errors import (
    AlreadyWrapped,
    CheckpointError,
    ConfigurationError,
    CorruptCheckpoint,
    DoesNotFit,
    FsshardError,
    LaunchError,
    MissingExtra,
    ModelError,
    OptimizerError,
    ParityError,
    PrecisionError,
    RankFailed,
    RankHung,
    RankMismatch,
    StateDictError,
    UnknownBackend,
    UnsupportedByBackend,
)

if TYPE_CHECKING:
    from fsshard.checkpoint.format.directory import latest
    from fsshard.checkpoint.interop.exporting import export
    from fsshard.checkpoint.loading import load
    from fsshard.checkpoint.saving import save, wait_for_saves
    from fsshard.complex_params.tensorfy import tensorfy, untensorfy
    from fsshard.launching.context import Context, init
    from fsshard.launching.processes import launch
    from fsshard.model.activation_checkpointing import checkpoint_blocks
    from fsshard.model.lora import lora
    from fsshard.parallel.data_rank import data_rank
    from fsshard.parity.scripts.recorder import trace
    from fsshard.planning.plan import plan
    from fsshard.planning.policies import Checkpointing, Precision
    from fsshard.sharded.averages import EMA
    from fsshard.sharded.grad_scaler import GradScaler
    from fsshard.sharded.gradient_leaves import leaf_samples
    from fsshard.sharded.join import join
    from fsshard.sharded.module import ShardedModule, clip_grad_norm_, register_forward_method
    from fsshard.sharded.optimizer import ShardedOptimizer, build_optimizer
    from fsshard.simulation.estimating import estimate
    from fsshard.simulation.memory_tracker import MemoryTracker
    from fsshard.simulation.throughput import Throughput
    from fsshard.simulation.tuning.tuning import tune
    from fsshard.wrapping import wrap

__all__ = [
    "EMA",
    "AlreadyWrapped",
    "CheckpointError",
    "Checkpointing",
    "ConfigurationError",
    "Context",
    "CorruptCheckpoint",
    "DoesNotFit",
    "FsshardError",
    "GradScaler",
    "LaunchError",
    "MemoryTracker",
    "MissingExtra",
    "ModelError",
    "OptimizerError",
    "ParityError",
    "Precision",
    "PrecisionError",
    "RankFailed",
    "RankHung",
    "RankMismatch",
    "ShardedModule",
    "ShardedOptimizer",
    "StateDictError",
    "Throughput",
    "UnknownBackend",
    "UnsupportedByBackend",
    "__version__",
    "build_optimizer",
    "checkpoint_blocks",
    "clip_grad_norm_",
    "data_rank",
    "estimate",
    "export",
    "init",
    "join",
    "latest",
    "launch",
    "leaf_samples",
    "load",
    "lora",
    "plan",
    "register_forward_method",
    "save",
    "tensorfy",
    "trace",
    "tune",
    "untensorfy",
    "wait_for_saves",
    "wrap",
]

_NAMES = {
    "checkpoint.format.directory": "latest",
    "checkpoint.interop.exporting": "export",
    "checkpoint.loading": "load",
    "checkpoint.saving": "save wait_for_saves",
    "complex_params.tensorfy": "tensorfy untensorfy",
    "launching.context": "Context init",
    "launching.processes": "launch",
    "model.activation_checkpointing": "checkpoint_blocks",
    "model.lora": "lora",
    "parallel.data_rank": "data_rank",
    "parity.scripts.recorder": "trace",
    "planning.plan": "plan",
    "planning.policies": "Checkpointing Precision",
    "sharded.averages": "EMA",
    "sharded.grad_scaler": "GradScaler",
    "sharded.gradient_leaves": "leaf_samples",
    "sharded.join": "join",
    "sharded.module": "ShardedModule clip_grad_norm_ register_forward_method",
    "sharded.optimizer": "ShardedOptimizer build_optimizer",
    "simulation.estimating": "estimate",
    "simulation.memory_tracker": "MemoryTracker",
    "simulation.throughput": "Throughput",
    "simulation.tuning.tuning": "tune",
    "wrapping": "wrap",
}
"""Module -> what is imported of it when it is first asked for, so that a script pays for what it runs only."""
_LATER = {}
for _module, _names in _NAMES.items():
    _LATER.update(dict.fromkeys(_names.split(), f"{__name__}.{_module}"))

_ROOMS = {
    *("backends", "comm", "complex_params", "launching", "model", "parallel", "parity", "planning"),
    *("sharded", "simulation", "wrapping"),
}
"""As after ``import fsshard.wrapping``."""

if not TYPE_CHECKING:  # else any name would be there for a type checker

    def __getattr__(name: str) -> Any:
        if name in _ROOMS:
            return import_module(f"{__name__}.{name}")
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_LATER[name]), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
