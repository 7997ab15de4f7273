"""tltorch's factorised weights, which store pairs of reals themselves, under names of their own."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from fsshard.complex_params.flattened import Flattened, flattened_class, is_tensorfied
from fsshard.complex_params.pairs import SUFFIX, Kind

__all__ = ["adopt_factorised", "factorised_classes"]


def factorised_classes() -> tuple[type, type] | None:
    """(ComplexHandler, ComplexFactorList) when tltorch is in use; a model made of it has imported it."""
    handlers = sys.modules.get("tltorch.factorized_tensors.complex_factorized_tensors")
    lists = sys.modules.get("tltorch.utils.parameter_list")
    return (handlers.ComplexHandler, lists.ComplexFactorList) if handlers and lists else None


def adopt_factorised(module: nn.Module, handler: type, factor_list: type) -> None:
    if isinstance(module, factor_list) and not is_tensorfied(module):
        module.__class__ = flattened_class(type(module), (), _RealListFlattened)
    elif isinstance(module, handler) and not is_tensorfied(module):
        present = [name for name, parameter in module._parameters.items() if parameter is not None]
        if present:
            stored = {name + SUFFIX: module._parameters[name] for name in present}
            module._parameters.clear()
            module._parameters.update(stored)
            views = tuple((name, Kind.RENAMED) for name in present)
            module.__class__ = flattened_class(type(module), views, _HandlerFlattened)


class _HandlerFlattened(Flattened):
    """tltorch's ``ComplexHandler`` (SFNO, ``factorization="ComplexTucker"``).

    It stores real tensors under the user's name already, but its ``__setattr__`` and ``register_*`` accept complex
    ones only, so an engine cannot put its real tensors there ("view_as_real is only supported for complex tensors").
    The storage gets another name, for which these overrides step aside. Its state dict stays real, as it is natively.
    """

    _fsshard_holds_reals = True

    def __setattr__(self, name: str, value: Any) -> None:
        if name.endswith(SUFFIX):
            nn.Module.__setattr__(self, name, value)
        elif name in type(self)._fsshard_views and isinstance(value, nn.Parameter):
            nn.Module.__setattr__(self, name + SUFFIX, nn.Parameter(torch.view_as_real(value.detach())))
        else:
            super(Flattened, self).__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name.endswith(SUFFIX):
            return nn.Module.__getattr__(self, name)
        return super(Flattened, self).__getattr__(name)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if name.endswith(SUFFIX):
            nn.Module.register_parameter(self, name, param)
        else:
            super().register_parameter(name, param)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        if name.endswith(SUFFIX):
            nn.Module.register_buffer(self, name, tensor, persistent)
        else:
            super().register_buffer(name, tensor)


class _RealListFlattened(Flattened):
    """tltorch's ``ComplexFactorList``: storage and names are fine, but registering must accept real tensors."""

    _fsshard_holds_reals = True

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if param is not None and param.is_complex():
            super().register_parameter(name, param)
        else:
            nn.Module.register_parameter(self, name, param)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        if tensor is not None and tensor.is_complex():
            super().register_buffer(name, tensor)
        else:
            nn.Module.register_buffer(self, name, tensor, persistent)
