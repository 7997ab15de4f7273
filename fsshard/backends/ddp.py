"""backend="ddp": torch's DistributedDataParallel. Every rank holds everything; gradients are averaged."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsshard.backends.base import Backend
from fsshard.backends.facts import EngineFacts, Tunable
from fsshard.backends.reducer_arrivals import Arrivals, ReplicatedModel
from fsshard.backends.registry import register_backend
from fsshard.complex_params.shown import stored_names
from fsshard.errors import ConfigurationError, UnsupportedByBackend
from fsshard.planning.entries import Entry
from fsshard.torch_private.autograd import disable_functorch, functorch_transforms_active
from fsshard.torch_private.ddp import SteadyReducer, rebuild_buckets

ALIGNMENT = 64
"""Bytes to which torch's CPU allocator aligns memory."""


@register_backend
class DDPBackend(Backend):
    """Replicated parameters, all-reduced gradients."""

    name: ClassVar[str] = "ddp"
    facts: ClassVar[EngineFacts] = EngineFacts(
        is_reference=True,
        strategies=("NO_SHARD",),
        hooks_outputs=True,
        tunable=Tunable(variants={"bucket views": {"gradient_as_bucket_view": True}}),
        option_names=("bucket_cap_mb", "gradient_as_bucket_view", "static_graph"),
    )
    _arrivals: Arrivals | None = None
    _replicated: ReplicatedModel | None = None
    _users_hook: tuple[object, Callable[..., Any]] | None = None  # (state, hook)

    def shard(self) -> nn.Module:
        from torch.nn.parallel import DistributedDataParallel

        if self._arrivals is not None:
            self._arrivals.detach()
            self._arrivals = None
        if not any(entry.parameter.requires_grad for entry in self.entries.values()):
            return self.module  # DDP refuses a module with nothing to reduce; there is nothing to reduce
        cuda = self.settings.device.type == "cuda"
        with stored_names():
            engine = DistributedDataParallel(
                self.module,
                device_ids=[self.settings.device] if cuda else None,
                process_group=self.settings.group,
                find_unused_parameters=self.settings.find_unused_parameters,
                forward_sync_buffers=False,  # ShardedModule does it, alike for every backend
                init_sync=False,  # wrap() has broadcast parameters and buffers, non-persistent ones too
                **{"gradient_as_bucket_view": self._can_view_buckets(), **self.settings.options},
            )
        if (hook := self._hook()) is not None:  # DDP takes one
            engine.register_comm_hook(*hook)
        if self._replicated is None and self.settings.world_size > 1:
            self._replicated = ReplicatedModel(self)
        named = {entry.parameter: name for name, entry in self.entries.items() if entry.parameter.requires_grad}
        self._arrivals = Arrivals(engine, named)
        return engine

    def _hook(self) -> tuple[Any, Callable[..., Any]] | None:
        """Return the user's hook with its state, or ours where torch's own reduction would not do."""
        reduce_dtypes = self._reduce_dtypes()
        if self._users_hook is not None:
            return self._users_hook
        if any(reduce_dtypes.values()):
            return (self.settings.group, reduce_dtypes), _reduce_narrow
        owners = (slot.owner for entry in self.all for slot in entry.slots if entry.parameter.requires_grad)
        if any(isinstance(owner, (nn.Embedding, nn.EmbeddingBag)) and owner.sparse for owner in owners):
            return self.settings.group, _reduce_sparse
        return None

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Register a hook as torch does: it gets ``(state, bucket)``, and sees complex gradients as pairs of reals.

        Raises:
            ConfigurationError: it is not callable, or one is registered already.
            UnsupportedByBackend: gradients are sent in narrower dtypes, which takes a hook itself.
            TypeError, ValueError: torch's own, for a hook of other arguments.
        """
        name = getattr(hook, "__name__", type(hook).__name__)
        if not callable(hook):
            raise ConfigurationError(f"register_comm_hook(state, {hook!r}): expected a function of (state, bucket)")
        if self._users_hook is not None:
            before = getattr(self._users_hook[1], "__name__", type(self._users_hook[1]).__name__)
            raise ConfigurationError(f"register_comm_hook({name}): {before} is registered already, and DDP takes one")
        narrow = {str(dtype) for dtype in self._reduce_dtypes().values() if dtype is not None}
        if narrow:
            raise UnsupportedByBackend(
                f"register_comm_hook({name}) of gradients that DDP's one hook sends in {', '.join(sorted(narrow))}",
                self.name,
                "set mixed_precision=fsshard.Precision(param=..., reduce=torch.float32) and narrow them in your hook",
            )
        self._users_hook = (state, hook)
        try:
            self.engine = self.shard()  # without the hook that there may have been
        except (TypeError, ValueError):
            self._users_hook = None
            self.engine = self.shard()
            raise

    def _can_view_buckets(self) -> bool:
        """Return whether gradients may lie in DDP's buckets, which saves a copy of them all."""
        # Buckets pack without alignment. Behind a parameter of odd size no gradient could be seen as complex in place
        # ("Tensor must have a storage_offset divisible by 2"): what a user writes into a gradient would be lost. And
        # matrix products and decompositions (Shampoo's, SOAP's) round by the address: other bits than in bare DDP.
        # One rank saves none: gradients that a user has kept over zero_grad() would be the next backward's, silently.
        trained = [entry.parameter for entry in self.all if entry.parameter.requires_grad]
        return self.settings.world_size > 1 and all(
            parameter.numel() * parameter.element_size() % ALIGNMENT == 0 for parameter in trained
        )

    def before_forward(self, *, training: bool) -> None:
        super().before_forward(training=training)
        if self._replicated is not None:
            self._replicated.called = True
        if self._arrivals is None or not torch.is_grad_enabled():
            return
        if functorch_transforms_active():
            if self.settings.find_unused_parameters or self.settings.options.get("static_graph"):
                # Of DDP's _DDPSink: "it must override the setup_context staticmethod" (torch 2.13).
                told = "torch.func with find_unused_parameters or static_graph"
                raise UnsupportedByBackend(told, self.name, "leave them off, or use backend='fairscale'")
            with disable_functorch():  # else "Cannot access data pointer of Tensor that doesn't have storage"
                rebuild_buckets(self.engine)
        self._arrivals.forward_begins()

    def derivative_starts(self) -> None:
        if self.settings.options.get("static_graph"):
            # DDP takes the first pass through its output for the backward, and reduces when that ends: what comes with
            # the real one stays local, silently (_DDPSink, torch 2.13).
            raise UnsupportedByBackend(
                "torch.autograd.grad through a model with static_graph=True", self.name, "leave static_graph off"
            )

    def backward_starts(self, *, synchronised: bool) -> None:
        if self._arrivals is not None:
            self._arrivals.backward_starts()

    def finish_backward(self, entries: Iterable[Entry]) -> None:
        if self._arrivals is not None:
            self._arrivals.finish()
        super().finish_backward(entries)

    def unused(self, names: Iterable[str]) -> list[str]:
        # A gradient that was dropped by hand (SwAV, DINO: p.grad = None) has come, and its parameter is not moved.
        unreached = self._arrivals.unreached if self._arrivals is not None else set()
        return [name for name in super().unused(names) if name in unreached] if unreached else []

    def zero_grad(self, entries: Iterable[Entry], *, set_to_none: bool) -> None:
        super().zero_grad(entries, set_to_none=set_to_none)
        if self._arrivals is not None:
            self._arrivals.strayed = False

    def _holds_local(self) -> bool:
        return self._arrivals is not None and self._arrivals.strayed

    def on_trainable_changed(self) -> None:
        # DDP fixes its set of parameters when built: one unfrozen later would never be reduced, silently, and the ranks
        # would drift apart (torch 2.13).
        self.engine = self.shard()

    def retire(self) -> None:
        ReplicatedModel.forget(entry.parameter for entry in self.all)
        if self._arrivals is not None:
            self._arrivals.detach()
            self._arrivals = None
        self.engine = self.module

    def simulate(self) -> None:
        # By itself DDP's reducer asserts that an all_reduce has a future (comm.cpp), and before the second step it
        # reads from memory in which order the gradients were ready (torch 2.13).
        engine: Any = self.engine
        if isinstance(engine, torch.nn.parallel.DistributedDataParallel):
            if self._hook() is None:
                engine.register_comm_hook(self.settings.group, _reduce_fake)
            setattr(engine, "reducer", SteadyReducer(engine.reducer))  # noqa: B010  # typed as a Reducer

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        if isinstance(self.engine, torch.nn.parallel.DistributedDataParallel):
            with self.engine.no_sync():
                yield
        else:
            yield


def _reduce_narrow(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket in narrower dtypes: divided first, so that the sum does not overflow."""
    group, reduce_dtypes = state
    whole = bucket.buffer()
    asked = [reduce_dtypes.get(parameter) for parameter in bucket.parameters()]
    if len(set(asked)) < 2:
        parts = {asked[0]: [whole]}
    else:  # fp32 units among others; ranks must meet in one order
        parts = {reduce_dtype: [] for reduce_dtype in sorted(set(asked), key=str)}
        for reduce_dtype, gradient in zip(asked, bucket.gradients(), strict=True):
            parts[reduce_dtype].append(gradient)
    futures: list[torch.futures.Future[Any]] = []
    for reduce_dtype, wide in parts.items():
        narrow = wide[0] if len(wide) == 1 else torch.cat([gradient.reshape(-1) for gradient in wide])
        narrow = narrow.to(reduce_dtype or narrow.dtype).div_(group.size())
        future = dist.all_reduce(narrow, group=group, async_op=True).get_future()
        futures.append(future.then(functools.partial(_put_into, wide, narrow)))
    return torch.futures.collect_all(futures).then(lambda _: whole)


def _reduce_sparse(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average as DDP does, but for sparse gradients."""
    # DDP divides these in place, where their values can be the very memory of the gradient that the rest of the
    # backward reads: below a sum with an embedding, gradients come out divided twice, silently (torch 2.13).
    size, whole = dist.get_world_size(state), bucket.buffer()
    divided = whole.mul_(1 / size) if whole.layout is torch.strided else whole / size
    future: Any = dist.all_reduce(divided, group=state, async_op=True).get_future()
    return future.then(lambda done: done.value()[0])  # type: ignore[no-any-return]


def _put_into(wide: list[Tensor], narrow: Tensor, _: Any) -> None:
    if len(wide) == 1:
        wide[0].copy_(narrow)
        return
    for gradient, part in zip(wide, narrow.split([gradient.numel() for gradient in wide]), strict=True):
        gradient.copy_(part.view(gradient.shape))


def _reduce_fake(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    buffer = bucket.buffer()
    dist.all_reduce(buffer, group=group)
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(buffer)
    return future


# DDP compares annotations with classes and not with their names ("bucket annotation should be dist.GradBucket", 2.13).
for _hook in (_reduce_narrow, _reduce_sparse, _reduce_fake):
    _hook.__annotations__.update(bucket=dist.GradBucket, **{"return": torch.futures.Future[torch.Tensor]})
