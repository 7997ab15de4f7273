"""FairScale's names: which are served, what to write in place of one, and the error for one that is not served.

A module of the front ends with ``__getattr__ = missing_from(__name__)``, so that an import of a name that it does not
have fails with the list of those that there are and not with a bare "cannot import name". Nothing here needs torch.
"""

from __future__ import annotations

import dis
import importlib
import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import NamedTuple, NoReturn

from .errors import NotServed

FRONT = "fsshard.compat.fairscale"
_IMPORT_FROM = dis.opmap["IMPORT_FROM"]

# Module -> its public names. Not asked of the modules, whose import would bring torch; a test compares them.
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
    "fairscale.optim": "GradScaler, OSS",
    "fairscale.optim.grad_scaler": "GradScaler, ShardedGradScaler",
    "fairscale.optim.oss": "OSS",
    "fairscale.version": "__version_tuple__",
}


# ------------------------------------------------------------------------------------------------ what to write instead


class Instead(NamedTuple):
    """The counterpart of one of FairScale's names: what there is, in one line, and what to write, if that is known."""

    advice: str
    lines: str = ""


_SHARDED = Instead(
    "torch.distributed.fsdp.fully_shard, or fsshard.wrap, which has it and three other engines",
    "import fsshard\n"
    'model, optimizer = fsshard.wrap(model, optimizer, backend="fsdp2")  # optimizer: a plain torch one',
)
_AUTO_WRAP = Instead(
    "torch.distributed.fsdp.fully_shard, called once for each block; fsshard.wrap does that by auto_wrap_policy",
    'import fsshard\nmodel, optimizer = fsshard.wrap(model, optimizer, backend="fsdp2", auto_wrap_policy={Block})'
    "  # classes, or bytes; optimizer: a plain torch one",
)
_PIPE = Instead(
    "torch.distributed.pipelining.pipeline, torch.distributed.pipelining.ScheduleGPipe",
    "from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline\n"
    "pipe = pipeline(model, mb_args=(micro_batch,), split_spec={'layers.4': SplitPoint.BEGINNING})\n"
    "schedule = ScheduleGPipe(pipe.build_stage(rank, device), n_microbatches=8, loss_fn=loss_fn)",
)
_TENSOR_PARALLEL = Instead(
    "torch.distributed.tensor.parallel.ColwiseParallel, torch.distributed.tensor.parallel.RowwiseParallel",
    "from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module\n"
    "parallelize_module(model, mesh, {'up': ColwiseParallel(), 'down': RowwiseParallel()})",
)
_MESH = Instead(
    "torch.distributed.device_mesh.init_device_mesh",
    "from torch.distributed.device_mesh import init_device_mesh\n"
    'mesh = init_device_mesh("cuda", (data, model), mesh_dim_names=("data", "model"))',
)
_SCALER = 'from torch.amp import GradScaler\nscaler = GradScaler("cuda")'
_ADASCALE = Instead(
    "a plain torch optimizer whose learning rate is scaled by hand, as many times as the batch is larger; FairScale's "
    "own AdaScale wraps an optimizer under torch.nn.parallel.DistributedDataParallel, in a run without fsshard.compat",
    "optimizer = torch.optim.SGD(model.parameters(), lr=lr * scale)  # scale: how many times larger the batch is",
)
_BUCKETS = Instead("torch.nn.parallel.DistributedDataParallel has buckets of its own: bucket_cap_mb")


def _kept(module: str, name: str) -> Instead:
    line = f"from fsshard.compat.{module} import {name}"
    return Instead("torch has nothing like it; import it from fsshard.compat", line)


# In the order in which a script would write them, which is that of the report.
BY_NAME: dict[str, Instead] = {
    "checkpoint_wrapper": Instead(
        "torch.utils.checkpoint.checkpoint, which with use_reentrant=False updates BatchNorm statistics twice, in the "
        "forward and when it is recomputed; fsshard.checkpoint_blocks, or fsshard.wrap with activation_checkpointing, "
        "does it once",
        "from fsshard import checkpoint_blocks\n"
        "checkpoint_blocks(model, lambda module: module is layer)  # before fsshard.wrap",
    ),
    "CheckpointFunction": Instead(
        "torch.utils.checkpoint.checkpoint",
        "from torch.utils.checkpoint import checkpoint\noutput = checkpoint(function, *args, use_reentrant=False)",
    ),
    **dict.fromkeys(
        ("wrap", "auto_wrap", "enable_wrap", "config_auto_wrap_policy", "ConfigAutoWrap", "auto_wrap_bn"), _AUTO_WRAP
    ),
    **dict.fromkeys(("OSS", "ShardedDataParallel", "FullyShardedDataParallel"), _SHARDED),
    "ShardedGradScaler": Instead(
        "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler for FSDP alone; fsshard.GradScaler under every "
        "engine",
        "import fsshard\nscaler = fsshard.GradScaler(model)  # model: what fsshard.wrap returned",
    ),
    "GradScaler": Instead("torch.amp.GradScaler; for a model of fsshard.wrap fsshard.GradScaler", _SCALER),
    **dict.fromkeys(("AdaScale", "AdaScaleWrapper"), _ADASCALE),
    "default_auto_wrap_policy": Instead(
        "torch.distributed.fsdp.wrap.size_based_auto_wrap_policy",
        "from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy",
    ),
    "FlattenParamsWrapper": Instead(
        "torch.distributed.fsdp.fully_shard, which shards each parameter as it is; nothing is flattened", _SHARDED.lines
    ),
    "Adam": Instead("torch.optim.Adam", "optimizer = torch.optim.Adam(model.parameters(), fused=True)"),
    **dict.fromkeys(("Pipe", "PipeRPCWrapper", "AsyncPipe", "DistributedPipeline"), _PIPE),
    **dict.fromkeys(
        ("ColumnParallelLinear", "ParallelEmbedding", "RowParallelLinear", "VocabParallelEmbedding"), _TENSOR_PARALLEL
    ),
    **dict.fromkeys(("initialize_model_parallel", "get_model_parallel_group"), _MESH),
    "MOELayer": Instead(
        "torch.distributed.nn.functional.all_to_all_single for the exchange; experts and gate are your own"
    ),
    "Top2Gate": Instead("torch has nothing like it; write a gate of your own"),
    **dict.fromkeys(("ParamBucket", "GradBucket"), _BUCKETS),
    "OffloadModel": Instead(
        "torch.distributed.fsdp.CPUOffloadPolicy",
        'import fsshard\nmodel = fsshard.wrap(model, backend="fsdp2", cpu_offload=True)',
    ),
    "SyncBatchNorm": Instead("torch.nn.SyncBatchNorm", "model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)"),
    "SlowMoDistributedDataParallel": Instead(
        "torch.distributed.optim.PostLocalSGDOptimizer averages models every few steps, without slow momentum",
        "from torch.distributed.optim import PostLocalSGDOptimizer",
    ),
    "DynamicLossScaler": Instead("torch.amp.GradScaler", _SCALER),
    "LayerwiseMemoryTracker": Instead(
        "torch.profiler.profile with profile_memory=True",
        "with torch.profiler.profile(profile_memory=True, with_modules=True) as profile: ...",
    ),
}

# Modules that are not served, and the names in them.
_MODULES: dict[str, tuple[str, ...]] = {
    "fairscale.nn.misc.flatten_params_wrapper": ("FlattenParamsWrapper",),
    "fairscale.nn.misc.param_bucket": ("ParamBucket",),
    "fairscale.nn.model_parallel": ("ColumnParallelLinear", "RowParallelLinear"),
    "fairscale.nn.moe": ("MOELayer", "Top2Gate"),
    "fairscale.nn.pipe": ("Pipe",),
    "fairscale.experimental": (
        *("DistributedPipeline", "OffloadModel", "SlowMoDistributedDataParallel", "SyncBatchNorm"),
        "LayerwiseMemoryTracker",
    ),
    "fairscale.optim.adam": ("Adam",),
    "fairscale.optim.adascale": ("AdaScale", "AdaScaleWrapper"),
}


def instead_of(name: str) -> dict[str, Instead]:
    """Return what to write instead of one of FairScale's names, or of what is in a module that is not served.

    Args:
        name: the full name, by whichever of its paths: ``fairscale.optim.OSS`` and ``fairscale.optim.oss.OSS`` are one.

    Returns:
        FairScale's short name -> what there is. Several for a module, none where nothing is known.
    """
    last = name.rpartition(".")[2]
    if last in BY_NAME:
        return {last: BY_NAME[last]}
    module = next((each for each in _MODULES if name == each or name.startswith(each + ".")), "")
    return {each: BY_NAME[each] for each in _MODULES.get(module, ())}


def steps(names: Iterable[str]) -> list[tuple[list[str], Instead]]:
    """Return what to write instead of several names: each line once, in the order of a script.

    Args:
        names: full names.

    Returns:
        ``(short names of FairScale's, what there is)``, of what has lines. One ``fsshard.wrap`` takes the place of all
        that wraps and shards.
    """
    found = {}
    for name in names:
        module, _, short = name.rpartition(".")
        if short not in BY_NAME and short in SERVED.get(module, "").split(", ") and module != "fairscale":
            found[short] = _kept(module, short)
        else:
            found |= instead_of(name)
    order = list(BY_NAME)
    merged: dict[str, tuple[list[str], Instead]] = {}
    for name in sorted(found, key=lambda name: (order.index(name) if name in BY_NAME else -1, name)):
        instead = _AUTO_WRAP if found[name] is _SHARDED and _AUTO_WRAP in found.values() else found[name]
        if instead.lines:
            merged.setdefault(instead.lines, ([], instead))[0].append(name)
    return list(merged.values())


# ------------------------------------------------------------------------------------------------ what is not served


def explain(name: str) -> str:
    """Return why a name cannot be had, what to use instead, and what can be had.

    Args:
        name: the full name in FairScale: ``"fairscale.nn.Pipe"``.
    """
    from . import fall_through  # not at the top: it puts a finder in place

    way_back = []
    if not fall_through.falls_through(name):
        lines = [f"{name} is not served: fairscale is {FRONT} here (fsshard.compat)"]
        way_back = ["  to use the real FairScale: run the script without fsshard.compat"]
    elif fall_through.is_installed():
        # Nobody redirects: the front was imported by its own name.
        lines = [f"{name} is left to the real FairScale; import it from there"]
    else:
        lines = [f"{name} is left to the real FairScale, which is not installed; run: pip install fairscale==0.4.13"]
    found = instead_of(name)
    own = name.rpartition(".")[2] in found
    lines += [f"  instead{'' if own else f' of {each}'}: {instead.advice}" for each, instead in found.items()]
    served = [f"    {module}: {names}" for module, names in SERVED.items()]
    return "\n".join([*lines, "  served:", *served, *way_back])


def missing_from(module: str, front: str = FRONT) -> Callable[[str], object]:
    """Return the ``__getattr__`` of a module of the front, which gives what is left to the real FairScale or raises."""
    place = "fairscale" + module.removeprefix(front)

    def __getattr__(name: str) -> object:
        from . import fall_through

        whole = f"{place}.{name}"
        redirected = any(getattr(finder, "redirects", False) for finder in sys.meta_path)
        if fall_through.falls_through(whole) and redirected and fall_through.is_installed():
            package = importlib.import_module(fall_through.EXPORTS.get(whole, whole))
            if whole in fall_through.EXPORTS:
                return getattr(package, name)
            return package
        _refuse(whole, sys._getframe(1))

    return __getattr__


def _refuse(name: str, caller: FrameType) -> NoReturn:
    """Raise for an attribute that a module does not have: :class:`NotServed` to who imports, else an AttributeError."""
    # Python and its tools look for such names; none is FairScale's.
    if name.rpartition(".")[2].startswith("__"):
        raise AttributeError(f"module {name.rpartition('.')[0]!r} has no attribute {name.rpartition('.')[2]!r}")
    # hasattr, getattr with a default and pickle.whichmodule must see an AttributeError. The statement `from module
    # import name` would swallow it and its text, and say "cannot import name" in its place.
    if caller.f_lasti >= 0 and caller.f_code.co_code[caller.f_lasti] == _IMPORT_FROM:
        raise NotServed(explain(name), name)
    raise AttributeError(explain(name))
