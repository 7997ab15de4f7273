"""A 2-norm that does not depend on how gradients are divided among ranks, where a sum in float64 may be too coarse.

Two ways of dividing the numbers among ranks add up squares in different orders, so that their float64 sums can differ
in the last bits. The norm is rounded to float32 afterwards, which hides that, except where the sum lies so near to the
middle between two float32 numbers that the difference decides. There all squares are added up exactly, as integers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction

import torch
import torch.distributed as dist
from torch import Tensor

LEVEL_BITS = 40
"""Bits of a square, relative to the largest one, that are added up together: sums of 2^22 of them fit an int64."""
LEVELS = 3
"""Levels of bits. What is smaller than 2^-120 of the largest square is left out."""
WORD = 2**31
"""Sums of several chunks are sent as two words, each of which fits an int64 for any number of ranks."""


def is_settled(power: float, summands: int) -> bool:
    """Return whether every order of the float64 sum gives the same float32 norm.

    Args:
        power: the sum of squares, in some order.
        summands: the most numbers that are added one after the other on the way to it.
    """
    if not math.isfinite(power) or power == 0.0:
        return True
    # A sum of n numbers that are not negative is within n u of the exact one in any order (Higham, Accuracy and
    # Stability of Numerical Algorithms, 2nd ed., section 4.2), and rounding to float32 is monotonous.
    roundings = summands + 8
    error = roundings * 2.0**-53
    low = math.sqrt(power * (1 - error))
    high = math.sqrt(power * (1 + error))
    in_float32 = torch.tensor([low, high]).float()
    lowest, highest = in_float32
    return bool(lowest == highest)


def exact_power(chunks: Iterable[Tensor], groups: Sequence[dist.ProcessGroup]) -> Fraction:
    """Return the sum of squares of float32 numbers, of ``chunks`` here and on all ranks of ``groups``. Collective."""
    parts = []
    largest = torch.zeros((), dtype=torch.float64)
    for chunk in chunks:
        if chunk.numel():
            part = chunk.double()
            parts.append(part)
            largest = torch.maximum(largest, part.abs().max())
    for group in groups:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    if not float(largest):
        return Fraction(0)
    # All squares are below 2 to the power of it.
    number = float(largest)
    _, exponent_of_largest = math.frexp(number)
    exponent = 2 * exponent_of_largest
    sums = [0] * LEVELS
    # Squares are in units of the lowest bit of the first level.
    scale = 2.0 ** (LEVEL_BITS - exponent)
    for part in parts:
        squares = part.square()
        left = squares * scale
        for level in range(LEVELS):
            whole = left.floor()
            units = whole.long()
            sums[level] += int(units.sum())
            rest = left - whole
            left = rest * 2.0**LEVEL_BITS
    halves = [divmod(total, WORD) for total in sums]
    words = torch.tensor(halves, dtype=torch.int64)
    for group in groups:
        dist.all_reduce(words, group=group)
    power = Fraction(0)
    for level, (high, low) in enumerate(words.tolist()):
        lowest_bit = exponent - LEVEL_BITS * (level + 1)
        unit = Fraction(2) ** lowest_bit
        power += (high * WORD + low) * unit
    return power


def rounded_root(power: Fraction) -> Tensor:
    """Return the float32 number next to the square root of ``power``: 0-dim."""
    root = torch.tensor(math.sqrt(power)).float()
    for toward in (-math.inf, math.inf):
        neighbour = torch.nextafter(root, torch.tensor(toward))
        ends = Fraction(float(root)) + Fraction(float(neighbour))
        middle = ends / 2
        is_above = power > middle**2
        if is_above == (toward > 0):
            return neighbour
    return root
