"""Detects process groups that a forked process inherited and cannot use: it has the connections, and no threads."""

from __future__ import annotations

import os
from weakref import WeakKeyDictionary

import torch.distributed as dist

from fsshard.errors import LaunchError

__all__ = ["check_not_inherited", "is_inherited"]

_owners: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
"""Group -> the process that has used it first; ``wrap`` and each meeting of ranks do."""


def is_inherited(group: dist.ProcessGroup | None) -> bool:
    """Tell whether the group belongs to the process that forked this one."""
    return group is not None and group.size() > 1 and _owners.setdefault(group, os.getpid()) != os.getpid()


def check_not_inherited(group: dist.ProcessGroup | None, what: str) -> None:
    """Raise LaunchError where a collective of the group would wait forever. ``what`` was called, as users write it."""
    if group is not None and is_inherited(group):
        raise LaunchError(
            f"{what}: process {os.getpid()} was forked from rank {group.rank()}, whose process group it inherited but "
            "cannot use: the connections belong to its parent. Call this on the rank itself; to train in other "
            "processes start them with fsshard.launch, or spawn them and create a group there (evaluation under "
            "torch.no_grad() is possible where every rank has whole parameters)"
        )
