"""Models that torch.compile was put around before wrap(): compiled unit by unit instead, under their own names.

``torch.compile(module)`` is a module around the module. It is part of every name below it (``_orig_mod.``), in state
dicts and files too, and what it compiles is the module's call with the hooks of all that it holds, the engine's
included. So it is taken off, and what it asked for is asked of wrap: ``compile=`` with its arguments, for the units
within.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from fsshard.errors import ConfigurationError, ModelError
from fsshard.model.compiling import Compilation, resolve_compilation
from fsshard.torch_private.compiling import keywords_of
from fsshard.torch_private.modules import compiled_within, has_call_hooks

__all__ = ["takes_compiled_models"]

Place = tuple[dict[str, nn.Module | None], str, nn.Module]
"""The children of a parent, the name there, and the compiled module."""


def takes_compiled_models(wrap: Callable[..., Any]) -> Callable[..., Any]:
    """``wrap`` for models, and parts of models, that were compiled before: see there."""

    @functools.wraps(wrap)
    def wrapped(model: Any, *args: Any, **settings: Any) -> Any:
        if not isinstance(model, nn.Module) or not any(compiled_within(module) for module in model.modules()):
            return wrap(model, *args, **settings)
        compilation = _asked_by(model, settings.get("compile", False))
        bare, places = _bare(model)
        kinds = {type(module) for _, module in _compiled(model)}
        inner = {type(_bare(module)[0]) for _, module in _compiled(model)}
        for name in ("auto_wrap_policy", "activation_checkpointing"):
            if isinstance(settings.get(name), (set, frozenset, list, tuple)):  # of classes, or names
                chosen = set(settings[name])
                settings[name] = (chosen - kinds) | (inner if chosen & kinds else set())
        _take_off(places)
        try:
            return wrap(bare, *args, **{**settings, "compile": compilation})
        except BaseException:
            for children, name, compiled in places:
                children[name] = compiled
            raise

    return wrapped


def _bare(model: nn.Module) -> tuple[nn.Module, list[Place]]:
    """The model itself, and where in it compiled modules are."""
    while (inner := compiled_within(model)) is not None:
        model = inner
    return model, [
        (module._modules, name, child)
        for module in model.modules()
        if compiled_within(module) is None
        for name, child in module._modules.items()
        if child is not None and compiled_within(child) is not None
    ]


def _take_off(places: list[Place]) -> None:
    for children, name, compiled in places:
        children[name] = _bare(compiled)[0]


def _asked_by(model: nn.Module, asked_too: object) -> Compilation:
    """Return what the compiled modules ask for together.

    Raises:
        ConfigurationError: they ask for several things, or ``compile=`` asks for one more.
        ModelError: a compiled module has what would be lost with it.
    """
    found = list(_compiled(model))
    names = tuple(dict.fromkeys(name for name, _ in found))
    told = ", ".join(repr(name) if name else "the model" for name in names[:3])
    if asked_too is not None and asked_too is not False:
        raise ConfigurationError(f"compile={asked_too!r}: {told} was compiled by torch.compile before; leave one out")
    asked = []
    for name, module in found:
        where = f"module {name!r}" if name else "the model"
        if has_call_hooks(module):
            raise ModelError(
                f"{where}: hooks were registered on what torch.compile returned, which wrap replaces by the module "
                "within; register them on the module before torch.compile, or on what wrap returns"
            )
        keywords = keywords_of(module)
        if keywords is None:
            raise ModelError(f"{where} is kept out of torch.compile by torch.compiler.disable; wrap the bare module")
        asked.append(keywords)
    if any(keywords != asked[0] for keywords in asked):
        raise ConfigurationError(
            f"{told} were compiled before with other arguments each ({asked[0]!r} and "
            f"{next(k for k in asked if k != asked[0])!r}); compile them alike, or wrap the bare model with compile="
        )
    compilation = resolve_compilation(asked[0])
    assert compilation is not None
    return replace(compilation, within=_outermost(names))


def _compiled(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Compiled modules by the name that what is within has without them."""
    while (inner := compiled_within(model)) is not None:
        yield prefix, model
        model = inner
    for name, child in model.named_children():
        yield from _compiled(child, f"{prefix}.{name}" if prefix else name)


def _outermost(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return those that lie in no other."""
    return tuple(
        name
        for name in names
        if not any(other != name and (not other or name.startswith(f"{other}.")) for other in names)
    )
