"""Honours ``FSDP.state_dict_type(model, ...)`` around ``model.state_dict()``, under every engine.

torch's functions look for its own wrappers in the model. Under another engine than FSDP1 they find none: what was asked
for is dropped without a word, and the context ends with ``KeyError: None`` (torch 2.13).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from fsshard.errors import ConfigurationError
from fsshard.model.checks import is_managed
from fsshard.patches import STATE_DICT_TYPE
from fsshard.sharded.module import ShardedModule

__all__ = ["honour_state_dict_type"]


def honour_state_dict_type(model: ShardedModule) -> None:
    """Let torch's functions know ``model`` while it lives."""
    STATE_DICT_TYPE.keep_for(model, _request)


def _request(
    module: Any, state_dict_type: Any, state_dict_config: Any = None, optim_state_dict_config: Any = None
) -> Callable[[], None] | None:
    """Have the next ``state_dict()`` give what is asked for; what takes that back, or None for who is not ours."""
    torchs: Any = sys.modules["torch.distributed.fsdp"]
    if not isinstance(module, ShardedModule):
        inner = isinstance(module, nn.Module) and is_managed(module)
        if inner and not torchs.FullyShardedDataParallel.fsdp_modules(module):
            raise ConfigurationError(
                f"FSDP.state_dict_type: {type(module).__name__} is a module within a model that was wrapped, and "
                "holds no FSDP unit; pass what fsshard.wrap returned, and call its state_dict()"
            )
        return None
    names = {"FULL_STATE_DICT": "FullStateDictConfig", "SHARDED_STATE_DICT": "ShardedStateDictConfig"}
    config = state_dict_config or getattr(torchs, names.get(state_dict_type.name, "LocalStateDictConfig"))()
    before, module._requested_state_dict = module._requested_state_dict, config
    return partial(setattr, module, "_requested_state_dict", before)
