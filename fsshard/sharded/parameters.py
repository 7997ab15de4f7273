"""Parameters as the user knows them, over the engine's storage."""

from __future__ import annotations

import functools
import re
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from fsshard.backends.base import Backend
from fsshard.backends.part_guards import refuse_parameter
from fsshard.complex_params.pairs import Form
from fsshard.complex_params.parameter_records import mark_stale
from fsshard.complex_params.shard_tensors import assign
from fsshard.complex_params.shown import AsParameter, even_gradient, moving, show_stored, shown_gradient, stand_for
from fsshard.errors import FsshardError, UnsupportedByBackend
from fsshard.planning.entries import Entry
from fsshard.torch_private.tensors import DATA, LOCAL_TENSOR

HAS_FORM = re.compile(
    r"size|dim|numel|stride|type|__len__|__hash__|__repr__|__format__|requires_grad_|detach_?|clone|view|reshape"
    r"|flatten|t|transpose|permute|squeeze|unsqueeze|__getitem__|data_ptr|untyped_storage|element_size|storage_offset"
    r"|get_device|share_memory_|rename_|retain_grad|.*_like|new_.*|.*_as|_?is_.*"
)
"""Functions that tell a parameter's form, give views, which have no values either, or new values of the same form."""
NO_VALUES = (
    "parameters of the model that this engine has cut have no values here (they are on the meta device): nothing can "
    "be computed with them, or written to them, outside of the forward. Compute a penalty in the forward and return "
    "it, or use the optimizer's weight_decay, or backend='fairscale' or 'ddp'; for numbers that are not "
    "differentiated use model.full_parameters(), and average weights by fsshard.EMA(model); write to them within "
    "model.full_parameters(writeback=True), or through model.load_state_dict"
)


def refuse_hooks(entry: Entry, backend: Backend) -> None:
    """Let the engine's own parameter raise where hooks on it would never be called, as the user's modules show it.

    FSDP2 itself calls the hooks of ``register_post_accumulate_grad_hook``, with the reduced gradient (torch 2.13).
    """
    attributes = vars(entry.parameter)
    refuse = functools.partial(_refuse_hook, entry.name, backend.name)
    attributes["register_hook"] = refuse
    if not backend.facts.has_dtensors:
        attributes["register_post_accumulate_grad_hook"] = refuse


def _refuse_hook(name: str, backend: str, *_: Any) -> NoReturn:
    raise UnsupportedByBackend(
        f"gradient hooks on {name!r}, which autograd does not reach: the engine writes its gradient",
        backend,
        "read the gradient after backward(), or hook the module's output",
    )


class _Hollow(Tensor):
    """Made of a parameter without values, and without values itself."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raise where values are read, or are written to the meta device, which loses them without a word.

        torch's own kernels there (of norm, sum, abs, ...) make their result with ``device=input.device``, where a
        parameter names the device of its shard: uninitialised memory (2.13, ``torch/_refs``).
        """
        name = getattr(func, "__name__", "")
        is_attribute = name in ("__get__", "__set__", "__delete__")
        if name == "__set__" and func.__self__ is DATA:
            is_attribute = False
            name = ".data = ..."
        if not (is_attribute or HAS_FORM.fullmatch(name)):
            if func is torch.autograd.grad:
                name = "torch.autograd.grad"
            raise FsshardError(f"{name}: {NO_VALUES}")
        with torch.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if type(result) is Tensor and result.is_meta:
            # What is made of it has no values either.
            return result.as_subclass(_Hollow)
        return result


class _ShapeOnly(AsParameter, nn.Parameter):  # type: ignore[misc]
    """Stands for a parameter whose part on this rank has no shape of its own (FSDP1's flat shards).

    It is on the meta device: shape, dtype and ``requires_grad`` are right, there are no values, and none can be
    written. FSDP1's gradient can be dropped, and nothing else: reading None there would make torch's own clipping skip
    it silently. Python attributes are those of the engine's parameter, which the modules show, too.
    """

    __torch_function__ = _Hollow.__torch_function__
    __reduce_ex__ = refuse_parameter
    data: Any = Tensor.data
    # On meta tensors torch.nn.init.orthogonal_ does nothing, and says nothing (torch 2.13).
    is_meta = False

    _fsshard_entry: Entry
    _fsshard_backend: Backend

    def register_hook(self, hook: object) -> NoReturn:
        """Refuse, since torch would never call it."""
        _refuse_hook(self._fsshard_entry.name, self._fsshard_backend.name)

    register_post_accumulate_grad_hook = register_hook

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Parameter of {self.dtype} {tuple(self.shape)}, of which this rank holds a part without a shape"

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device of the shard; ``next(model.parameters()).device`` is asked for that."""
        return self._fsshard_backend.settings.device

    @property
    def grad(self) -> Tensor | None:
        entry = self._fsshard_entry
        if hasattr(entry.parameter, LOCAL_TENSOR):
            # FSDP2 holds a complex one as a list of its numbers, cut between any two of them. The gradient is a DTensor
            # of one dimension over the engine's memory: what is done number by number, and norms, are right on it.
            gradient = even_gradient(entry.parameter)
            if gradient is None:
                return None
            shown = shown_gradient(gradient, entry.kind)
            if not entry.kind.order:
                shown.whole_shape = entry.shape
            return shown  # type: ignore[no-any-return]
        raise FsshardError(
            f"the gradient of {entry.name!r} is a flat shard of its unit. An optimizer that "
            "fsshard.build_optimizer(model, torch.optim.AdamW, ...) has made takes it for step() and zero_grad(); clip "
            "with model.clip_grad_norm_(max_norm); to change gradients number by number, or to clip their values, use "
            "backend='fsdp2', 'fairscale' or 'ddp'"
        )

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        entry = self._fsshard_entry
        if value is not None and hasattr(entry.parameter, LOCAL_TENSOR) and self.grad is not None:
            assign(self.grad, value)
            return
        if value is not None:
            raise FsshardError(
                f"the gradient of {entry.name!r} is a shard that belongs to the engine; it can only be set to None"
            )
        self._fsshard_backend.zero_grad([entry], set_to_none=True)
        # The next step does not take it for one that never came.
        self._fsshard_backend.step.dropped.add(entry.name)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None


class ParameterViews:
    """The parameters of a wrapped model as its user sees them, each the same object as long as that is right."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._views: dict[str, Any] = {}

    def moving(self) -> AbstractContextManager[None]:
        """Return the context in which the engine moves its parameters to other memory."""
        return moving((entry.parameter for entry in self._backend.all), self._views.values())

    @functools.cached_property
    def _hidden(self) -> bool:
        """Whether what a rank holds of a parameter has no shape of its own, on this rank or on another (FSDP1)."""
        # One that happens to lie whole in this rank's flat shard too: what a script does must not depend on the rank.
        return any(entry.cut is not None and entry.cut.buffer for entry in self._backend.all)

    def show(self, entry: Entry) -> nn.Parameter:
        """Return the engine's own parameter where it is the user's, else what stands for it."""
        parameter = entry.parameter
        kind = entry.kind
        hidden = self._hidden
        if not hidden and parameter.shape == entry.shape and not kind.is_complex and not kind.order:
            return parameter
        has_shape = not hidden and parameter.shape == entry.stored_shape
        # A DTensor of one number cannot lose the dimension that it is sharded along.
        if has_shape and (kind.form is Form.COMPLEX or kind.order or not hasattr(parameter, LOCAL_TENSOR)):
            self._views[entry.name] = show_stored(parameter, kind)
        elif entry.name not in self._views:
            self._views[entry.name] = self._stand_in(entry)
        return self._views[entry.name]  # type: ignore[no-any-return]

    def _stand_in(self, entry: Entry) -> Any:
        # It is kept, and an inference tensor could never be trained.
        with torch.inference_mode(False):
            value = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
            view = _ShapeOnly(value, requires_grad=entry.parameter.requires_grad)
        view._fsshard_entry = entry
        view._fsshard_backend = self._backend
        stand_for(view, entry.parameter)
        mark_stale(
            view,
            f"parameter {entry.name!r} is a view of what the engine manages; build the optimizer with "
            "fsshard.build_optimizer",
        )
        return view
