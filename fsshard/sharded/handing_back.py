"""A model that comes back from its engine: as it was before ``wrap``, with whole weights, so that anything can take it.

An engine changes the user's modules in place. The difference between two looks at them, before :func:`fsshard.wrap` and
behind it, is taken back; what the user has changed since stays. Parameters are the very objects of before, where
somebody still holds them (a list in the model, say), so that no reference goes stale.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fsshard.backends.whole import gather_all
from fsshard.complex_params.flattened import stored_in
from fsshard.complex_params.parameter_records import forget_record
from fsshard.complex_params.replaced import forget_replacement
from fsshard.complex_params.slots import public_name
from fsshard.errors import ModelError
from fsshard.model.checks import unmark_managed
from fsshard.sharded.module import ShardedModule
from fsshard.torch_private.fsdp2 import forget_unit
from fsshard.torch_private.tensors import backward_hooks_of

_OURS = ("fsshard.", "torch.distributed.")
_MARKS = ("_fsshard", "_fsdp", "_is_fsdp")
_HELD = ("_parameters", "_buffers", "_modules")
_ABSENT = object()


class Bare:
    """A model's modules before :func:`fsshard.wrap`; their parameters are not kept alive."""

    def __init__(self, model: nn.Module) -> None:
        self._parts = [_Part(m) for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]

    def wrapped(self) -> None:
        """Learn what has been changed since: to be called right after ``wrap``."""
        for part in self._parts:
            part.look_again()

    def hand_back(self, model: ShardedModule) -> None:
        """Let the user's model be what it was before ``wrap`` made ``model`` of it, whole, in host memory. Collective.

        Buffers stay this rank's. Gradients are dropped; ``model`` and its optimizers must not be used any more.

        Raises:
            ModelError: other mesh dimensions than data divide it, too; nothing was changed.
        """
        backend, module = model.backend, model.backend.module
        if backend.settings.model_mesh is not None:
            raise ModelError("a model on a mesh of more dimensions than data stays under its engine; load a checkpoint")
        backend.reshard()
        values = gather_all(((entry, entry.local()) for entry in backend.all), backend.settings.device)
        whole = [e.kind.to_user(v.detach().to("cpu", copy=True)) for e, v in zip(backend.all, values, strict=True)]
        users = model._fsshard.buffers.dtypes
        dtypes = {name: users.get(public_name(name), buffer.dtype) for name, buffer in module.named_buffers()}
        backend.retire()
        for part in self._parts:
            part.restore()
        parts = {id(part.module): part for part in self._parts}
        for entry, value in zip(backend.all, whole, strict=True):
            places = [(parts[id(slot.owner)], slot.attribute) for slot in entry.slots if id(slot.owner) in parts]
            if places:
                part, name = places[0]
                parameter = part.parameters[name].with_value(value, entry.parameter)
                for part, name in places:
                    part.module._parameters[name] = parameter
        for name, buffer in module.named_buffers():
            buffer.data = buffer.to(dtypes.get(name, buffer.dtype))
        unmark_managed(module.modules())


class _Part:
    """One module: what it was like, then what has been changed."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self._class = module, type(module)
        self._before, self._children = _members(module), dict(module._modules)
        self._names = set(self._before)
        self.parameters = {name: _Original(value) for name, value in module._parameters.items()}

    def look_again(self) -> None:
        """Keep the differences only: the user may let go of the rest."""
        before, now = self._before, _members(self.module)
        self._changed = {k for k in {**before, **now} if before.get(k, _ABSENT) is not now.get(k, _ABSENT)}
        self._changed -= _hook_tables(self.module).keys()
        self._before, self._after = ({k: v for k, v in each.items() if k in self._changed} for each in (before, now))
        self._wrapped_children = dict(self.module._modules)
        self._stored = set(stored_in(self.module))  # names of parameters while an engine has it

    def restore(self) -> None:
        """Restore all but the parameters that an engine has had. What the user has changed since stays."""
        module, members = self.module, vars(self.module)
        now = {key: members.pop(key) for key in self._changed & members.keys()}
        members.update(_taken_back(self._before, self._after, now))
        stored = {*self.parameters, *module._parameters}
        for key in [k for k in members if (k.startswith(_MARKS) or k in stored) and k not in self._names]:
            del members[key]  # made by a forward
        module.__class__ = self._class
        forget_unit(module)
        tables = _hook_tables(module).values()
        gone = {number for table in tables for number, hook in table.items() if _is_ours(hook)}
        for table in tables:  # those beside a table of hooks have the same numbers
            for number in gone & set(table):
                del table[number]
        children = _taken_back(self._children, self._wrapped_children, dict(module._modules))
        module._modules.clear()
        module._modules.update(children)
        users = {k: v for k, v in module._parameters.items() if k not in self.parameters and k not in self._stored}
        module._parameters.clear()  # those that an engine has had are put here later
        module._parameters.update({**{name: original.alive() for name, original in self.parameters.items()}, **users})


def _members(module: nn.Module) -> dict[str, Any]:
    return {key: value for key, value in vars(module).items() if key not in _HELD}


def _taken_back(before: dict[str, Any], after: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Return ``now`` with what became ``after`` of ``before`` taken back, where it was not changed since."""
    is_ours = {key: now.get(key, _ABSENT) is after.get(key, _ABSENT) for key in (*before, *now)}
    sources = ((key, before if ours else now) for key, ours in is_ours.items())
    return {key: source[key] for key, source in sources if key in source}


class _Original:
    """A parameter before ``wrap``; not kept alive, as an engine lets go of whole ones."""

    def __init__(self, parameter: nn.Parameter | None) -> None:
        self._class = type(parameter)
        self.alive: Callable[[], nn.Parameter | None] = (lambda: None) if parameter is None else weakref.ref(parameter)

    def with_value(self, value: Tensor, engines: nn.Parameter) -> nn.Parameter:
        """Return the parameter with its whole value, and with the user's attributes of the engine's."""
        parameter: Any = self.alive()
        trainable = engines.requires_grad
        extra = {key: item for key, item in vars(engines).items() if not _is_mark(key, item)}
        if parameter is None or parameter.is_meta or parameter.dtype != value.dtype:
            parameter = nn.Parameter(value, requires_grad=trainable)
            if issubclass(self._class, nn.Parameter):
                parameter.__class__ = self._class
        else:
            forget_replacement(parameter)
            forget_record(parameter)
            parameter.__class__ = self._class
            for key in [key for key, item in vars(parameter).items() if _is_mark(key, item)]:
                del parameter.__dict__[key]
            hooks: Any = backward_hooks_of(parameter) or {}
            for number in [n for n, hook in hooks.items() if _is_ours(hook)]:
                del hooks[number]
            parameter.grad = None
            parameter.data = value
            parameter.requires_grad_(trainable)
        parameter.__dict__.update(extra)
        return parameter  # type: ignore[no-any-return]


def _hook_tables(module: nn.Module) -> dict[str, dict[Any, Any]]:
    return {k: table for k, table in vars(module).items() if k[0] == "_" and "hooks" in k and isinstance(table, dict)}


def _is_mark(key: str, item: Any) -> bool:
    return key.startswith(_MARKS) or (callable(item) and _is_ours(item))


def _is_ours(hook: Any) -> bool:
    """Return whether an engine has registered it."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    owner = getattr(hook, "__self__", None)
    found = getattr(hook, "__module__", None) if owner is None else type(owner).__module__
    return str(found).startswith(_OURS)
