"""Every change that fsshard makes to torch, Python or neuraloperator for the whole process.

Importing fsshard changes nothing. Each change is made for the first object that needs it (a wrapped model, a
ShardedDataParallel, a split domain, a process group) and undone when the last of them is gone. Whoever needs a change
gives the function that acts in it, so that what is changed is read here and what it does in its own room:

======================  ================================================================  ==========================
change                  without it                                                        acts in
======================  ================================================================  ==========================
``CLIP_GRAD_NORM``      ``clip_grad_norm_`` scales each rank's part by its own norm       backends/, oss/
``OPTIMIZER_STEP``      an optimizer over parameters that were replaced trains nothing    sharded/optimizer.py
``DTENSOR_ITEM``        ``float(p.norm())`` of a shard is another number on each rank     backends/part_guards.py
``STATE_DICT_TYPE``     ``FSDP.state_dict_type`` is dropped, and ends with a KeyError     sharded/state_dict.py
``FIELD_LOSSES``        a loss of a slab of a field is silently not that of the field     parallel/domain/
``END_OF_PROCESS``      a lost rank is not named, and a finished script aborts            launching/leaving.py
======================  ================================================================  ==========================

Not here is what stays: handlers of ``os.fork`` that close what a child must not keep, the variables such as ``RANK``
that ``init()`` writes for libraries that read them, a filter of one warning (``oss/norm_and_scaling.py``), what lasts
for a ``with`` only, and what ``python -m fsshard.compat`` and ``redirect.install()`` change on demand.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import inspect
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsshard.torch_private.clip_grad import torchs_total_norm
from fsshard.torch_private.compiling import disable_dynamo
from fsshard.torch_private.dispatch import LOCAL_SCALAR_DENSE
from fsshard.torch_private.tensors import dtensor_handlers

Function = Callable[..., Any]
Undo = Callable[[], object]


class Patch:
    """A change to the process that lasts while an object needs it.

    Args:
        put: makes the change, for functions that are asked in it, and gives what undoes it; None where there is nothing
            to change yet.
    """

    def __init__(self, put: Callable[[Patch], Undo | None]) -> None:
        self._put = put
        self._undo: Undo | None = None
        self._needs: list[tuple[weakref.ref[Any], Function]] = []
        # What acts in the change, each function once.
        self.functions: list[Function] = []

    @property
    def in_place(self) -> bool:
        """Return whether the process is changed now."""
        return self._undo is not None

    def keep_for(self, needing: Any, function: Function, *, first: bool = False) -> None:
        """Make the change, unless it is made, and keep it while ``needing`` is alive.

        Args:
            needing: any object that can be referred to weakly.
            function: acts in the change.
            first: ask it before those that were given earlier.
        """
        if not any(known() is needing and asked is function for known, asked in self._needs):
            need = (weakref.ref(needing, self._gone), function)
            self._needs.insert(0 if first else len(self._needs), need)
            self._list_functions()
        if self._undo is None:
            self._undo = self._put(self)

    def needing(self, function: Function) -> list[Any]:
        """The objects for which ``function`` acts."""
        return [alive for known, asked in self._needs if asked is function and (alive := known()) is not None]

    def _gone(self, reference: weakref.ref[Any]) -> None:
        self._needs[:] = [need for need in self._needs if need[0] is not reference]
        self._list_functions()
        if not self._needs and self._undo is not None:
            undo, self._undo = self._undo, None
            undo()

    def _list_functions(self) -> None:
        self.functions = list(dict.fromkeys(function for _, function in self._needs))


def _replace(owner: Any, functions: Mapping[str, Any]) -> Undo:
    """Set attributes of a module or class; undoing leaves those that somebody else has replaced since."""
    before = {name: vars(owner)[name] for name in functions}
    for name, function in functions.items():
        setattr(owner, name, function)
    now = {name: vars(owner)[name] for name in functions}

    def undo() -> None:
        for name, function in before.items():
            if vars(owner).get(name) is now[name]:
                setattr(owner, name, function)

    return undo


def _all(undoing: Sequence[Undo]) -> Undo:
    def undo() -> None:
        for each in reversed(undoing):
            each()

    return undo


# ------------------------------------------------------------------------------------------------ clip_grad_norm_


def _put_total_norm(patch: Patch) -> Undo:
    """``clip_grad_norm_`` looks it up in its module, so that scripts which have imported that before are reached."""
    original = torchs_total_norm.value

    @functools.wraps(original)
    def total_norm(tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: Any = None) -> Any:
        parameters = _clipped_parameters(sys._getframe(1))
        torchs = functools.partial(original, foreach=foreach)
        for norm in patch.functions if parameters else ():
            total = norm(parameters, float(norm_type), torchs)
            if total is not None:
                break
        else:
            return original(tensors, norm_type, error_if_nonfinite, foreach)
        if error_if_nonfinite and not bool(torch.isfinite(total)):
            raise RuntimeError(f"the norm of order {norm_type} of the gradients is {float(total)}; nothing was clipped")
        return total

    return _replace(clip_grad, {torchs_total_norm.name.rpartition(":")[2]: total_norm})


def _clipped_parameters(caller: FrameType) -> list[Tensor]:
    """The parameters that ``clip_grad_norm_`` was given; none where something else asks for a norm.

    From its frame: it passes on the gradients alone, and a rank can have none while others wait for it.
    """
    if (caller.f_code.co_filename, caller.f_code.co_name) != (clip_grad.__file__, "clip_grad_norm_"):
        return []
    found = caller.f_locals.get("parameters")
    return [parameter for parameter in found if isinstance(parameter, Tensor)] if isinstance(found, list) else []


CLIP_GRAD_NORM = Patch(_put_total_norm)
"""A function takes the parameters, the order of the norm, and torch's own function of gradients, order and whether to
raise; it gives None where the parameters are not its own. Without it: pytorch #72548, #170862."""


# ------------------------------------------------------------------------------------------------ optimizers


def _put_step_hook(patch: Patch) -> Undo:
    @disable_dynamo  # torch.compile of anybody's step has no business in here
    def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
        for function in patch.functions:
            function(optimizer)

    return register_optimizer_step_pre_hook(hook).remove


OPTIMIZER_STEP = Patch(_put_step_hook)
"""A function takes any torch optimizer that is about to step. Without it: pytorch #149205, fairscale #423."""


# ------------------------------------------------------------------------------------------------ numbers of DTensors


def _put_item_handler(patch: Patch) -> Undo | None:
    """Return where torch itself puts operations on DTensors that no sharding rule covers."""
    handlers = dtensor_handlers()
    if handlers is None or LOCAL_SCALAR_DENSE in handlers:
        return None

    def item(call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for function in patch.functions:
            function(args[0])
        return call(args[0].to_local(), *args[1:], **kwargs)

    handlers[LOCAL_SCALAR_DENSE] = item
    return lambda: handlers.pop(LOCAL_SCALAR_DENSE)


DTENSOR_ITEM = Patch(_put_item_handler)
"""A function takes the DTensor whose number is asked for, and raises where it has none. Without it: pytorch #144054."""


# ------------------------------------------------------------------------------------------------ FSDP.state_dict_type


def _put_state_dict_type(patch: Patch) -> Undo | None:
    """Nothing is imported: who calls these has imported them."""
    torchs = sys.modules.get("torch.distributed.fsdp")
    if torchs is None:
        return None
    fsdp = torchs.FullyShardedDataParallel
    torchs_set, torchs_context = fsdp.set_state_dict_type, fsdp.state_dict_type

    def restoring(module: Any, *args: Any, **kwargs: Any) -> Undo | None:
        return next((undo for function in patch.functions if (undo := function(module, *args, **kwargs))), None)

    def set_state_dict_type(module: Any, *args: Any, **kwargs: Any) -> Any:
        if restoring(module, *args, **kwargs) is None:
            return torchs_set(module, *args, **kwargs)

    @contextlib.contextmanager
    def state_dict_type(module: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        restore = restoring(module, *args, **kwargs)
        with contextlib.nullcontext() if restore else torchs_context(module, *args, **kwargs):
            try:
                yield
            finally:
                if restore is not None:
                    restore()

    functions = {"set_state_dict_type": set_state_dict_type, "state_dict_type": state_dict_type}
    return _replace(fsdp, {name: staticmethod(function) for name, function in functions.items()})


STATE_DICT_TYPE = Patch(_put_state_dict_type)
"""A function takes a module, the type and its configurations; it gives what restores the module's earlier ones, and
None for a module that it does not know. Without it: accelerate #2032."""


# ------------------------------------------------------------------------------------------------ losses of fields

_DERIVATIVES = ("dx", "dy", "dz")
NEURALOP_FIELD_METHODS: dict[str, dict[str, tuple[str, ...]]] = {
    "data_losses": {
        "LpLoss": ("abs", "rel"),
        "H1Loss": ("abs", "rel"),
        "HdivLoss": ("abs", "rel"),
        "PointwiseQuantileLoss": ("__call__",),
        "MSELoss": ("__call__",),
    },
    "equation_losses": dict.fromkeys(
        ("BurgersEqnLoss", "ICLoss", "PoissonInteriorLoss", "PoissonBoundaryLoss", "PoissonEqnLoss"), ("__call__",)
    ),
    "differentiation": {
        "FiniteDiff": _DERIVATIVES,
        "FourierDiff": (*_DERIVATIVES, "derivative", "partial", "compute_multiple_derivatives"),
    },
}
"""neuraloperator 2.0's losses and derivatives of fields, and their methods that all uses of them go through."""


def _put_loss_checks(patch: Patch) -> Undo:
    means = {
        name: _asking(patch, function, "")
        for name, function in vars(F).items()
        if inspect.isroutine(function)
        and name[0] != "_"
        and "reduction" in (getattr(function, "__annotations__", None) or ())
    }
    undoing = [_replace(F, means)]
    for module, kinds in NEURALOP_FIELD_METHODS.items():
        found = importlib.import_module(f"neuralop.losses.{module}")
        for kind, methods in kinds.items():
            owner = getattr(found, kind, None)
            if owner is None:
                continue
            asking = {}
            for name in methods:
                if name in vars(owner):
                    asking[name] = _asking(patch, vars(owner)[name], kind)
            undoing.append(_replace(owner, asking))
    return _all(undoing)


def _asking(patch: Patch, original: Function, kind: str) -> Function:
    @functools.wraps(original)
    def asking(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            for function in patch.functions:
                function(original, kind, args, kwargs)
        return original(*args, **kwargs)

    return asking


FIELD_LOSSES = Patch(_put_loss_checks)
"""A function takes a loss, the name of neuraloperator's class that has it (none for torch's own), and its arguments; it
raises where the loss would be wrong."""


# ------------------------------------------------------------------------------------------------ end of the process


def _put_end(patch: Patch) -> Undo:
    before, process, unregister, system = sys.excepthook, os.getpid(), atexit.unregister, sys

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        before(kind, error, trace)
        for function in patch.functions:
            function(error)

    def finished() -> None:
        for function in patch.functions if os.getpid() == process else ():  # forked children have no group
            function(None)

    sys.excepthook = hook
    atexit.register(finished)

    def undo() -> None:  # the last model may go with the interpreter, when this file's globals are gone
        unregister(finished)
        if system.excepthook is hook:
            system.excepthook = before

    return undo


END_OF_PROCESS = Patch(_put_end)
"""A function takes the error that ends the process, after it was printed, and at exit None. Without it: pytorch #98682
where a script ends without ``destroy_process_group()``."""

PATCHES = {
    "CLIP_GRAD_NORM": CLIP_GRAD_NORM,
    "OPTIMIZER_STEP": OPTIMIZER_STEP,
    "DTENSOR_ITEM": DTENSOR_ITEM,
    "STATE_DICT_TYPE": STATE_DICT_TYPE,
    "FIELD_LOSSES": FIELD_LOSSES,
    "END_OF_PROCESS": END_OF_PROCESS,
}
