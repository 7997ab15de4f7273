"""What of FairScale's import tree is served here, and what to use in place of the rest.

A module of this package ends with ``__getattr__ = missing_from(__name__)``, so that an import of a name that it does
not have fails with that list and not with a bare "cannot import name".
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from .errors import NotServed

__all__ = ["INSTEAD", "SERVED", "explain", "missing_from"]

ROOT = __name__.rpartition(".")[0]

SERVED: dict[str, tuple[str, ...]] = {
    "nn": (
        "checkpoint_wrapper",
        "FlattenParamsWrapper",
        "auto_wrap",
        "config_auto_wrap_policy",
        "default_auto_wrap_policy",
        "enable_wrap",
        "wrap",
    ),
    "nn.checkpoint": ("checkpoint_wrapper", "is_checkpointing", "is_recomputing"),
    "nn.checkpoint.checkpoint_activations": (
        "checkpoint_wrapper",
        "disable_checkpointing",
        "enable_checkpointing",
        "enable_recomputing",
        "is_checkpointing",
        "is_checkpointing_disabled",
        "is_recomputing",
        "thread_local",
    ),
    "nn.checkpoint.checkpoint_utils": ("patch_batchnorm",),
    "nn.misc": ("FlattenParamsWrapper", "checkpoint_wrapper"),
    "nn.misc.flatten_params_wrapper": ("FlatParameter", "FlattenParamsWrapper"),
    "nn.wrap": ("auto_wrap", "config_auto_wrap_policy", "default_auto_wrap_policy", "enable_wrap", "wrap"),
    "nn.wrap.auto_wrap": ("ConfigAutoWrap",),
}
"""Module -> its public names, both without ``fairscale.``"""

_SHARDING = "fsshard.wrap(model, backend=...) with fsshard.build_optimizer(model, torch.optim.AdamW, ...)"
_CHECKPOINT = "torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)"

INSTEAD: dict[str, str] = {
    "optim": _SHARDING,
    "optim.oss": _SHARDING,
    "optim.grad_scaler": "fsshard.GradScaler(model)",
    "optim.adascale": "a learning rate of your own; torch has no AdaScale",
    "nn.data_parallel": _SHARDING,
    "nn.ShardedDataParallel": _SHARDING,
    "nn.FullyShardedDataParallel": "fsshard.wrap(model, backend='fsdp2'), or torch.distributed.fsdp.fully_shard",
    "nn.Pipe": "torch.distributed.pipelining",
    "nn.PipeRPCWrapper": "torch.distributed.pipelining",
    "nn.pipe": "torch.distributed.pipelining",
    "nn.MOELayer": "torch.distributed.all_to_all_single with autograd (torch.distributed.nn.functional)",
    "nn.Top2Gate": "a gate of your own; torch has none",
    "nn.moe": "torch.distributed.all_to_all_single with autograd (torch.distributed.nn.functional)",
    "nn.model_parallel": "torch.distributed.tensor.parallel",
    "nn.checkpoint.checkpoint_activations.CheckpointFunction": _CHECKPOINT,
    "nn.checkpoint.checkpoint_activations.get_rng_state": "torch.random.fork_rng()",
    "nn.checkpoint.checkpoint_activations.set_rng_state": "torch.random.fork_rng()",
    "nn.checkpoint.checkpoint_activations.autocast": "torch.autocast(device_type, dtype)",
    "nn.checkpoint.checkpoint_activations.is_autocast_enabled": "torch.is_autocast_enabled(device_type)",
    "nn.misc.ParamBucket": "the gradient buckets of torch's DistributedDataParallel (bucket_cap_mb)",
    "nn.misc.GradBucket": "the gradient buckets of torch's DistributedDataParallel (bucket_cap_mb)",
    "nn.misc.param_bucket": "the gradient buckets of torch's DistributedDataParallel (bucket_cap_mb)",
    "experimental": "torch.distributed.pipelining, or torch.distributed.fsdp with CPUOffloadPolicy",
    "utils": "the module of the same name under fairscale.internal, or torch's own",
}
"""Names that FairScale 0.4.13, or a release before it, has and this package has not -> what to use."""


def explain(name: str) -> str:
    """Say that a name is not served, what to use in its place, and what is served.

    Args:
        name: dotted, without ``fairscale.``: ``"nn.Pipe"``.
    """
    parts = name.split(".")
    known = (INSTEAD.get(".".join(parts[:end])) for end in range(len(parts), 0, -1))
    instead = next(filter(None, known), None)
    lines = [f"fsshard.compat.fairscale does not serve fairscale.{name}"]
    lines += [f"use in its place: {instead}"] if instead else []
    lines += ["served are:"]
    lines += [f"  fairscale.{module}: {', '.join(names)}" for module, names in SERVED.items()]
    return "\n".join(lines)


def missing_from(module: str) -> Callable[[str], NoReturn]:
    """Give the ``__getattr__`` of a module: :func:`explain` to who imports, an AttributeError to who looks.

    ``hasattr``, ``getattr`` with a default and ``pickle.whichmodule`` must see an AttributeError. The import
    statement would swallow it and its text (it says "cannot import name" in its place), so it gets an ImportError.
    """
    inner = module[len(ROOT) + 1 :]

    def __getattr__(name: str) -> NoReturn:
        text = explain(f"{inner}.{name}" if inner else name)
        if _imports(sys._getframe(1)):
            raise NotServed(text, name=name)
        raise AttributeError(text)

    return __getattr__


def _imports(frame: FrameType) -> bool:
    """Whether the frame is at the ``name`` of ``from module import name``."""
    return frame.f_code.co_code[frame.f_lasti] == dis.opmap["IMPORT_FROM"]
