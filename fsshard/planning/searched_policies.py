"""Policies that return whole settings of wrap(), found by a search of their own.

:func:`fsshard.wrap` asks such a policy for its settings and goes on with them; how they are found it does not know. A
policy is handed in as ``auto_wrap_policy``, as an object or by a name that somebody registered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from fsshard.errors import ConfigurationError

__all__ = ["SearchedPolicy", "elsewhere", "register_policy", "searched_policy"]


@runtime_checkable
class SearchedPolicy(Protocol):
    """What wrap() asks for its settings."""

    def find_settings(
        self, model: nn.Module, optimizer: Optimizer | None, given: Mapping[str, Any], group: dist.ProcessGroup
    ) -> dict[str, Any]:
        """The arguments of wrap() that were found, ``"backend"`` and those in ``given`` among them. Collective.

        Args:
            model: the bare model; it stays as it is.
            optimizer: the live one, if it was handed over.
            given: arguments of wrap() that the caller has chosen, the backend among them.
            group: the ranks that share the work.
        """


class _Named(NamedTuple):
    """How a name becomes a policy, and what to do where no search can be."""

    make: Callable[[object], SearchedPolicy]
    elsewhere: str


_named: dict[str, _Named] = {}


def register_policy(name: str, make: Callable[[object], SearchedPolicy], *, elsewhere: str) -> None:
    """Let ``auto_wrap_policy=name`` mean a searched policy.

    Args:
        name: what the user writes.
        make: called with what the user gave as ``tuning=``, None if nothing.
        elsewhere: what to do where ``auto_wrap_policy`` can only pick units, as in :func:`fsshard.plan`.
    """
    _named[name] = _Named(make, elsewhere)


def searched_policy(policy: object, arguments: object) -> SearchedPolicy | None:
    """The policy that ``auto_wrap_policy=policy`` and ``tuning=arguments`` mean; None for one that picks units only.

    Raises:
        ConfigurationError: there are arguments for a policy that takes none.
    """
    if isinstance(policy, str) and policy in _named:
        return _named[policy].make(arguments)
    if arguments is not None:
        names = " or ".join(f"auto_wrap_policy={name!r}" for name in sorted(_named))
        raise ConfigurationError(f"tuning={arguments!r} goes with {names}; give both, or neither")
    return policy if isinstance(policy, SearchedPolicy) else None


def elsewhere(policy: object) -> str | None:
    """What to say of a searched policy where units are picked only; None if it is none."""
    if isinstance(policy, str):
        return _named[policy].elsewhere if policy in _named else None
    return "it searches for settings of fsshard.wrap()" if isinstance(policy, SearchedPolicy) else None
