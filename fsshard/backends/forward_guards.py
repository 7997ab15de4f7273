"""What a forward must not do where parameters are sharded: read another unit's shard, or write what will be lost.

An engine that divides parameters shows a module its whole weights while the forward of their unit runs, and this rank's
shard at all other times. A forward that reads the weights of another unit (a penalty over ``self.parameters()``, a
projection with the weights of an embedding), or through a reference from before ``wrap``, computes with the shard:
FSDP1 silently where shapes allow it, FSDP2 with the rank's part of a sum, or "got mixed torch.Tensor and DTensor"
(torch 2.13). So does a loss that is computed with weights beside the forward. What a forward writes into a whole
weight, no shard ever sees.

*Reads.* While the model's forward runs, the parameters that stand for shards have a class whose ``__torch_function__``
refuses what needs their numbers; from there to the backward it refuses what would be differentiated. At other times
that attribute is torch's own that does nothing. While an engine gathers a unit or puts it away, the unit's own shards
are of the class that they were made with, and all are from the backward on, until the user's code has its turn: torch
knows an ``nn.Parameter`` at a glance, and asks of a subclass in Python, at each assignment to a module (2.13).

*Writes.* Version counters of the whole parameters tell, once per forward. What is written through ``.data`` they do
not count: in the first forward that trains, the second, the fourth and so on the bits of a unit's weights are added up
before and after it. Every rank finds the same, without asking the others.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fsshard.errors import ModelError, StaleParameter
from fsshard.torch_private.dispatch import disabled_torch_function
from fsshard.torch_private.modules import IN_APPLY
from fsshard.torch_private.pytree import tree_map
from fsshard.torch_private.tensors import IS_PARAMETER, PRIVATE_GETTERS, version_of

__all__ = ["Guard", "Shard", "Watched", "fingerprint", "replaced", "runs_too_early", "written"]

_OFF = disabled_torch_function

_TOLD = (
    frozenset(
        [
            "dtype",
            "device",
            "requires_grad",
            "grad",
            "grad_dtype",
            "is_leaf",
            "layout",
            "grad_fn",
            "is_cuda",
            "is_cpu",
            "is_meta",
            "is_sparse",
            "is_quantized",
            "is_nested",
            "is_mkldnn",
            "names",
            "output_nr",
            "retains_grad",
            "itemsize",
            "nbytes",
            "is_complex",
            "is_floating_point",
            "is_signed",
            "is_inference",
            "is_shared",
            "get_device",
            "element_size",
            "requires_grad_",
            "register_hook",
            "register_post_accumulate_grad_hook",
            "retain_grad",
            "untyped_storage",
            "data_ptr",
            "storage_offset",
            "__hash__",
            "__repr__",
            "__format__",
            "__deepcopy__",
            "__reduce_ex__",
        ]
    )
    | PRIVATE_GETTERS
)
"""What is the same of a shard, or is asked for by engines and printing."""

_SHAPES = frozenset(
    ["shape", "ndim", "size", "dim", "numel", "nelement", "stride", "is_contiguous", "__len__", "ndimension"]
)
"""What is told as it is of the whole parameter."""

_VIEWS = frozenset(
    [
        "data",
        "detach",
        "T",
        "mT",
        "H",
        "mH",
        "real",
        "view_as_complex",
        "view_as_real",
        "t",
        "transpose",
        "permute",
        "squeeze",
        "unsqueeze",
        "view_as",
        "swapaxes",
        "movedim",
        "conj",
        "alias",
    ]
)
"""What may be taken of a shard as long as nothing is computed with it: its result is watched, too."""


class Watched(NamedTuple):
    """One parameter that stands for a shard.

    Attributes:
        name: the user's name of it.
        unit: the name of the unit that it is gathered with.
        shape: of the whole stored parameter.
        dtype: of the stored parameter.
        stale: whether it is what the engine has replaced; else it holds the shard.
    """

    name: str
    unit: str
    shape: torch.Size
    dtype: torch.dtype
    stale: bool = False

    def error(self, how: str = "forward") -> Exception:
        """What is raised when it is read: by a forward, or outside of it by a ``"loss"`` or by a ``"move"``."""
        if how == "move":
            return ModelError(
                f"{self.name!r} is moved or cast, as by module.cpu() or module.double(), and this rank holds a part of "
                "it only, which is the engine's: move the model before fsshard.wrap, or take whole values, "
                "model.state_dict(rank0_only=True, offload_to_cpu=True)"
            )
        if how == "loss":
            return ModelError(
                f"a loss is computed with {self.name!r} outside of the model's forward, where this rank holds a part "
                "of it only: its value would be a part's. Compute it in the forward of the weight's unit and return "
                "it, use the optimizer's weight_decay (under 'fsdp2' also what its full_tensor() gives), or "
                "backend='fairscale' or 'ddp'; for numbers that are not differentiated use torch.no_grad() and "
                "model.full_parameters()"
            )
        if self.stale:
            return StaleParameter(
                f"{self.name!r} is read through a reference from before fsshard.wrap (in a list, a closure, ...), "
                "which the engine has replaced: what is trained is not there; read it as an attribute of its module, "
                "and build the optimizer with fsshard.build_optimizer"
            )
        if not self.unit:
            return ModelError(
                f"the forward reads {self.name!r} where this rank holds a part of it only: the weights that belong to "
                "no unit of their own are whole in forwards of the wrapped model (call model(x), not model.module(x)), "
                "as attributes of their modules (not in a list or a closure from before fsshard.wrap, nor in a "
                "state_dict()). Or use backend='fairscale' or 'ddp'"
            )
        where = f"sharding unit {self.unit!r}"
        return ModelError(
            f"the forward reads {self.name!r} of {where} where this rank holds a part of it only: a unit's weights are "
            "whole within the unit's own forward, as attributes of their modules, and nowhere else (not in the forward "
            "of another unit or around it, in hooks behind it, or in a list from before fsshard.wrap). Let reader and "
            "weight be in one unit (leave it out of auto_wrap_policy; with auto_wrap_policy=None the model is one "
            "unit), or use backend='fairscale' or 'ddp'"
        )


class _Hollow(Tensor):
    """A view of a shard: shape and dtype, and no values when the forward is over, either."""

    _fsshard_shard_of: Watched


_COPIES = re.compile(
    r"(zeros|ones|empty|full|rand|randn|randint)_like|new_\w+|clone|detach|data|to|cpu|cuda|(?!__)\w+_|="
)
"""What may be done with a shard outside of forwards where gradients are recorded."""


def _key(func: Any) -> str:
    """The name of a function; of an attribute's getter the attribute's, of its setter ``"="``."""
    name = getattr(func, "__name__", "")
    if name in ("__set__", "__delete__"):
        return "="
    return getattr(getattr(func, "__self__", None), "__name__", "") if name == "__get__" else name


def _refuse(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """``__torch_function__`` of watched parameters while the forward runs."""
    key = _key(func)
    with torch.DisableTorchFunctionSubclass():
        if key in _TOLD or (key == "=" and func.__self__.__name__ != "data"):
            return func(*args, **(kwargs or {}))
        read = args[0] if args else None
        watched = getattr(read, "_fsshard_shard_of", None)
        if watched is None or watched.stale or (key not in _SHAPES and key not in _VIEWS):
            raise _first(args, kwargs).error()
        stand_in = read if isinstance(read, _Hollow) else torch.empty(watched.shape, dtype=watched.dtype, device="meta")
        found = func(stand_in, *args[1:], **(kwargs or {}))
    return tree_map(lambda value: _hollow(value, watched) if isinstance(value, Tensor) else value, found)


def _refuse_loss(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """``__torch_function__`` of watched parameters between a forward and its backward."""
    key = _key(func)
    harmless = key in _TOLD or key in _SHAPES or _COPIES.fullmatch(key) or (key == "equal" and _all_whole(args))
    if torch.is_grad_enabled() and not harmless:
        watched = _first(args, kwargs)
        # view_as_...: how a complex weight is shown; nothing is computed yet. What is stale refuses its gradient.
        if not watched.stale and not key.startswith("view_as_"):
            raise watched.error("move" if key == IN_APPLY else "loss")
    with torch.DisableTorchFunctionSubclass():
        return func(*args, **(kwargs or {}))


def _all_whole(args: Any) -> bool:
    """Whether torch compares whole tensors, and tells every rank: DTensors, as Lightning's BaseFinetuning does."""
    from torch.distributed.tensor import DTensor

    return bool(args) and all(isinstance(each, DTensor) for each in args)


def _first(args: Any, kwargs: Any) -> Watched:
    """The first watched parameter among the arguments of an operation."""
    found: list[Watched] = []

    def look(value: Any) -> Any:
        if isinstance(value, Tensor) and hasattr(value, "_fsshard_shard_of"):
            found.append(value._fsshard_shard_of)
        return value

    tree_map(look, (args, kwargs or {}))
    return found[0]


_Hollow.__torch_function__ = classmethod(_refuse)  # type: ignore[assignment, method-assign]

_READS, _LOSSES = classmethod(_refuse), classmethod(_refuse_loss)


def _hollow(value: Tensor, watched: Watched) -> Tensor:
    found = value.as_subclass(_Hollow)
    found._fsshard_shard_of = watched
    return found


class _Switch:
    """First base of the classes of watched parameters; those of one model share a subclass of it."""

    __slots__ = ()
    __torch_function__: Any = _OFF


class Shard(NamedTuple):
    """A parameter of the model as the engine made it, and the classes that it is of.

    Attributes:
        parameter: the shard.
        made: its class to the engine.
        watched: its class to the user's code.
    """

    parameter: Any
    made: type
    watched: type


class Guard:
    """Watches the parameters of one model while its forward runs."""

    def __init__(self) -> None:
        self._depth = 0
        self.is_lifted = False
        self._switch: Any = type("_WatchedOfOneModel", (_Switch,), {"__slots__": (), "__torch_function__": _OFF})
        self._state: Any = _OFF  # what is there now
        self._watching: dict[type, type] = {}
        self._shards: list[Shard] = []  # those that are made as nn.Parameter
        self._rests = False  # they are what they were made as
        self._aside: Sequence[Shard] = ()  # so are these: their unit is being gathered, or put away
        self._forwards = 0  # that train
        self.probes = False  # whether the values of whole weights are to be looked at in the present one
        self._versions: list[tuple[Tensor, int, str]] = []

    def __reduce__(self) -> Any:
        return _of_nothing, ()  # hooks go along into copies of a module

    @contextlib.contextmanager
    def lifted(self) -> Iterator[None]:
        """Context in which modules hold whole parameters of their own, and forwards do not involve the engine."""
        self.is_lifted = True
        self.pause()
        try:
            yield
        finally:
            self.is_lifted = False

    @property
    def looks_away(self) -> bool:
        """Whether hooks have nothing to do: a user's compilation of a module has no part of them in its graph."""
        return self.is_lifted or torch.compiler.is_compiling()

    @property
    def is_outside(self) -> bool:
        """Whether a unit's hooks have nothing to do: in a recomputation, too, where FSDP1 shows weights elsewhere."""
        return not self._depth or self.is_lifted or torch.compiler.is_compiling()

    def install(self, root: nn.Module) -> None:
        """Watch during the forwards of ``root``, whoever calls it."""
        root.register_forward_pre_hook(self._begins, prepend=True)
        root.register_forward_hook(self._ends, always_call=True)

    def _begins(self, module: nn.Module, *_: Any) -> None:
        if self.looks_away:
            return
        if not self._depth:
            trains = module.training and torch.is_grad_enabled()
            self._forwards += trains
            self.probes = trains and self._forwards & (self._forwards - 1) == 0
        self._depth += 1
        self.resume()

    def _ends(self, *_: Any) -> None:
        if self.looks_away:
            return
        self._depth = max(self._depth - 1, 0)
        if not self._depth:
            self.pause()

    def outside(self) -> None:
        """Neither a forward runs nor a backward: the user computes losses, or looks at weights."""
        if not self._depth and not self.is_lifted:
            self._turn(_LOSSES)

    def pause(self) -> None:
        """The engine works, and may read."""
        self._turn(_OFF)

    def resume(self) -> None:
        """The model's own code goes on, if its forward is under way."""
        if self._depth:
            self._turn(_READS)

    def rest(self) -> None:
        """The engine works until the user's code is told of: in a backward."""
        self._turn(_OFF)
        if not self._rests:
            self._rests = True
            for shard, made, _ in self._shards:
                shard.__class__ = made

    def engine_works_on(self, unit: Sequence[Shard]) -> None:
        """In the midst of a forward the engine works on one unit, of which it may read all, and of no other.

        It does so many times in a step. That is why not everything is let go: only a class that is written to costs
        more than the parameters of one unit, since it loses what Python has remembered of its attributes.
        """
        self.engine_done()
        if self._state is not _OFF:
            self._aside = unit
            for shard, made, _ in unit:
                shard.__class__ = made

    def engine_done(self) -> None:
        """The work that :meth:`engine_works_on` announced has ended."""
        unit, self._aside = self._aside, ()
        for shard, _, watched in unit:
            shard.__class__ = watched

    def _turn(self, state: Any) -> None:
        if state is self._state:
            return
        self._state = self._switch.__torch_function__ = state
        if state is _OFF:
            return
        self.engine_done()  # which it does not say where it has raised
        if self._rests:
            self._rests = False
            for shard, _, watched in self._shards:
                shard.__class__ = watched

    def watch(self, parameter: Tensor, watched: Watched) -> Shard:
        """From now on the model's forward must not read ``parameter``."""
        found: Any = parameter
        found._fsshard_shard_of = watched
        if watched.stale and found.requires_grad:
            found.register_hook(functools.partial(_refuse_gradient, watched))
        kind = type(found)
        if isinstance(found, _Switch):
            return Shard(found, kind, kind)
        if kind not in self._watching:
            self._watching[kind] = _watched_class(kind, self._switch)
        shard = Shard(found, kind, self._watching[kind])
        found.__class__ = shard.watched
        # What is stale may be let go of by all others. A DTensor is known by no glance, and cannot be copied as it is.
        if kind is nn.Parameter and not watched.stale:
            self._shards.append(shard)
        return shard

    def remember(self, whole: Tensor, name: str) -> None:
        """Let :meth:`after_forward` compare the version of ``whole``, which the engine fills again, with today's."""
        self._versions.append((whole, version_of(whole), name))

    def after_forward(self, *_: Any) -> None:
        """Raise for what was written since :meth:`remember` was told of it: a forward hook of the root.

        Raises:
            ModelError: names the weights.
        """
        if self.looks_away:
            return
        names = [name for whole, version, name in self._versions if version_of(whole) != version]
        if names:
            self._versions = [(whole, version_of(whole), name) for whole, _, name in self._versions]
            raise written(names)


def _refuse_gradient(watched: Watched, gradient: Tensor) -> None:
    raise watched.error()


def _of_nothing() -> Guard:
    """What a copy of a module has in place of the guard of its original."""
    guard = Guard()
    guard.is_lifted = True
    return guard


def runs_too_early(unit: str) -> ModelError:
    """What is raised where a unit would be the outermost for good, as the first that runs is to torch."""
    return ModelError(
        f"sharding unit {unit!r} runs before the first forward of what fsshard.wrap returned, "
        "by a call of the model within it, of a part, or of a method; call what wrap returned, and let a method run "
        "under the engine: fsshard.register_forward_method(model, name)"
    )


def _watched_class(kind: type, switch: type) -> type:
    members: dict[str, Any] = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    members["__deepcopy__"] = _deepcopy_unwatched
    if issubclass(kind, nn.Parameter):
        # isinstance(p, Parameter) asks a subclass for it first, and is slow without (torch/nn/parameter.py, 2.13).
        members[IS_PARAMETER] = True
    return type(kind.__name__, (switch, kind), members)


def _deepcopy_unwatched(self: Any, memo: dict[int, Any]) -> Any:
    """A copy is nobody's parameter, and is not watched."""
    if id(self) not in memo:
        memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
    return memo[id(self)]


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def fingerprint(weights: Iterable[Tensor]) -> list[int]:
    """A number of each whole weight that a writing changes: the sum of its bits. None of a simulation's."""
    whole = [weight.detach() for weight in weights if type(weight) is Tensor or type(weight) is nn.Parameter]
    kinds = [_INTEGERS[weight.element_size()] for weight in whole]
    # Added up as they are: another dtype would take a copy of the weight.
    sums = [weight.view(kind).sum(dtype=kind).long() for weight, kind in zip(whole, kinds, strict=True)]
    return torch.stack(sums).tolist() if sums else []


def written(names: Iterable[str]) -> ModelError:
    """What is raised where a forward has changed weights."""
    return ModelError(
        f"the forward changes {', '.join(map(repr, names))} in place, which would be lost: what a forward sees is "
        "gathered from the ranks' shards and thrown away. Change weights after optimizer.step(), within `with "
        "torch.no_grad(), model.full_parameters(writeback=True):`, or compute with a changed copy (w = "
        "self.weight.clamp(...)); F.embedding(max_norm=...) writes, too. Or use backend='fairscale' or 'ddp', in "
        "float32"
    )


def replaced(name: str) -> ModelError:
    """What is raised where a module holds another tensor than the engine's."""
    return ModelError(
        f"{name!r} is not the engine's parameter any more when its unit's forward begins: torch.func.functional_call, "
        "or an assignment after fsshard.wrap, has put another tensor there, which the engine would overwrite with what "
        "it gathers. Load values with model.load_state_dict, or use backend='fairscale' or 'ddp'"
    )
