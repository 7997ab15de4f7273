"""Where a hook on what a forward has returned is sure to run when its backward begins.

Of an output that is a view, autograd forgets the node when anything is written to it in place (``h = block(h)``,
``h += residual``, where the block ends in ``view`` or ``transpose``): it then goes from the memory's own tensor to the
writing, and hooks on the view are never called. FSDP2 warns of it ("returned a view tensor"), FSDP1 does not; what
follows is weights that are not there in backward, or gradients that are reduced by nobody, in silence (torch 2.13).
Hooks on the tensor that the view is of are called all the same.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["bases", "forward_begins", "grad_tensors", "hook_bases", "hook_views_too"]


def grad_tensors(output: Any) -> Iterator[Tensor]:
    """The tensors in a model's output that take a gradient: in dicts, lists, tuples and dataclasses, nested."""
    if isinstance(output, Tensor):
        if output.requires_grad:
            yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from grad_tensors(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from grad_tensors(value)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        for item in dataclasses.fields(output):
            yield from grad_tensors(getattr(output, item.name))


def forward_begins() -> int:
    """What :func:`bases` is to be told afterwards: the number of the next node of autograd's in this thread."""
    return torch._C._autograd._get_sequence_nr()


def bases(outputs: Iterable[Tensor], since: int = 0) -> list[Tensor]:
    """What those of ``outputs`` are views of that can be written in place.

    Args:
        outputs: of a forward, which take a gradient.
        since: :func:`forward_begins` before it. What was made earlier, and not written since, has a backward of its
            own, before and after this forward's.
    """
    found: dict[int, Tensor] = {}
    for tensor in outputs:
        base = tensor._base
        node = None if base is None else base.grad_fn
        if node is not None and node._sequence_nr() >= since and _may_be_written(tensor):
            found[id(base)] = base  # type: ignore[assignment]
    return list(found.values())


def _may_be_written(view: Tensor) -> bool:
    """Whether autograd takes a writing to ``view``: not to one of several views, and not to what a Function returns."""
    return bool(torch._C._autograd._get_creation_meta(view) == torch._C._autograd.CreationMeta.DEFAULT)


def hook_bases(unit: Any, output: Any, since: int) -> None:
    """Give what the outputs of an FSDP1 unit are views of the hook that FSDP1 has given the outputs."""
    from torch.distributed.fsdp._common_utils import HandleTrainingState
    from torch.distributed.fsdp._runtime_utils import _pre_backward_hook

    handle = unit._handle
    recomputed = handle is not None and handle._training_state == HandleTrainingState.BACKWARD_PRE
    if torch.is_grad_enabled() and not recomputed:
        for base in bases(grad_tensors(output), since):
            base.register_hook(functools.partial(_pre_backward_hook, unit, unit, handle))


def hook_views_too(unit: Any) -> None:
    """Let FSDP2 hook what the outputs of ``unit`` are views of, and not warn of them any more."""
    from torch.distributed.fsdp._common_utils import collect_grad_tensors

    state = unit._get_fsdp_state()
    torchs = state._register_pre_backward_hook

    def register(output: Any) -> Any:
        if torch._C._are_functorch_transforms_active():
            return torchs(output)
        if torch.is_grad_enabled():
            outputs = collect_grad_tensors(output)
            for tensor in (*outputs, *bases(outputs)):
                tensor.register_hook(state._pre_backward)
        return output

    state._register_pre_backward_hook = register
