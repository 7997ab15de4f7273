"""Honours ``FSDP.state_dict_type(model, ...)`` around ``model.state_dict()``, under every engine.

torch's functions look for its own wrappers in the model. Under another engine than FSDP1 they find none: what was asked
for is dropped without a word, and the context ends with ``KeyError: None`` (torch 2.13). So they are replaced, once, by
functions that look at the model first.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from fsshard.errors import ConfigurationError
from fsshard.model.checks import is_managed
from fsshard.sharded.module import ShardedModule

__all__ = ["watch_state_dict_types"]

TORCHS = "torch.distributed.fsdp"


def watch_state_dict_types() -> None:
    """From now on torch's functions know wrapped models. Nothing is imported: who calls them has imported them."""
    if TORCHS not in sys.modules:
        return
    fsdp: Any = sys.modules[TORCHS].FullyShardedDataParallel
    torchs_set, torchs_context = fsdp.set_state_dict_type, fsdp.state_dict_type
    if hasattr(torchs_set, "_fsshard_asks"):
        return

    def set_state_dict_type(module: Any, state_dict_type: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(module, ShardedModule):
            if isinstance(module, nn.Module) and is_managed(module) and not fsdp.fsdp_modules(module):
                raise ConfigurationError(
                    f"FSDP.state_dict_type: {type(module).__name__} is a module within a model that was wrapped, and "
                    "holds no FSDP unit; pass what fsshard.wrap returned, and call its state_dict()"
                )
            return torchs_set(module, state_dict_type, *args, **kwargs)
        before, module._requested_state_dict = module._requested_state_dict, _config(state_dict_type, *args, **kwargs)
        return before

    @contextlib.contextmanager
    def state_dict_type(module: Any, state_dict_type: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        if not isinstance(module, ShardedModule):
            with torchs_context(module, state_dict_type, *args, **kwargs):
                yield
            return
        before = set_state_dict_type(module, state_dict_type, *args, **kwargs)
        try:
            yield
        finally:
            module._requested_state_dict = before

    set_state_dict_type._fsshard_asks = True  # type: ignore[attr-defined]
    fsdp.set_state_dict_type = staticmethod(set_state_dict_type)
    fsdp.state_dict_type = staticmethod(state_dict_type)


def _config(state_dict_type: Any, state_dict_config: Any = None, optim_state_dict_config: Any = None) -> Any:
    """What ``model.state_dict(config=...)`` takes, or refuses in words."""
    if state_dict_config is not None:
        return state_dict_config
    torchs: Any = sys.modules[TORCHS]
    names = {"FULL_STATE_DICT": "FullStateDictConfig", "SHARDED_STATE_DICT": "ShardedStateDictConfig"}
    return getattr(torchs, names.get(state_dict_type.name, "LocalStateDictConfig"))()
