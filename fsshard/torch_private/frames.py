"""How torch's engines look on the stack of a rank that waits: the functions in which they do so, and what those do.

Nothing here calls them, so what is missing costs the name of a step in a message.
"""

from __future__ import annotations

from fsshard.torch_private.registry import Area

__all__ = ["BACKWARD", "DDP_STEPS", "DDP_WAITS", "FSDP1_STEPS", "FSDP2_STEPS"]

AREA = Area("frames")
UTILS, RUNTIME = "torch/distributed/utils.py", "torch/distributed/fsdp/_runtime_utils.py"
GROUP = "torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py"
_GROUP = "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup"


def _frame(name: str, source: str) -> str:
    """What the stack says in a function: the last part of its name."""
    use = "to say by its frame in which step a rank waits"
    AREA.later(name, source=source, use=use, otherwise="where a rank hangs there, its step is not named")
    return name.replace(":", ".").rpartition(".")[2]


BACKWARD = _frame("torch.autograd.graph:_engine_run_backward", "torch/autograd/graph.py")
"""The innermost function in Python while a backward runs in C++."""
_START = {
    _frame("torch.distributed.utils:_sync_module_states", UTILS): "broadcast of the weights",
    _frame("torch.distributed.utils:_sync_params_and_buffers", UTILS): "broadcast of the weights",
    _frame("torch.distributed.utils:_verify_param_shape_across_processes", UTILS): "check of the shapes",
}
DDP_STEPS = {
    _frame(
        "torch.nn.parallel:DistributedDataParallel._sync_buffers", "torch/nn/parallel/distributed.py"
    ): "broadcast of buffers",
    **_START,
}
DDP_WAITS = {
    _frame(
        "torch.nn.parallel:DistributedDataParallel._pre_forward", "torch/nn/parallel/distributed.py"
    ): "broadcast of the buckets",  # in C++
}
FSDP1_STEPS = {
    _frame("torch.distributed.fsdp._runtime_utils:_unshard", RUNTIME): "unshard",
    _frame(
        "torch.distributed.fsdp._flat_param:FlatParamHandle.unshard", "torch/distributed/fsdp/_flat_param.py"
    ): "unshard",
    _frame("torch.distributed.fsdp._runtime_utils:_post_backward_hook", RUNTIME): "gradient reduction",
    _frame("torch.distributed.fsdp._runtime_utils:_reduce_grad", RUNTIME): "gradient reduction",
    **_START,
}
FSDP2_STEPS = {
    _frame(f"{_GROUP}.unshard", GROUP): "unshard",
    _frame(f"{_GROUP}.wait_for_unshard", GROUP): "unshard",
    _frame(f"{_GROUP}.post_backward", GROUP): "gradient reduction",
    _frame(
        "torch.distributed.fsdp._fully_shard._fsdp_collectives:foreach_reduce",
        "torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py",
    ): "gradient reduction",
}

# ------------------------------------------------------------------------------------------------ counted on

for _name in ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "barrier"):
    AREA.stands_on(
        f"torch.distributed.distributed_c10d:{_name}",
        why="which collectives it calls, and so what a rank that hangs in it is said to wait in",
    )
