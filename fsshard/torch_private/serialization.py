"""What is counted on in the files of ``torch.save`` and of torch.distributed.checkpoint; nothing private is used."""

from __future__ import annotations

from fsshard.torch_private.registry import Area

AREA = Area("serialization")

# ------------------------------------------------------------------------------------------------ counted on

AREA.stands_on(
    "torch.serialization:_save",
    why="how torch lays out a file: ours has the same records",
)
AREA.stands_on(
    "torch.distributed.checkpoint.metadata",
    why="what is pickled into a directory of torch.distributed.checkpoint, read by other versions",
)
AREA.stands_on(
    "torch.distributed.checkpoint.planner_helpers",
    why="how a tensor's slices are asked for",
)
AREA.stands_on(
    "torch.distributed.checkpoint.default_planner",
    why="which tensors are written, and under which names",
)
