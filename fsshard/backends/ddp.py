"""backend="ddp": torch's DistributedDataParallel. Everything whole on every rank, gradients averaged."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsshard.backends.arrivals import Arrivals
from fsshard.backends.base import Backend, Entry, Settings
from fsshard.backends.same_host import SWITCHES, check_switches, exchange_of, wants_shared_memory
from fsshard.backends.shared_buckets import SharedBuckets, sum_bucket, summed
from fsshard.errors import UnsupportedByBackend

__all__ = ["DDPBackend"]


class DDPBackend(Backend):
    """Replicated parameters, all-reduced gradients."""

    name: ClassVar[str] = "ddp"
    strategies: ClassVar[tuple[str, ...]] = ("NO_SHARD",)
    hooks_outputs: ClassVar[bool] = True
    option_names: ClassVar[tuple[str, ...]] = (
        "bucket_cap_mb",
        "gradient_as_bucket_view",
        "static_graph",
        *SWITCHES,
    )
    _arrivals: Arrivals | None = None

    @classmethod
    def check(cls, settings: Settings) -> None:
        super().check(settings)
        check_switches(settings)

    def _shard(self) -> nn.Module:
        from torch.nn.parallel import DistributedDataParallel

        if self._arrivals is not None:
            self._arrivals.detach()
            self._arrivals = None
        if not any(entry.parameter.requires_grad for entry in self.entries.values()):
            return self.module  # DDP refuses a module with nothing to reduce; there is nothing to reduce
        cuda = self.settings.device.type == "cuda"
        options = {name: value for name, value in self.settings.options.items() if name not in SWITCHES}
        engine = DistributedDataParallel(
            self.module,
            device_ids=[self.settings.device] if cuda else None,
            process_group=self.settings.group,
            find_unused_parameters=self.settings.find_unused_parameters,
            forward_sync_buffers=False,  # ShardedModule does it, alike for every backend
            init_sync=False,  # wrap() has broadcast parameters and buffers, non-persistent ones too
            **{"gradient_as_bucket_view": self._can_view_buckets(), **options},
        )
        wires = self.wires()
        if any(wires.values()):
            engine.register_comm_hook((self.settings.group, wires), _reduce_narrow)
        elif engine._use_python_reducer:
            pass  # by torch._dynamo.config.optimize_ddp: it calls hooks with a gradient, not with a bucket (torch 2.13)
        elif (shared := self._shared_buckets()) is not None:
            engine.register_comm_hook(shared, sum_bucket)
        elif self._has_sparse_gradients():
            engine.register_comm_hook(self.settings.group, _reduce_sparse)
        named = {entry.parameter: name for name, entry in self.entries.items() if entry.parameter.requires_grad}
        self._arrivals = Arrivals(engine, named)
        return engine

    def _shared_buckets(self) -> SharedBuckets | None:
        """Let two ranks of one host sum buckets in shared memory; the sum of more has an order, which is gloo's."""
        group = self.settings.group
        if group is None or group.size() != 2 or not wants_shared_memory(self.settings):
            return None
        exchange = exchange_of(group)
        return None if exchange is None else SharedBuckets(exchange, group)

    def _has_sparse_gradients(self) -> bool:
        embeddings = (m for m in self.module.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)))
        return any(module.sparse and module.weight.requires_grad for module in embeddings)

    def _can_view_buckets(self) -> bool:
        """Whether gradients may lie in DDP's buckets, which saves a copy of them all.

        Buckets pack without alignment, and behind a parameter of odd size no gradient could be seen as complex in place
        ("Tensor must have a storage_offset divisible by 2"): what a user writes into a gradient would be lost.
        """
        several = self.settings.world_size > 1
        complex_ones = any(entry.kind.is_complex for entry in self.all)
        return several and not (complex_ones and any(entry.stored_shape.numel() & 1 for entry in self.all))

    def before_forward(self, *, training: bool) -> None:
        super().before_forward(training=training)
        if self._arrivals is None or not torch.is_grad_enabled():
            return
        if torch._C._are_functorch_transforms_active():
            self._prepare_for_functorch()
        self._arrivals.forward_begins()

    def _prepare_for_functorch(self) -> None:
        if self.settings.find_unused_parameters or self.settings.options.get("static_graph"):
            # Of DDP's _DDPSink: "it must override the setup_context staticmethod" (torch 2.13).
            raise UnsupportedByBackend(
                "torch.func with find_unused_parameters or static_graph",
                self.name,
                "leave them off, or use backend='fairscale'",
            )
        with torch._C._DisableFuncTorch():  # else "Cannot access data pointer of Tensor that doesn't have storage"
            cast(Any, self.engine).reducer._rebuild_buckets()

    def derivative_starts(self) -> None:
        if self.settings.options.get("static_graph"):
            # DDP takes the first pass through its output for the backward, and reduces when that ends: what comes with
            # the real one stays local, in silence (_DDPSink, torch 2.13).
            raise UnsupportedByBackend(
                "torch.autograd.grad through a model with static_graph=True", self.name, "leave static_graph off"
            )

    def backward_starts(self, *, synchronised: bool) -> None:
        if self._arrivals is not None:
            self._arrivals.backward_starts()

    def finish_backward(self, entries: Iterable[Entry]) -> None:
        if self._arrivals is not None:
            self._arrivals.finish()

    def zero_grad(self, entries: Iterable[Entry], *, set_to_none: bool) -> None:
        super().zero_grad(entries, set_to_none=set_to_none)
        if self._arrivals is not None:
            self._arrivals.strayed = False

    def _on_trainable_changed(self, changed: list[str]) -> None:
        # DDP fixes its set of parameters when built: one unfrozen later would never be reduced, in silence, and the
        # ranks would drift apart (torch 2.13).
        self.engine = self._shard()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        if isinstance(self.engine, torch.nn.parallel.DistributedDataParallel):
            with self.engine.no_sync():
                yield
        else:
            yield


def _reduce_narrow(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket in narrower dtypes: divided first, so that the sum does not overflow."""
    group, wires = state
    whole = bucket.buffer()
    asked = [wires.get(parameter) for parameter in bucket.parameters()]
    if len(set(asked)) < 2:
        parts = {asked[0]: [whole]}
    else:  # islands beside other units; ranks must meet in one order
        parts = {wire: [] for wire in sorted(set(asked), key=str)}
        for wire, gradient in zip(asked, bucket.gradients(), strict=True):
            parts[wire].append(gradient)
    futures: list[torch.futures.Future[Any]] = []
    for wire, wide in parts.items():
        narrow = wide[0] if len(wide) == 1 else torch.cat([gradient.reshape(-1) for gradient in wide])
        narrow = narrow.to(wire or narrow.dtype).div_(group.size())
        future = dist.all_reduce(narrow, group=group, async_op=True).get_future()
        futures.append(future.then(functools.partial(_put_into, wide, narrow)))
    return torch.futures.collect_all(futures).then(lambda _: whole)


def _reduce_sparse(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average as DDP does, but for sparse gradients.

    DDP divides these in place, where their values can be the very memory of the gradient that the rest of the backward
    reads: below a sum with an embedding, gradients come out divided twice, in silence (torch 2.13).
    """
    size, whole = dist.get_world_size(state), bucket.buffer()
    divided = whole.mul_(1 / size) if whole.layout is torch.strided else whole / size
    return summed(divided, state)


def _put_into(wide: list[Tensor], narrow: Tensor, _: Any) -> None:
    if len(wide) == 1:
        wide[0].copy_(narrow)
        return
    for gradient, part in zip(wide, narrow.split([gradient.numel() for gradient in wide]), strict=True):
        gradient.copy_(part.view(gradient.shape))


# DDP compares annotations with classes and not with their names ("bucket annotation should be dist.GradBucket", 2.13).
for _hook in (_reduce_narrow, _reduce_sparse):
    _hook.__annotations__.update(bucket=dist.GradBucket, **{"return": torch.futures.Future[torch.Tensor]})
