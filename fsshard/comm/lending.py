"""Memory that is lent to gloo for a collective, and taken back when it is done."""

from __future__ import annotations

from torch import Tensor


# gloo's threads hold on to the arguments of their last collective until after Work.wait has returned, for as long as
# they are not scheduled or wait for Python's lock (torch 2.13): a unit's buffers would live longer on some steps than
# on others. So gloo is given tensors of its own over them, which let go of the memory when it has arrived.
def lend(*buffers: Tensor) -> list[Tensor]:
    """Return tensors over the memory of ``buffers``; detached, since a view would keep its base alive."""
    return list(map(Tensor.detach, buffers))


def let_go(lent: list[Tensor]) -> None:
    """Leave the memory to its other holders, whoever still has the tensors themselves."""
    while lent:
        tensor = lent.pop()
        tensor.data = tensor.new_empty(0)
