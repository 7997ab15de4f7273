"""The interface of an implementation of OSS under backend="fairscale", and which one there is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from fsshard.errors import ConfigurationError, MissingExtra
from fsshard.oss.partitioned import PartitionedOptimizer

__all__ = ["Implementation", "implementation_of", "name_of"]

MODULES = {"real": "fsshard.backends.fairscale_patched", "native": "fsshard.backends.fairscale_native"}


@dataclass(frozen=True)
class Implementation:
    """An OSS.

    Attributes:
        about: whose it is, for people.
        optimizer: makes it: of groups, ``optim``, the class, ``group`` and its settings.
        one_dtype: an optimizer takes storage of one dtype only.
    """

    about: str
    optimizer: Callable[..., PartitionedOptimizer]
    one_dtype: bool = False


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
