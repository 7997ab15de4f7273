"""Behaviour of torch that an area of :mod:`fsshard.torch_private` counts on without using it by name.

Only :mod:`tools.torch_digests` reads this: it digests the source of each, to see whether it has changed.
"""

from __future__ import annotations

from typing import NamedTuple


class CountedOn(NamedTuple):
    """Something of torch's that no area names, and whose behaviour one counts on all the same.

    Attributes:
        area: the file of fsshard/torch_private, or what else it is about.
        name: ``"module:function"``, ``"module:Class"`` with its methods, or ``"module"`` with all that it defines.
        why: what of its behaviour is counted on.
    """

    area: str
    name: str
    why: str


COUNTED_ON: dict[str, dict[str, str]] = {
    "autograd": {
        "torch.autograd": "what grad and backward make of their arguments before C++",
        "torch.autograd.function:Function": "how a node of ours is called, under torch.func too",
        "torch.autograd.graph": "when hooks on several tensors, on nodes and on what is saved run",
        "torch.utils.checkpoint": "when a block is recomputed, and which saved tensors are compared with it",
    },
    "c10d": {
        "torch.distributed.distributed_c10d:_World": "where process groups and their names are kept",
        "torch.distributed.distributed_c10d:_new_group_with_tag": "that ranks outside of a new group wait for nobody",
        "torch.distributed.distributed_c10d:init_process_group": (
            "which device_id is taken, and what the default group is called"
        ),
        "torch.distributed.rendezvous": "who hosts the store under torchrun, and at which address",
        "torch.testing._internal.distributed.fake_pg": "what simulated ranks exchange",
    },
    "clip_grad": {
        "torch.nn.utils.clip_grad": "in which order norms are added up, and the names that clip_grad_norm_ looks up",
        "torch.utils._foreach_utils:_group_tensors_by_device_and_dtype": "in which order gradients are grouped",
    },
    "ddp": {
        "torch.nn.parallel.distributed:DistributedDataParallel": (
            "when buffers are sent, the reducer is told of a forward, and hooks get buckets"
        ),
    },
    "fsdp1": {
        "torch.distributed.fsdp._flat_param:FlatParamHandle": (
            "where parameters and gradients lie, whole and sharded, and when they are shown"
        ),
        "torch.distributed.fsdp._runtime_utils": (
            "when a unit is gathered, reduced and freed, and how its gradient is cast, divided and added up"
        ),
        "torch.distributed.fsdp._unshard_param_utils": (
            "what is gathered and written back where parameters are shown whole"
        ),
        "torch.distributed.fsdp.api:MixedPrecision": "what None means for each of its dtypes",
        "torch.distributed.fsdp.fully_sharded_data_parallel:FullyShardedDataParallel": (
            "the order of hooks and gathers around a forward"
        ),
    },
    "fsdp2": {
        "torch.distributed._composable.contract": "that fully_shard.state(module) is the state of a unit",
        "torch.distributed.fsdp._fully_shard._fsdp_api:MixedPrecisionPolicy": "what None means for each of its dtypes",
        "torch.distributed.fsdp._fully_shard._fsdp_collectives": (
            "in which dtype gradients are reduced, and when what our collectives give back is read, cast and divided"
        ),
        "torch.distributed.fsdp._fully_shard._fsdp_init": "which parameters become a unit's",
        "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam": (
            "which tensors a parameter and its gradient lie in, whole and sharded"
        ),
        "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup": (
            "when a unit is gathered, reduced and freed, and where its gradients are meanwhile"
        ),
        "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState": (
            "which hooks run around a unit's forward and backward, and which end a backward"
        ),
        "torch.distributed.fsdp._fully_shard._fully_shard:FSDPModule": "what the settings of a unit do",
    },
    "modules": {
        "torch.nn.modules.module:Module": (
            "in which order hooks run around a call, a state dict and a load, and what .to() does to parameters"
        ),
    },
    "optimizers": {
        "torch.amp.grad_scaler:GradScaler": "how a step is decided upon, and what an optimizer is handed",
        "torch.optim.adam:_multi_tensor_adam": (
            "that complex numbers are taken as pairs before any arithmetic but weight decay"
        ),
        "torch.optim.adam:_single_tensor_adam": (
            "that complex numbers are taken as pairs before any arithmetic but weight decay"
        ),
        "torch.optim.lr_scheduler:LRScheduler": "what a scheduler puts around optimizer.step",
        "torch.optim.optimizer:Optimizer": "in which order hooks run, and what a state dict has",
    },
    "serialization": {
        "torch.distributed.checkpoint.default_planner": "which tensors are written, and under which names",
        "torch.distributed.checkpoint.metadata": (
            "what is pickled into a directory of torch.distributed.checkpoint, read by other versions"
        ),
        "torch.distributed.checkpoint.planner_helpers": "how a tensor's slices are asked for",
        "torch.serialization:_save": "how torch lays out a file: ours has the same records",
    },
    "tensors": {
        "torch.distributed.tensor._api:DTensor": "how a shard is made, read and gathered",
        "torch.nn.parameter:Parameter": "what is taken for a parameter, and how it is copied",
    },
}
"""Area -> name -> why."""


def counted_on() -> tuple[CountedOn, ...]:
    """Return all of it, by area."""
    return tuple(
        sorted(CountedOn(area, name, why) for area, names in COUNTED_ON.items() for name, why in names.items())
    )
