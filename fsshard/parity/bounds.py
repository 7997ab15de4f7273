"""How far rounding alone may carry two engines apart: the error model behind the verdict "bound".

Every step starts from the same weights and optimizer state on both sides (a run that has come apart within its bound
is put back onto the reference after each step), so a step's bound never has to follow errors through a trajectory.
Within a step:

* **Forward.** At one world size each rank computes its loss from the same bits by the same operations: equal.
* **Reduction.** A gradient is the mean over N ranks of local gradients g_r. Engines add them in different orders. An
  order of n summands commits at most n - 1 roundings, each of relative size u, so with gamma_k = k u / (1 - k u) each
  result is within gamma_(n-1) sum |g_r| / N of the exact one (Higham, Accuracy and Stability of Numerical Algorithms,
  2nd ed., section 4.2), and two results within twice that of each other. Division by N is exact where N is a power
  of two and up to two more roundings elsewhere (engines divide before, after, or both). sum |g_r| is taken element by
  element from the ranks' own batches. Two summands have one order only, so on two ranks the bound is zero: equal.
  (Below the normal numbers halving rounds too, and engines halve at different places: see :func:`underflow`.)
* **Clipping.** The norm must be that of the run's own gradients, summed in float64 and rounded once.
* **Optimizer.** An update may amplify a rounding error without limit (Adam divides by a square root that can be
  zero), so no bound is derived for it at all: the recipe's own optimizer, run on one process from the reference's
  weights and state with this run's gradients, must give this run's weights and state to the last bit.

One process on the joined batch, a divided model, another torch or processor add in other orders inside of kernels that
nobody can look into. Their bound is measured: P draws of the same step's rounding errors, see :func:`spread_factor`.
"""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist

import torch
from torch import Tensor

__all__ = ["ORDERS", "reduction_bound", "reduction_roundings", "spread_factor", "underflow", "unit_roundoff"]

ORDERS = 8
"""Draws of a whole training that runs freely (:mod:`fsshard.parity.against`)."""
FALSE_ALARM = 1e-9
"""Probability that a tensor which differs by rounding alone exceeds the measured bound."""


def unit_roundoff(dtype: torch.dtype) -> float:
    """u: half the distance from 1 to the next number, of the real type behind a complex one."""
    real = dtype.to_real() if dtype.is_complex else dtype
    return torch.finfo(real).eps / 2


def reduction_roundings(world_size: int, reductions: int = 1) -> int:
    """Return how many roundings one order of the mean over ranks commits at most; 0 where all orders agree.

    Args:
        world_size: N, summands per reduction.
        reductions: reductions whose results are added (accumulation without ``no_sync``).
    """
    summands = world_size * reductions
    if summands <= 2 and reductions == 1:
        return 0
    if world_size == 1:
        return 0  # nothing is reduced, and local sums run in the order of the batches
    divisions = 0 if world_size & (world_size - 1) == 0 else 2 * reductions
    return summands - 1 + divisions


def underflow(dtype: torch.dtype, world_size: int, reductions: int = 1) -> float:
    """Return what divisions of subnormal numbers may add, on both sides: half a unit before, or after the sum, each."""
    if world_size == 1:
        return 0.0
    real = dtype.to_real() if dtype.is_complex else dtype
    smallest = torch.finfo(real).smallest_normal * torch.finfo(real).eps
    return 2 * (world_size + 1) * reductions * smallest


def reduction_bound(magnitude: Tensor, roundings: int) -> Tensor:
    """``2 gamma_k`` times the mean of moduli, element by element (real view), in float64.

    Args:
        magnitude: sum over ranks of |g_r| / N.
        roundings: k. One more is counted for those in ``magnitude`` itself.
    """
    u = unit_roundoff(magnitude.dtype)
    gamma = (roundings + 1) * u / (1 - (roundings + 1) * u)
    return 2 * gamma * magnitude.double()


@lru_cache(maxsize=4096)
def spread_factor(elements: int, draws: int, false_alarm: float = FALSE_ALARM) -> float:
    """Return how far beyond the largest of the observed rounding errors the next draw of them may reach.

    Model (Higham and Mary, SIAM J. Sci. Comput. 41(5), 2019: rounding errors as random variables of mean zero): the
    error of an element is normal with one sigma in all evaluations, whose draws are independent; elements may depend
    on each other in any way (all elements of a small factor of a tensor carry the same sums). Then the largest
    observed modulus is at least ``a sigma`` except with probability ``(2 Phi(a) - 1)^draws``, and the largest of the
    next evaluation at most ``b sigma`` except with probability ``elements (2 - 2 Phi(b))``. With half of
    ``false_alarm`` for either, b / a is the factor.

    Args:
        elements: of the tensor (a complex number has two).
        draws: observed evaluations.
        false_alarm: probability that rounding alone exceeds the bound.

    Returns:
        b / a: about 70 to 90 for 8 draws, since 8 draws say little about the ninth.
    """
    half, normal = false_alarm / 2, NormalDist()
    a = normal.inv_cdf((1 + half ** (1 / max(1, draws))) / 2)
    b = -normal.inv_cdf(half / (2 * max(1, elements)))
    return max(1.0, b / a)


def measured_bound(spread: float, largest: float, elements: int, draws: int, dtype: torch.dtype) -> float:
    """The bound of one tensor between two orders of the same samples.

    Args:
        spread: largest modulus of the observed differences. Differences carry both sides' errors, as the difference
            that is to be judged does.
        largest: largest modulus in the tensor; one rounding of it is the least error that is assumed, since the few
            draws of a small tensor may all be zero.
        elements: of the tensor.
        draws: observed orders.
        dtype: of the tensor.
    """
    least = unit_roundoff(dtype) * largest
    if draws == 0 or not math.isfinite(spread):
        return 2 * least
    return spread_factor(elements, draws) * max(spread, least)
