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
from fsshard.parallel.domain.slabs import FIRST, Layout, Slabs, checksum, even_parts, layout_text, mark_of
from fsshard.patches import FIELD_LOSSES
from fsshard.torch_private.autograd import current_graph_task_id
from fsshard.torch_private.fake_tensors import FakeTensor

KEY = "fsshard.slab"
"""In the ``metadata`` of an autograd node: what it made is the output of a split model; True if slabs are uneven."""


def marked_in_graph(output: Tensor, is_uneven: bool) -> Tensor:
    """Return the same tensor, known in its graph for what a split model has returned."""
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
        if uneven:
            return mark.domain.is_uneven(mark.sizes)
        return mark.domain.size > 1
    seen = set()
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
FAILED = 0
DTYPE = 1
OF_WHOLE = 2
CHECKSUM = 3
SHAPE = 4
"""Places in a rank's header: whether it cannot go on; its dtype's number; whether the checksum is of the whole field
(1), of the slab (0), or was not made (NOT_MADE); the checksum; the shape of its input, and then that of the whole."""
NOT_MADE = 2


class Entrance:
    """A forward pre-hook: finds out how the input lies on the ranks."""

    def __init__(self, domain: Slabs) -> None:
        self._domain = domain
        self._warned = False

    def __call__(
        self,
        module: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Find out how the input lies on the ranks, which tell each other what they have. Collective.

        Where their group has no backend for the CPU this would wait for the device: there they do not for inputs that
        they know, and have agreed on before.

        Raises:
            ConfigurationError: the input is none, or of another domain.
            RankMismatch: slabs do not fit together, or another rank could not take part.
        """
        if current_graph_task_id() != -1:
            # It is computed again: every module looks its layout up.
            return
        domain = self._domain
        field: Any = args[0] if args else kwargs.get("x")
        error = None
        kind = None
        sizes = None
        try:
            sizes = _known(domain, field)
        except FsshardError as raised:
            error = raised
        if sizes is not None:
            kind = (sizes, field.shape, field.dtype)
            is_agreed = kind in domain.agreed and not domain.compares_always
            # In a simulation other ranks do as this one does.
            if is_agreed or isinstance(field, FakeTensor):
                domain.enter(domain.even(sizes))
                return
        looks = domain.compares_numbers or kind not in domain.agreed
        table = domain.table(_header(domain, field, sizes, error, looks=looks))
        if table[..., FAILED].any():
            _raise_everywhere(domain, error)
        _check_alike(domain, table)
        self._look_at_checksums(table.flatten(0, -2))
        layout = domain.fitting(table[..., _split_places(domain)])
        _check_even(domain, layout)
        domain.agreed.add(kind)
        domain.enter(layout)

    def _look_at_checksums(self, rows: Tensor) -> None:
        if bool((rows[:, OF_WHOLE] == NOT_MADE).any()):
            return
        checksums = rows[:, CHECKSUM]
        alike = bool((checksums == checksums[0]).all())
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
        """Return the output, marked."""
        if not isinstance(output, Tensor) or current_graph_task_id() != -1:
            return output
        domain = self._domain
        sizes = domain.leave(output)
        if domain.size > 1:
            output = marked_in_graph(output, domain.is_uneven(sizes))
        domain.mark(output, sizes)
        return output


def _known(domain: Slabs, field: Any) -> tuple[int, ...] | None:
    """Return the sizes of the whole, where this rank knows them."""
    if not isinstance(field, Tensor) or field.ndim != FIRST + domain.order or field.dtype not in DTYPES:
        got = type(field).__name__
        if isinstance(field, Tensor):
            got = f"{tuple(field.shape)}, {field.dtype}"
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


def _split_places(domain: Slabs) -> list[int]:
    """Return where a header has the sizes of the split dimensions."""
    return [SHAPE + FIRST + axis.dim for axis in domain.axes]


def _check_even(domain: Slabs, layout: Layout) -> None:
    """Raise unless all ranks have what ``torch.tensor_split`` gives them."""
    for axis, sizes in zip(domain.axes, layout, strict=True):
        rows = sum(sizes)
        domain.check_rows(rows, axis)
        expected = even_parts(rows, axis.size)
        if sizes != expected:
            raise RankMismatch(
                f"slabs do not fit together: {layout_text([sizes])}, where torch.tensor_split of {rows} rows "
                f"over {axis.size} ranks gives {layout_text([expected])}"
            )


def _header(
    domain: Slabs, field: Any, sizes: tuple[int, ...] | None, error: FsshardError | None, *, looks: bool
) -> Tensor:
    header = torch.zeros(SHAPE + FIRST + 2 * domain.order, dtype=torch.int64)
    if error is not None:
        header[FAILED] = 1
        return header
    header[DTYPE] = DTYPES.index(field.dtype)
    header[OF_WHOLE] = NOT_MADE
    if looks or field.device.type == "cpu":
        mark = mark_of(field)
        total = None if mark is None else mark.checksum
        header[OF_WHOLE] = total is not None
        if total is None:
            total = checksum(field)
        header[CHECKSUM] = total.cpu()
    unknown = (0,) * domain.order
    header[SHAPE:] = torch.tensor([*field.shape, *(sizes or unknown)])
    return header


def _raise_everywhere(domain: Slabs, error: FsshardError | None) -> None:
    """Say on all ranks which of them cannot go on, and why. Collective."""

    def fail() -> None:
        if error is not None:
            raise error

    # Ranks of another row hear of it from those that have.
    for axis in domain.axes:
        try:
            agree(axis.group, fail)
        except FsshardError as raised:
            error = error or raised
    if error is not None:
        raise error


def _check_alike(domain: Slabs, table: Tensor) -> None:
    rows = table.flatten(0, -2)
    places = [CHECKSUM, *_split_places(domain)]
    # A rank whose input is of a new kind has made a checksum where others have not.
    if bool((rows[:, OF_WHOLE] == NOT_MADE).any()):
        places.append(OF_WHOLE)
    compared = rows.clone()
    compared[:, places] = 0
    if bool((compared == compared[:1]).all()):
        return
    texts = {_header_text(row, domain.order) for row in rows.tolist()}
    inputs = "; ".join(sorted(texts))
    along = " and ".join(f"d{axis.dim + 1}" for axis in domain.axes)
    raise RankMismatch(
        f"slabs do not fit together: the ranks of a domain put in {inputs}. They need the same samples "
        f"(fsshard.data_rank(mesh) for the sampler), cut along {along} only"
    )


def _header_text(header: list[int], order: int) -> str:
    """Return a rank's input for people: its shape, that of the whole, and its dtype."""
    end = SHAPE + FIRST + order
    whole = "an unknown whole"
    if any(header[end:]):
        whole = str(tuple(header[end:]))
    dtype = str(DTYPES[header[DTYPE]]).removeprefix("torch.")
    return f"{tuple(header[SHAPE:end])} of {whole}, {dtype}"
