"""Counts live bytes by kind in a real training, step by step."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsshard.comm.agreement import per_rank
from fsshard.errors import ConfigurationError, MissingExtra
from fsshard.nested import leaves
from fsshard.sharded.module import ShardedModule, live_optimizers
from fsshard.sharded.reports import MemoryReport, RankMemory, cuda_bytes, held_tensors
from fsshard.simulation.tracking import GRANULARITY, Tracker
from fsshard.torch_private.modules import is_compiled

T = TypeVar("T")


class MemoryTracker:
    """Context that counts this rank's live bytes by kind while a script trains, and finds the peak of each step.

    ::

        with fsshard.MemoryTracker(model, writer="runs/memory") as memory:
            for batch in loader:
                loss_fn(model(memory.inputs(batch))).backward()
                optimizer.step()
                optimizer.zero_grad()
                memory.step()
        print(memory.report(all_ranks=True))

    Without :meth:`step`, everything within the context is one step. It runs Python code at every operator, so a tracked
    step is slower. It does not see memory that no operator returns: workspaces of kernels, fragments of the allocator,
    buffers of gloo and NCCL. On CUDA reports therefore also have torch's own figures; torch has one peak per device, so
    ``torch.cuda.max_memory_allocated`` is reset at every step. Bytes count on the models' device only.

    Trackers may be nested. After an exception (out of memory, say) ``unfinished`` has the peak until then, by kind.

    Args:
        *models: each a :class:`~fsshard.ShardedModule`, or any module; all on one kind of device. Parameters of others
            that run within it count as parameters too, once they have run.
        writer: a TensorBoard ``SummaryWriter``, or a folder: every step is written to ``rank0`` and so on in it. None
            writes nothing.
        first_step: number of the first step.

    Attributes:
        highest: this rank's step with the highest peak so far, or None.
        unfinished: what was seen of the step that an exception ended, or None.
        next_step: number of the step under way.

    Raises:
        ConfigurationError: no model, or on several kinds of device; a model is compiled.
        MissingExtra: a folder was given, and tensorboard is not installed.
    """

    def __init__(self, *models: nn.Module, writer: Any = None, first_step: int = 0) -> None:
        if not models or not all(isinstance(model, nn.Module) for model in models):
            raise ConfigurationError(f"MemoryTracker got {models!r}; hand over one model, or several")
        self._folder: Path | None = None
        if isinstance(writer, (str, os.PathLike)):
            self._folder = Path(writer)
            writer = None
            summary_writer()
        devices = {}
        for model in models:
            # Compiled code allocates where no operator tells of it, and torch 2.13 compiles nothing under a tracker.
            if _is_compiled(model):
                raise ConfigurationError(
                    "MemoryTracker cannot see what a compiled model allocates; track it without compile=, or on CUDA "
                    "use torch.cuda.max_memory_allocated"
                )
            device = _device_of(model)
            devices[device.type] = device
        if len(devices) > 1:
            raise ConfigurationError(
                f"MemoryTracker got models on {' and '.join(devices)}; track those of one kind of device together"
            )
        self.models = models
        self.writer = writer
        (self.device,) = devices.values()
        self.highest: MemoryReport | None = None
        self.unfinished: MemoryReport | None = None
        self.next_step = first_step
        self._entered_at = first_step
        self._tracker: Tracker | None = None

    def __enter__(self) -> MemoryTracker:
        if self._tracker is not None:
            raise ConfigurationError("this MemoryTracker is already active; make another one, or leave it first")
        tracker = Tracker(granularity=GRANULARITY.get(self.device.type, 1), device=self.device.type)
        for model in self.models:
            module = model.module if isinstance(model, ShardedModule) else model
            # Modules of several models may have the same names.
            prefix = f"{type(module).__name__}." if len(self.models) > 1 else ""
            tracker.watch(module, prefix)
        for kind, tensor in self._held():
            tracker.mark(tensor, kind)
        self._entered_at = self.next_step
        self.unfinished = None
        if self._folder is not None:
            rank = 0 if self._group is None else self._group.rank()
            self.writer = summary_writer()(str(self._folder / f"rank{rank}"))
        tracker.__enter__()
        self._tracker = tracker
        self._reset()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        tracker = self._entered()
        try:
            if kind is not None:
                self.unfinished = self._seen(f"peak of step {self.next_step}, which {kind.__name__} ended")
            elif self.next_step == self._entered_at:
                self.step()
        finally:
            self._tracker = None
            tracker.__exit__(kind, error, trace)
            if self._folder is not None:
                self.writer.close()
                self.writer = None

    def inputs(self, batch: T) -> T:
        """Return the batch itself; its tensors, however nested, count as inputs from now on."""
        self._entered().mark(list(leaves(batch)), "inputs")
        return batch

    def live(self) -> MemoryReport:
        """Return what lives now, by kind; what a forward has made are activations as long as it lives."""
        return self._report("alive now", self._with_gradients().live(), highest={}, phases={})

    def step(self) -> MemoryReport:
        """End a training step: its peak, which is written where a writer was given, and the count starts again.

        Local: no other rank takes part.
        """
        report = self._seen(f"peak of step {self.next_step}")
        if self.writer is not None:
            report.write(self.writer, self.next_step)
        if self.highest is None or report.ranks[0].total > self.highest.ranks[0].total:
            self.highest = report
        self.next_step += 1
        self._reset()
        return report

    def _seen(self, what: str) -> MemoryReport:
        usage = self._with_gradients().usage()
        return self._report(
            what,
            usage.by_kind,
            highest=usage.highest,
            phases=usage.phases,
            moment=str(usage.moment),
        )

    def _with_gradients(self) -> Tracker:
        """Return the tracker, with all gradients known as such."""
        # Until the optimizer's step one is known by the collective that reduced it, and not all are reduced so.
        tracker = self._entered()
        for kind, tensor in self._held():
            if kind == "gradients":
                tracker.mark(tensor, kind)
        return tracker

    def report(self, *, all_ranks: bool = False) -> MemoryReport:
        """Return the step with the highest peak so far; every rank has its own.

        With ``all_ranks`` every rank's is reported, and the call is collective.
        """
        if self.highest is None:
            raise ConfigurationError("no step has ended yet; call step() after the optimizer's, or leave the context")
        if not all_ranks or self._group is None:
            return self.highest
        ranks = tuple(per_rank(self._group, self.highest.ranks[0]))
        return replace(self.highest, what="the highest peak of a step on each rank", ranks=ranks)

    def __str__(self) -> str:
        if self.highest is None:
            return "MemoryTracker: no step has ended yet"
        return str(self.highest)

    def _entered(self) -> Tracker:
        if self._tracker is None:
            raise ConfigurationError("outside of `with MemoryTracker(model) as memory:` nothing is tracked")
        return self._tracker

    def _held(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (kind, tensor) of what the models and their optimizers hold now."""
        for model in self.models:
            if isinstance(model, ShardedModule):
                yield from held_tensors(model.backend, live_optimizers(model))
                continue
            for parameter in model.parameters():
                if parameter.grad is not None:
                    yield "gradients", parameter.grad

    def _reset(self) -> None:
        self._entered().reset()
        if self.device.type == "cuda":
            # torch has one peak per device, which counts from here on.
            torch.cuda.reset_peak_memory_stats(self.device)

    @property
    def _group(self) -> dist.ProcessGroup | None:
        for model in self.models:
            if isinstance(model, ShardedModule):
                return model.backend.settings.group
        return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None

    def _report(self, what: str, by_kind: Mapping[str, int], **more: Any) -> MemoryReport:
        group = self._group
        allocated, most = cuda_bytes(self.device)
        memory = RankMemory(
            rank=0 if group is None else group.rank(),
            by_kind=by_kind,
            allocated=allocated,
            max_allocated=most,
            **more,
        )
        backends = [model.backend.name for model in self.models if isinstance(model, ShardedModule)]
        return MemoryReport(
            what=what,
            backend=" and ".join(dict.fromkeys(backends)),
            device=str(self.device),
            world_size=1 if group is None else group.size(),
            ranks=(memory,),
        )


def summary_writer() -> Any:
    """Return the class of TensorBoard's writers, or raise if tensorboard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise MissingExtra("tensorboard", "tensorboard", "writing to a folder for TensorBoard") from error
    return SummaryWriter


def _device_of(model: nn.Module) -> torch.device:
    if isinstance(model, ShardedModule):
        return model.backend.settings.device
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return torch.device("cpu")


def _is_compiled(model: nn.Module) -> bool:
    if isinstance(model, ShardedModule) and model.backend.settings.compilation is not None:
        return True
    return any(map(is_compiled, model.modules()))
