"""What is counted on in the files of ``torch.save`` and of torch.distributed.checkpoint; nothing private is used."""

from __future__ import annotations

from fsshard.torch_private.registry import Area

AREA = Area("serialization")

# ------------------------------------------------------------------------------------------------ counted on

AREA.stands_on(
    {
        "torch.serialization:_save": "how torch lays out a file: ours has the same records",
        "torch.distributed.checkpoint.metadata": (
            "what is pickled into a directory of torch.distributed.checkpoint, read by other versions"
        ),
        "torch.distributed.checkpoint.planner_helpers": "how a tensor's slices are asked for",
        "torch.distributed.checkpoint.default_planner": "which tensors are written, and under which names",
    }
)
