"""Cuts a split field, puts it together and measures it: the object that users hold.

Losses have the values and gradients of one process that has the whole field, and every rank of a domain gets the same
value. Averaged over all ranks, gradients are those of the mean over the domains' samples: a loss that sums over the
batch does so over the domain's, as on a data-parallel rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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

    def abs(self, x: Tensor, y: Tensor, quadrature: Any = None, take_root: bool = True) -> Tensor:
        """The Lp norm of x - y; see neuraloperator. Collective."""
        _check_slabs(self.domain, x, y)
        if quadrature is None:
            sizes = [*x.shape[: x.ndim - self.domain.order], *self.domain.whole(self.domain.layout_of(x), x.shape)]
            quadrature = [self.measure[-j] / sizes[-j] for j in range(self.d, 0, -1)]
        elif isinstance(quadrature, float):
            quadrature = [quadrature] * self.d
        total = math.prod(quadrature) * summed(self._power(_wide(x) - _wide(y)), self.domain.axes)
        norm: Tensor = self.reduce_all(total ** (1.0 / self.p) if take_root and self.p != 1 else total)
        return _as_torch_has_it(norm.squeeze(), x, y)

    def rel(self, x: Tensor, y: Tensor, take_root: bool = True) -> Tensor:
        """The Lp norm of x - y, relative to that of y; see neuraloperator. Collective."""
        _check_slabs(self.domain, x, y)
        powers = [self._power(_wide(x) - _wide(y)), self._power(_wide(y))]
        over, under = summed(torch.stack(powers), self.domain.axes)
        if take_root and self.p != 1:
            over, under = over ** (1.0 / self.p), under ** (1.0 / self.p)
        norm: Tensor = self.reduce_all(over / (under + self.eps))
        return _as_torch_has_it(norm.squeeze(), x, y)

    def _power(self, x: Tensor) -> Tensor:
        """The sum over this rank's points of |x|^p."""
        flat = torch.flatten(x, start_dim=-self.d)
        return torch.sum(flat**self.p if self.p % 2 == 0 else torch.abs(flat) ** self.p, dim=-1)


class DomainH1Loss(H1Loss):
    """neuraloperator's ``H1Loss`` of the whole fields, which are gathered: differences go over the slabs' borders."""

    def __init__(self, domain: Slabs, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _check_dimensions(domain, self.d)
        self.domain = domain

    def abs(self, x: Tensor, y: Tensor, quadrature: Any = None, take_root: bool = True) -> Tensor:
        """The H1 norm of x - y; see neuraloperator. Collective."""
        norm: Tensor = super().abs(*self._whole(x, y), quadrature=quadrature, take_root=take_root)
        return norm

    def rel(self, x: Tensor, y: Tensor, quadrature: Any = None, take_root: bool = True) -> Tensor:
        """The H1 norm of x - y, relative to that of y; see neuraloperator. Collective."""
        norm: Tensor = super().rel(*self._whole(x, y), quadrature=quadrature, take_root=take_root)
        return norm

    def _whole(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        _check_slabs(self.domain, x, y)
        layout = self.domain.layout_of(x)
        return self.domain.join(x, layout), self.domain.join(y, layout)


class DomainMSELoss(MSELoss):
    """neuraloperator's ``MSELoss``: means over ``dim``, without it over all but the batch; their sum."""

    def __init__(self, domain: Slabs) -> None:
        super().__init__()
        self.domain = domain

    def __call__(self, y_pred: Tensor, y: Tensor, dim: Sequence[int] | None = None, **kwargs: Any) -> Tensor:
        """The sum of the means. Collective."""
        _check_slabs(self.domain, y_pred, y)
        sizes = _whole_shape(self.domain, y_pred)
        dims = range(1, y_pred.ndim) if dim is None else dim
        total = summed(((_wide(y_pred) - _wide(y)) ** 2).sum(), self.domain.axes)
        return _as_torch_has_it(total / math.prod(sizes[at] for at in dims), y_pred, y)


def mean_of_squares(domain: Slabs, prediction: Tensor, target: Tensor) -> Tensor:
    """The mean of (prediction - target)^2 over everything. Collective."""
    _check_slabs(domain, prediction, target)
    total = summed(((_wide(prediction) - _wide(target)) ** 2).sum(), domain.axes)
    return _as_torch_has_it(total / math.prod(_whole_shape(domain, prediction)), prediction, target)


HALF = (torch.float16, torch.bfloat16)


def _wide(x: Tensor) -> Tensor:
    """Float32 for half precision, in which a sum over a field overflows where its mean does not."""
    return x.float() if x.dtype in HALF else x


def _as_torch_has_it(value: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """In half precision if both are: of one that is, and another in float32, the loss is in float32."""
    dtype = torch.result_type(x, y)
    return value.to(dtype) if dtype in HALF else value


def _whole_shape(domain: Slabs, slab: Tensor) -> list[int]:
    return [*slab.shape[: slab.ndim - domain.order], *domain.whole(domain.layout_of(slab), slab.shape)]


def _check_dimensions(domain: Slabs, dims: int) -> None:
    if dims < domain.order:
        raise ConfigurationError(f"d={dims}: the field has {domain.order} spatial dimensions; pass d={domain.order}")


def _check_slabs(domain: Slabs, x: Tensor, y: Tensor) -> None:
    """Against a whole target, which broadcasting would take for others, and targets of other samples. Collective."""
    if x.shape != y.shape:
        raise ConfigurationError(
            f"expected two slabs of one shape, got {tuple(x.shape)} and {tuple(y.shape)}; scatter the target, "
            "domain.scatter(y)"
        )
    looks = domain.compares_numbers or y.device.type == "cpu"
    if not (domain.compares_always and looks) or isinstance(y, FakeTensor):
        return
    mark = mark_of(y)
    known = None if mark is None else mark.checksum
    header = torch.tensor([0, 0]) if known is None else torch.stack([torch.ones_like(known), known]).cpu()
    told = domain.table(header).flatten(0, -2)
    if bool(told[:, 0].all()) and not bool((told[:, 1] == told[0, 1]).all()):
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
        """The mean of squares over the whole batch and field, as ``torch.nn.functional.mse_loss``. Collective."""
        return mean_of_squares(self, prediction, target)

    def LpLoss(self, *args: Any, **kwargs: Any) -> DomainLpLoss:
        """neuraloperator's ``LpLoss`` over the whole field, of slabs; takes the same arguments."""
        return DomainLpLoss(self, *args, **kwargs)

    def H1Loss(self, *args: Any, **kwargs: Any) -> DomainH1Loss:
        """neuraloperator's ``H1Loss`` over the whole field, of slabs, which it gathers; takes the same arguments."""
        return DomainH1Loss(self, *args, **kwargs)

    def MSELoss(self) -> DomainMSELoss:
        """neuraloperator's ``MSELoss`` over the whole field, of slabs: a mean per sample, summed over the batch."""
        return DomainMSELoss(self)
