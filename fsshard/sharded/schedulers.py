"""LR schedulers created before wrap(): found, and pointed at the new optimizer."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fsshard.errors import OptimizerError
from fsshard.torch_private.optimizers import mark_stepped, mark_tracked, steps_are_tracked

__all__ = ["attached_to", "check_schedulers", "point_at"]


def check_schedulers(optimizers: Sequence[Optimizer], schedulers: Sequence[object], advice: str | None = None) -> None:
    """Raise unless every scheduler of ``optimizers`` is among ``schedulers``, and these drive nothing else. Local.

    Args:
        optimizers: that are handed over.
        schedulers: that are handed over with them.
        advice: what to write where one is not handed over; None names ``fsshard.wrap``.

    Raises:
        OptimizerError: says which line to move, or what to hand over.
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
    handed = {id(held) for scheduler in schedulers for held in _nested(scheduler, set())}
    for optimizer in optimizers:
        left = [type(s).__name__ for s in _alive() if id(s) not in handed and s.optimizer is optimizer]
        # What drove it may be gone; then its mark on the step is all that is known.
        if left or (not handed and steps_are_tracked(optimizer.step)):
            name = left[0] if left else "an LR scheduler"
            wraps = (
                "hand it over as well, `model, optimizer, scheduler = fsshard.wrap(model, optimizer, scheduler, ...)`, "
                f"or move the line that makes the {left[0] if left else 'scheduler'} below `model, optimizer = "
                "fsshard.wrap(model, optimizer, ...)`, so that it is made from the optimizer that wrap returns"
            )
            raise OptimizerError(
                f"{name} (an LR scheduler) is attached to the optimizer and would keep driving the old one; "
                + (advice or wraps)
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


def attached_to(optimizer: Optimizer) -> list[LRScheduler]:
    """The live schedulers that drive an optimizer, without those that another one of them calls."""
    found = [scheduler for scheduler in _alive() if scheduler.optimizer is optimizer]
    inner = {id(held) for scheduler in found for held in _nested(scheduler, set()) if held is not scheduler}
    return [scheduler for scheduler in found if id(scheduler) not in inner]


def _places(scheduler: object, seen: set[int]) -> Iterator[tuple[dict[str, Any], str, Optimizer]]:
    """Where a scheduler, and those within it, hold an optimizer."""
    for held in _nested(scheduler, seen):
        members = vars(held)
        for key, value in members.items():
            if isinstance(value, Optimizer):
                yield members, key, value


def _nested(scheduler: object, seen: set[int]) -> Iterator[object]:
    """The scheduler, and those that it calls: of SequentialLR, ChainedScheduler, and users' own warm-ups."""
    if id(scheduler) in seen or not hasattr(scheduler, "__dict__") or isinstance(scheduler, Optimizer):
        return
    seen.add(id(scheduler))
    yield scheduler
    for value in vars(scheduler).values():
        items = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else [value]
        for item in items:
            if isinstance(item, LRScheduler) or isinstance(getattr(item, "__dict__", {}).get("optimizer"), Optimizer):
                yield from _nested(item, seen)


def _alive() -> list[LRScheduler]:
    """Every scheduler of the process. Their types are asked, for objects that stand for others answer by raising."""
    return [found for found in gc.get_objects() if issubclass(type(found), LRScheduler) and hasattr(found, "optimizer")]


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
