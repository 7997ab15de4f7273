"""Methods of the user's model that run under the engine, as its forward does."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from fsshard.errors import ModelError

__all__ = ["ForwardMethod", "explained"]


class ForwardMethod:
    """Stand-in for a method of the user's model: called outside of a forward, it goes through the engine.

    Args:
        owner: what ``fsshard.wrap`` returned; not kept alive.
        own: the method.
    """

    def __init__(self, owner: Any, own: Callable[..., Any]) -> None:
        functools.update_wrapper(self, own)
        self._owner, self._own = weakref.ref(owner), own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        owner = self._owner()
        if owner is None or owner.runs_user_code:
            return self._own(*args, **kwargs)
        members = vars(owner.module)
        before = {name: members[name] for name in ("forward",) if name in members}

        def restore() -> None:
            members.pop("forward", None)
            members.update(before)

        def once(*args: Any, **kwargs: Any) -> Any:
            restore()  # the method may call the forward, as generate() of transformers does
            return self._own(*args, **kwargs)

        members["forward"] = _in_place_of(before.get("forward"), once)
        try:
            return owner(*args, **kwargs)
        finally:
            restore()

    def __reduce__(self) -> Any:
        own: Any = self._own
        return getattr, (own.__self__, own.__name__)  # a copy of the model has its own method


def _in_place_of(forward: Any, once: Callable[..., Any]) -> Callable[..., Any]:
    """``once``, within what wrap() has put around the model's own forward: casts of its parameters."""
    forward = getattr(forward, "original", forward)  # of a root that is computed again in the backward
    if isinstance(forward, functools.partial) and forward.args:
        inner = _in_place_of(forward.args[0], once)
        return functools.partial(forward.func, inner, *forward.args[1:], **forward.keywords)
    return once


def explained(owner: Any, method: Callable[..., Any]) -> Callable[..., Any]:
    """``method`` of the model of ``owner``, which is told how to see whole weights where torch met a part of one."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except RuntimeError as error:
            if owner.runs_user_code or type(error) is not RuntimeError:
                raise
            name = method.__name__
            raise ModelError(
                f"{name}() failed, outside of the model's forward, where a rank has a part of each weight: {error}. If "
                f"it computes with weights, write fsshard.register_forward_method(model, {name!r}) after "
                "fsshard.wrap, on every rank: it then runs under the engine as the forward does"
            ) from error

    return call
