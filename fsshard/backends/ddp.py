"""backend="ddp": torch's DistributedDataParallel. Every rank holds everything; gradients are averaged."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch import nn

from fsshard.backends.base import Backend
from fsshard.backends.ddp_hooks import BucketSums, reduce_bucket, reduce_fake
from fsshard.backends.facts import EngineFacts, Tunable
from fsshard.backends.reducer_arrivals import Arrivals, ReplicatedModel
from fsshard.backends.registry import register_backend
from fsshard.complex_params.shown import stored_names
from fsshard.errors import ConfigurationError, UnsupportedByBackend
from fsshard.planning.entries import Entry
from fsshard.torch_private.autograd import disable_functorch, functorch_transforms_active
from fsshard.torch_private.ddp import SteadyReducer, rebuild_buckets

# Bytes to which torch's CPU allocator aligns memory.
ALIGNMENT = 64


@register_backend
class DDPBackend(Backend):
    """Replicated parameters, all-reduced gradients."""

    name: ClassVar[str] = "ddp"
    facts: ClassVar[EngineFacts] = EngineFacts(
        is_reference=True,
        strategies=("NO_SHARD",),
        hooks_outputs=True,
        adds_in_tree=True,
        tunable=Tunable(variants={"bucket views": {"gradient_as_bucket_view": True}}),
        option_names=("bucket_cap_mb", "gradient_as_bucket_view", "static_graph"),
    )
    _arrivals: Arrivals | None = None
    _replicated: ReplicatedModel | None = None
    _simulated = False  # the other ranks are not there
    _users_hook: tuple[object, Callable[..., Any]] | None = None  # (state, hook)

    def shard(self) -> nn.Module:
        from torch.nn.parallel import DistributedDataParallel

        if self._arrivals is not None:
            self._arrivals.detach()
            self._arrivals = None
        if not any(entry.parameter.requires_grad for entry in self.entries.values()):
            # DDP refuses a module with nothing to reduce, and there is nothing to reduce.
            return self.module
        cuda = self.settings.device.type == "cuda"
        with stored_names(), self.settings.ignored.hidden():
            engine = DistributedDataParallel(
                self.module,
                device_ids=[self.settings.device] if cuda else None,
                process_group=self.settings.group,
                find_unused_parameters=self.settings.find_unused_parameters,
                # ShardedModule does it, alike for every backend.
                forward_sync_buffers=False,
                # wrap() has broadcast parameters and buffers, non-persistent ones too.
                init_sync=False,
                **{"gradient_as_bucket_view": self._can_view_buckets(), **self.settings.options},
            )
        if (hook := self._hook()) is not None:  # DDP takes one
            engine.register_comm_hook(*hook)
        if self._replicated is None and self.settings.world_size > 1:
            self._replicated = ReplicatedModel(self)
        # It may be built anew within no_sync().
        engine.require_backward_grad_sync = not self.step.is_silent
        named = {entry.parameter: name for name, entry in self.entries.items() if entry.parameter.requires_grad}
        self._arrivals = Arrivals(engine, named)
        return engine

    def _hook(self) -> tuple[Any, Callable[..., Any]] | None:
        """Return the user's hook with its state, or ours where torch's own reduction would not do."""
        if self._users_hook is not None:
            return self._users_hook
        group = self.settings.group
        if group is None:
            return None
        reduce_dtypes = self._reduce_dtypes()
        if self._simulated:
            # By itself DDP's reducer asserts that an all_reduce has a future (comm.cpp, torch 2.13).
            return BucketSums(group, reduce_dtypes), reduce_fake
        owners = set()
        for entry in self.all:
            if entry.parameter.requires_grad:
                owners.update([slot.owner for slot in entry.slots])
        embeddings = [owner for owner in owners if isinstance(owner, (nn.Embedding, nn.EmbeddingBag))]
        has_sparse = any(embedding.sparse for embedding in embeddings)
        # DDP itself adds up in an order that depends on where a number lies in its bucket; of two ranks there is one.
        if group.size() > 2 or has_sparse or any(reduce_dtypes.values()):
            return BucketSums(group, reduce_dtypes), reduce_bucket
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
            # It is built anew, without the hook that there may have been.
            self.engine = self.shard()
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
            # Within a transform torch 2.13 raises "Cannot access data pointer of Tensor that doesn't have storage".
            with disable_functorch():
                rebuild_buckets(self.engine)
        self._arrivals.forward_begins(awaits_backward=bool(self.step.pending))

    def derivative_starts(self) -> None:
        if self.settings.options.get("static_graph"):
            # DDP takes the first pass through its output for the backward, and reduces when that ends: what comes with
            # the real one stays local, silently (_DDPSink, torch 2.13).
            raise UnsupportedByBackend(
                "torch.autograd.grad through a model with static_graph=True", self.name, "leave static_graph off"
            )

    def backward_starts(self, *, synchronised: bool) -> None:
        super().backward_starts(synchronised=synchronised)
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
            self._arrivals.drop()

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
        self._simulated = True
        self.engine = self.shard()
        # By itself DDP's reducer reads from memory, before the second step, in which order gradients were ready (2.13).
        engine = self.engine
        if isinstance(engine, torch.nn.parallel.DistributedDataParallel):
            setattr(engine, "reducer", SteadyReducer(engine.reducer))  # noqa: B010  # typed as a Reducer

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        # What DDP's own does, for the wrapper that is there by then.
        self._synchronise(False)
        try:
            yield
        finally:
            self._synchronise(not self.step.is_silent)

    def _synchronise(self, reduces: bool) -> None:
        if isinstance(self.engine, torch.nn.parallel.DistributedDataParallel):
            self.engine.require_backward_grad_sync = reduces
