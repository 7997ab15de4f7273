"""Runs the user's ``param_init_fn`` on modules, and checks what it did.

Memory that was just made holds whatever was there before, and looks like numbers. So every operation of the function
is watched: which memory it wrote, and whether it reached into modules that are not its own. Floating-point memory is
filled with NaN first, which also shows what was written in part only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fsshard.complex_params.flattened import showing_the_users
from fsshard.errors import FsshardError, ModelError
from fsshard.torch_private.dispatch import TorchDispatchMode, schema_of
from fsshard.torch_private.tensors import LOCAL_TENSOR, storage_key

__all__ = ["Holding", "Initialiser", "initialise", "storage_of"]

Initialiser = Callable[[nn.Module], object]
MARKED = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128)
"""Dtypes in which NaN marks what has not been written."""


@dataclass(frozen=True)
class Holding:
    """A tensor that just got memory.

    Attributes:
        held: the parameter or buffer that modules hold.
        names: the user's names of it, in the order of ``places``.
        places: the modules that hold it, and their keys.
        memory: its memory, whatever becomes of ``held``.
    """

    held: Tensor
    names: tuple[str, ...]
    places: tuple[tuple[nn.Module, str], ...]
    memory: Tensor

    @property
    def told(self) -> tuple[str, ...]:
        """The names by which it is asked for: a tied parameter by its first one, a buffer by every key that it has."""
        return self.names[:1] if isinstance(self.held, nn.Parameter) else self.names


def storage_of(tensor: Tensor) -> int:
    """Identifies a piece of memory as long as it lives; of a DTensor that of this rank's part."""
    local: Tensor = getattr(tensor, LOCAL_TENSOR, tensor)
    return int(storage_key(local.untyped_storage()))


def initialise(
    init: Initialiser,
    modules: Sequence[nn.Module],
    holdings: Sequence[Holding],
    elsewhere: Mapping[int, str],
    names: Mapping[nn.Module, str],
) -> set[str]:
    """Call ``init`` with each module. Local.

    A tensor that it assigns in place of another one is taken as numbers: they are copied, and modules hold what they
    held before, with its ties, its device, and whether it is trained.

    Args:
        init: gives a module its numbers.
        modules: in the order in which they are initialised.
        holdings: what has memory now.
        elsewhere: storage -> name of what belongs to other units, and must be left alone.
        names: of all modules.

    Returns:
        Names of what has no values yet.

    Raises:
        ModelError: it failed; it reached into another unit; it assigned a tensor of another shape or dtype, or added
            or removed one.
    """
    watch = _WriteRecorder({storage_of(holding.memory) for holding in holdings}, elsewhere)
    held_by: dict[nn.Module, list[Holding]] = {}
    for holding in holdings:
        _mark(holding.memory)
        for module, _ in holding.places:
            held_by.setdefault(module, []).append(holding)
    for module in modules:
        where = f"param_init_fn on {names[module] or '(the model)'} ({type(module).__name__})"
        before = (list(module._parameters), list(module._buffers))
        _call(init, module, watch, where)
        if [set(module._parameters), set(module._buffers)] != [set(keys) for keys in before]:
            changed = {*module._parameters, *module._buffers} ^ {*before[0], *before[1]}
            raise ModelError(f"{where} added or removed {', '.join(sorted(changed))}; do that before fsshard.wrap")
        for holding in held_by.get(module, ()):
            _take_back(holding, watch, where)
    for holding in holdings:  # a parent may have assigned to its children
        _take_back(holding, watch, "param_init_fn")
    return {name for holding in holdings if not _filled(holding, watch) for name in holding.told}


def _mark(memory: Tensor) -> None:
    if memory.dtype in MARKED:
        memory.fill_(float("nan"))


def _call(init: Initialiser, module: nn.Module, watch: _WriteRecorder, where: str) -> None:
    try:
        with torch.no_grad(), watch:
            with showing_the_users(module):
                init(module)
    except FsshardError:
        raise
    except _Foreign as error:
        raise ModelError(
            f"{where} reaches {error}, which belongs to another sharding unit and may be sharded by now; initialise "
            "only the module's own parameters (children are called first), put both into one unit with "
            "auto_wrap_policy, or build a real model on rank 0"
        ) from None
    except Exception as error:
        raise ModelError(f"{where} failed: {type(error).__name__}: {error}") from error


def _take_back(holding: Holding, watch: _WriteRecorder, where: str) -> None:
    """Copy the numbers of what was assigned, and let the modules hold what they held before."""
    for name, (module, key) in zip(holding.names, holding.places, strict=True):
        is_parameter = isinstance(holding.held, nn.Parameter)
        found: dict[str, Any] = module._parameters if is_parameter else module._buffers
        now = found[key]
        if now is holding.held and storage_of(now) == storage_of(holding.memory) and now.shape == holding.memory.shape:
            continue
        wanted = (tuple(holding.memory.shape), holding.memory.dtype)
        got = None if now is None else (tuple(now.shape), now.dtype)
        # buffers can be held in another dtype under mixed precision
        cast = not is_parameter and got is not None and now.is_floating_point() and wanted[1].is_floating_point
        if got is None or now.is_meta or got[0] != wanted[0] or (got[1] != wanted[1] and not cast):
            what = "nothing" if got is None else "no memory" if now.is_meta else f"{got[1]} of shape {got[0]}"
            raise ModelError(f"{where} assigned to {name}: expected {wanted[1]} of shape {wanted[0]}, got {what}")
        if watch.is_blank(now):  # torch's Module.to_empty, say
            _mark(holding.memory)
            watch.blank.add(storage_of(holding.memory))
        else:
            with torch.no_grad():
                holding.memory.copy_(now.detach())
            watch.blank.discard(storage_of(holding.memory))
        holding.held.data = holding.memory
        found[key] = holding.held


def _filled(holding: Holding, watch: _WriteRecorder) -> bool:
    memory = holding.memory
    if not memory.numel():
        return True
    written = not watch.is_blank(memory)
    if memory.dtype not in MARKED or (written and not isinstance(holding.held, nn.Parameter)):
        return written  # a buffer of NaN can be meant
    real = torch.view_as_real(memory) if memory.is_complex() else memory
    return not bool(real.amax().isnan())  # which needs no memory, unlike isnan().any()


class _Foreign(Exception):
    """The name of what was reached."""


class _WriteRecorder(TorchDispatchMode):
    """Sees every operation, ``.data`` or not: what memory it writes.

    Attributes:
        blank: storages that nobody has written yet.
    """

    def __init__(self, blank: set[int], elsewhere: Mapping[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.blank = blank
        self._elsewhere = elsewhere

    def is_blank(self, tensor: Tensor) -> bool:
        """Whether nothing has been written to it."""
        return storage_of(tensor) in self.blank

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in _tensors((args, kwargs)):
            if storage_of(tensor) in self._elsewhere:
                raise _Foreign(self._elsewhere[storage_of(tensor)])
        out = func(*args, **kwargs)
        for index, argument in enumerate(schema_of(func).arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[index] if index < len(args) else kwargs.get(argument.name)
                self.blank -= {storage_of(tensor) for tensor in _tensors(value)}
        name, returns = schema_of(func).name, schema_of(func).returns
        if "lift" in name or not any(result.alias_info is not None for result in returns):  # no view and not in place
            made = {storage_of(tensor) for tensor in _tensors(out)}
            self.blank = self.blank | made if "empty" in name else self.blank - made
        return out


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if not value.is_meta and value.layout == torch.strided:
            yield value
    elif isinstance(value, Mapping):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
