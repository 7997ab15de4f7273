"""LR schedulers that are handed to wrap() with their optimizer, and pointed at the new one."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fsshard.errors import OptimizerError
from fsshard.torch_private.optimizers import mark_stepped, mark_tracked, steps_are_tracked

__all__ = ["check_schedulers", "point_at"]


def check_schedulers(optimizers: Sequence[Optimizer], schedulers: Sequence[object]) -> None:
    """Raise unless ``schedulers`` drive ``optimizers`` and nothing else. Local.

    Args:
        optimizers: that are handed over.
        schedulers: that are handed over with them.

    Raises:
        OptimizerError: says what to hand over.
    """
    known = {id(optimizer) for optimizer in optimizers}
    for scheduler in schedulers:
        driven = [value for _, _, value in _places(scheduler, set())]
        name = type(scheduler).__name__
        if not driven:
            raise OptimizerError(f"scheduler: expected an LR scheduler over the optimizer, got {name}")
        if any(id(value) not in known for value in driven):
            raise OptimizerError(
                f"the {name} drives an optimizer that was not handed over; pass it to fsshard.wrap, too: "
                "wrap(model, [optimizer, other], [scheduler, ...])"
            )


def point_at(schedulers: Iterable[object], replaced: Sequence[tuple[Optimizer, Optimizer]]) -> None:
    """Let the schedulers drive the new optimizers, at the step where they are.

    Args:
        schedulers: of the old ones.
        replaced: (old, new).
    """
    for scheduler in schedulers:
        for holder, key, old in list(_places(scheduler, set())):
            for new in [new for one, new in replaced if one is old]:  # none: the user has pointed it elsewhere since
                holder[key] = new
                _track_steps(new)


def _places(scheduler: object, seen: set[int]) -> Iterator[tuple[dict[str, Any], str, Optimizer]]:
    """Yield the places where a scheduler, and those within it, hold an optimizer."""
    for held in _nested(scheduler, seen):
        members = vars(held)
        for key, value in members.items():
            if isinstance(value, Optimizer):
                yield members, key, value


def _nested(scheduler: object, seen: set[int]) -> Iterator[object]:
    """Yield the scheduler, and those that it calls: of SequentialLR, ChainedScheduler, and users' own warm-ups."""
    if id(scheduler) in seen or not hasattr(scheduler, "__dict__") or isinstance(scheduler, Optimizer):
        return
    seen.add(id(scheduler))
    yield scheduler
    for value in vars(scheduler).values():
        items = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else [value]
        for item in items:
            if isinstance(item, LRScheduler) or isinstance(getattr(item, "__dict__", {}).get("optimizer"), Optimizer):
                yield from _nested(item, seen)


def _track_steps(optimizer: Any) -> None:
    """Note steps where schedulers look for it: they warn of an order of calls that is none (torch 2.13).

    What ``LRScheduler.__init__`` does to the optimizer that it is given, in torch/optim/lr_scheduler.py.
    """
    if steps_are_tracked(optimizer.step):
        return
    stepped, reference = type(optimizer).step, weakref.ref(optimizer)

    @functools.wraps(stepped)
    def step(*args: Any, **kwargs: Any) -> Any:
        found = reference()
        assert found is not None, "its own method is called"
        mark_stepped(found)
        return stepped(found, *args, **kwargs)

    mark_tracked(step)
    optimizer.step = step
