"""Models without memory: sharded first, filled then, so that no rank holds the whole model.

A model built under ``torch.device("meta")`` has shapes and no numbers. :func:`fsshard.wrap` makes it real one unit at a
time, and each unit is sharded before the next one. Where the numbers come from is a :class:`Source`: the real model of
rank 0, tensor by tensor; a function that initialises a module, such as its own ``reset_parameters``; or nothing yet.
What has no numbers then, ``load_state_dict`` has to bring before the first forward.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsshard.agreement import exchange
from fsshard.complex_params import ParameterSlot, parameter_slots, public_name
from fsshard.errors import ConfigurationError, ModelError
from fsshard.initialisation import Holding, Initialiser, initialise, storage_of

__all__ = ["Source", "check_resettable", "initialiser", "is_meta", "meta_tensors", "take_out"]


def meta_tensors(model: nn.Module) -> list[str]:
    """Names of the parameters, then of the buffers, that are on the meta device."""
    parameters = [slot.name for slot in parameter_slots(model) if slot.parameter.is_meta]
    return parameters + [name for name, buffer in model.named_buffers() if buffer.is_meta]


def is_meta(model: nn.Module) -> bool:
    """Whether the parameters are on the meta device.

    Raises:
        ModelError: some are, and some are not.
    """
    flags = {slot.name: slot.parameter.is_meta for slot in parameter_slots(model)}
    if any(flags.values()) and not all(flags.values()):
        real = [name for name, flag in flags.items() if not flag]
        raise ModelError(
            f"some parameters are on the meta device and some are not ({', '.join(real[:3])}); build the whole model "
            "under torch.device('meta'), or all of it outside"
        )
    return any(flags.values())


def initialiser(value: object) -> Initialiser | None:
    """The function that ``param_init_fn=`` names: it gives one module's own parameters and buffers their numbers."""
    if value is None:
        return None
    if value == "reset_parameters":
        return _reset
    if callable(value):
        return value
    raise ConfigurationError(f"param_init_fn={value!r}: expected 'reset_parameters', or a callable that takes a module")


def _reset(module: nn.Module) -> None:
    module.reset_parameters()  # type: ignore[operator]


def check_resettable(model: nn.Module, init: Initialiser | None) -> None:
    """Raise for modules that hold parameters or buffers without memory and cannot give themselves numbers.

    Raises:
        ModelError: names them.
    """
    if init is not _reset:
        return
    lacking = {
        f"{name or '(the model)'} ({type(module).__name__})"
        for name, module in model.named_modules()
        if _holds_meta(module) and not callable(getattr(module, "reset_parameters", None))
    }
    if lacking:
        raise ModelError(
            f"param_init_fn='reset_parameters': no such method in {', '.join(sorted(lacking)[:5])}; pass a function "
            "that initialises a module, build the model really on rank 0 and on meta elsewhere, or load a state dict"
        )


def _holds_meta(module: nn.Module) -> bool:
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return any(tensor.is_meta for tensor in own)


def take_out(model: nn.Module) -> dict[str, Tensor]:
    """Leave shapes in the model and return its numbers: parameters and buffers by the user's names, ties once."""
    held: dict[str, Tensor] = {}
    replaced: dict[int, nn.Parameter] = {}
    for slot in list(parameter_slots(model)):
        parameter = slot.parameter
        if id(parameter) not in replaced:
            held[slot.name] = parameter.detach()
            replaced[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
        slot.owner._parameters[slot.stored] = replaced[id(parameter)]
    buffers: dict[int, Tensor] = {}
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = buffers.setdefault(id(buffer), torch.empty_like(buffer, device="meta"))
                held[f"{id(module)}.{key}"] = buffer
    return held


@dataclass
class Source:
    """Where the numbers of a model without memory come from.

    Attributes:
        model: it, tensorfied.
        device: where it will be.
        group: the ranks that share the work.
        init: gives a module its numbers; None where there is none.
        from_rank0: rank 0 had a real model.
        held: there, its numbers, from :func:`take_out`.
        unfilled: names of parameters and buffers that have no numbers yet; the same on every rank.
    """

    model: nn.Module
    device: torch.device
    group: dist.ProcessGroup | None
    init: Initialiser | None = None
    from_rank0: bool = False
    held: dict[str, Tensor] = field(default_factory=dict)
    unfilled: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._names = {module: public_name(name) for name, module in self.model.named_modules()}
        self._made: list[ParameterSlot] = []
        # by the identity of the first: without and with memory, and the name
        self._buffers: dict[int, tuple[Tensor, Tensor, str]] = {}

    def make_real(self, region: Iterable[nn.Module], places: list[list[ParameterSlot]]) -> list[nn.Parameter]:
        """Give memory and numbers to one unit. Collective.

        Args:
            region: the unit's modules without those of the units below it, children before their parents.
            places: per distinct parameter its slots, the first name first.

        Returns:
            The new parameters, in that order.

        Raises:
            ModelError: the function that initialises failed, on any rank.
        """
        modules = [module for module in region if _holds_meta(module)]
        earlier = self._storages()
        parameters = [self._allocate(slots) for slots in places]
        buffers = self._allocate_buffers(modules)
        self._made += [slot for slots in places for slot in slots]
        holdings = parameters + buffers
        if self.init is None:
            without = set() if self.from_rank0 else {name for holding in holdings for name in holding.told}
        else:
            for holding in holdings:
                earlier.pop(storage_of(holding.memory), None)  # a buffer that modules of several units share
            init = self.init
            results = exchange(self.group, lambda: initialise(init, modules, holdings, earlier, self._names))
            without = results[0]  # rank 0's numbers are sent, or there are none
        self.unfilled |= without
        self._send(parameters, places, without)
        self._send(buffers, None, without)
        return [holding.held for holding in parameters if isinstance(holding.held, nn.Parameter)]

    def _storages(self) -> dict[int, str]:
        """Storage -> name of what earlier units own, where engines have put it by now."""
        found = {storage_of(slot.parameter): slot.name for slot in self._made}
        return found | {storage_of(real): name for _, real, name in self._buffers.values()}

    def _allocate(self, slots: list[ParameterSlot]) -> Holding:
        old = slots[0].parameter
        memory = torch.empty_like(old, device=self.device, requires_grad=False)
        new = nn.Parameter(memory, requires_grad=old.requires_grad)
        for slot in slots:
            slot.owner._parameters[slot.stored] = new
        places = tuple((slot.owner, slot.stored) for slot in slots)
        return Holding(new, tuple(slot.name for slot in slots), places, memory)

    def _allocate_buffers(self, modules: list[nn.Module]) -> list[Holding]:
        found: dict[int, Holding] = {}
        for module in modules:
            for key, buffer in module._buffers.items():
                if buffer is None or not buffer.is_meta:
                    continue
                name = f"{self._names[module]}.{key}" if self._names[module] else key
                if id(buffer) not in self._buffers:
                    self._buffers[id(buffer)] = (buffer, torch.empty_like(buffer, device=self.device), name)
                real = module._buffers[key] = self._buffers[id(buffer)][1]
                before = found.get(id(real), Holding(real, (), (), real.detach()))
                found[id(real)] = Holding(real, (*before.names, name), (*before.places, (module, key)), before.memory)
        return list(found.values())

    @torch.no_grad()
    def _send(self, holdings: list[Holding], slots: list[list[ParameterSlot]] | None, without: set[str]) -> None:
        """Rank 0's numbers to all, where it has them."""
        for index, holding in enumerate(holdings):
            if holding.names[0] in without:
                continue
            slot = None if slots is None else slots[index][0]
            module, key = holding.places[0]
            value = self.held.pop(f"{id(module)}.{key}" if slot is None else slot.name, None)
            into = holding.memory
            if value is not None:
                into.copy_(value if slot is None else slot.kind.to_stored(value))
            if self.group is not None and self.group.size() > 1 and into.numel():
                sent = into.contiguous()  # gloo sends memory as it lies, and layouts may differ (torch 2.13)
                dist.broadcast(torch.view_as_real(sent) if sent.is_complex() else sent, group=self.group, group_src=0)
                if sent is not into:
                    into.copy_(sent)
