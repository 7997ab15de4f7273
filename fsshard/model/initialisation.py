"""Runs the user's ``param_init_fn`` on modules, and checks what it did.

Memory that was just made holds whatever was there before, and looks like numbers. So it is filled with NaN first
(integers: with the largest one), also what the function itself makes by ``torch.empty``; what still holds that was not
written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fsshard.complex_params.flattened import showing_the_users
from fsshard.errors import FsshardError, ModelError
from fsshard.torch_private.tensors import LOCAL_TENSOR, storage_key, version_of

__all__ = ["Holding", "Initialiser", "initialise", "storage_of"]

Initialiser = Callable[[nn.Module], object]


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
    elsewhere: Mapping[str, Tensor],
    names: Mapping[nn.Module, str],
) -> set[str]:
    """Call ``init`` with each module. Local.

    A tensor that it assigns in place of another one is taken as numbers: they are copied, and modules hold what they
    held before, with its ties, its device, and whether it is trained.

    Args:
        init: gives a module its numbers.
        modules: in the order in which they are initialised.
        holdings: what has memory now.
        elsewhere: what belongs to other units, by name, and must be left alone.
        names: of all modules.

    Returns:
        Names of what has no values yet.

    Raises:
        ModelError: it failed; it wrote to another unit; it assigned a tensor of another shape or dtype, or added or
            removed one.
    """
    held_by: dict[nn.Module, list[Holding]] = {}
    for holding in holdings:
        _mark(holding.memory)
        for module, _ in holding.places:
            held_by.setdefault(module, []).append(holding)
    marked = [version_of(holding.memory) for holding in holdings]
    versions = {name: version_of(tensor) for name, tensor in elsewhere.items()}
    for module in modules:
        where = f"param_init_fn on {names[module] or '(the model)'} ({type(module).__name__})"
        before = (set(module._parameters), set(module._buffers))
        try:
            with torch.no_grad(), _empty_is_marked(), showing_the_users(module):
                init(module)
        except FsshardError:
            raise
        except Exception as error:
            raise ModelError(f"{where} failed: {type(error).__name__}: {error}") from error
        reached = [name for name, tensor in elsewhere.items() if version_of(tensor) != versions[name]]
        if reached:
            raise ModelError(
                f"{where} writes to {reached[0]}, which belongs to another sharding unit and may be sharded by now; "
                "initialise only the module's own parameters (children are called first), put both into one unit with "
                "auto_wrap_policy, or build a real model on rank 0"
            )
        if (set(module._parameters), set(module._buffers)) != before:
            changed = {*module._parameters, *module._buffers} ^ (before[0] | before[1])
            raise ModelError(f"{where} added or removed {', '.join(sorted(changed))}; do that before fsshard.wrap")
        for holding in held_by.get(module, ()):
            _take_back(holding, where)
    for holding in holdings:  # a parent may have assigned to its children
        _take_back(holding, "param_init_fn")
    written = [version_of(holding.memory) != version for holding, version in zip(holdings, marked, strict=True)]
    return {
        name
        for holding, has_changed in zip(holdings, written, strict=True)
        if _lacks_numbers(holding, has_changed)
        for name in holding.told
    }


def _mark(memory: Tensor) -> None:
    """Fill memory as torch fills what it makes by ``torch.empty``, where it is asked to."""
    if memory.is_floating_point() or memory.is_complex():
        memory.fill_(float("nan"))
    else:
        memory.fill_(True if memory.dtype == torch.bool else torch.iinfo(memory.dtype).max)


@contextlib.contextmanager
def _empty_is_marked() -> Iterator[None]:
    """Let ``torch.empty``, and so ``Module.to_empty``, give marked memory."""
    deterministic: Any = torch.utils.deterministic
    before = torch.get_deterministic_debug_mode(), deterministic.fill_uninitialized_memory
    try:
        # The filling is part of deterministic algorithms; "warn" lets functions that have none run as they are.
        torch.set_deterministic_debug_mode("error" if before[0] == 2 else "warn")
        deterministic.fill_uninitialized_memory = True
        yield
    finally:
        torch.set_deterministic_debug_mode(before[0])
        deterministic.fill_uninitialized_memory = before[1]


def _is_marked(tensor: Tensor) -> bool:
    """Return whether nothing but the mark is in a tensor; of truth values that cannot be known."""
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().all())
    return tensor.dtype != torch.bool and bool((tensor == torch.iinfo(tensor.dtype).max).all())


def _take_back(holding: Holding, where: str) -> None:
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
        if not _is_marked(now):  # else it comes from torch's Module.to_empty, say
            with torch.no_grad():
                holding.memory.copy_(now.detach())
        holding.held.data = holding.memory
        found[key] = holding.held


def _lacks_numbers(holding: Holding, has_changed: bool) -> bool:
    """Tell whether memory is as it was marked: of a parameter any part of it, of a buffer, where NaN can be meant, all.

    Args:
        holding: it.
        has_changed: its version counter has, which writings through ``.data`` do not raise.
    """
    memory = holding.memory
    if not memory.numel():
        return False
    if isinstance(holding.held, nn.Parameter) and (memory.is_floating_point() or memory.is_complex()):
        real = torch.view_as_real(memory) if memory.is_complex() else memory
        return bool(real.amax().isnan())  # which needs no memory, unlike isnan().any()
    return not has_changed and (memory.dtype == torch.bool or _is_marked(memory))
