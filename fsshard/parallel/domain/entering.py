"""Inputs and outputs of a split operator's forward: each rank's slab of the same samples, or an error on every rank.

neuraloperator's losses divide by norms, and take differences between neighbours: of a slab they are silently wrong. So
are means of torch's losses, where ranks have slabs of different sizes. So they refuse what a split model has returned.
It is known again in two ways: by itself, and by the graph that leads from it to the loss, unless a gather lies between.
Without a graph (``torch.no_grad``) what was computed of an output, and is not the output itself, is not known again.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fsshard.comm.agreement import agree
from fsshard.errors import ConfigurationError, FsshardError, RankMismatch
from fsshard.parallel.domain.exchange import DomainGather
from fsshard.parallel.domain.slabs import FIRST, Slabs, checksum, even_parts, layout_text, mark_of
from fsshard.patches import FIELD_LOSSES
from fsshard.torch_private.autograd import current_graph_task_id
from fsshard.torch_private.fake_tensors import FakeTensor

KEY = "fsshard.slab"
"""In the ``metadata`` of an autograd node: what it made is the output of a split model; True if slabs are uneven."""


def marked_in_graph(output: Tensor, is_uneven: bool) -> Tensor:
    """The same tensor, known in its graph for what a split model has returned."""
    node: Any = output.grad_fn
    if node is not None:
        node.metadata[KEY] = is_uneven
    return output


def guard_losses(domain: Slabs) -> None:
    """Let neuraloperator's losses raise for a slab of a domain, and torch's means for uneven ones, while it lives."""
    FIELD_LOSSES.keep_for(domain, _refuse_slabs)


def _refuse_slabs(loss: Callable[..., Any], kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    values = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    if kind and any(_is_slab(value) for value in values):
        raise ConfigurationError(
            f"neuraloperator's {kind} of a slab is not that of the whole field: use domain.LpLoss, domain.H1Loss, "
            "domain.MSELoss or domain.mse_loss, with the domain that shard_domain returned, or any loss of "
            "domain.gather(output)"
        )
    if kind or not any(_is_slab(value, uneven=True) for value in values):
        return
    if inspect.signature(loss).bind(*args, **kwargs).arguments.get("reduction", "mean") == "mean":
        raise ConfigurationError(
            f"the mean that {loss.__name__} takes of a slab counts each rank alike, and the ranks have "
            "different numbers of rows: use domain.mse_loss or domain.MSELoss, with the domain that "
            "shard_domain returned; or any loss of domain.gather(output); or with the whole target y: "
            f"`F.{loss.__name__}(output, domain.scatter(y), reduction='sum') * domain.size / y.numel()`"
        )


def _is_slab(value: Tensor, *, uneven: bool = False) -> bool:
    """Return whether it is, or was computed of, a slab; with ``uneven``: of ranks with different numbers of rows."""
    mark = mark_of(value)
    if mark is not None:
        return mark.domain.is_uneven(mark.sizes) if uneven else mark.domain.size > 1
    seen: set[Any] = set()
    left: list[Any] = [value.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if KEY in node.metadata and (node.metadata[KEY] or not uneven):
            return True
        if node.name() != f"{DomainGather.__name__}Backward":
            left += [before for before, _ in node.next_functions]
    return False


DTYPES = (torch.float32, torch.float64, torch.complex64, torch.complex128, torch.bfloat16, torch.float16)
FAILED, DTYPE, OF_WHOLE, CHECKSUM, SHAPE = 0, 1, 2, 3, 4
"""Places in a rank's header: whether it cannot go on; its dtype's number; whether the checksum is of the whole field
(1), of the slab (0), or was not made (NOT_MADE); the checksum; the shape of its input, and then that of the whole."""
NOT_MADE = 2


class Entrance:
    """A forward pre-hook: finds out how the input lies on the ranks."""

    def __init__(self, domain: Slabs) -> None:
        self._domain = domain
        self._warned = False

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Ranks tell each other what they have. Where their group has no backend for the CPU it would wait for the
        device: there they do not for inputs that they know, and have agreed on before. Collective.

        Raises:
            ConfigurationError: the input is none, or of another domain.
            RankMismatch: slabs do not fit together, or another rank could not take part.
        """
        if current_graph_task_id() != -1:
            return  # computed again: every module looks its layout up
        field: Any = args[0] if args else kwargs.get("x")
        error, known = None, None
        try:
            known = _known(self._domain, field)
        except FsshardError as raised:
            error = raised
        kind = None if known is None else (known, field.shape, field.dtype)
        alone = isinstance(field, FakeTensor)  # in a simulation, whose other ranks do as this one does
        if kind is not None and (alone or (kind in self._domain.agreed and not self._domain.compares_always)):
            self._domain.enter(self._domain.even(kind[0]))
            return
        looks = self._domain.compares_numbers or kind not in self._domain.agreed
        header = _header(self._domain, field, known, error, looks=looks)
        table = self._domain.table(header)
        if table[..., FAILED].any():
            _raise_everywhere(self._domain, error)
        _check_alike(self._domain, table)
        self._look_at_checksums(table.flatten(0, -2))
        layout = self._domain.fitting(table[..., [SHAPE + FIRST + axis.dim for axis in self._domain.axes]])
        for axis, sizes in zip(self._domain.axes, layout, strict=True):
            self._domain.check_rows(sum(sizes), axis)
            if sizes != even_parts(sum(sizes), axis.size):
                raise RankMismatch(
                    f"slabs do not fit together: {layout_text([sizes])}, where torch.tensor_split of {sum(sizes)} rows "
                    f"over {axis.size} ranks gives {layout_text([even_parts(sum(sizes), axis.size)])}"
                )
        self._domain.agreed.add(kind)
        self._domain.enter(layout)

    def _look_at_checksums(self, rows: Tensor) -> None:
        alike = bool((rows[:, CHECKSUM] == rows[0, CHECKSUM]).all())
        if bool((rows[:, OF_WHOLE] == NOT_MADE).any()):
            return
        if rows[0, OF_WHOLE]:
            if not alike:
                raise RankMismatch(
                    "the ranks of a domain have scattered different fields: they need the same samples, in the same "
                    "order and with the same augmentation; fsshard.data_rank(mesh) of the whole mesh tells the sampler "
                    "which"
                )
        elif alike and self._domain.size > 1 and not self._warned:
            self._warned = True
            warnings.warn(
                "all ranks of a domain passed the same numbers, which are taken for slabs of a larger field; if they "
                "are the whole field, pass domain.scatter(x)",
                stacklevel=2,
            )


class Exit:
    """A forward hook: what is returned is known for a slab, by itself and in the graph."""

    def __init__(self, domain: Slabs) -> None:
        self._domain = domain

    def __call__(self, module: Any, args: Any, output: Any) -> Any:
        """The output, marked."""
        if not isinstance(output, Tensor) or current_graph_task_id() != -1:
            return output
        sizes = self._domain.leave(output)
        marked = marked_in_graph(output, self._domain.is_uneven(sizes)) if self._domain.size > 1 else output
        self._domain.mark(marked, sizes)
        return marked


def _known(domain: Slabs, field: Any) -> tuple[int, ...] | None:
    """The sizes of the whole, where this rank knows them."""
    if not isinstance(field, Tensor) or field.ndim != FIRST + domain.order or field.dtype not in DTYPES:
        got = f"{tuple(field.shape)}, {field.dtype}" if isinstance(field, Tensor) else type(field).__name__
        dims = ", ".join(f"d{dim + 1}" for dim in range(domain.order))
        raise ConfigurationError(f"a split operator expects a tensor (batch, channels, {dims}), got {got}")
    mark = mark_of(field)
    if mark is not None and not mark.domain.same_ranks(domain):
        raise ConfigurationError(
            f"the input was scattered over {mark.domain}, and the model is split over {domain}; scatter it with the "
            "domain that shard_domain returned for this model"
        )
    whole = domain.shape if mark is None else mark.sizes
    if whole is None:
        return None
    if len(whole) != domain.order:
        raise ConfigurationError(f"domain.shape is {tuple(whole)}, and the model has {domain.order} spatial dimensions")
    here = list(whole)
    for axis, size in zip(domain.axes, domain.own(domain.even(whole)), strict=True):
        domain.check_rows(here[axis.dim], axis)
        here[axis.dim] = size
    if list(field.shape[FIRST:]) != here:
        raise ConfigurationError(
            f"slabs do not fit together: of a field of {tuple(whole)} points this rank has {tuple(here)} "
            f"(torch.tensor_split), and the input has {tuple(field.shape[FIRST:])}"
        )
    return tuple(whole)


def _header(
    domain: Slabs, field: Any, known: tuple[int, ...] | None, error: FsshardError | None, *, looks: bool
) -> Tensor:
    numbers = torch.zeros(SHAPE + FIRST + 2 * domain.order, dtype=torch.int64)
    if error is None:
        mark = mark_of(field)
        total = None if mark is None else mark.checksum
        numbers[DTYPE], numbers[OF_WHOLE] = DTYPES.index(field.dtype), NOT_MADE
        if looks or field.device.type == "cpu":
            numbers[OF_WHOLE] = total is not None
            numbers[CHECKSUM] = (checksum(field) if total is None else total).cpu()
        numbers[SHAPE:] = torch.tensor([*field.shape, *(known or (0,) * domain.order)])
    else:
        numbers[FAILED] = 1
    return numbers


def _raise_everywhere(domain: Slabs, error: FsshardError | None) -> None:
    """Some rank cannot go on: say on all which, and why. Collective."""

    def fail() -> None:
        if error is not None:
            raise error

    for axis in domain.axes:  # ranks of another row hear of it from those that have
        try:
            agree(axis.group, fail)
        except FsshardError as raised:
            error = error or raised
    if error is not None:
        raise error


def _check_alike(domain: Slabs, table: Tensor) -> None:
    rows = table.flatten(0, -2)
    split = [SHAPE + FIRST + axis.dim for axis in domain.axes]
    alike = rows.clone()
    # A rank whose input is of a new kind has made a checksum where others have not.
    alike[:, [CHECKSUM, *split, *([OF_WHOLE] if bool((rows[:, OF_WHOLE] == NOT_MADE).any()) else [])]] = 0
    if bool((alike == alike[:1]).all()):
        return
    along = " and ".join(f"d{axis.dim + 1}" for axis in domain.axes)
    end = SHAPE + FIRST + domain.order
    found = sorted(
        {
            f"{tuple(row[SHAPE:end])} of {tuple(row[end:]) if any(row[end:]) else 'an unknown whole'}, "
            f"{str(DTYPES[row[DTYPE]]).removeprefix('torch.')}"
            for row in rows.tolist()
        }
    )
    raise RankMismatch(
        f"slabs do not fit together: the ranks of a domain put in {'; '.join(found)}. They need the same samples "
        f"(fsshard.data_rank(mesh) for the sampler), cut along {along} only"
    )
