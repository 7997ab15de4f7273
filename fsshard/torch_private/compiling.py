"""torch.compile: how to stay out of it, and what a module was compiled with."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from fsshard.torch_private.registry import Area

AREA = Area("compiling")
F = TypeVar("F", bound=Callable[..., Any])

_disable: Any = AREA.take(
    "torch._compile:_disable_dynamo",
    use="runs a function eagerly inside of what is compiled; imports dynamo no sooner than it is called",
    otherwise="torch.compile over a recomputed block breaks its graph somewhere else",
    fallback=lambda function: function,
)


def disable_dynamo(function: F) -> F:
    """``function``, which torch.compile leaves alone."""
    found: F = _disable(function)
    return found


_CONTEXT = AREA.attribute(
    "torch._dynamo.eval_frame:OptimizedModule.dynamo_ctx",
    use="how a module was compiled by torch.compile(module)",
    otherwise="models that were compiled before wrap()",
)
_BACKEND = AREA.attribute(
    "torch._dynamo.eval_frame:_TorchDynamoContext._torchdynamo_orig_backend",
    use="torch.compile's backend within what dynamo puts around it",
    otherwise="models that were compiled before wrap()",
)


def keywords_of(compiled: nn.Module) -> dict[str, Any] | None:
    """The arguments of ``torch.compile`` by which a module was compiled; None where dynamo was kept out of it."""
    context = getattr(compiled, _CONTEXT)
    callback = context.callback
    while hasattr(callback, _BACKEND):
        callback = getattr(callback, _BACKEND)
    if not callable(callback):
        return None
    name = getattr(callback, "compiler_name", None)
    if name == "inductor":
        keywords: dict[str, Any] = {"options": dict(callback.config)} if callback.config else {}
    elif name is None:
        keywords = {"backend": callback}
    else:  # a name that was registered, or a function's
        is_named = name in torch.compiler.list_backends(exclude_tags=())
        keywords = {"backend": name if is_named else callback.compiler_fn, **callback.kwargs}
    if getattr(context, "fullgraph", False):
        keywords["fullgraph"] = True
    if getattr(callback, "dynamic", None) is not None:
        keywords["dynamic"] = callback.dynamic
    return keywords


def import_dynamo() -> None:
    """Return what DDP, FSDP and each optimizer would import when they are first used, which takes seconds."""
    if hasattr(torch, "compile"):
        importlib.import_module("torch._dynamo")
