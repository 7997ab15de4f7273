"""Detects process groups that a forked process inherited and cannot use.

After ``os.fork`` the child has the parent's connections and none of its threads: a collective begun there waits
forever, and what it sends would reach the other ranks as the parent's.
"""

from __future__ import annotations

import os
from weakref import WeakSet

import torch.distributed as dist

from fsshard.errors import LaunchError
from fsshard.torch_private.c10d import all_groups

__all__ = ["check_not_inherited", "is_inherited"]

_inherited: WeakSet[dist.ProcessGroup] = WeakSet()
_forked = False


def is_inherited(group: dist.ProcessGroup | None) -> bool:
    """Whether the group was made by the process that forked this one."""
    return _forked and group is not None and group.size() > 1 and group in _inherited


def check_not_inherited(group: dist.ProcessGroup | None, what: str) -> None:
    """Raise where a collective of the group would wait forever.

    Args:
        group: None is no group at all.
        what: what was called, as users write it.

    Raises:
        LaunchError: this process was forked from the rank that made the group.
    """
    if is_inherited(group):
        assert group is not None
        raise LaunchError(
            f"{what}: process {os.getpid()} was forked from rank {group.rank()}, whose process group it inherited but "
            "cannot use: the connections belong to its parent. Call this on the rank itself; to train in other "
            "processes start them with fsshard.launch, or spawn them and create a group there (evaluation under "
            "torch.no_grad() is possible where every rank has whole parameters)"
        )


def _in_child() -> None:
    global _forked
    _forked = True
    for group in all_groups():
        _inherited.add(group)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
