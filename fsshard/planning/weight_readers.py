"""Finds modules whose forward hands the weights of the modules below it to autograd, by the names in its code.

An adjoint method, a reversible block or an implicit layer gives ``child.parameters()`` to a custom Function or to
``torch.autograd.grad``. Sharded engines show whole weights in the forward of their unit only, so a child that was made
a unit without the user's word would change what such code means: it would be given shards.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import nn

_LISTS = frozenset(("parameters", "named_parameters"))
_AUTOGRAD = frozenset(("apply", "grad"))
"""``SomeFunction.apply`` and ``torch.autograd.grad``: what operators of torch compute with raises by itself."""


def readers_of_weights(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules whose forward, with what it calls, hands other modules' parameters to autograd.

    What a forward calls is found by name: methods of its class, and functions in its file's globals or in modules
    there. torch and the standard library are not followed. A reader that is not found raises in its first forward.
    """
    readers = []
    answers: dict[tuple[type, Any], set[str]] = {}
    for module in modules:
        forward = module.__dict__.get("forward", type(module).forward)
        forward = getattr(forward, "__func__", forward)
        if not isinstance(forward, FunctionType) or _is_foreign(forward):
            continue
        key = type(module), forward
        if key not in answers:
            answers[key] = _names_in(forward, type(module))
        names = answers[key]
        if names & _AUTOGRAD and (names & _LISTS or names & _names_of_weights_below(module)):
            readers.append(module)
    return readers


def _names_of_weights_below(module: nn.Module) -> set[str]:
    """Return the attributes that hold weights of modules below, and nothing in the module itself."""
    below = {name.rpartition(".")[2] for name, _ in module.named_parameters() if "." in name}
    return below - {*module._parameters, *module._buffers, *module._modules, *vars(module), *dir(type(module))}


def _names_in(forward: FunctionType, cls: type) -> set[str]:
    """Return all names that the code of a forward uses, and of the functions that it calls."""
    names: set[str] = set()
    seen: set[FunctionType] = set()
    waiting = [forward]
    while waiting:
        function = waiting.pop()
        if function in seen:
            continue
        seen.add(function)
        own = {name for code in _codes(function.__code__) for name in code.co_names}
        names |= own
        waiting += _called(own, function.__globals__, cls)
        decorated = getattr(function, "__wrapped__", None)
        if isinstance(decorated, FunctionType):
            waiting.append(decorated)
    return names


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a function, and of the functions within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _called(names: Collection[str], file: dict[str, Any], cls: type) -> list[FunctionType]:
    """Return the functions that these names may mean in a file and in a class."""
    imported = [value for value in file.values() if isinstance(value, ModuleType) and not _is_foreign(value)]
    places = [file, *map(vars, cls.__mro__), *map(vars, imported)]
    meanings = [place.get(name) for place in places for name in names]
    functions = [getattr(meaning, "__func__", meaning) for meaning in meanings]  # of static and class methods
    return [value for value in functions if isinstance(value, FunctionType) and not _is_foreign(value)]


def _is_foreign(value: FunctionType | ModuleType) -> bool:
    """Return whether a function or a module is torch's or the standard library's."""
    name = value.__name__ if isinstance(value, ModuleType) else value.__module__
    package = (name or "").partition(".")[0]
    return package == "torch" or package in sys.stdlib_module_names
