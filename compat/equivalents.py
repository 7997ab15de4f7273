"""What to write instead of FairScale's names: advice for those that are not served, lines for the report."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BY_NAME", "Equivalent", "equivalent"]


@dataclass(frozen=True)
class Equivalent:
    """What stands in torch, or here, for one of FairScale's names.

    Attributes:
        torch: full names in torch.
        lines: what to write.
        note: what differs, in a few words.
    """

    torch: tuple[str, ...]
    lines: tuple[str, ...]
    note: str = ""

    @property
    def advice(self) -> str:
        """In one line."""
        return ", ".join(self.torch) + (f" ({self.note})" if self.note else "")


_SCALER = Equivalent(
    ("torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler",),
    ("from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler", 'scaler = ShardedGradScaler("cuda")'),
    "its first argument is the device, and backoff_factor comes before growth_factor",
)
_SHARDED = Equivalent(
    ("torch.distributed.fsdp.fully_shard",),
    (
        "import fsshard",
        'model, optimizer = fsshard.wrap(model, optimizer, backend="fsdp2")  # optimizer: a plain torch one',
    ),
    "or fsshard.wrap, which has it and three other engines",
)
_AUTO_WRAP = Equivalent(
    ("torch.distributed.fsdp.fully_shard",),
    ("import fsshard", 'model = fsshard.wrap(model, backend="fsdp2", auto_wrap_policy={Block})  # classes, or bytes'),
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
_MESH = Equivalent(
    ("torch.distributed.device_mesh.init_device_mesh",),
    (
        "from torch.distributed.device_mesh import init_device_mesh",
        'mesh = init_device_mesh("cuda", (data, model), mesh_dim_names=("data", "model"))',
    ),
)

BY_NAME: dict[str, Equivalent] = {
    "OSS": _SHARDED,
    "ShardedDataParallel": _SHARDED,
    "FullyShardedDataParallel": _SHARDED,
    "checkpoint_wrapper": Equivalent(
        ("torch.utils.checkpoint.checkpoint",),
        (
            "from functools import partial",
            "from torch.utils.checkpoint import checkpoint",
            "layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)",
        ),
        "with use_reentrant=False; BatchNorm statistics are updated twice, in the forward and when it is recomputed",
    ),
    "ShardedGradScaler": _SCALER,
    "GradScaler": Equivalent(
        ("torch.amp.GradScaler",), ("from torch.amp import GradScaler", 'scaler = GradScaler("cuda")')
    ),
    "wrap": _AUTO_WRAP,
    "auto_wrap": _AUTO_WRAP,
    "enable_wrap": _AUTO_WRAP,
    "config_auto_wrap_policy": _AUTO_WRAP,
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

# Modules whose own name says less than what is in them.
_MODULES = {
    "fairscale.nn.model_parallel": "ColumnParallelLinear",
    "fairscale.nn.pipe": "Pipe",
    "fairscale.experimental.nn.ampnet_pipe": "Pipe",
    "fairscale.experimental.nn.distributed_pipeline": "Pipe",
    "fairscale.experimental.nn.offload": "OffloadModel",
    "fairscale.experimental.nn.sync_batchnorm": "SyncBatchNorm",
    "fairscale.experimental.nn.data_parallel": "SlowMoDistributedDataParallel",
    "fairscale.experimental.optim.dynamic_loss_scaler": "DynamicLossScaler",
    "fairscale.experimental.tooling.layer_memory_tracker": "LayerwiseMemoryTracker",
    "fairscale.optim.adam": "Adam",
}


def equivalent(name: str) -> Equivalent | None:
    """What to write instead of one of FairScale's names; None where there is nothing like it.

    Args:
        name: the full name, by whichever of its paths: ``fairscale.optim.OSS`` and ``fairscale.optim.oss.OSS`` are one.
    """
    found = BY_NAME.get(name.rpartition(".")[2])
    while found is None and "." in name:
        found = BY_NAME.get(_MODULES.get(name, ""))
        name = name.rpartition(".")[0]
    return found
