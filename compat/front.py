"""Table of FairScale's names that the front serves, and of those left to the real FairScale. Imports nothing of it."""

from __future__ import annotations

__all__ = ["EXPORTS", "FALL_THROUGH", "FRONT", "SERVED", "falls_through"]

FRONT = "fsshard.compat.fairscale"
FALL_THROUGH = ("fairscale.nn.model_parallel", "fairscale.nn.moe", "fairscale.nn.pipe")
# Where fairscale.nn has a name from a package that falls through.
EXPORTS = {
    "fairscale.nn.MOELayer": "fairscale.nn.moe",
    "fairscale.nn.Pipe": "fairscale.nn.pipe",
    "fairscale.nn.PipeRPCWrapper": "fairscale.nn.pipe",
    "fairscale.nn.Top2Gate": "fairscale.nn.moe",
}

# A table and not asked of the modules, whose import would bring torch. A test compares it with their __all__.
SERVED = {
    "fairscale": "nn, optim",
    "fairscale.nn": (
        "FullyShardedDataParallel, ShardedDataParallel, auto_wrap, checkpoint_wrapper, config_auto_wrap_policy, "
        "default_auto_wrap_policy, enable_wrap, wrap"
    ),
    "fairscale.nn.checkpoint": (
        "checkpoint_wrapper, disable_checkpointing, is_checkpointing, is_checkpointing_disabled, is_recomputing, "
        "patch_batchnorm"
    ),
    "fairscale.nn.checkpoint.checkpoint_activations": (
        "ThreadLocalCheckpointingState, checkpoint_wrapper, disable_checkpointing, enable_checkpointing, "
        "enable_recomputing, is_checkpointing, is_checkpointing_disabled, is_recomputing, thread_local"
    ),
    "fairscale.nn.checkpoint.checkpoint_utils": "patch_batchnorm",
    "fairscale.nn.data_parallel": (
        "FullyShardedDataParallel, ShardedDataParallel, TrainingState, auto_wrap_bn, get_fsdp_instances, "
        "no_pre_load_state_dict_hook"
    ),
    "fairscale.nn.data_parallel.fully_sharded_data_parallel": (
        "FullyShardedDataParallel, ProcessGroupName, TrainingState, auto_wrap_bn, get_fsdp_instances, "
        "no_pre_load_state_dict_hook"
    ),
    "fairscale.nn.data_parallel.sharded_ddp": "ShardedDataParallel",
    "fairscale.nn.misc": "checkpoint_wrapper",
    "fairscale.nn.misc.checkpoint_activations": "checkpoint_wrapper, patch_batchnorm",
    "fairscale.nn.wrap": "auto_wrap, config_auto_wrap_policy, default_auto_wrap_policy, enable_wrap, wrap",
    "fairscale.nn.wrap.auto_wrap": (
        "ConfigAutoWrap, auto_wrap, config_auto_wrap_policy, default_auto_wrap_policy, enable_wrap, wrap"
    ),
    "fairscale.optim": "AdaScale, AdaScaleWrapper, GradScaler, OSS",
    "fairscale.optim.adascale": "AdaScale, AdaScaleWrapper",
    "fairscale.optim.grad_scaler": "GradScaler, ShardedGradScaler",
    "fairscale.optim.oss": "OSS",
    "fairscale.version": "__version_tuple__",
}
"""Module -> its public names."""


def falls_through(name: str) -> bool:
    """Return whether a module, or a name that FairScale exports from one, is left to the real FairScale."""
    name = EXPORTS.get(name, name)
    return any(name == each or name.startswith(each + ".") for each in FALL_THROUGH)
