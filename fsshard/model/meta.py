"""Models on the meta device: sharded first and filled afterwards, so that no rank holds the whole model.

A model built under ``torch.device("meta")`` has shapes and no values. :func:`fsshard.wrap` makes it real one unit at a
time, and each unit is sharded before the next one. Where the numbers come from is a :class:`ValueSource`: the real
model of rank 0, tensor by tensor; a function that initialises a module, such as its own ``reset_parameters``; or
nothing yet. What has no values then, ``load_state_dict`` has to bring before the first forward.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsshard.comm.agreement import exchange, per_rank
from fsshard.complex_params.flattened import showing_the_users
from fsshard.complex_params.replaced import attributes_of
from fsshard.complex_params.slots import ParameterSlot, public_name
from fsshard.errors import ConfigurationError, FsshardError, ModelError, RankMismatch
from fsshard.model.memory_layout import storage_of
from fsshard.torch_private.tensors import version_of

Initialiser = Callable[[nn.Module], object]
"""Gives one module's own parameters and buffers their values."""


def is_meta(slots: Sequence[ParameterSlot]) -> bool:
    """Return whether the parameters of a model are on the meta device; raise if some are, and some are not."""
    real = [slot.name for slot in slots if not slot.parameter.is_meta]
    if real and len(real) < len(slots):
        raise ModelError(
            f"some parameters are on the meta device and some are not ({', '.join(real[:3])}); build the whole model "
            "under torch.device('meta'), or all of it outside"
        )
    return not real and bool(slots)


def initialiser(value: object) -> Initialiser | None:
    """Return the function that ``param_init_fn=`` names."""
    if value is None:
        return None
    if value == "reset_parameters":
        return _reset
    if callable(value):
        return value
    raise ConfigurationError(f"param_init_fn={value!r}: expected 'reset_parameters', or a callable that takes a module")


def _reset(module: nn.Module) -> None:
    module.reset_parameters()  # type: ignore[operator]


def check_resettable(modules: Mapping[str, nn.Module], init: Initialiser | None) -> None:
    """Raise for modules that hold parameters or buffers without memory and cannot initialise themselves."""
    if init is not _reset:
        return
    lacking = set()
    for name, module in modules.items():
        if _holds_meta(module) and not callable(getattr(module, "reset_parameters", None)):
            lacking.add(f"{name or '(the model)'} ({type(module).__name__})")
    if lacking:
        raise ModelError(
            f"param_init_fn='reset_parameters': no such method in {', '.join(sorted(lacking)[:5])}; pass a function "
            "that initialises a module, build a real model on rank 0 and meta ones elsewhere, or load a state dict"
        )


def _holds_meta(module: nn.Module) -> bool:
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return any(tensor.is_meta for tensor in own)


def take_out(modules: Iterable[nn.Module], slots: Sequence[ParameterSlot]) -> dict[str, Tensor]:
    """Leave shapes in the modules and return their values: parameters and buffers by the user's names, ties once."""
    values = {}
    parameters = {}
    for slot in slots:
        parameter = slot.parameter
        if id(parameter) not in parameters:
            values[slot.name] = parameter.detach()
            blank = torch.empty_like(parameter, device="meta")
            parameters[id(parameter)] = _like(parameter, blank)
        slot.owner._parameters[slot.stored] = parameters[id(parameter)]
    buffers = {}
    for module in modules:
        for key, buffer in module._buffers.items():
            if buffer is not None:
                if id(buffer) not in buffers:
                    buffers[id(buffer)] = torch.empty_like(buffer, device="meta")
                module._buffers[key] = buffers[id(buffer)]
                values[f"{id(module)}.{key}"] = buffer
    return values


def _like(parameter: Tensor, memory: Tensor) -> nn.Parameter:
    """Return a parameter over other memory, with the same attributes."""
    new = nn.Parameter(memory, parameter.requires_grad)
    new.__dict__.update(attributes_of(parameter))
    return new


@dataclass
class ValueSource:
    """The source of the values of a tensorfied model on the meta device.

    Attributes:
        names: public names of the modules.
        init: gives a module its numbers; None where there is none.
        from_rank0: rank 0 had a real model.
        held: there, its numbers, from :func:`take_out`.
        unfilled: names of parameters and buffers that have no values yet; the same on every rank.
    """

    names: Mapping[nn.Module, str]
    device: torch.device
    group: dist.ProcessGroup | None
    init: Initialiser | None = None
    from_rank0: bool = False
    held: dict[str, Tensor] = field(default_factory=dict)
    unfilled: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._made: list[ParameterSlot] = []
        # by the identity of the first: without and with memory, and the name
        self._buffers: dict[int, tuple[Tensor, Tensor, str]] = {}

    def make_real(self, region: Iterable[nn.Module], places: list[list[ParameterSlot]]) -> list[nn.Parameter]:
        """Give memory and values to one unit. Collective.

        Args:
            region: the unit's modules without those of the units below it, children before their parents.
            places: per distinct parameter its slots, the first name first.

        Returns:
            The new parameters, in that order.
        """
        modules = [module for module in region if _holds_meta(module)]
        # Where engines have put what was made before, by now.
        elsewhere: dict[str, Tensor] = {}
        for slot in self._made:
            elsewhere[slot.name] = slot.parameter
        for _, real, name in self._buffers.values():
            elsewhere[name] = real
        parameters = list(map(self._allocate, places))
        buffers = self._allocate_buffers(modules)
        for slots in places:
            self._made += slots
        holdings = parameters + buffers
        without = set()
        if self.init is not None:
            init = self.init
            # A buffer that modules of several units share is made here.
            own = {id(holding.held) for holding in holdings}
            for name, tensor in list(elsewhere.items()):
                if id(tensor) in own:
                    del elsewhere[name]
            results = exchange(self.group, lambda: initialise(init, modules, holdings, elsewhere, self.names))
            # Rank 0's numbers are sent.
            without = results[0]
        elif not self.from_rank0:
            for holding in holdings:
                without.update(holding.told)
        self.unfilled |= without
        self._send(parameters, places, without)
        self._send(buffers, None, without)
        return [holding.held for holding in parameters if isinstance(holding.held, nn.Parameter)]

    def _allocate(self, slots: list[ParameterSlot]) -> Holding:
        old = slots[0].parameter
        memory = torch.empty_like(old, device=self.device, requires_grad=False)
        new = _like(old, memory)
        names = []
        places = []
        for slot in slots:
            slot.owner._parameters[slot.stored] = new
            names.append(slot.name)
            places.append((slot.owner, slot.stored))
        return Holding(new, tuple(names), tuple(places), memory)

    def _allocate_buffers(self, modules: list[nn.Module]) -> list[Holding]:
        reals = {}
        names = defaultdict(list)
        places = defaultdict(list)
        for module in modules:
            prefix = f"{self.names[module]}." if self.names[module] else ""
            for key, buffer in module._buffers.items():
                if buffer is None or not buffer.is_meta:
                    continue
                name = prefix + key
                if id(buffer) not in self._buffers:
                    memory = torch.empty_like(buffer, device=self.device)
                    self._buffers[id(buffer)] = (buffer, memory, name)
                _, real, _ = self._buffers[id(buffer)]
                module._buffers[key] = real
                reals[id(real)] = real
                names[id(real)].append(name)
                places[id(real)].append((module, key))
        holdings = []
        for number, real in reals.items():
            names_of_real = tuple(names[number])
            places_of_real = tuple(places[number])
            holdings.append(Holding(real, names_of_real, places_of_real, real.detach()))
        return holdings

    @torch.no_grad()
    def _send(
        self,
        holdings: list[Holding],
        slots: list[list[ParameterSlot]] | None,
        without: set[str],
    ) -> None:
        """Send rank 0's numbers to all, where it has them."""
        for index, holding in enumerate(holdings):
            if holding.names[0] in without:
                continue
            if slots is None:
                module, key = holding.places[0]
                value = self.held.pop(f"{id(module)}.{key}", None)
            else:
                slot = slots[index][0]
                value = self.held.pop(slot.name, None)
                if value is not None:
                    value = slot.kind.to_stored(value)
            memory = holding.memory
            if value is not None:
                memory.copy_(value)
            if self.group is None or self.group.size() == 1 or not memory.numel():
                continue
            # gloo sends memory as it lies, and layouts may differ (torch 2.13).
            sent = memory.contiguous()
            real = torch.view_as_real(sent) if sent.is_complex() else sent
            dist.broadcast(real, group=self.group, group_src=0)
            if sent is not memory:
                memory.copy_(sent)


def no_numbers_yet(unfilled: Set[str], in_state_dict: Set[str]) -> ModelError:
    """Return the error that names what has memory and no values, and says where its values can come from."""
    awaited = sorted(unfilled & in_state_dict)
    constants = sorted(unfilled - in_state_dict)
    sentences = []
    if awaited:
        sentences.append(
            f"no values yet for {', '.join(awaited[:5])}: the model was built on the meta device; load a state dict "
            "that has them, or wrap with a param_init_fn that sets them"
        )
    if constants:
        sentences.append(
            f"no values yet for {', '.join(constants[:5])}, non-persistent buffers, which no state dict has: wrap "
            "with a param_init_fn that sets them (what it leaves alone can come from a state dict; for a model of "
            "transformers: param_init_fn=model._init_weights), or build a real model on rank 0"
        )
    return ModelError(". And ".join(sentences))


def ranks_on_meta(slots: Sequence[ParameterSlot], group: dist.ProcessGroup) -> list[bool]:
    """Return which ranks' models are on the meta device; raise if only rank 0's is. Collective."""
    # All parameters of a rank are alike: see check_model().
    on_meta = per_rank(group, slots[0].parameter.is_meta)
    if on_meta[0] and not all(on_meta):
        raise RankMismatch(
            f"the model is on the meta device on rank 0 and real on rank {on_meta.index(False)}; make rank 0's the "
            "real one"
        )
    return on_meta


def value_source(
    modules: Mapping[str, nn.Module],
    slots: Sequence[ParameterSlot],
    on_meta: Sequence[bool],
    device: torch.device,
    group: dist.ProcessGroup | None,
    init: Initialiser | None,
) -> ValueSource:
    """Return where the values of a model that is on the meta device on some rank come from; real ones leave the model.

    ``init`` is used where no rank has values.
    """
    rank = 0 if group is None else group.rank()
    held = {} if on_meta[rank] else take_out(modules.values(), slots)
    for module in modules.values():
        for key, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[key] = buffer.to(device)
    return ValueSource(
        {module: public_name(name) for name, module in modules.items()},
        device,
        group,
        init if on_meta[0] else None,
        from_rank0=not on_meta[0],
        held=held if rank == 0 else {},
    )


# ------------------------------------------------------------------------------------------------ the user's function


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
        if isinstance(self.held, nn.Parameter):
            return self.names[:1]
        return self.names


def initialise(
    init: Initialiser,
    modules: Sequence[nn.Module],
    holdings: Sequence[Holding],
    elsewhere: Mapping[str, Tensor],
    names: Mapping[nn.Module, str],
) -> set[str]:
    """Call ``init`` with each module, in this order, and check what it did. Local.

    Memory that was just made holds whatever was there before, and looks like numbers. So it is filled with NaN first
    (integers: with the largest one), also what the function itself makes by ``torch.empty``; what still holds that was
    not written.

    Args:
        init: gives a module its numbers.
        modules: the unit's.
        holdings: what has memory now.
        elsewhere: what belongs to other units, by name, and must be left alone.
        names: of all modules.

    Returns:
        Names of what has no values yet.
    """
    held_by = defaultdict(list)
    for holding in holdings:
        _mark(holding.memory)
        for module, _ in holding.places:
            held_by[module].append(holding)
    marked = [version_of(holding.memory) for holding in holdings]
    versions = {name: version_of(tensor) for name, tensor in elsewhere.items()}
    for module in modules:
        where = f"param_init_fn on {names[module] or '(the model)'} ({type(module).__name__})"
        before = _keys_of(module)
        try:
            with torch.no_grad(), _empty_is_marked(), showing_the_users(module.modules()):
                init(module)
        except FsshardError:
            raise
        except Exception as error:
            raise ModelError(f"{where} failed: {type(error).__name__}: {error}") from error
        for name, tensor in elsewhere.items():
            if version_of(tensor) != versions[name]:
                raise ModelError(
                    f"{where} writes to {name}, which belongs to another sharding unit and may be sharded by now; "
                    "initialise only the module's own parameters (children are called first), put both into one unit "
                    "with auto_wrap_policy, or build a real model on rank 0"
                )
        if _keys_of(module) != before:
            changed = set().union(*_keys_of(module)) ^ set().union(*before)
            raise ModelError(f"{where} added or removed {', '.join(sorted(changed))}; do that before fsshard.wrap")
        for holding in held_by.get(module, ()):
            _take_back(holding, where)
    # A parent may have assigned to its children.
    for holding in holdings:
        _take_back(holding, "param_init_fn")
    without: set[str] = set()
    for holding, version in zip(holdings, marked, strict=True):
        has_changed = version_of(holding.memory) != version
        if _lacks_numbers(holding, has_changed):
            without.update(holding.told)
    return without


def _keys_of(module: nn.Module) -> tuple[set[str], set[str]]:
    return set(module._parameters), set(module._buffers)


def _mark(memory: Tensor) -> None:
    """Fill memory as torch fills what it makes by ``torch.empty``, where it is asked to."""
    if memory.is_floating_point() or memory.is_complex():
        memory.fill_(float("nan"))
    else:
        largest = True if memory.dtype == torch.bool else torch.iinfo(memory.dtype).max
        memory.fill_(largest)


@contextlib.contextmanager
def _empty_is_marked() -> Iterator[None]:
    """Let ``torch.empty``, and so ``Module.to_empty``, give marked memory."""
    deterministic: Any = torch.utils.deterministic
    mode = torch.get_deterministic_debug_mode()
    fills = deterministic.fill_uninitialized_memory
    try:
        # The filling is part of deterministic algorithms; "warn" lets functions that have none run as they are.
        torch.set_deterministic_debug_mode("error" if mode == 2 else "warn")
        deterministic.fill_uninitialized_memory = True
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        deterministic.fill_uninitialized_memory = fills


def _is_marked(tensor: Tensor) -> bool:
    """Return whether nothing but the mark is in a tensor; of truth values that cannot be known."""
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().all())
    if tensor.dtype == torch.bool:
        return False
    largest = torch.iinfo(tensor.dtype).max
    return bool((tensor == largest).all())


def _take_back(holding: Holding, where: str) -> None:
    """Copy the numbers of what was assigned; modules keep what they held, with its ties, device, and requires_grad."""
    memory = holding.memory
    is_parameter = isinstance(holding.held, nn.Parameter)
    for name, (module, key) in zip(holding.names, holding.places, strict=True):
        tensors: dict[str, Any] = module._parameters if is_parameter else module._buffers
        value = tensors[key]
        is_untouched = value is holding.held and value.shape == memory.shape
        if is_untouched and storage_of(value) == storage_of(memory):
            continue
        wrong = _why_unfit(value, memory, may_cast=not is_parameter)
        if wrong:
            raise ModelError(
                f"{where} assigned to {name}: expected {memory.dtype} of shape {tuple(memory.shape)}, got {wrong}"
            )
        # What is marked comes from torch's Module.to_empty, say.
        if not _is_marked(value):
            with torch.no_grad():
                memory.copy_(value.detach())
        holding.held.data = memory
        tensors[key] = holding.held


def _why_unfit(value: Tensor | None, memory: Tensor, *, may_cast: bool) -> str:
    """Say what was assigned if its numbers cannot be copied to memory; buffers may be in another dtype there."""
    if value is None:
        return "nothing"
    if value.is_meta:
        return "no memory"
    casts = may_cast and value.is_floating_point() and memory.is_floating_point()
    if value.shape != memory.shape or (value.dtype != memory.dtype and not casts):
        return f"{value.dtype} of shape {tuple(value.shape)}"
    return ""


def _lacks_numbers(holding: Holding, has_changed: bool) -> bool:
    """Tell whether memory is as it was marked: of a parameter any part, of a buffer, where NaN can be meant, all."""
    memory = holding.memory
    if not memory.numel():
        return False
    if isinstance(holding.held, nn.Parameter) and (memory.is_floating_point() or memory.is_complex()):
        real = torch.view_as_real(memory) if memory.is_complex() else memory
        return bool(real.amax().isnan())  # which needs no memory, unlike isnan().any()
    # The version counter tells, but of writings through ``.data``.
    if has_changed:
        return False
    return memory.dtype == torch.bool or _is_marked(memory)
