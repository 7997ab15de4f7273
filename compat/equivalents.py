"""Counterparts of FairScale's names: advice for those that are not served, lines for the report.

Every name in here that begins with ``torch.`` or ``fsshard.`` is looked up by a test.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .front import SERVED

__all__ = ["BY_NAME", "Equivalent", "equivalents", "steps"]


@dataclass(frozen=True)
class Equivalent:
    """The counterpart of one of FairScale's names, in torch or here.

    Attributes:
        torch: full names in torch; empty where it has nothing like it.
        lines: what to write; empty where that depends on the script.
        note: what differs, in a few words.
    """

    torch: tuple[str, ...]
    lines: tuple[str, ...]
    note: str = ""

    @property
    def advice(self) -> str:
        """Say it in one line."""
        names = ", ".join(self.torch)
        return f"{names} ({self.note})" if names and self.note else names or self.note


_SCALER = Equivalent(
    ("torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler",),
    ("import fsshard", "scaler = fsshard.GradScaler(model)  # model: what fsshard.wrap returned"),
    "for FSDP alone; fsshard.GradScaler under every engine",
)
_SHARDED = Equivalent(
    ("torch.distributed.fsdp.fully_shard",),
    (
        "import fsshard",
        'model, optimizer = fsshard.wrap(model, optimizer, backend="fsdp2")  # optimizer: a plain torch one',
    ),
    "or fsshard.wrap, which has it and three other engines, with fsshard.build_optimizer",
)
_AUTO_WRAP = Equivalent(
    ("torch.distributed.fsdp.fully_shard",),
    (
        "import fsshard",
        'model, optimizer = fsshard.wrap(model, optimizer, backend="fsdp2", auto_wrap_policy={Block})'
        "  # classes, or bytes; optimizer: a plain torch one",
    ),
    "called once for each block; fsshard.wrap does that by auto_wrap_policy",
)
_PIPE = Equivalent(
    ("torch.distributed.pipelining.pipeline", "torch.distributed.pipelining.ScheduleGPipe"),
    (
        "from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline",
        "pipe = pipeline(model, mb_args=(micro_batch,), split_spec={'layers.4': SplitPoint.BEGINNING})",
        "schedule = ScheduleGPipe(pipe.build_stage(rank, device), n_microbatches=8, loss_fn=loss_fn)",
    ),
)
_COLUMN = Equivalent(
    ("torch.distributed.tensor.parallel.ColwiseParallel",),
    (
        "from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module",
        "parallelize_module(model, mesh, {'up': ColwiseParallel(), 'down': RowwiseParallel()})",
    ),
)
_ROW = Equivalent(("torch.distributed.tensor.parallel.RowwiseParallel",), _COLUMN.lines)
_RANDOM = Equivalent(("torch.random.fork_rng",), ("with torch.random.fork_rng(): ...",))
_BUCKETS = Equivalent(("torch.nn.parallel.DistributedDataParallel",), (), "it has buckets of its own: bucket_cap_mb")
_MESH = Equivalent(
    ("torch.distributed.device_mesh.init_device_mesh",),
    (
        "from torch.distributed.device_mesh import init_device_mesh",
        'mesh = init_device_mesh("cuda", (data, model), mesh_dim_names=("data", "model"))',
    ),
)


def _kept(module: str, name: str) -> Equivalent:
    """Return the import of a name without counterpart, which can be had without FairScale."""
    lines = (f"from fsshard.compat.{module} import {name}",)
    return Equivalent((), lines, "torch has nothing like it; import it from fsshard.compat")


# In the order in which a script would write them, which is that of the report.
BY_NAME: dict[str, Equivalent] = {
    "checkpoint_wrapper": Equivalent(
        ("torch.utils.checkpoint.checkpoint",),
        (
            "from fsshard import checkpoint_blocks",
            "checkpoint_blocks(model, lambda module: module is layer)  # before fsshard.wrap",
        ),
        "torch's, with use_reentrant=False, updates BatchNorm statistics twice, in the forward and when it is "
        "recomputed; fsshard.checkpoint_blocks, or fsshard.wrap with activation_checkpointing, does it once",
    ),
    "CheckpointFunction": Equivalent(
        ("torch.utils.checkpoint.checkpoint",),
        (
            "from torch.utils.checkpoint import checkpoint",
            "output = checkpoint(function, *args, use_reentrant=False)",
        ),
        "with use_reentrant=False",
    ),
    "get_rng_state": _RANDOM,
    "set_rng_state": _RANDOM,
    "autocast": Equivalent(("torch.autocast",), ()),
    "is_autocast_enabled": Equivalent(("torch.is_autocast_enabled",), (), "with the device type"),
    "wrap": _AUTO_WRAP,
    "auto_wrap": _AUTO_WRAP,
    "enable_wrap": _AUTO_WRAP,
    "config_auto_wrap_policy": _AUTO_WRAP,
    "ConfigAutoWrap": _AUTO_WRAP,
    "auto_wrap_bn": _AUTO_WRAP,
    "OSS": _SHARDED,
    "ShardedDataParallel": _SHARDED,
    "FullyShardedDataParallel": _SHARDED,
    "ShardedGradScaler": _SCALER,
    "GradScaler": Equivalent(
        ("torch.amp.GradScaler",),
        ("from torch.amp import GradScaler", 'scaler = GradScaler("cuda")'),
        "for a model of fsshard.wrap fsshard.GradScaler",
    ),
    "AdaScale": _kept("fairscale.optim", "AdaScale"),
    "AdaScaleWrapper": _kept("fairscale.optim", "AdaScaleWrapper"),
    "default_auto_wrap_policy": Equivalent(
        ("torch.distributed.fsdp.wrap.size_based_auto_wrap_policy",),
        ("from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy",),
    ),
    "FlattenParamsWrapper": Equivalent(
        ("torch.distributed.fsdp.fully_shard",),
        _SHARDED.lines,
        "it shards each parameter as it is; nothing is flattened",
    ),
    "Adam": Equivalent(
        ("torch.optim.Adam",), ("optimizer = torch.optim.Adam(model.parameters(), fused=True)",), "with fused=True"
    ),
    "Pipe": _PIPE,
    "PipeRPCWrapper": _PIPE,
    "AsyncPipe": _PIPE,
    "DistributedPipeline": _PIPE,
    "ColumnParallelLinear": _COLUMN,
    "ParallelEmbedding": _COLUMN,
    "RowParallelLinear": _ROW,
    "VocabParallelEmbedding": _ROW,
    "initialize_model_parallel": _MESH,
    "get_model_parallel_group": _MESH,
    "MOELayer": Equivalent(
        ("torch.distributed.nn.functional.all_to_all_single",), (), "the exchange alone; experts and gate are yours"
    ),
    "Top2Gate": Equivalent((), (), "torch has nothing like it; a gate of your own"),
    "ParamBucket": _BUCKETS,
    "GradBucket": _BUCKETS,
    "OffloadModel": Equivalent(
        ("torch.distributed.fsdp.CPUOffloadPolicy",),
        ("import fsshard", 'model = fsshard.wrap(model, backend="fsdp2", cpu_offload=True)'),
    ),
    "SyncBatchNorm": Equivalent(
        ("torch.nn.SyncBatchNorm",), ("model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)",)
    ),
    "SlowMoDistributedDataParallel": Equivalent(
        ("torch.distributed.optim.PostLocalSGDOptimizer",),
        ("from torch.distributed.optim import PostLocalSGDOptimizer",),
        "averages models every few steps, without slow momentum",
    ),
    "DynamicLossScaler": Equivalent(
        ("torch.amp.GradScaler",), ("from torch.amp import GradScaler", 'scaler = GradScaler("cuda")')
    ),
    "LayerwiseMemoryTracker": Equivalent(
        ("torch.profiler.profile",),
        ("with torch.profiler.profile(profile_memory=True, with_modules=True) as profile: ...",),
        "with profile_memory=True",
    ),
}

# What is in the modules whose own name says less.
_MODULES: dict[str, tuple[str, ...]] = {
    "fairscale.nn.data_parallel": ("ShardedDataParallel", "FullyShardedDataParallel"),
    "fairscale.nn.misc.flatten_params_wrapper": ("FlattenParamsWrapper",),
    "fairscale.nn.misc.param_bucket": ("ParamBucket",),
    "fairscale.nn.model_parallel": ("ColumnParallelLinear", "RowParallelLinear"),
    "fairscale.nn.moe": ("MOELayer", "Top2Gate"),
    "fairscale.nn.pipe": ("Pipe",),
    "fairscale.experimental.nn": ("DistributedPipeline", "OffloadModel", "SyncBatchNorm"),
    "fairscale.experimental.nn.ampnet_pipe": ("Pipe",),
    "fairscale.experimental.nn.distributed_pipeline": ("DistributedPipeline",),
    "fairscale.experimental.nn.offload": ("OffloadModel",),
    "fairscale.experimental.nn.sync_batchnorm": ("SyncBatchNorm",),
    "fairscale.experimental.nn.data_parallel": ("SlowMoDistributedDataParallel",),
    "fairscale.experimental.optim.dynamic_loss_scaler": ("DynamicLossScaler",),
    "fairscale.experimental.tooling.layer_memory_tracker": ("LayerwiseMemoryTracker",),
    "fairscale.experimental": (
        "DistributedPipeline",
        "OffloadModel",
        "SlowMoDistributedDataParallel",
        "SyncBatchNorm",
        "LayerwiseMemoryTracker",
    ),
    "fairscale.optim": ("OSS", "ShardedGradScaler", "GradScaler", "AdaScale"),
    "fairscale.optim.adam": ("Adam",),
    "fairscale.optim.adascale": ("AdaScale",),
    "fairscale.optim.grad_scaler": ("ShardedGradScaler", "GradScaler"),
    "fairscale.optim.oss": ("OSS",),
}


def equivalents(name: str) -> dict[str, Equivalent]:
    """Return what to write instead of one of FairScale's names, or of what is in one of its modules.

    Args:
        name: the full name, by whichever of its paths: ``fairscale.optim.OSS`` and ``fairscale.optim.oss.OSS`` are one.

    Returns:
        FairScale's short name -> what there is. Several for a module, none where nothing is known.
    """
    last = name.rpartition(".")[2]
    if last in BY_NAME:
        return {last: BY_NAME[last]}
    while "." in name:  # a module below one of these
        if name in _MODULES:
            return {each: BY_NAME[each] for each in _MODULES[name]}
        name = name.rpartition(".")[0]
    return {}


def steps(names: Iterable[str]) -> list[tuple[list[str], Equivalent]]:
    """Return what to write instead of several names: each line once, in the order of a script.

    Args:
        names: full names, of modules too; a module counts where none of the others is below it.

    Returns:
        ``(short names of FairScale's, what there is)``, of what has lines. One ``fsshard.wrap`` takes the place of all
        that wraps and shards.
    """
    asked = set(names)
    served = {f"{module}.{name}" for module, names in SERVED.items() for name in names.split(", ")}
    found: dict[str, Equivalent] = {}
    for name in asked:
        if name.rpartition(".")[2] in BY_NAME or not any(other.startswith(f"{name}.") for other in asked):
            found |= equivalents(name) if name not in served else _own(name)
    order = list(BY_NAME)
    merged: dict[tuple[str, ...], tuple[list[str], Equivalent]] = {}
    for name in sorted(found, key=lambda name: (order.index(name) if name in BY_NAME else -1, name)):
        instead = _AUTO_WRAP if found[name] is _SHARDED and _AUTO_WRAP in found.values() else found[name]
        if instead.lines:
            merged.setdefault(instead.lines, ([], instead))[0].append(name)
    return list(merged.values())


def _own(name: str) -> dict[str, Equivalent]:
    """Return what is known of a name that is served, or else where it can be had without FairScale."""
    module, _, short = name.rpartition(".")
    return {short: BY_NAME.get(short) or _kept(module, short)}
