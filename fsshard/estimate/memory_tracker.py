"""Live bytes by kind in a real training, step by step: :class:`MemoryTracker`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsshard.backends.base import per_rank
from fsshard.errors import ConfigurationError
from fsshard.memory_report import MemoryReport, RankMemory, check_writer, cuda_bytes, held_tensors
from fsshard.sharded import ShardedModule, live_optimizers

if TYPE_CHECKING:
    from fsshard.estimate.tracking import Tracker

__all__ = ["MemoryTracker"]

T = TypeVar("T")
GRANULARITY = {"cuda": 512}
"""Sizes are rounded up to multiples of what the device's allocator hands out; 1 byte on all others."""


class MemoryTracker:
    """Within it, counts this rank's live bytes by kind while a script trains, and finds the peak of each step.

    ::

        with fsshard.MemoryTracker(model, writer=SummaryWriter(folder)) as memory:
            for batch in loader:
                loss_fn(model(memory.inputs(batch))).backward()
                optimizer.step()
                optimizer.zero_grad()
                memory.step()
        print(memory.report(all_ranks=True))

    Without :meth:`step` all that happens within is one step. It sees every operator, in Python, so a step takes
    longer: to watch a long training, enter it for a step now and then. What operators do not hand out it does not see:
    workspaces inside of kernels, fragments of an allocator, what gloo and NCCL keep. On CUDA reports therefore have
    torch's own figures beside them; torch has one peak per device, so ``torch.cuda.max_memory_allocated`` starts anew
    at every step. Bytes count on the model's device only.

    Args:
        model: a :class:`~fsshard.ShardedModule`, or any module.
        writer: a TensorBoard ``SummaryWriter``, to which every step is written; None writes nothing.
        tag: what TensorBoard's tags begin with.
        first_step: number of the first step.

    Raises:
        ConfigurationError: ``writer`` is none, or the model is compiled.
    """

    def __init__(self, model: nn.Module, *, writer: Any = None, tag: str = "memory", first_step: int = 0) -> None:
        if writer is not None:
            check_writer(writer)
        _check_not_compiled(model)
        self.model, self.writer, self.tag = model, writer, tag
        self.device = _device_of(model)
        self.highest: MemoryReport | None = None
        self.next_step = first_step
        self._steps = 0
        self._tracker: Tracker | None = None

    def __enter__(self) -> MemoryTracker:
        if self._tracker is not None:
            raise ConfigurationError("this MemoryTracker is entered already; make another one, or leave it first")
        from fsshard.estimate.tracking import Tracker  # costs a tenth of torch's own import, for those who track only

        tracker = Tracker(granularity=GRANULARITY.get(self.device.type, 1), device=self.device.type)
        tracker.watch(self.model.module if isinstance(self.model, ShardedModule) else self.model)
        for kind, tensor in self._held():
            tracker.mark(tensor, kind)
        self._steps = 0
        tracker.__enter__()
        self._tracker = tracker
        self._reset()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        tracker = self._entered()
        try:
            if kind is None and not self._steps:
                self.step()
        finally:
            self._tracker = None
            tracker.__exit__(kind, error, trace)

    def inputs(self, batch: T) -> T:
        """The batch itself; its tensors, however nested, count as inputs from now on."""
        self._entered().mark(batch, "inputs")
        return batch

    def live(self) -> MemoryReport:
        """What lives now, by kind; what a forward has made are activations as long as it lives."""
        tracker = self._entered()
        # Until the optimizer's step a gradient is known by the collective that reduced it, and not all are reduced so.
        tracker.mark([tensor for kind, tensor in self._held() if kind == "gradients"], "gradients")
        return self._report("alive now", self._mine(tracker.live(), highest={}, phases={}))

    def step(self) -> MemoryReport:
        """End a training step: its peak, which is written where a writer was given, and the count starts anew.

        Local: no other rank takes part.
        """
        tracker = self._entered()
        tracker.mark([tensor for kind, tensor in self._held() if kind == "gradients"], "gradients")
        usage = tracker.usage()
        mine = self._mine(usage.by_kind, usage.highest, usage.phases, str(usage.moment))
        found = self._report(f"peak of step {self.next_step}", mine)
        if self.writer is not None:
            found.write(self.writer, self.next_step, self.tag)
        if self.highest is None or found.ranks[0].total > self.highest.ranks[0].total:
            self.highest = found
        self.next_step += 1
        self._steps += 1
        self._reset()
        return found

    def report(self, *, all_ranks: bool = False) -> MemoryReport:
        """The step with the highest peak so far; every rank has its own.

        Args:
            all_ranks: report every rank's; collective then, else local.

        Raises:
            ConfigurationError: no step has ended yet.
        """
        if self.highest is None:
            raise ConfigurationError("no step has ended yet; call step() after the optimizer's, or leave the context")
        if not all_ranks or self._group is None:
            return self.highest
        ranks = tuple(per_rank(self._group, self.highest.ranks[0]))
        return replace(self.highest, what="the highest peak of a step on each rank", ranks=ranks)

    def __str__(self) -> str:
        return str(self.highest) if self.highest is not None else "MemoryTracker: no step has ended yet"

    # ------------------------------------------------------------------------------------------ inside

    def _entered(self) -> Tracker:
        if self._tracker is None:
            raise ConfigurationError("outside of `with MemoryTracker(model) as memory:` nothing is tracked")
        return self._tracker

    def _held(self) -> Iterator[tuple[str, Tensor]]:
        """(kind, tensor) of what the model and its optimizers hold now."""
        if isinstance(self.model, ShardedModule):
            yield from held_tensors(self.model.backend, live_optimizers(self.model))
        else:
            yield from (("gradients", p.grad) for p in self.model.parameters() if p.grad is not None)

    def _reset(self) -> None:
        self._entered().reset()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    @property
    def _group(self) -> dist.ProcessGroup | None:
        if isinstance(self.model, ShardedModule):
            return self.model.backend.settings.group
        return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None

    def _mine(
        self, by_kind: Mapping[str, int], highest: Mapping[str, int], phases: Mapping[str, int], moment: str = ""
    ) -> RankMemory:
        group = self._group
        allocated, most = cuda_bytes(self.device)
        return RankMemory(
            rank=0 if group is None else group.rank(),
            by_kind=by_kind,
            highest=highest,
            phases=phases,
            moment=moment,
            allocated=allocated,
            max_allocated=most,
        )

    def _report(self, what: str, mine: RankMemory) -> MemoryReport:
        group = self._group
        return MemoryReport(
            what=what,
            backend=self.model.backend.name if isinstance(self.model, ShardedModule) else "",
            device=str(self.device),
            world_size=1 if group is None else group.size(),
            ranks=(mine,),
        )


def _device_of(model: nn.Module) -> torch.device:
    if isinstance(model, ShardedModule):
        return model.backend.settings.device
    tensors = (tensor for tensors in (model.parameters(), model.buffers()) for tensor in tensors)
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def _check_not_compiled(model: nn.Module) -> None:
    """Compiled code allocates where no operator tells of it, and torch 2.13 compiles nothing new under a tracker."""
    ours = isinstance(model, ShardedModule) and model.backend.settings.compilation is not None
    raw = any(
        module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"
        for module in model.modules()
    )
    if ours or raw:
        raise ConfigurationError(
            "MemoryTracker cannot see what a compiled model allocates; track it without compile=, or on CUDA use "
            "torch.cuda.max_memory_allocated"
        )
