"""The interface of an implementation of OSS under backend="fairscale", and which one there is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import torch.distributed as dist

from fsshard.errors import ConfigurationError, MissingExtra
from fsshard.oss.partitioned import PartitionedOptimizer

__all__ = ["REDUCTION", "Implementation", "Replicas", "implementation_of", "name_of"]

REDUCTION = "the gradient reduction of FairScale, in backward"
"""Where a rank waits, for the message that names another one which is lost."""

MODULES = {"real": "fsshard.backends.fairscale_patched", "native": "fsshard.backends.fairscale_native"}


@dataclass(frozen=True)
class Replicas:
    """Several groups that divide the optimizer among their ranks, each in the same way.

    Attributes:
        everyone: the ranks of all these groups.
        same_part: the ranks, one of each group, that own what this one owns.
    """

    everyone: dist.ProcessGroup
    same_part: dist.ProcessGroup


@dataclass(frozen=True)
class Implementation:
    """An OSS.

    Attributes:
        about: whose it is, for people.
        optimizer: makes it: of groups, ``optim``, the class, ``group`` and its settings.
        one_dtype: an optimizer takes storage of one dtype only.
        takes_replicas: gradients can be averaged over several groups of owners.
    """

    about: str
    optimizer: Callable[..., PartitionedOptimizer]
    one_dtype: bool = False
    takes_replicas: bool = False


def name_of(asked: object) -> str:
    """Return ``"real"`` or ``"native"``; by default the first where FairScale is installed.

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
    """Return the implementation of that name, imported when it is used.

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
