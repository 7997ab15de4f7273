"""Refuses to copy, save, load, or read numbers of a part of the weights as if it were the whole.

``torch.save(model.module.state_dict())`` on rank 0 is how models under DDP are saved. Where the model is divided rank 0
has a part, and would write that without a word; a state dict of the whole needs every rank, and rank 0 alone would wait
in vain for the others. So the user's own modules refuse, and say what to write instead.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import FrameType
from typing import Any, NoReturn, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fsshard.errors import FsshardError
from fsshard.patches import DTENSOR_ITEM
from fsshard.torch_private.modules import load_state_dict_pre_hooks, state_dict_pre_hooks

SAVE = (
    "on every rank write `state = model.state_dict(rank0_only=True, offload_to_cpu=True)`, where model is "
    "what fsshard.wrap returned, then torch.save(state, file) on rank 0; or fsshard.save(folder, model, optimizer). "
    "Where another library asks, let it do so within `with model.full_parameters():`, entered on every rank"
)
LOAD = "call load_state_dict of what fsshard.wrap returned, on every rank, or fsshard.load"


class PartsGuard:
    """Watches over the modules and parameters of one model under an engine that divides it.

    Args:
        root: the user's model, with whatever an engine has put into its tree.
        parameters: what the engine holds, each a part.
        torchs_own: leave torch.distributed.checkpoint alone, which knows what parts these are.

    Attributes:
        save: how users save whole weights, for errors; a front whose users call no ``wrap`` puts its own words here.
        load: how they load them.
    """

    save, load = SAVE, LOAD

    def __init__(self, root: nn.Module, parameters: Iterable[Tensor], *, torchs_own: bool) -> None:
        self._torchs_own = torchs_own
        self._lifted = 0
        for module in _tree(root):
            # What torch.jit has compiled takes no hooks, and has no parameters here: wrap refuses it where it has some.
            if isinstance(module, torch.jit.ScriptModule):
                continue
            _guards[module] = weakref.ref(self)
            # Functions of this file: hooks go along into copies and pickles of a module. In front of the engine's own,
            # since FSDP1's gathers the unit, and leaves it gathered after an exception (torch 2.13).
            save = module.register_state_dict_pre_hook(_before_state_dict)
            load = module.register_load_state_dict_pre_hook(_before_load)
            cast(Any, state_dict_pre_hooks(module)).move_to_end(save.id, last=False)
            cast(Any, load_state_dict_pre_hooks(module)).move_to_end(load.id, last=False)
        for parameter in parameters:
            # Both are looked up on the object before its class. A module that has it cannot be copied either, which
            # FSDP1 would allow: AveragedModel(model.module) would average parts (torch 2.13).
            parameter.__dict__["__reduce_ex__"] = parameter.__dict__["__deepcopy__"] = refuse_parameter

    @contextlib.contextmanager
    def lifted(self) -> Iterator[None]:
        """Context in which state dicts may be taken."""
        self._lifted += 1
        try:
            yield
        finally:
            self._lifted -= 1

    def admits(self, given: Collection[Any] | None) -> bool:
        """Return whether a state dict may be taken now, or ``given`` be loaded."""
        if self._lifted or not self._torchs_own:
            return bool(self._lifted)
        if given is None:
            return _asked_by_torch()
        return {Tensor, nn.Parameter}.isdisjoint(map(type, given))


def _tree(root: nn.Module) -> dict[nn.Module, None]:
    """Return all modules, and what an engine has put around them, which ``modules()`` does not show."""
    modules = {root: None}
    for child in root.children():
        modules |= _tree(child)
    return modules


# By the modules themselves, which copies of them are not. The guard of a model that was let go admits nothing.
_guards: WeakKeyDictionary[nn.Module, weakref.ref[PartsGuard]] = WeakKeyDictionary()


def _before_state_dict(module: nn.Module, *_: Any) -> None:
    if (watched := _guards.get(module)) is not None:
        guard = watched()
        if guard is None or not guard.admits(None):
            raise FsshardError(
                f"state_dict() of {_named(module)}, a module under the engine, has this rank's part of the weights; "
                + (SAVE if guard is None else guard.save)
            )


def _before_load(module: nn.Module, state_dict: Mapping[str, Any], prefix: str, *_: Any) -> None:
    names = [prefix + name for name, parameter in module._parameters.items() if parameter is not None]
    given = [state_dict[name] for name in names if name in state_dict]
    if given and (watched := _guards.get(module)) is not None:
        guard = watched()
        if guard is None or not guard.admits(given):
            raise FsshardError(
                f"load_state_dict of {_named(module)}, a module under the engine, which has this rank's part of the "
                f"weights; {LOAD if guard is None else guard.load}"
            )


def _asked_by_torch() -> bool:
    """Return whether torch.distributed.checkpoint asks: at most the hooks and nn.Module are in between."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _module_of(frame).startswith(("torch.nn.modules.", __name__)):
        frame = frame.f_back
    return frame is not None and _module_of(frame).startswith("torch.distributed.checkpoint")


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))


def _named(module: nn.Module) -> str:
    """Return the class as the user knows it; FSDP2 makes one called ``FSDP...`` of it (torch 2.13)."""
    cls = type(module)
    return cls.__mro__[2].__name__ if cls.__mro__[1].__name__ == "FSDPModule" else cls.__name__


def refuse_parameter(*_: Any) -> NoReturn:
    """Raise in place of ``__reduce_ex__`` and ``__deepcopy__``, which pickle and copy ask."""
    raise FsshardError(
        "a sharded parameter, or a module that has one, cannot be copied or pickled: it is this rank's part only. To "
        f"save it, {SAVE}. To copy a module, call copy.deepcopy within `with model.full_parameters():` on every rank "
        "(backend 'fsdp'), or load the state dict into a bare model"
    )


def refuse_numbers_of_parts(backend: Any) -> None:
    """Let DTensors over the engine's meshes that are parts, or sums that are not summed yet, give no numbers.

    ``item()``, ``float()`` and ``bool()`` of a DTensor are those of the rank's local tensor (torch 2.13): a norm
    for a log would be another number on every rank. Gathering it unasked would be a collective, and who logs
    on rank 0 only would wait forever.
    """
    DTENSOR_ITEM.keep_for(backend, _refuse)


def _refuse(value: Any) -> None:
    whole = all(placement.is_replicate() for placement in value.placements)
    engines = () if whole else DTENSOR_ITEM.needing(_refuse)
    entries = itertools.chain.from_iterable(engine.all for engine in engines)
    if any(entry.parameter.device_mesh == value.device_mesh for entry in entries):
        raise FsshardError(
            "a Python number was requested from a tensor of which this rank has only a part (it was computed from a "
            "sharded parameter or gradient), so every rank would get another number. On every rank write "
            "value.full_tensor().item(), or compute with the whole weights within model.full_parameters()"
        )
