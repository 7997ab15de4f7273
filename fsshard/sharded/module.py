"""ShardedModule: what wrap() returns, the same under every backend."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from fsshard.backends.base import Backend
from fsshard.backends.clipping import count_all_ranks
from fsshard.backends.whole import counted_over_ranks, gather_all
from fsshard.comm.watchdog import meet, taking_part
from fsshard.complex_params.parameter_records import new_record
from fsshard.complex_params.slots import public_name
from fsshard.errors import ConfigurationError, FsshardError, ModelError, RankMismatch
from fsshard.planning.plan import Plan
from fsshard.sharded.contents import check_same_parameters
from fsshard.sharded.controller import ModelController
from fsshard.sharded.forward_methods import ForwardMethod
from fsshard.sharded.grad_norm import clip_by_norm
from fsshard.sharded.gradient_leaves import check_leaves
from fsshard.sharded.mean_factor import Count, mean_factor
from fsshard.sharded.parameters import refuse_hooks
from fsshard.sharded.reports import MemoryReport, explain, memory_report
from fsshard.sharded.state_dict import asked_for, gather_state_dict, load_whole
from fsshard.sharded.term_gradients import TermGradients, check_terms, term_gradients
from fsshard.torch_private.modules import IncompatibleKeys, share_non_persistent_buffers

log = logging.getLogger("fsshard")


class ShardedModule(nn.Module):
    """A model under an engine; made by :func:`fsshard.wrap`.

    Calling it runs the engine. All other attributes are those of the user's model, and so are ``model[0]``,
    ``len(model)`` and iteration; use ``isinstance`` on ``model.module``. Parameters, state dicts and norms have the
    names, shapes and complex dtypes of the original model.

    Attributes:
        module: the user's model.
        plan: the plan that the backend executes.
        backend: the :class:`~fsshard.backends.base.Backend` that executes it; ``backend.name`` is its name.
    """

    module: nn.Module
    backend: Backend
    _fsshard: ModelController
    """All that is ours, behind one name: every other name is the user's model's."""

    def __init__(self, backend: Backend, *, broadcast_buffers: bool, buffer_dtypes: Mapping[str, torch.dtype]) -> None:
        super().__init__()
        self.module = backend.module
        share_non_persistent_buffers(self, backend.module)
        containers = [name for name in CONTAINERS if hasattr(type(backend.module), name)]
        self.__class__ = _class_with(tuple(containers))
        self.__dict__["backend"] = backend
        controller = ModelController(backend, broadcast_buffers=broadcast_buffers, buffer_dtypes=buffer_dtypes)
        # From here on a write of a name is a write to the user's model.
        self.__dict__["_fsshard"] = controller
        if counted_over_ranks(backend):
            count_all_ranks(controller)
        for entry in backend.all:
            if backend.facts.divides == "elements":
                new_record(entry.parameter).is_shard = True
                refuse_hooks(entry, backend)
            if entry.kind.is_complex or backend.facts.divides == "owners":
                new_record(entry.parameter).refusal = (
                    f"parameter {entry.name!r} is managed by fsshard (backend {backend.name!r}), and torch's optimizer "
                    "cannot step it; build the optimizer with fsshard.build_optimizer(model, torch.optim.AdamW, lr=...)"
                )
        if backend.facts.divides == "elements" and callable(getattr(self.module, "generate", None)):
            # Of transformers: it reads the root's weights before its forwards.
            register_forward_method(self, "generate")

    # ------------------------------------------------------------------------------------------ what it is

    @property
    def plan(self) -> Plan:
        """The plan that the backend executes."""
        return self.backend.settings.plan

    def explain(self, estimate: Any = None) -> str:
        """Return the plan as a table, with the cost of each unit and its lower bound. Local; nothing is run.

        docs/memory.md explains each column. A step has one forward and one backward, and calls every unit once.

        Args:
            estimate: the result of :func:`fsshard.estimate` for this training, which is shown below: peak by kind.

        Raises:
            ConfigurationError: the estimate is of another model, backend or mesh.
        """
        return explain(self.backend, estimate)

    def memory_report(self, *, all_ranks: bool = False) -> MemoryReport:
        """Report bytes of parameters, buffers, gradients and optimizer states that this rank holds, on its host too.

        Storages are counted, each once and whole, with padding; FSDP1 lets dropped gradients go at the next forward
        only. :class:`fsshard.MemoryTracker` sees what an engine keeps besides these, and what a step needs on its way.

        Args:
            all_ranks: report every rank's; collective then, else local.
        """
        whole = (self._fsshard.whole or {}).values()
        return memory_report(self.backend, live_optimizers(self), whole, all_ranks=all_ranks)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in ("module", "_fsshard"):
                raise
            if name.startswith("__composable_api_state_key"):
                # Functions of FSDP1 look for their units in a module's children, and not in those of a module that is
                # marked so (torch 2.13). get_optimizer_state_dict would put together what is whole already.
                return {"replicate": None}
            if name.startswith("_ddp_"):
                # The first thing that torch's DDP looks for.
                raise ModelError(
                    "DistributedDataParallel(model): expected a bare model, got what fsshard.wrap returned, which "
                    "trains on all ranks already; call it as it is, with backend='ddp' for DDP"
                ) from None
            value = getattr(self.module, name)
        if name in self.backend.facts.needs_whole and self._fsshard.whole is None:
            return functools.partial(_refuse_on_parts, name, type(self.module).__name__)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        is_built = "_fsshard" in self.__dict__
        if is_built and (name in OWN_NAMES or name in ("module", "backend", "_fsshard")):
            raise ModelError(
                f"model.{name} = ...: expected a name that what fsshard.wrap returned does not have itself; to change "
                f"an attribute of your model, write model.module.{name} = ..."
            )
        is_torchs = name in self.__dict__ or hasattr(nn.Module, name)
        if is_built and not is_torchs and hasattr(self.module, name):
            # A write must reach what a read would give.
            setattr(self.module, name, value)
            return
        if is_built and isinstance(value, (nn.Parameter, nn.Buffer, nn.Module)):
            _check_trains_nothing(name, value)
            # On the wrapper it would be in no list and no state dict.
            setattr(self.module, name, value)
            return
        super().__setattr__(name, value)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a frozen parameter of the user's model; a trainable one raises."""
        _check_trains_nothing(name, param)
        self.module.register_parameter(name, param)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Register a buffer of the user's model."""
        self.module.register_buffer(name, tensor, persistent)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Add a module to the user's model; one with trainable parameters raises."""
        _check_trains_nothing(name, module)
        self.module.add_module(name, module)

    def __repr__(self) -> str:
        return f"ShardedModule(backend={self.backend.name!r}, {self.module!r})"

    def __deepcopy__(self, memo: Any) -> Any:
        return self.__reduce_ex__(0)

    def __reduce_ex__(self, protocol: Any) -> Any:
        before = "for an average use fsshard.EMA(model); else copy the model before fsshard.wrap"
        instead = before if self.backend.facts.divides == "elements" else f"copy model.module, or {before}"
        raise FsshardError(
            "a ShardedModule belongs to its process group and cannot be copied (deepcopy, AveragedModel) or pickled; "
            f"keep model.state_dict(), or {instead}"
        )

    # ------------------------------------------------------------------------------------------ training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's forward under the engine."""
        return self._fsshard.forward(args, kwargs)

    def train(self, mode: bool = True) -> ShardedModule:
        """Set the mode of the wrapper and of the user's modules.

        Raises:
            ModelError: a module reads weights in its own ``train`` or ``eval``, of which this rank holds a part.
        """
        try:
            return super().train(mode)
        except (RuntimeError, TypeError) as error:
            if isinstance(error, FsshardError) or not any(entry.is_cut for entry in self.backend.all):
                raise
            call = f"model.{'train' if mode else 'eval'}()"
            raise ModelError(
                f"{call}: a module of the model works on its weights there, as loralib's layers merge theirs, and this "
                f"rank holds parts of them ({error}); write: with model.full_parameters(writeback=True): {call}"
            ) from error

    def no_sync(self) -> AbstractContextManager[None]:
        """Context in which backward accumulates local gradients; the first backward after it reduces them all."""
        return self._fsshard.no_sync()

    def leaves(self, count: int, *, seed: int | None = None) -> Iterator[int]:
        """Yield this rank's micro-batches of a step that has the same bits on any number of ranks. Collective.

        ``for leaf in model.leaves(8): loss_fn(model(batch_of(step, leaf))).backward()`` leaves the mean over all 8
        leaves' gradients, added up in one order, on 1, 2, 4 or 8 ranks. Random numbers are those of the leaf: torch's
        generators are seeded for each, and put back after the loop. After every second leaf gradients are reduced;
        sums of earlier ones are kept beside them, at most log2(leaves of a rank) - 1.

        Args:
            count: leaves of a step, over all ranks. The number of ranks divides it, and is a power of two.
            seed: of the step's random numbers; None draws one from rank 0's generator.

        Yields:
            The leaf's number, from 0 to ``count - 1``: it says which samples these are
            (:func:`fsshard.leaf_samples`), whatever the rank.

        Raises:
            ConfigurationError: the number of ranks is no power of two, or does not divide ``count``.
            RankMismatch: the ranks ask for different numbers of leaves.
            OptimizerError: there are gradients already, or another loop is under way.
            ModelError: the forward writes buffers, such as running statistics.
        """
        check_leaves(count, self.backend.settings.world_size)
        return self._fsshard.leaf_loops.run(count, seed)

    def mean_factor(
        self,
        counts: Count | Sequence[Count],
        *,
        leaves: int | None = None,
    ) -> float:
        """Return by what to multiply sums of losses, so that the step is over the mean of all tokens. Collective.

        ``(loss_sum * factor).backward()`` for each micro-batch of the step, on every rank: the gradient is then the sum
        of all gradients, divided by the sum of all counts, however unequal these are. Call it once per step, before
        its first backward. It is the number of ranks divided by the total of their counts, the nearest float64 of it.
        The average of the weighted losses over the ranks, each rank's added up, is the mean loss. One exchange of five
        numbers per rank, which are read on the host.

        Args:
            counts: how many tokens, points or valid pixels this rank has in the step (or the sum of their weights): a
                number of at least 0, a tensor whose elements are added up, or a list with one for each micro-batch.
                Exact below 2**53. Ranks that see the same samples (tp, cp, domain) give the same number, that of whole
                samples; a batch that :func:`fsshard.join` repeats does not count, whatever is given.
            leaves: those of the step under :meth:`leaves`, to be called before its loop; ``counts`` are then of any
                share of the step's samples, as long as each sample is counted by one rank.

        Returns:
            The same number on every rank.

        Raises:
            ConfigurationError: on every rank: counts that are negative, not finite or no numbers on any of them, or 0
                on all of them; bad ``leaves``.
            OptimizerError: it was called between two micro-batches of a step.
            ModelError: it was called within a loop over leaves.
            RankMismatch: ranks that see the same samples have counted differently, or ``leaves`` differs.
        """
        return mean_factor(self.backend, counts, leaves)

    @property
    def require_backward_grad_sync(self) -> bool:
        """Tell whether backward reduces gradients: False is :meth:`no_sync`, until True. Set it before a forward."""
        return self._fsshard.synchronises

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self._fsshard.synchronises = value

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the autocast context of the mixed-precision policy: one that does nothing, in float32.

        Not needed where every floating-point tensor of the forward comes from a unit's inputs or parameters; a forward
        that makes float32 tensors of its own and multiplies them with weights needs it. Float32 units are excluded.
        """
        settings = self.backend.settings
        dtype = settings.precision.param
        if dtype in (None, torch.float32):
            return contextlib.nullcontext()
        return torch.autocast(settings.device.type, dtype=dtype)

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let ``hook(state, bucket)`` reduce gradients, as ``DistributedDataParallel`` does. To be called on all ranks.

        Args:
            state: is handed to the hook.
            hook: of ``torch.distributed.algorithms.ddp_comm_hooks``, or one's own.

        Raises:
            UnsupportedByBackend: another engine than ``ddp``, or one that reduces in narrower dtypes.
            ConfigurationError: one is registered already.
        """
        self.backend.register_comm_hook(state, hook)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of all parameters, or zero them."""
        self._fsshard.zero_grad(self.backend.all, set_to_none=set_to_none)
        for parameter in self.backend.settings.ignored.parameters.values():
            if set_to_none or parameter.grad is None:
                parameter.grad = None
            else:
                parameter.grad.zero_()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Scale all gradients so that their norm is at most ``max_norm``. Collective.

        The norm is over the original numbers: a complex one counts by its modulus, not by its halves. Powers are
        summed in float64 and the result is rounded to float32, so that the order in which shards are summed does not
        show: every backend gives the same norm and the same clipped gradients. With float64 weights it is not rounded,
        and backends differ in its last bits.

        Args:
            max_norm: the largest norm allowed, as in ``torch.nn.utils.clip_grad_norm_``.
            norm_type: p of the p-norm, > 0; ``inf`` for the largest modulus.
            error_if_nonfinite: raise if the norm is NaN or infinite.

        Returns:
            The norm before clipping: 0-dim float32, or float64 if a weight is, the same on every rank.
        """
        return clip_grad_norm_([self], max_norm, norm_type, error_if_nonfinite)

    def term_gradients(self, terms: Sequence[Tensor]) -> TermGradients:
        """Compare the gradients of a loss's terms, averaged over the ranks, to weight the terms by. Collective.

        Call it between the forward and the loss's ``backward()``, on every rank: each term is differentiated by all
        trainable parameters, at the cost of a backward pass, and the graph stays. No ``.grad`` changes, also not of
        earlier micro-batches, and it does not matter whether this is within :meth:`no_sync`. Terms may hold derivatives
        of the model (``create_graph=True``), and come from several forwards. Numbers are those of replicas averaged by
        hand, under every backend: sums are in float64, and the results are float32, or float64 if a weight is.

        On the way a rank holds one term's gradient whole, and then its share of each. Under ``fsdp`` units stay
        gathered from here to the end of the loss's backward.

        Args:
            terms: of the loss, T numbers with a graph, this rank's; as many and in the same order on every rank.

        Returns:
            ``norms`` of shape (T,), and ``cosines`` of shape (T, T).

        Raises:
            ConfigurationError: a term is not one real number, or depends on nothing that is trained; or other mesh
                dimensions than data divide or share parameters.
            RankMismatch: the ranks have different numbers of terms.
        """
        self._fsshard.check_knows_all_ranks("term_gradients")
        self._fsshard.step.refuse_means("term_gradients()")
        with taking_part(self.backend.settings.group, "term_gradients()"):
            return term_gradients(self.backend, check_terms(self.backend, terms))

    # ------------------------------------------------------------------------------------------ parameters

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the original names with parameters of the original shape and dtype.

        Each is what its module shows, over the engine's memory and with its gradient, which can be changed in place or
        dropped; under ``fsdp2`` a DTensor. What an engine cuts elsewhere than between rows has no shape on a rank and
        is on the meta device (use :meth:`full_parameters` for values): all parameters under ``fsdp``; complex ones
        under ``fsdp2`` whose rows the ranks cannot share evenly, with a DTensor of one dimension as their gradient.
        Each can be handed to :func:`~fsshard.build_optimizer`; a plain torch optimizer over complex ones raises.
        """
        if self.backend.facts.has_dtensors:
            # What is written to them must be seen by the next forward.
            self.backend.reshard()
        for entry in self.backend.all:
            names = [entry.name] if remove_duplicate else [slot.name for slot in entry.slots]
            shown = self._fsshard.shown(entry)
            for name in names:
                # Without recurse only those of the root module itself.
                if recurse or "." not in name:
                    yield f"{prefix}.{name}" if prefix else name, shown
        for name, parameter in self.backend.settings.ignored.parameters.items():
            if recurse or "." not in name:
                yield f"{prefix}.{name}" if prefix else name, parameter

    def named_modules(self, memo: Any = None, prefix: str = "", remove_duplicate: bool = True) -> Any:
        """Yield the user's modules under their names: the names of :meth:`named_parameters` begin with these."""
        return self.module.named_modules(memo, prefix, remove_duplicate)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the children of the user's model."""
        return self.module.named_children()

    def children(self) -> Iterator[nn.Module]:
        """Yield the user's model, which ``train()`` and ``apply()`` of torch look for here."""
        yield self.module

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers of the user's model under their original names."""
        with self.backend.bare() as module:
            buffers = list(module.named_buffers(prefix, recurse, remove_duplicate))
        for name, buffer in buffers:
            yield public_name(name), buffer

    @contextlib.contextmanager
    def full_parameters(self, writeback: bool = False) -> Iterator[dict[str, Tensor]]:
        """Context in which the user's modules hold whole parameters; collective on entry and exit.

        Args:
            writeback: keep changes made in the context (each rank keeps its part of its own values, so every rank must
                make the same changes).

        Yields:
            ``{original name: whole tensor}``, complex where the model is; the modules' attributes show the same memory.

        Raises:
            ModelError: the model was built on the meta device, and some of it has no values yet.
        """
        self._fsshard.check_filled()
        backend = self.backend
        with taking_part(backend.settings.group, "full_parameters()"):
            if any(entry.is_cut for entry in backend.all):
                meet(backend.settings.group, "full_parameters()")
            backend.reshard()
            parts = ((entry, entry.local()) for entry in backend.all)
            values = gather_all(parts, backend.settings.device)
            stored = dict(zip(backend.entries, values, strict=True))
        whole = {name: backend.entries[name].kind.to_user(value) for name, value in stored.items()}
        self._fsshard.whole = whole
        try:
            with backend.bare(), backend.whole_parameters(stored):
                yield dict(whole)
        finally:
            self._fsshard.whole = None
        if writeback:
            with torch.no_grad():
                for name, entry in backend.entries.items():
                    entry.put(stored[name])

    def requires_grad_(self, requires_grad: bool = True) -> ShardedModule:
        """Freeze or unfreeze all parameters; also within :meth:`full_parameters`, which shows copies of them."""
        for entry in self.backend.all:
            entry.parameter.requires_grad_(requires_grad)
        return self

    # ------------------------------------------------------------------------------------------ state dicts

    def state_dict(  # type: ignore[override]
        self, *, rank0_only: bool = False, offload_to_cpu: bool = False, config: Any = None
    ) -> dict[str, Any]:
        """Return the original model's state dict: names, order, shapes, complex dtypes, whole tensors. Collective.

        Parameters are assembled one at a time; with ``rank0_only`` small ones are sent together, up to a MiB. Rank 0
        then receives large shards in place and needs one copy of the model for it (on a GPU with ``offload_to_cpu``:
        one parameter there, the copy in host memory), the others need nothing; without it every rank needs a copy and
        two of the largest parameter.

        Args:
            rank0_only: the other ranks take part and get ``{}``.
            offload_to_cpu: every tensor moves to host memory as soon as it is whole.
            config: torch's ``FullStateDictConfig`` in place of the two; under ``fsdp`` also what a
                ``FSDP.state_dict_type(...)`` around the call says.

        Raises:
            ConfigurationError: ``config`` asks for anything else than whole tensors.
            ModelError: the model was built on the meta device, and some of it has no values yet.
            RankMismatch: the ranks asked for different things, or have not taken the same steps.
        """
        controller = self._fsshard
        config = controller.requested_state_dict if config is None else config
        rank0_only, offload_to_cpu = asked_for(config, rank0_only, offload_to_cpu)
        controller.check_filled()
        settings = self.backend.settings
        with taking_part(settings.group, "state_dict()"):
            flags = meet(settings.everyone, "state_dict()", f"{rank0_only} {offload_to_cpu}")
            if len(set(flags)) > 1:
                raise RankMismatch("state_dict: expected one rank0_only and offload_to_cpu on all ranks, got several")
            controller.step_counts.compare()
            controller.buffers.sync()
            return gather_state_dict(self.backend, controller.buffers, rank0_only, offload_to_cpu)

    def load_state_dict(
        self,
        state_dict: Mapping[str, Any] | None,
        strict: bool = True,
        assign: bool = False,
        *,
        broadcast_from_rank0: bool = False,
    ) -> IncompatibleKeys:
        """Load whole tensors under the original names. All or nothing. Collective.

        Args:
            state_dict: what :meth:`state_dict`, or the unwrapped model, gave; the same on every rank.
            strict: raise on missing and unexpected keys. Another shape raises in any case.
            assign: not supported: the engine owns the memory.
            broadcast_from_rank0: only rank 0 has the dict, the others pass None; it is sent tensor by tensor.

        Raises:
            StateDictError: names every missing, unexpected or wrongly shaped key.
            RankMismatch: names what differs between the dicts of two ranks; nothing was loaded.
            ModelError: trainable parameters were added, replaced or removed after :func:`fsshard.wrap`.
        """
        if assign:
            raise ConfigurationError("load_state_dict(assign=True): the engine owns the memory; use assign=False")
        controller = self._fsshard
        if controller.whole is None:
            check_same_parameters(self.backend)
        with taking_part(self.backend.settings.group, "load_state_dict()"):
            result = load_whole(self.backend, state_dict, controller.buffers, strict, broadcast_from_rank0)
        # Values have come for these keys, and for the parameters behind them.
        loaded = set(self.backend.key_order) - set(result.missing_keys)
        keys = self.backend.keys
        names = {keys[key] for key in loaded & keys.keys()}
        controller.note_filled(loaded | names)
        return result

    # ------------------------------------------------------------------------------------------ moves

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Raise for moves and casts, which would pull the engine's memory from under it; allow what changes nothing."""
        probe = torch.empty(1, device=self.backend.settings.device)
        moved = fn(probe)
        if moved.device != probe.device or moved.dtype != probe.dtype:
            raise FsshardError(
                f"the model is on {probe.device} in its own dtype under backend {self.backend.name!r}; "
                f"move or cast it (here: to {moved.device}, {moved.dtype}) before fsshard.wrap"
            )
        return self


def wrapped_models(models: Any, call: str) -> list[ShardedModule]:
    """Return one or several wrapped models as a list; raise a ConfigurationError for anything else."""
    members = [models]
    if isinstance(models, Mapping):
        members = list(models.values())
    elif isinstance(models, Iterable) and not isinstance(models, nn.Module):
        members = list(models)
    if not members or not all(isinstance(model, ShardedModule) for model in members):
        kinds = ", ".join(type(model).__name__ for model in members) or "none"
        raise ConfigurationError(f"{call}: expected models that fsshard.wrap returned, got {kinds}")
    if len(set(map(id, members))) < len(members):
        raise ConfigurationError(f"{call}: expected different models, got one of them twice")
    return members


@torch.no_grad()
def clip_grad_norm_(
    models: Iterable[ShardedModule] | Mapping[str, ShardedModule],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale the gradients of several models by one factor, so that their norm together is at most ``max_norm``.

    Collective. As :meth:`ShardedModule.clip_grad_norm_` for a single model; the models may be under different engines.

    Args:
        models: what :func:`fsshard.wrap` returned, in the same order on every rank; or a mapping to them by name.
        max_norm: the largest norm allowed over the gradients of all models together.
        norm_type: p of the p-norm, > 0; ``inf`` for the largest modulus.
        error_if_nonfinite: raise if the norm is NaN or infinite.

    Returns:
        The norm before clipping: 0-dim float32, or float64 if a weight is, the same on every rank.

    Raises:
        ConfigurationError: a model is not what wrap returned, or is there twice.
        OptimizerError: every backward pass of a model since its last step ran under ``no_sync()``.
    """
    members = wrapped_models(models, "clip_grad_norm_")
    # Numbers in any form, as torch's own takes them.
    max_norm = float(max_norm)
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise ConfigurationError(f"norm_type: expected a positive number or inf, got {norm_type}")
    backends = [model.backend for model in members]
    for model in members:
        model._fsshard.check_knows_all_ranks("clip_grad_norm_")
    with taking_part(backends[0].settings.group, "clip_grad_norm_()"):
        for model in members:
            model._fsshard.finish_gradients(model.backend.all)
        return clip_by_norm(backends, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)


def _check_trains_nothing(name: str, value: object) -> None:
    """Raise if something is put on a wrapped model that has to be trained, which no engine would do."""
    parameters = list(value.parameters()) if isinstance(value, nn.Module) else [value]
    if any(isinstance(parameter, nn.Parameter) and parameter.requires_grad for parameter in parameters):
        raise ModelError(
            f"model.{name} = ...: expected nothing trainable, since the engine trains what was there at fsshard.wrap, "
            f"got a {type(value).__name__} that takes gradients; set it on your own model before fsshard.wrap"
        )


def _refuse_on_parts(name: str, owner: str, *_: Any, **__: Any) -> None:
    raise FsshardError(
        f"{name}() of {owner} would see this rank's part of the weights only; call it inside `with "
        "model.full_parameters():` (entered on every rank), or use model.state_dict()"
    )


OWN_NAMES = frozenset(vars(ShardedModule)) - frozenset(dir(nn.Module)) - {"require_backward_grad_sync"}
"""Public names of ours, which hide those of the user's model; on the wrapper nobody may write to them."""

CONTAINERS = ("__getitem__", "__setitem__", "__delitem__", "__len__", "__iter__", "__contains__", "__reversed__")
"""Methods that Python looks up on the type of an object, and not through ``__getattr__``."""


# By names, so that the user's class is not kept alive.
@functools.cache
def _class_with(names: tuple[str, ...]) -> type[ShardedModule]:
    """Return a ShardedModule with those of :data:`CONTAINERS` that the user's class has: ``model[0]`` is its ``[0]``.

    On all of them they would say that any model is iterable and has a length, and so may be false.
    """

    # A class without __contains__, and a Sequential is one, is searched by iteration.
    methods = {name: lambda self, *args, name=name: getattr(self.module, name)(*args) for name in names}
    if not methods:
        return ShardedModule
    return type("ShardedModule", (ShardedModule,), {"__module__": __name__, **methods})


def register_forward_method(model: ShardedModule, method_name: str) -> None:
    """Let a method of the user's model run under the engine, with whole weights and gradients, as its forward does.

    For methods that compute with weights and are called by themselves, as in ``model.encode_image(images)``. Register
    them on every rank. A call is then a forward of the whole model: all ranks make it, and weights that it does not use
    are unused ones of that forward. ``generate`` of transformers is registered by itself.

    Args:
        model: what :func:`fsshard.wrap` returned.
        method_name: the method's name.

    Raises:
        ConfigurationError: ``model`` is not what wrap returned, or its model has no such method.
    """
    own = getattr(model.module, method_name, None) if isinstance(model, ShardedModule) else None
    if not isinstance(own, (MethodType, ForwardMethod)):
        raise ConfigurationError(
            "register_forward_method: expected what fsshard.wrap returned, and the name of a method of its model; got "
            f"{type(model).__name__} and {method_name!r}"
        )
    if isinstance(own, MethodType):
        vars(model.module)[method_name] = ForwardMethod(model, own)


def live_optimizers(model: ShardedModule) -> list[Any]:
    """Return the optimizers that were built over ``model`` and are still used."""
    return list(model._fsshard.optimizers)
