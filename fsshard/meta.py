"""Models without memory: sharded first, filled then, so that no rank holds the whole model.

A model built under ``torch.device("meta")`` has shapes and no numbers. :func:`fsshard.wrap` makes it real one unit at a
time, and each unit is sharded before the next one. Where the numbers come from is a :class:`Source`: the real model of
rank 0, tensor by tensor; the modules' own ``reset_parameters``; or nothing yet, and then ``load_state_dict`` has to
bring them before the first forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsshard.complex_params import ParameterSlot, parameter_slots
from fsshard.errors import ConfigurationError, ModelError

__all__ = ["Source", "check_resettable", "initialiser", "is_meta", "meta_tensors", "take_out"]

Initialiser = Callable[[nn.Module], object]


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
        unfilled: names of parameters and buffers that have no numbers yet.
    """

    model: nn.Module
    device: torch.device
    group: dist.ProcessGroup | None
    init: Initialiser | None = None
    from_rank0: bool = False
    held: dict[str, Tensor] = field(default_factory=dict)
    unfilled: set[str] = field(default_factory=set)

    def make_real(self, region: Iterable[nn.Module], places: list[list[ParameterSlot]]) -> list[nn.Parameter]:
        """Give memory and numbers to one unit. Collective.

        Args:
            region: the unit's modules without those of the units below it.
            places: per distinct parameter its slots, the first name first.

        Returns:
            The new parameters, in that order.
        """
        made: list[nn.Parameter] = []
        for slots in places:
            old = slots[0].parameter
            new = nn.Parameter(torch.empty_like(old, device=self.device), requires_grad=old.requires_grad)
            for slot in slots:
                slot.owner._parameters[slot.stored] = new
            made.append(new)
        modules = list(region)
        buffers = [self._real_buffer(module, key) for module in modules for key in module._buffers]
        if self.init is not None:
            with torch.no_grad():
                for module in modules:
                    if module._parameters or module._buffers:
                        self.init(module)
        self._send(made, [slots[0] for slots in places], [buffer for buffer in buffers if buffer is not None])
        return made

    def _real_buffer(self, module: nn.Module, key: str) -> tuple[nn.Module, str] | None:
        buffer = module._buffers[key]
        if buffer is None or not buffer.is_meta:
            return None
        module._buffers[key] = torch.empty_like(buffer, device=self.device)
        return module, key

    @torch.no_grad()
    def _send(
        self, parameters: list[nn.Parameter], slots: list[ParameterSlot], buffers: list[tuple[nn.Module, str]]
    ) -> None:
        if not self.from_rank0 and self.init is None:
            names = {id(module): name for name, module in self.model.named_modules()}
            self.unfilled |= {slot.name for slot in slots}
            self.unfilled |= {f"{names[id(m)]}.{key}" if names[id(m)] else key for m, key in buffers}
            return
        for parameter, slot in zip(parameters, slots, strict=True):
            self._fill(parameter.data, self.held.pop(slot.name, None), slot)
        for module, key in buffers:
            buffer = module._buffers[key]
            assert buffer is not None
            self._fill(buffer, self.held.pop(f"{id(module)}.{key}", None), None)

    def _fill(self, into: Tensor, value: Tensor | None, slot: ParameterSlot | None) -> None:
        if value is not None:
            into.copy_(value if slot is None else slot.kind.to_stored(value))
        if self.group is not None and self.group.size() > 1 and into.numel():
            dist.broadcast(torch.view_as_real(into) if into.is_complex() else into, group=self.group, group_src=0)
