"""What is in a file of ``torch.save``: the functions that rebuild its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from fsshard.torch_private.registry import Area

__all__ = ["legacy_storage_names", "rebuild_tensor", "rebuild_tensor_of_any_dtype"]

AREA = Area("serialization")
_LOST = "exporting a checkpoint to a file of torch.save"

legacy_storage_names: Callable[[], Mapping[torch.dtype, str]] = AREA.take(
    "torch.storage:_dtype_to_storage_type_map",
    source="torch/storage.py",
    use="the class of storage that a file names for a dtype",
    otherwise=_LOST,
)
rebuild_tensor: Any = AREA.take(
    "torch._utils:_rebuild_tensor_v2",
    source="torch/_utils.py",
    use="the function that a file names for a tensor",
    otherwise=_LOST,
)
rebuild_tensor_of_any_dtype: Any = AREA.take(
    "torch._utils:_rebuild_tensor_v3",
    source="torch/_utils.py",
    use="the same for dtypes that have no class of storage",
    otherwise=_LOST,
)

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
