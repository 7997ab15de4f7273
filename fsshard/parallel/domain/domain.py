"""Cuts a split field, puts it together and measures it: the object that users hold.

Losses have the values and gradients of one process that has the whole field, and every rank of a domain gets the same
value. Averaged over all ranks, gradients are those of the mean over the domains' samples: a loss that sums over the
batch does so over the domain's, as on a data-parallel rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from neuralop.losses.data_losses import H1Loss, LpLoss, MSELoss
from torch import Tensor

from fsshard.errors import ConfigurationError, RankMismatch
from fsshard.parallel.domain.exchange import summed
from fsshard.parallel.domain.slabs import Slabs, mark_of
from fsshard.torch_private.fake_tensors import FakeTensor


class DomainLpLoss(LpLoss):
    """neuraloperator's ``LpLoss``: norms over the whole field; one sum over the domain's ranks."""

    def __init__(self, domain: Slabs, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _check_dimensions(domain, self.d)
        self.domain = domain

    def abs(
        self,
        x: Tensor,
        y: Tensor,
        quadrature: Any = None,
        take_root: bool = True,
    ) -> Tensor:
        """Return the Lp norm of x - y; see neuraloperator. Collective."""
        domain = self.domain
        _check_slabs(domain, x, y)
        if quadrature is None:
            sizes = _whole_shape(domain, x)[-self.d :]
            measures = self.measure[-self.d :]
            quadrature = [measure / size for measure, size in zip(measures, sizes, strict=True)]
        elif isinstance(quadrature, float):
            quadrature = [quadrature] * self.d
        power = self._power(_wide(x) - _wide(y))
        norm = math.prod(quadrature) * summed(power, domain.axes)
        if take_root and self.p != 1:
            norm = norm ** (1.0 / self.p)
        return _as_torch_has_it(self.reduce_all(norm).squeeze(), x, y)

    def rel(
        self,
        x: Tensor,
        y: Tensor,
        take_root: bool = True,
    ) -> Tensor:
        """Return the Lp norm of x - y, relative to that of y; see neuraloperator. Collective."""
        _check_slabs(self.domain, x, y)
        target = _wide(y)
        difference = self._power(_wide(x) - target)
        powers = torch.stack([difference, self._power(target)])
        over, under = summed(powers, self.domain.axes)
        if take_root and self.p != 1:
            root = 1.0 / self.p
            over = over**root
            under = under**root
        norm = self.reduce_all(over / (under + self.eps))
        return _as_torch_has_it(norm.squeeze(), x, y)

    def _power(self, x: Tensor) -> Tensor:
        """Return the sum over this rank's points of |x|^p."""
        flat = torch.flatten(x, start_dim=-self.d)
        if self.p % 2 != 0:
            flat = torch.abs(flat)
        return torch.sum(flat**self.p, dim=-1)


class DomainH1Loss(H1Loss):
    """neuraloperator's ``H1Loss`` of the whole fields, which are gathered: differences go over the slabs' borders."""

    def __init__(self, domain: Slabs, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _check_dimensions(domain, self.d)
        self.domain = domain

    def abs(
        self,
        x: Tensor,
        y: Tensor,
        quadrature: Any = None,
        take_root: bool = True,
    ) -> Tensor:
        """Return the H1 norm of x - y; see neuraloperator. Collective."""
        x, y = self._whole(x, y)
        norm: Tensor = super().abs(x, y, quadrature=quadrature, take_root=take_root)
        return norm

    def rel(
        self,
        x: Tensor,
        y: Tensor,
        quadrature: Any = None,
        take_root: bool = True,
    ) -> Tensor:
        """Return the H1 norm of x - y, relative to that of y; see neuraloperator. Collective."""
        x, y = self._whole(x, y)
        norm: Tensor = super().rel(x, y, quadrature=quadrature, take_root=take_root)
        return norm

    def _whole(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        _check_slabs(self.domain, x, y)
        layout = self.domain.layout_of(x)
        whole = self.domain.join(x, layout)
        return whole, self.domain.join(y, layout)


class DomainMSELoss(MSELoss):
    """neuraloperator's ``MSELoss``: means over ``dim``, without it over all but the batch; their sum."""

    def __init__(self, domain: Slabs) -> None:
        super().__init__()
        self.domain = domain

    def __call__(
        self,
        y_pred: Tensor,
        y: Tensor,
        dim: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Return the sum of the means. Collective."""
        if dim is None:
            dim = range(1, y_pred.ndim)
        return _mean_of_squares(self.domain, y_pred, y, dim)


def _mean_of_squares(
    domain: Slabs,
    prediction: Tensor,
    target: Tensor,
    dims: Iterable[int],
) -> Tensor:
    """Return the sum of (prediction - target)^2 over everything, over the number of points in ``dims``. Collective."""
    _check_slabs(domain, prediction, target)
    sizes = _whole_shape(domain, prediction)
    difference = _wide(prediction) - _wide(target)
    squares = difference**2
    total = summed(squares.sum(), domain.axes)
    count = math.prod(sizes[dim] for dim in dims)
    mean = total / count
    return _as_torch_has_it(mean, prediction, target)


HALF = (torch.float16, torch.bfloat16)


def _wide(x: Tensor) -> Tensor:
    """Return ``x``, in float32 if it is in half precision, where a sum over a field overflows and its mean does not."""
    if x.dtype in HALF:
        return x.float()
    return x


def _as_torch_has_it(value: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return the loss in half precision if both are: of one that is, and another in float32, it is in float32."""
    dtype = torch.result_type(x, y)
    if dtype in HALF:
        return value.to(dtype)
    return value


def _whole_shape(domain: Slabs, slab: Tensor) -> list[int]:
    """Return the shape of the whole field. Collective where the slab does not tell it."""
    layout = domain.layout_of(slab)
    sizes = domain.whole(layout, slab.shape)
    batch = slab.shape[: slab.ndim - domain.order]
    return [*batch, *sizes]


def _check_dimensions(domain: Slabs, dims: int) -> None:
    if dims < domain.order:
        raise ConfigurationError(f"d={dims}: the field has {domain.order} spatial dimensions; pass d={domain.order}")


def _check_slabs(domain: Slabs, x: Tensor, y: Tensor) -> None:
    """Raise for a whole target, which broadcasting would take for others, and targets of other samples. Collective."""
    if x.shape != y.shape:
        raise ConfigurationError(
            f"expected two slabs of one shape, got {tuple(x.shape)} and {tuple(y.shape)}; scatter the target, "
            "domain.scatter(y)"
        )
    if isinstance(y, FakeTensor) or not domain.compares_always:
        return
    # The checksum of a tensor on an accelerator would wait for the device.
    if y.device.type != "cpu" and not domain.compares_numbers:
        return
    mark = mark_of(y)
    row = torch.tensor([0, 0])
    if mark is not None and mark.checksum is not None:
        row[0] = 1
        row[1] = mark.checksum.cpu()
    rows = domain.table(row).flatten(0, -2)
    marked, checksums = rows.unbind(1)
    # A rank whose target is not marked cannot tell, and nobody raises.
    if not bool(marked.all()):
        return
    if not bool((checksums == checksums[0]).all()):
        raise RankMismatch(
            "the ranks of a domain have different targets: they need the same samples, in the same order and with "
            "the same augmentation (fsshard.data_rank(mesh) for the sampler)"
        )


class Domain(Slabs):
    """The ranks that share every sample, each with a slab of it. Made by :func:`fsshard.parallel.shard_domain`.

    Beside what :class:`~fsshard.parallel.domain.slabs.Slabs` has (``scatter``, ``gather``, ``shape``, ``bytes_sent``):
    losses of slabs, with the values and gradients of one process that has the whole fields.
    """

    def mse_loss(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Return the mean of squares over batch and field, as ``torch.nn.functional.mse_loss``. Collective."""
        return _mean_of_squares(self, prediction, target, range(prediction.ndim))

    def LpLoss(self, *args: Any, **kwargs: Any) -> DomainLpLoss:
        """neuraloperator's ``LpLoss`` over the whole field, of slabs; takes the same arguments."""
        return DomainLpLoss(self, *args, **kwargs)

    def H1Loss(self, *args: Any, **kwargs: Any) -> DomainH1Loss:
        """neuraloperator's ``H1Loss`` over the whole field, of slabs, which it gathers; takes the same arguments."""
        return DomainH1Loss(self, *args, **kwargs)

    def MSELoss(self) -> DomainMSELoss:
        """neuraloperator's ``MSELoss`` over the whole field, of slabs: a mean per sample, summed over the batch."""
        return DomainMSELoss(self)
