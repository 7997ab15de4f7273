"""A model that comes back from its engine: as it was before ``wrap``, with whole weights, so that anything can take it.

An engine changes the user's modules in place: their classes, hooks, children and parameters. What :func:`fsshard.wrap`
has changed is the difference between two looks at the modules, one before it and one behind it; that difference is
taken back, and what the user has changed since stays. Parameters are the very objects of before, where somebody still
holds them (a list in the model, say), so that no reference goes stale.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fsshard.backends.whole import gather_all
from fsshard.complex_params.flattened import stored_in
from fsshard.complex_params.replaced import forget_replacement
from fsshard.errors import ModelError
from fsshard.model.checks import unmark_managed
from fsshard.sharded.module import ShardedModule
from fsshard.torch_private.fsdp2 import forget_unit
from fsshard.torch_private.tensors import backward_hooks_of

__all__ = ["Bare"]

_OURS = ("fsshard.", "torch.distributed.")
_MARKS = ("_fsshard", "_fsdp", "_is_fsdp")
_HELD = ("_parameters", "_buffers", "_modules")
_ABSENT = object()


class Bare:
    """A model's modules before :func:`fsshard.wrap`, which are looked at and not kept alive."""

    def __init__(self, model: nn.Module) -> None:
        self._parts = [_Part(m) for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]

    def wrapped(self) -> None:
        """Learn what has been changed since: to be called right after ``wrap``."""
        for part in self._parts:
            part.look_again()

    def hand_back(self, model: ShardedModule) -> None:
        """Let the user's model be what it was, with whole weights in host memory. Collective.

        Buffers stay this rank's. Gradients are dropped; ``model`` and its optimizers must not be used any more.

        Args:
            model: what ``wrap`` made of it.

        Raises:
            ModelError: other mesh dimensions than data divide it, too; nothing was changed.
        """
        backend, module = model.backend, model.backend.module
        if backend.settings.model_mesh is not None:
            raise ModelError("a model on a mesh of more dimensions than data stays under its engine; load a checkpoint")
        backend.reshard()
        values = gather_all(((entry, entry.local()) for entry in backend.all), backend.settings.device)
        whole: dict[str, Tensor] = {}
        for entry, stored in zip(backend.all, values, strict=True):
            whole[entry.name] = entry.kind.to_user(stored.detach().to("cpu", copy=True))
        dtypes = {name: model.buffers_held.dtypes.get(name, buffer.dtype) for name, buffer in module.named_buffers()}
        slots = [(entry, slot) for entry in backend.all for slot in entry.slots]
        backend.retire()
        for part in self._parts:
            part.restore()
        memo: dict[str, nn.Parameter] = {}
        entries = {(id(slot.owner), slot.attribute): entry for entry, slot in slots}
        for part in self._parts:
            for name, original in part.parameters.items():
                entry_there = entries.get((id(part.module), name))
                if not original.was_there:
                    continue
                if entry_there is None:  # no engine has had it
                    part.module._parameters[name] = original.alive
                    continue
                if entry_there.name not in memo:
                    value = whole.pop(entry_there.name)
                    memo[entry_there.name] = original.with_value(value, entry_there.parameter)
                part.module._parameters[name] = memo[entry_there.name]
        for name, buffer in module.named_buffers():
            buffer.data = buffer.to(dtypes.get(name, buffer.dtype))
        unmark_managed(module)


class _Part:
    """One module: what it was like, then what has been changed."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self._class = type(module)
        self._members = {k: v for k, v in vars(module).items() if k not in _HELD}
        self._children = self._wrapped_children = dict(module._modules)
        self.parameters = {name: _Original(value) for name, value in module._parameters.items()}
        self._names = set(self._members)
        self._stored: set[str] = set()  # names of parameters while an engine has it
        self._changed: dict[str, tuple[Any, Any]] = {}  # name -> what it was, and became by wrap

    @property
    def module(self) -> nn.Module:
        """The module, which its model keeps alive."""
        module = self._module()
        assert module is not None, "its model holds it"
        return module

    def look_again(self) -> None:
        """Keep the differences only: the user may let go of the rest."""
        module, before = self.module, self._members
        now = {k: v for k, v in vars(module).items() if k not in _HELD}
        pairs = {key: (before.get(key, _ABSENT), now.get(key, _ABSENT)) for key in {**before, **now}}
        hooks = {key for key, _ in _hook_tables(module)}
        self._changed = {key: pair for key, pair in pairs.items() if pair[0] is not pair[1] and key not in hooks}
        self._wrapped_children, self._stored = dict(module._modules), set(stored_in(module))
        self._members = {}

    def restore(self) -> None:
        """Restore all but parameters, whose places are empty then. What the user has changed since stays."""
        module = self.module
        members = module.__dict__
        for key, (before, after) in self._changed.items():
            if members.get(key, _ABSENT) is after:
                members.pop(key, None)
                if before is not _ABSENT:
                    members[key] = before
        stored = {*self.parameters, *module._parameters}
        for key in [k for k in members if (k.startswith(_MARKS) or k in stored) and k not in self._names]:
            del members[key]  # made by a forward
        module.__class__ = self._class
        forget_unit(module)
        tables = [table for _, table in _hook_tables(module)]
        gone = {number for table in tables for number, hook in table.items() if _is_ours(hook)}
        for table in tables:  # those beside a table of hooks have the same numbers
            for number in gone & set(table):
                del table[number]
        children = self._children_of_now()
        module._modules.clear()
        module._modules.update(children)
        users = {k: v for k, v in module._parameters.items() if k not in self.parameters and k not in self._stored}
        module._parameters.clear()
        module._parameters.update({**dict.fromkeys(self.parameters), **users})

    def _children_of_now(self) -> dict[str, nn.Module | None]:
        """Return the child modules to restore: those from before ``wrap``, with what the user has changed since."""
        before, wrapped, now = self._children, self._wrapped_children, self.module._modules
        children = {}
        for name in {**before, **now}:
            if name in now and now[name] is not wrapped.get(name):
                children[name] = now[name]
            elif name in before and (name in now or name not in wrapped):
                children[name] = before[name]
        return children


class _Original:
    """A parameter before ``wrap``; not kept alive, as an engine lets go of whole ones."""

    def __init__(self, parameter: nn.Parameter | None) -> None:
        self.was_there = parameter is not None
        self._class = type(parameter)
        self._reference = None if parameter is None else weakref.ref(parameter)

    @property
    def alive(self) -> nn.Parameter | None:
        """The parameter itself, where somebody still holds it."""
        return None if self._reference is None else self._reference()

    def with_value(self, value: Tensor, engines: nn.Parameter) -> nn.Parameter:
        """Return the parameter with its whole value, and with the user's attributes of the engine's."""
        parameter: Any = self.alive
        trainable = engines.requires_grad
        extra = {key: item for key, item in vars(engines).items() if not _is_mark(key, item)}
        if parameter is None or parameter.is_meta or parameter.dtype != value.dtype:
            parameter = nn.Parameter(value, requires_grad=trainable)
            if issubclass(self._class, nn.Parameter):
                parameter.__class__ = self._class
        else:
            forget_replacement(parameter)
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


def _hook_tables(module: nn.Module) -> Iterator[tuple[str, dict[Any, Any]]]:
    for key, table in vars(module).items():
        if key.startswith("_") and "hooks" in key and isinstance(table, Mapping):
            yield key, table  # type: ignore[misc]


def _is_mark(key: str, item: Any) -> bool:
    return key.startswith(_MARKS) or (callable(item) and _is_ours(item))


def _is_ours(hook: Any) -> bool:
    """Return whether an engine has registered it."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    owner = getattr(hook, "__self__", None)
    found = getattr(hook, "__module__", None) if owner is None else type(owner).__module__
    return str(found).startswith(_OURS)
