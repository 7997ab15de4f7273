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
