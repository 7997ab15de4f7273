"""Links to torch's documentation, from a table: no inventory is fetched when the site is built. A hook of mkdocs.

Signatures and docstrings name torch's classes by their full name, ``torch.nn.Module``. Each of the table is told to
autorefs as if it were on a page of ours. A name that is not in the table is shown without a link.
"""

from __future__ import annotations

from typing import Any

HOME = "https://docs.pytorch.org/docs/stable"

NAMES = {
    "torch.Tensor": "tensors.html#torch.Tensor",
    "torch.compile": "generated/torch.compile.html",
    "torch.device": "tensor_attributes.html#torch.device",
    "torch.dtype": "tensor_attributes.html#torch.dtype",
    "torch.load": "generated/torch.load.html",
    "torch.save": "generated/torch.save.html",
    "torch.autograd.grad": "generated/torch.autograd.grad.html",
    "torch.distributed.ProcessGroup": "distributed.html",
    "torch.distributed.checkpoint": "distributed.checkpoint.html",
    "torch.distributed.device_mesh.DeviceMesh": "distributed.html#torch.distributed.device_mesh.DeviceMesh",
    "torch.distributed.device_mesh.init_device_mesh": "distributed.html#torch.distributed.device_mesh.init_device_mesh",
    "torch.distributed.fsdp.FullyShardedDataParallel": "fsdp.html#torch.distributed.fsdp.FullyShardedDataParallel",
    "torch.distributed.fsdp.MixedPrecision": "fsdp.html#torch.distributed.fsdp.MixedPrecision",
    "torch.distributed.fsdp.ShardingStrategy": "fsdp.html#torch.distributed.fsdp.ShardingStrategy",
    "torch.distributed.fsdp.fully_shard": "distributed.fsdp.fully_shard.html",
    "torch.nn.Module": "generated/torch.nn.Module.html",
    "torch.nn.Parameter": "generated/torch.nn.parameter.Parameter.html",
    "torch.nn.parallel.DistributedDataParallel": "generated/torch.nn.parallel.DistributedDataParallel.html",
    "torch.nn.utils.clip_grad_norm_": "generated/torch.nn.utils.clip_grad_norm_.html",
    "torch.optim.Optimizer": "optim.html#torch.optim.Optimizer",
    "torch.optim.lr_scheduler.LRScheduler": "generated/torch.optim.lr_scheduler.LRScheduler.html",
    "torch.utils.checkpoint": "checkpoint.html",
    "torch.utils.data.DataLoader": "data.html#torch.utils.data.DataLoader",
}
"""Full name -> its place in the documentation."""


def on_pre_build(config: Any) -> None:
    """Tell autorefs where torch's names are."""
    autorefs = config.plugins["autorefs"]
    for name, place in NAMES.items():
        autorefs.register_url(name, f"{HOME}/{place}")
