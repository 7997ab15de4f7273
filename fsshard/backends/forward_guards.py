"""Guards of forwards over sharded parameters: they may not read another unit's shard, or write what will be lost.

FSDP shows a module its whole weights in the forward of their unit, and this rank's shard at all other times. A forward
that reads the weights of another unit (a penalty over ``self.parameters()``, a projection with an embedding's weights)
computes with the shard: FSDP1 silently where shapes allow it (torch 2.13); FSDP2 raises, see ``forward_methods.py``.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fsshard.complex_params.shard_tensors import shard_tensor
from fsshard.complex_params.shown import stored_of
from fsshard.errors import ModelError

# Attributes that may be asked of a shard: it is the same of the whole weight, or engines and printing need it.
_ANSWERED = frozenset((
    "dtype", "device", "requires_grad", "grad", "grad_dtype", "is_leaf", "layout", "grad_fn", "is_cuda", "is_cpu",
    "is_meta", "is_sparse", "is_quantized", "is_nested", "is_mkldnn", "is_complex", "is_floating_point", "is_inference",
    "get_device", "element_size", "itemsize", "requires_grad_", "register_hook", "retain_grad", "retains_grad",
    "register_post_accumulate_grad_hook", "untyped_storage", "data_ptr", "__hash__", "__repr__", "__format__",
))  # fmt: skip

# Views of a shard that may be taken, and are shards themselves: what computes with them is refused.
_VIEWS = frozenset(("data", "detach", "t", "transpose", "view_as_complex", "view_as_real"))

# Questions of a property that shows what is stored as a complex weight, as a scalar or as a DTensor.
_SHOWING = frozenset(("dim", "numel", "reshape", "view_as"))


class Watched(NamedTuple):
    """A parameter of which this rank holds a shard.

    Attributes:
        name: the user's name of it.
        unit: the name of the unit that it is gathered with; empty for the root.
        is_shown: whether a property shows it to the user.
    """

    name: str
    unit: str
    is_shown: bool

    def error(self) -> ModelError:
        """Return what is raised when a forward reads it."""
        unit = f"sharding unit {self.unit!r}" if self.unit else "the root unit"
        return ModelError(
            f"the forward reads {self.name!r} of {unit} where this rank holds a part of it only: {_ADVICE}"
        )


_ADVICE = (
    "weights are whole in forwards of the wrapped model (call model(x), not model.module(x) or the module that was "
    "wrapped). A unit's weights are whole in its own forward only, and only as attributes of their modules: not in the "
    "forward of another unit, in a hook after its own, in a state_dict(), or in a list from before fsshard.wrap. Put "
    "reader and weight into one unit (leave it out of auto_wrap_policy; with auto_wrap_policy=None the model is one "
    "unit), or use backend='fairscale' or 'ddp'"
)
# The message where FSDP2 has raised, or returns a sharded tensor.
READS_SHARD = f"the forward computes with a weight of which this rank holds a part only, a DTensor: {_ADVICE}"


class LooksAtForwards:
    """Decides which forwards of a model are looked at: the first, second, fourth and so on, and each sixteenth.

    Those with gradients and those without are counted by themselves, so that the first of both is looked at. Every rank
    decides alike.
    """

    def __init__(self) -> None:
        self._counts = [0, 0]

    def begin(self) -> bool:
        """Count a forward of the whole model, and return whether it is looked at."""
        kind = int(torch.is_grad_enabled())
        self._counts[kind] += 1
        count = self._counts[kind]
        is_power_of_two = count & (count - 1) == 0
        return (is_power_of_two or count % 16 == 0) and not torch.compiler.is_compiling()


class ReadsGuard(TorchFunctionMode):
    """Context in which nothing may be computed with a shard: around forwards of FSDP1 that are looked at.

    The parameters that FSDP1 made are shards at all times: in a unit's forward it puts plain tensors in their places
    (torch 2.13).
    """

    def __init__(self, shards: Iterable[tuple[Tensor, Watched]]) -> None:
        super().__init__()
        self._shards = {id(parameter): watched for parameter, watched in shards}
        # By id; each is kept, so that no other tensor gets that id.
        self._views: dict[int, tuple[Any, Watched]] = {}

    def __exit__(self, *error: Any) -> None:
        self._views.clear()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Nothing of this goes into the graph of a user's own compiled function.
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        watched = next(filter(None, map(self._find, (*args, *kwargs.values()))), None)
        if watched is None:
            return func(*args, **kwargs)
        name = _name_of(func)
        # torch's own, as for version counters.
        is_private = name.startswith("_") and not name.startswith("__")
        is_view = name in _VIEWS or (watched.is_shown and name in _SHOWING)
        # The attribute .grad has the name of torch.autograd.grad.
        is_answered = name in _ANSWERED and func is not torch.autograd.grad
        if not (is_private or is_view or is_answered) and not _is_asked_by_torch():
            raise watched.error()
        result = func(*args, **kwargs)
        if is_view and isinstance(result, Tensor):
            self._views[id(result)] = (result, watched)
        return result

    def _find(self, value: Any) -> Watched | None:
        """Return whose shard ``value`` is, or holds in a list; None if it is none."""
        if isinstance(value, (list, tuple)):
            return next(filter(None, map(self._find, value)), None)
        if not isinstance(value, Tensor):
            return None
        # What a property shows to the user is another tensor than the stored shard.
        for shard in (value, stored_of(value)):
            watched = self._shards.get(id(shard))
            if watched is not None:
                return watched
        _, watched = self._views.get(id(value), (None, None))
        return watched


class DerivativesGuard(TorchFunctionMode):
    """Context of a forward over DTensors: no derivative may be taken by a shard, on which nothing depends there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.autograd.grad and not torch.compiler.is_compiling():
            inputs = kwargs.get("inputs", ())
            if len(args) > 1:
                inputs = args[1]
            if isinstance(inputs, Tensor):
                inputs = [inputs]
            refuse_shards(inputs)
        return func(*args, **kwargs)


def refuse_shards(tensors: Iterable[Any]) -> None:
    """Raise if a tensor that a forward works with is a shard."""
    if any(isinstance(tensor, shard_tensor()) for tensor in tensors):
        raise ModelError(READS_SHARD)


def refuse_shards_in_graph(outputs: Iterable[Tensor]) -> None:
    """Raise if outputs of a forward depend on a shard: a custom Function or an operator was given it.

    FSDP2 lets autograd reach gathered parameters only, so that the shard, and its weight, would never be trained.
    """
    nodes = [output.grad_fn for output in outputs]
    seen = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        refuse_shards([getattr(node, "variable", None)])
        nodes += [following for following, _ in node.next_functions]


def refuse_losses(shard: Tensor, name: str) -> None:
    """Let the backward of a loss that was computed with a shard raise; what FSDP1 reduces does not come by autograd."""

    def refuse(_: Tensor) -> None:
        raise ModelError(
            f"a loss is computed with {name!r} outside of its unit's forward, where this rank holds only a part of "
            "it, so that the loss is that of a part. Compute it in the forward of the weight's unit and return it, "
            "use the optimizer's weight_decay, or backend='fairscale' or 'ddp'; for numbers that are not "
            "differentiated use torch.no_grad() and model.full_parameters()"
        )

    if shard.requires_grad:
        shard.register_hook(refuse)


def _is_asked_by_torch() -> bool:
    """Return whether FSDP1 itself asks: for shapes, when a unit is put away under no_sync (torch 2.13)."""
    return str(sys._getframe(2).f_globals.get("__name__")).startswith("torch.distributed.fsdp.")


def _name_of(func: Any) -> str:
    """Return the name of a function; of an attribute's getter the attribute's; of its setter ``data``."""
    name: str = getattr(func, "__name__", "")
    if name in ("__set__", "__delete__"):
        return "data"  # engines set it
    return getattr(getattr(func, "__self__", None), "__name__", "") if name == "__get__" else name


# Bytes of an element -> integers of that size.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# The dict of a module that holds a weight while it is gathered, the key in it, and the user's name.
Place = tuple[Mapping[str, Any], str, str]


class GatheredWeights:
    """Learns which weights one forward of the model has changed, by the bits of what was gathered for it.

    By bits, since ``.data`` has a version of its own, and of the whole, so that all ranks see it alike.

    Args:
        units: each unit's module, at whose call its weights are gathered, or are already; and their places.
    """

    def __init__(self, units: Sequence[tuple[nn.Module, list[Place]]]) -> None:
        self._units = [(unit, places) for unit, places in units if places]
        self._handles: list[Any] = []
        # The sums of units whose forward runs, by place in units.
        self._before: dict[int, Tensor] = {}
        # Of units whose forward has ended: the sums before it and behind it. They are compared at the end of the whole
        # forward, since a GPU would be waited for.
        self._looks: list[tuple[list[Place], Tensor, Tensor]] = []
        # Numbers of a simulation have no bits.
        self.enabled = True

    def watch(self) -> None:
        """Look at the forward that begins."""
        self.stop()
        if not self.enabled:
            return
        for number, (unit, _) in enumerate(self._units):
            begins = unit.register_forward_pre_hook(functools.partial(self._begins, number), prepend=True)
            _move_beside_engines(begins, behind=True)
            ends = unit.register_forward_hook(functools.partial(self._ends, number))
            _move_beside_engines(ends, behind=False)
            self._handles += [begins, ends]

    def stop(self) -> None:
        """Look at nothing more."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._before.clear()
        self._looks.clear()

    def changed(self) -> list[str]:
        """Return the names of the weights that were changed since :meth:`watch`, also in units that have not ended."""
        for number in list(self._before):
            self._ends(number)
        # Each once, in order; a unit that is called twice is looked at twice.
        names: dict[str, None] = {}
        for places, before, after in self._looks:
            flags = (before != after).tolist()
            for (_, _, name), flag in zip(places, flags, strict=True):
                if flag:
                    names[name] = None
        self.stop()
        return list(names)

    def _begins(self, number: int, *_: Any) -> None:
        places = self._units[number][1]
        self._before[number] = _sums_of_bits(places)

    def _ends(self, number: int, *_: Any) -> None:
        before = self._before.pop(number, None)
        if before is not None:
            places = self._units[number][1]
            self._looks.append((places, before, _sums_of_bits(places)))


def _sums_of_bits(places: Sequence[Place]) -> Tensor:
    sums = []
    for parameters, key, _ in places:
        weight = parameters[key].detach()
        numbers = weight.contiguous().view(-1)
        bits = numbers.view(_BITS[weight.element_size()])
        sums.append(bits.sum(dtype=torch.int64))
    return torch.stack(sums)


def _move_beside_engines(handle: Any, *, behind: bool) -> None:
    """Let a hook run right behind the engine's own, which gathers, or right before it, which frees; others stay."""
    table = handle.hooks_dict_ref()
    own, *others = sorted(table, key=lambda key: key != handle.id)
    is_engines = []
    for key in others:
        module = str(getattr(table[key], "__module__", ""))
        is_engines.append(module.startswith("torch.distributed."))
    # FSDP1 has no hook here: it gathers around the module.
    if True not in is_engines:
        return
    first = is_engines.index(True) + behind
    for key in (own, *others[first:]):
        table.move_to_end(key)


def written(names: Iterable[str]) -> ModelError:
    """Return what is raised where a forward has changed weights."""
    return ModelError(
        f"the forward changes {', '.join(map(repr, names))} in place, which would be lost: what a forward sees is "
        "gathered from the ranks' shards and thrown away. Change weights after optimizer.step(), within `with "
        "torch.no_grad(), model.full_parameters(writeback=True):`, or compute with a changed copy (w = "
        "self.weight.clamp(...)). Let a forward that initialises weights by its first batch run before training, on "
        "one batch for all ranks: `with torch.no_grad(), model.full_parameters(writeback=True): model.module(batch)`. "
        "F.embedding(max_norm=...) writes, too. Or use backend='fairscale' or 'ddp', in float32"
    )


def check_places(
    places: tuple[Sequence[Any], Sequence[str]],
    names: Sequence[str],
    shards: Sequence[Any],
    others: Callable[[], Iterable[Iterable[Any]]],
) -> None:
    """Raise if a module holds another tensor than the engine's when its unit's forward begins.

    Args:
        places: the dicts of the modules that hold parameters, and the keys there.
        names: the user's names of the parameters.
        shards: what is there at rest.
        others: gives, for each, what else the engine puts there.
    """
    tensors = [*map(dict.get, *places)]
    # Nearly always; then there is nothing to look at one by one.
    if all(map(operator.is_, tensors, shards)):
        return
    for name, tensor, shard, known in zip(names, tensors, shards, others(), strict=True):
        if tensor is not shard and id(tensor) not in map(id, known):
            raise ModelError(
                f"{name!r} is not the engine's parameter any more when its unit's forward begins: "
                "torch.func.functional_call, or an assignment after fsshard.wrap, has put another tensor there, which "
                "the engine would overwrite with what it gathers. Load values with model.load_state_dict, or use "
                "backend='fairscale' or 'ddp'"
            )
