"""An all-gather of FSDP2's that sends float32 in a narrower dtype: what arrives is rounded, what a rank has stays."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsshard.comm.gloo.collectives import Gather
from fsshard.torch_private.fsdp2_collectives import AllGather


class NarrowGather(AllGather):
    """An all-gather in ``dtype``; every rank gets the same rounded numbers, of its own part too.

    Args:
        dtype: what numbers are rounded to, to the nearest, ties to even.
        inner: gathers them; None: torch's own collective.
    """

    def __init__(self, dtype: torch.dtype, inner: AllGather | None = None) -> None:
        super().__init__()
        self._dtype = dtype
        self._inner = inner

    allocate = Gather.allocate

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fill ``output_tensor`` with every rank's ``input_tensor``, rounded."""
        narrow = torch.empty_like(output_tensor, dtype=self._dtype)
        own = narrow.chunk(group.size())[group.rank()]
        own.copy_(input_tensor)
        if self._inner is not None:
            work = self._inner(narrow, own, group, async_op)
        else:
            work = dist.all_gather_single(narrow, own, group=group, async_op=async_op)
        if work is None:
            output_tensor.copy_(narrow)
            return None
        return _Widened(work, narrow, output_tensor)


class _Widened(dist.Work):
    """The collective, and then the copy into what is computed with."""

    def __init__(self, work: Any, narrow: Tensor, output: Tensor) -> None:
        super().__init__()
        self._work = work
        self._narrow: Tensor | None = narrow
        self._output = output

    def wait(self, timeout: Any = None) -> bool:
        self._work.wait()
        if self._narrow is not None:
            self._output.copy_(self._narrow)
            self._narrow = None
        return True
