"""A model that comes back from its engine: as it was before ``wrap``, with whole weights, so that anything can take it.

An engine changes the user's modules in place. The difference between two looks at them, before :func:`fsshard.wrap` and
behind it, is taken back; what the user has changed since stays.
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
Members = dict[str, Any]
"""A module's attributes by name, or its children."""


class ModelBeforeWrap:
    """A model's modules before :func:`fsshard.wrap`; their parameters are not kept alive."""

    def __init__(self, model: nn.Module) -> None:
        self._parts = []
        for module in model.modules():
            if not isinstance(module, torch.jit.ScriptModule):
                self._parts.append(_Part(module))

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
        backend = model.backend
        module = backend.module
        if backend.settings.model_mesh is not None:
            raise ModelError("a model on a mesh of more dimensions than data stays under its engine; load a checkpoint")
        backend.reshard()
        shards = ((entry, entry.local()) for entry in backend.all)
        values = gather_all(shards, backend.settings.device)
        whole = []
        for entry, value in zip(backend.all, values, strict=True):
            on_host = value.detach().to("cpu", copy=True)
            whole.append(entry.kind.to_user(on_host))
        dtypes = model._fsshard.buffers.dtypes
        backend.retire()
        parts = {}
        for part in self._parts:
            part.restore()
            parts[part.module] = part
        for entry, value in zip(backend.all, whole, strict=True):
            parameter = None
            for slot in entry.slots:
                owner = parts.get(slot.owner)
                if owner is None:
                    continue
                # A tied parameter is one object in all its places.
                if parameter is None:
                    parameter = owner.parameters[slot.attribute].with_value(value, entry.parameter)
                slot.owner._parameters[slot.attribute] = parameter
        for name, buffer in module.named_buffers():
            dtype = dtypes.get(public_name(name), buffer.dtype)
            buffer.data = buffer.to(dtype)
        unmark_managed(module.modules())


class _Part:
    """One module: what it was like, then what has been changed."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._class = type(module)
        self._before = _members(module)
        self._children = dict(module._modules)
        self._names = set(self._before)
        self.parameters = {name: _Original(value) for name, value in module._parameters.items()}

    def look_again(self) -> None:
        """Keep the differences only: the user may let go of the rest."""
        before = self._before
        after = _members(self.module)
        # restore() looks through tables of hooks for the engine's own.
        for name in _hook_tables(self.module):
            before.pop(name, None)
            after.pop(name, None)
        for name in before.keys() & after.keys():
            if before[name] is after[name]:
                del before[name], after[name]
        self._after = after
        self._wrapped_children = dict(self.module._modules)
        # Names of parameters while an engine has it.
        self._stored = set(stored_in(self.module))

    def restore(self) -> None:
        """Restore all but the parameters that an engine has had. What the user has changed since stays."""
        module = self.module
        members = vars(module)
        changed = self._before.keys() | self._after.keys()
        now = {name: members.pop(name) for name in changed & members.keys()}
        members.update(_reverted(self._before, self._after, now))
        stored = {*self.parameters, *module._parameters}
        # What a forward has made under the engine.
        for name in members.keys() - self._names:
            if name in stored or name.startswith(_MARKS):
                del members[name]
        module.__class__ = self._class
        forget_unit(module)
        _remove_hooks(module)
        children = _reverted(self._children, self._wrapped_children, dict(module._modules))
        module._modules.clear()
        module._modules.update(children)
        # hand_back() puts those here later that an engine has had.
        parameters = {}
        for name, original in self.parameters.items():
            parameters[name] = original.alive()
        for name, parameter in module._parameters.items():
            if name not in parameters and name not in self._stored:
                parameters[name] = parameter
        module._parameters.clear()
        module._parameters.update(parameters)


def _members(module: nn.Module) -> Members:
    return {key: value for key, value in vars(module).items() if key not in _HELD}


def _reverted(before: Members, after: Members, now: Members) -> Members:
    """Return ``now`` with the change from ``before`` to ``after`` reverted, where nothing was changed since."""
    members = {}
    for name in {**before, **now}:
        is_ours = now.get(name, _ABSENT) is after.get(name, _ABSENT)
        source = before if is_ours else now
        if name in source:
            members[name] = source[name]
    return members


def _remove_hooks(module: nn.Module) -> None:
    """Remove the hooks that an engine has registered."""
    tables = _hook_tables(module).values()
    numbers = set()
    for table in tables:
        numbers |= {number for number, hook in table.items() if _is_ours(hook)}
    # Tables beside one of hooks, such as whether a hook takes keywords, have the same numbers.
    for table in tables:
        for number in numbers & table.keys():
            del table[number]


def _nothing() -> None:
    """Stand for a reference to a parameter that a module does not have."""


class _Original:
    """A parameter before ``wrap``; not kept alive, as an engine lets go of whole ones."""

    def __init__(self, parameter: nn.Parameter | None) -> None:
        self._class = type(parameter)
        self.alive: Callable[[], nn.Parameter | None] = _nothing
        if parameter is not None:
            self.alive = weakref.ref(parameter)

    def with_value(self, value: Tensor, engines: nn.Parameter) -> nn.Parameter:
        """Return the parameter with its whole value, and with the user's attributes of the engine's."""
        parameter: Any = self.alive()
        # Somebody may still hold the very object, in a list of the model, say: no reference goes stale.
        if parameter is None or parameter.is_meta or parameter.dtype != value.dtype:
            parameter = nn.Parameter(value)
            if issubclass(self._class, nn.Parameter):
                parameter.__class__ = self._class
        else:
            forget_replacement(parameter)
            forget_record(parameter)
            parameter.__class__ = self._class
            _remove_marks(parameter)
            parameter.grad = None
            parameter.data = value
        parameter.requires_grad_(engines.requires_grad)
        for key, item in vars(engines).items():
            if not _is_mark(key, item):
                parameter.__dict__[key] = item
        return parameter  # type: ignore[no-any-return]


def _remove_marks(parameter: nn.Parameter) -> None:
    """Remove the attributes and hooks that an engine has put on a parameter."""
    for key, item in list(vars(parameter).items()):
        if _is_mark(key, item):
            delattr(parameter, key)
    hooks: Any = backward_hooks_of(parameter) or {}
    for number, hook in list(hooks.items()):
        if _is_ours(hook):
            del hooks[number]


def _hook_tables(module: nn.Module) -> dict[str, dict[Any, Any]]:
    """Return a module's dicts of hooks by attribute."""
    tables = {}
    for name, value in vars(module).items():
        if name.startswith("_") and "hooks" in name and isinstance(value, dict):
            tables[name] = value
    return tables


def _is_mark(key: str, item: Any) -> bool:
    return key.startswith(_MARKS) or (callable(item) and _is_ours(item))


def _is_ours(hook: Any) -> bool:
    """Return whether an engine has registered it."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    owner = getattr(hook, "__self__", None)
    if owner is not None:
        hook = type(owner)
    module_name = getattr(hook, "__module__", None)
    return str(module_name).startswith(_OURS)
