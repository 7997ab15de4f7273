"""The contents of a wrapped model's modules: buffers, which are rank 0's on every rank, and a check for changes.

A module or parameter that is added, replaced or removed after wrap would be trained by no engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsshard.backends.base import Backend
from fsshard.backends.whole import copied
from fsshard.comm.agreement import per_rank
from fsshard.complex_params.flattened import stored_in
from fsshard.complex_params.slots import parameter_slots, public_name
from fsshard.errors import ModelError
from fsshard.state_objects import is_composite
from fsshard.torch_private.tensors import foreach_copy_

_Place = tuple[str, str]
"""The name of a module, and of a buffer in it."""
_Layout = dict[_Place, tuple[torch.Size, torch.dtype]]


class ModelBuffers:
    """The buffers of one model: whether the ranks' may differ, and which dtypes users gave them."""

    def __init__(self, backend: Backend, broadcast: bool, dtypes: Mapping[str, torch.dtype]) -> None:
        self._module = backend.module
        self._group = backend.settings.group
        if self._group is not None and self._group.size() == 1:
            # There is nobody to send to.
            self._group = None
        self._device = backend.settings.device
        self.broadcast = broadcast
        # The rank of the group whose buffers count: not 0 where rank 0 has no batches left.
        self.source = 0
        # The rank whose buffers will count once they were sent.
        self.next_source = 0
        self._parts = _modules_of(self._module)
        # Whether modules have come or gone since it was wrapped.
        self._changed = False
        # The user's dtypes, by name, of buffers that mixed precision holds in another one.
        self.dtypes = dict(dtypes)
        # Whether a forward in training may have made the ranks' differ since they were last sent.
        self.differ = False
        self._simulated = False
        # Of rank 0's buffers, as every rank knows it; ``wrap`` has compared them.
        self._layout = _layout_of(self._now())

    def look_again(self) -> None:
        """Find the modules again, since some without trainable parameters may have come or gone."""
        parts = _modules_of(self._module)
        self._changed |= parts != self._parts
        self._parts = parts

    def _now(self) -> dict[_Place, Tensor]:
        """Return the distinct buffers of the model's modules as they are now, by module and name, without a walk."""
        # Of a buffer in several places the last one counts, where the first one stands.
        # By identity, since a tensor's hash is a call of a Python function.
        distinct = {}
        for part, module in self._parts.items():
            for key, buffer in module._buffers.items():
                if buffer is not None and not buffer.is_meta:
                    distinct[id(buffer)] = ((part, key), buffer)
        return dict(distinct.values())

    def are_trained(self) -> bool:
        """Return whether a module that has buffers is in training mode, whatever mode the model is in."""
        return any(part.training and part._buffers for part in self._parts.values())

    def sync(self, *, then_differ: bool = False) -> None:
        """Send rank 0's buffers to all where a training forward may have made them differ, as DDP does. Collective."""
        if self.differ and self.broadcast and self._group is not None:
            if not then_differ:
                # Before evaluations and state dicts; in training, forwards that are looked at do so.
                self.look_again()
            self.send()
        self.source = self.next_source
        self.differ = then_differ

    def send(self) -> None:
        """Give each rank rank 0's value of every buffer that both have in one shape and dtype. Collective.

        Other buffers (a mask that one rank has made longer) stay as they are. A model without buffers sends none,
        as under DDP, until modules are put into it.
        """
        group = self._group
        if group is None or not (self._layout or self._changed):
            return
        with torch.no_grad():
            while not self._send_layout(group):
                # All know by now which buffers rank 0 has.
                pass

    def _send_layout(self, group: dist.ProcessGroup) -> bool:
        """Send what the ranks know of; return False where rank 0 had other buffers, which all know now. Collective."""
        buffers = self._now()
        is_first = group.rank() == self.source
        layout = _layout_of(buffers)
        sizes = [shape.numel() * dtype.itemsize for shape, dtype in self._layout.values()]
        # The first byte says whether rank 0 has other buffers than the ranks know of. Then the rest means nothing, and
        # none of it may be written into anybody's buffers.
        changed = is_first and layout != self._layout
        length = 1 + sum(sizes)
        message = torch.full((length,), changed, dtype=torch.uint8, device=self._device)
        contents = message[1:]
        if is_first and not changed and sizes:
            parts = [_bytes_of(buffers[place]) for place in self._layout]
            torch.cat(parts, out=contents)
        dist.broadcast(message, group=group, group_src=self.source)
        if not is_first and not self._simulated:
            changed = bool(message[0])
        if changed:
            layouts = per_rank(group, layout)
            self._layout = layouts[self.source]
            return False
        if not is_first:
            own = []
            sent = []
            received = contents.split(sizes)
            for (place, kind), part in zip(self._layout.items(), received, strict=True):
                if layout.get(place) == kind:
                    own.append(buffers[place])
                    sent.append(part)
            _write(own, sent)
        return True

    def simulate(self) -> None:
        """Read nothing that another rank has sent."""
        self._simulated = True

    def for_user(self, key: str, value: Any, *, offload_to_cpu: bool = False) -> Any:
        """Return a copy of a buffer, or an extra state itself, as a state dict has it under ``key``."""
        if not isinstance(value, Tensor):
            return value
        if is_composite(value):
            return copied(value)
        device = "cpu" if offload_to_cpu else value.device
        copy = value.detach().to(device, copy=True)
        return copy.to(self.dtypes.get(key, copy.dtype))


def _modules_of(model: nn.Module) -> dict[str, nn.Module]:
    return {public_name(name): module for name, module in model.named_modules()}


def _layout_of(buffers: Mapping[_Place, Tensor]) -> _Layout:
    return {place: (buffer.shape, buffer.dtype) for place, buffer in buffers.items()}


def _bytes_of(buffer: Tensor) -> Tensor:
    # ``.data`` has a version counter of its own. Raised by what is sent, the buffer's would make the backward of an
    # earlier forward fail: "modified by an inplace operation" (pytorch 22095). torch 2.13's DDP leaves it alone, too.
    flat = buffer.data.contiguous().view(-1)
    return flat.view(torch.uint8)


def _write(buffers: list[Tensor], parts: list[Tensor]) -> None:
    """Copy the bytes that rank 0 has sent to where the buffers are."""
    dense = []
    sent = []
    for buffer, part in zip(buffers, parts, strict=True):
        if buffer.is_contiguous():
            dense.append(_bytes_of(buffer))
            sent.append(part)
        else:
            # A part of the message need not begin where the dtype may; its copy does.
            values = part.clone().view(buffer.dtype)
            buffer.data.copy_(values.view(buffer.shape))
    if dense:
        foreach_copy_(dense, sent)


# ------------------------------------------------------------------------------------------------ changes


def check_same_parameters(backend: Backend) -> None:
    """Raise if the trainable parameters of a wrapped model are not those that were wrapped. Local.

    Modules without parameters, parameters without gradient and buffers may come and go.

    Raises:
        ModelError: names what was added, replaced or removed.
    """
    changes: dict[str, list[str]] = {"added": [], "replaced": [], "removed": []}
    modules = set(backend.module.modules())
    wrapped = set()
    for entry in backend.all:
        for slot in entry.slots:
            wrapped.add((slot.owner, slot.stored))
            parameter = stored_in(slot.owner).get(slot.stored)
            if parameter is not entry.parameter and not backend.shows(entry, parameter):
                changes["replaced"].append(slot.name)
            if slot.owner not in modules:
                changes["removed"].append(slot.name)
    ignored = backend.settings.ignored
    for slot in parameter_slots(backend.module):
        parameter = slot.parameter
        if (slot.owner, slot.stored) in wrapped or not isinstance(parameter, nn.Parameter):
            continue
        if parameter.requires_grad and parameter not in ignored:
            changes["added"].append(slot.name)
    texts = []
    for change, names in changes.items():
        if not names:
            continue
        more = ", ..." if len(names) > 5 else ""
        texts.append(f"{change}: {', '.join(names[:5])}{more}")
    if texts:
        raise ModelError(
            "parameters were added, replaced or removed after fsshard.wrap, which the engine does not see "
            f"({'; '.join(texts)}): it would keep training the old ones only. Change the model first and wrap it "
            "then; to change values, use model.load_state_dict, or write in place"
        )
