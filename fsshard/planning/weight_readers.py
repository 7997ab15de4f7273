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
# SomeFunction.apply and torch.autograd.grad: what operators of torch compute with raises by itself.
_AUTOGRAD = frozenset(("apply", "grad"))


def readers_of_weights(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules whose forward, with what it calls, hands other modules' parameters to autograd.

    What a forward calls is found by name: methods of its class, and functions in its file's globals or in modules
    there. torch and the standard library are not followed. A reader that is not found raises in its first forward.
    """
    readers = []
    answers = {}
    for module in modules:
        cls = type(module)
        # A TorchScript class has no forward (torch 2.13: an AttributeError).
        forward = module.__dict__.get("forward", getattr(cls, "forward", None))
        forward = getattr(forward, "__func__", forward)
        if not isinstance(forward, FunctionType) or _is_foreign(forward):
            continue
        key = cls, forward
        if key not in answers:
            answers[key] = _names_in(forward, cls)
        names = answers[key]
        # Most forwards hand nothing to autograd.
        if not names & _AUTOGRAD:
            continue
        if names & _LISTS or names & _names_of_weights_below(module):
            readers.append(module)
    return readers


def _names_of_weights_below(module: nn.Module) -> set[str]:
    """Return the attributes that hold weights of modules below, and nothing in the module itself."""
    below = set()
    for name, _ in module.named_parameters():
        path, _, attribute = name.rpartition(".")
        if path:
            below.add(attribute)
    own = {*module._parameters, *module._buffers, *module._modules}
    own.update(vars(module))
    own.update(dir(type(module)))
    return below - own


def _names_in(forward: FunctionType, cls: type) -> set[str]:
    """Return all names that the code of a forward uses, and of the functions that it calls."""
    names = set()
    seen = set()
    waiting = [forward]
    while waiting:
        function = waiting.pop()
        if function in seen:
            continue
        seen.add(function)
        own: set[str] = set()
        for code in _codes(function.__code__):
            own.update(code.co_names)
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
    places = [file, *map(vars, cls.__mro__)]
    for value in file.values():
        if isinstance(value, ModuleType) and not _is_foreign(value):
            places.append(vars(value))
    functions = []
    for place in places:
        for name in names:
            value = place.get(name)
            # A static or class method has its function within it.
            value = getattr(value, "__func__", value)
            if isinstance(value, FunctionType) and not _is_foreign(value):
                functions.append(value)
    return functions


def _is_foreign(value: FunctionType | ModuleType) -> bool:
    """Return whether a function or a module is torch's or the standard library's."""
    name = value.__module__ if isinstance(value, FunctionType) else value.__name__
    package = (name or "").partition(".")[0]
    return package == "torch" or package in sys.stdlib_module_names
