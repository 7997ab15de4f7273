"""What backend="fairscale" needs of an implementation of OSS and ShardedDataParallel, and which one there is."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from fsshard.errors import ConfigurationError, MissingExtra
from fsshard.oss.partitioned import PartitionedOptimizer

__all__ = ["REDUCTION", "Implementation", "Replicas", "ShardedEngine", "implementation_of", "name_of"]

REDUCTION = "the gradient reduction of FairScale, in backward"
"""Where a rank waits, for the message that names another one which is lost."""

MODULES = {"real": "fsshard.backends.fairscale_patched", "native": "fsshard.backends.fairscale_native"}


class ShardedEngine(Protocol):
    """A module around the user's, which reduces each gradient to the rank that owns the parameter."""

    @property
    def seen(self) -> Collection[nn.Parameter]:
        """Parameters that a backward has reached on any rank since their gradients were dropped."""

    def backward_starts(self) -> None:
        """The outermost backward begins; called in its graph task, before any gradient arrives."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Within it backward passes accumulate local gradients."""

    def finish(self) -> None:
        """Reduce what is new on any rank. Collective."""

    def discard(self, parameters: Iterable[nn.Parameter], *, dropped: bool) -> None:
        """Gradients are being zeroed, or dropped: forget what has not been reduced of them."""

    def check_ended(self) -> None:
        """A forward begins: no backward runs any more, and one that raised is over."""

    def refresh_trainable(self) -> None:
        """Lay parameters out anew after some were frozen or unfrozen."""

    def detach(self) -> None:
        """Another engine takes over."""


@dataclass(frozen=True)
class Replicas:
    """Several groups that divide the optimizer among their ranks, each in the same way.

    Attributes:
        everyone: the ranks of all these groups.
        same_part: the ranks, one of each group, that own what this one owns.
    """

    everyone: dist.ProcessGroup
    same_part: dist.ProcessGroup


class MakesEngine(Protocol):
    """The class of an implementation's ShardedDataParallel."""

    def __call__(
        self,
        module: nn.Module,
        optimizers: list[Any],
        group: Any,
        reduce_dtypes: Mapping[nn.Parameter, torch.dtype | None],
        replicas: Replicas | None,
    ) -> ShardedEngine: ...


@dataclass(frozen=True)
class Implementation:
    """An OSS and a ShardedDataParallel.

    Attributes:
        about: whose they are, for people.
        optimizer: makes the first: of groups, ``optim``, the class, ``group`` and its settings.
        engine: makes the second.
        reduces_by: the kind of collective that brings gradients to their owners.
        one_dtype: an optimizer takes storage of one dtype only.
        takes_replicas: gradients can be averaged over several groups of owners.
    """

    about: str
    optimizer: Callable[..., PartitionedOptimizer]
    engine: MakesEngine
    reduces_by: str
    one_dtype: bool = False
    takes_replicas: bool = False


def name_of(asked: object) -> str:
    """``"real"`` or ``"native"``; by default the first where FairScale is installed.

    Raises:
        ConfigurationError: something else was asked for.
        MissingExtra: the real one, which is not installed.
    """
    if asked is None:
        try:
            implementation_of("real")
        except MissingExtra:
            return "native"
        return "real"
    if not isinstance(asked, str) or asked not in MODULES:
        raise ConfigurationError(
            f"backend 'fairscale', implementation={asked!r}: expected 'real' (FairScale 0.4.13, patched), 'native' "
            "(fsshard's own), or None for the first where it is installed"
        )
    implementation_of(asked)
    return asked


def implementation_of(name: str) -> Implementation:
    """The implementation of that name, imported when it is used.

    Raises:
        MissingExtra: FairScale is not installed.
    """
    try:
        found: Implementation = import_module(MODULES[name]).IMPLEMENTATION
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "fairscale":
            raise
        raise MissingExtra("fairscale", "fairscale", f"backend='fairscale', implementation={name!r}") from error
    return found
