"""build_optimizer and ShardedOptimizer: one optimizer interface over the shards of any backend.

What the optimizer sees while it steps is in :mod:`fsshard.sharded.optimizer_step`; here are the object that users hold,
how it is built, and the checks that keep an optimizer from being silently wrong.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsshard.backends.reducer_arrivals import check_step
from fsshard.backends.whole import (
    HAS_BEGUN,
    copied,
    gather_states,
    owned,
    owns_state,
    scatter_state,
    state_device,
    state_entry,
    state_of,
    states_at_rest,
    whole_owners,
)
from fsshard.comm.agreement import agree, check_alike, digest_of, exchange
from fsshard.comm.watchdog import meet, taking_part
from fsshard.complex_params.pairs import laid, order_in_memory
from fsshard.complex_params.parameter_records import record_of
from fsshard.complex_params.shown import stored_of
from fsshard.errors import OptimizerError, StateDictError, UnsupportedByBackend
from fsshard.model.ignored import Ignored
from fsshard.oss.partition import GLOBAL_OPTIMIZERS
from fsshard.oss.partitioned import PartitionedOptimizer, finished_by, local_optimizer
from fsshard.patches import OPTIMIZER_STEP
from fsshard.planning.entries import Entry
from fsshard.sharded.contents import check_same_parameters
from fsshard.sharded.optimizer_checks import (
    WHOLE_TENSOR_OPTIMIZERS,
    OptimizerRequest,
    check_asked_alike,
    rank_independent_text,
)
from fsshard.sharded.optimizer_keywords import groups_with_keywords, parameters_by_keyword
from fsshard.sharded.optimizer_matrices import See, take_see
from fsshard.sharded.optimizer_step import is_stepping, viewing_class
from fsshard.sharded.torch_checkpoint_calls import StateOfParameters, by_name
from fsshard.state_objects import is_plain_tensor
from fsshard.torch_private.autograd import current_graph_task_id
from fsshard.torch_private.optimizers import STEPPED, mark_tracked
from fsshard.torch_private.tensors import LOCAL_TENSOR, sparse_values

if TYPE_CHECKING:
    from fsshard.sharded.module import ShardedModule


Groups = list[dict[str, Any]]


class ShardedOptimizer(Optimizer):
    """A torch ``Optimizer`` over a :class:`~fsshard.sharded.module.ShardedModule`; made by :func:`build_optimizer`.

    ``param_groups``, ``zero_grad``, ``defaults``, step hooks and LR schedulers work as on the optimizer class that it
    was built of. ``state_dict`` is by parameter name, whole and complex on every backend, and loads under any.
    """

    def __init__(self, model: ShardedModule, inner: Optimizer, request: OptimizerRequest) -> None:
        self.inner = inner
        self.request = request
        self.optimizer_class = request.optimizer_class
        self._number = model._fsshard.step_counts.new_optimizer()
        self.model = model
        self._around_step = taking_part(model.backend.settings.group, "optimizer.step()")
        self._under_scaler = False
        defaults = dict(local_optimizer(inner).defaults)
        # Torch's own constructor would build the groups again; this sets up hooks and profiling alone.
        Optimizer.__setstate__(self, {"defaults": defaults})
        self._list_entries()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups, with the engine's own parameters; learning rates and the like can be set as usual."""
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: Iterable[dict[str, Any]]) -> None:
        """Put other groups in their place, as Lightning's BaseFinetuning does when it goes on from a checkpoint.

        Raises:
            OptimizerError: no parameter, one in two groups, or one that is not the model's; nothing was changed.
            UnsupportedByBackend: under ``fairscale``, as for :meth:`add_param_group`.
        """
        self._check_groups_may_change("param_groups = ...")
        resolved = with_parameters(self.model, _resolved(self.model, groups))
        defaults = local_optimizer(self.inner).defaults
        members = []
        for group in resolved:
            members += group["params"]
        if not members or len(set(members)) < len(members):
            how = "some parameters are given twice" if members else "there is no group"
            raise OptimizerError(f"param_groups = ...: {how}; give each parameter that is to be stepped once")
        self.inner.param_groups[:] = [{**defaults, **group} for group in resolved]
        self._list_entries()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters (or names) of the model.

        Raises:
            UnsupportedByBackend: under ``fairscale``, whose OSS moves ownership when a group is added and then updates
                some parameters on no rank (FairScale 0.4.13); and with ``whole=True`` where that has owners.
        """
        self._check_groups_may_change("add_param_group")
        resolved = _resolved(self.model, [param_group])
        (group,) = with_parameters(self.model, resolved)
        self.inner.add_param_group(group)
        self._list_entries()

    def _check_groups_may_change(self, how: str) -> None:
        if isinstance(self.inner, PartitionedOptimizer) or whole_owners(self.inner) is not None:
            raise UnsupportedByBackend(how, self.model.backend.name, "build a second optimizer over the new parameters")

    def _list_entries(self) -> None:
        # Kept, because a closure looks at it while the groups hold views.
        self.entries = []
        self._group_of = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                entry = self.model._fsshard.find_entry(parameter)
                self.entries.append(entry)
                self._group_of[entry.name] = group

    @property
    def state(self) -> Any:  # type: ignore[override]
        """This rank's state: real tensors shaped like the local parts. It may be kept: each look is at the latest."""
        return StateOfParameters(self)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of this optimizer's parameters, or zero them."""
        self.model._fsshard.zero_grad(self.entries, set_to_none=set_to_none)

    # ------------------------------------------------------------------------------------------ a step

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Update the parameters. Collective.

        Args:
            closure: runs forward and backward, as for the class's own ``step``; it may be called several times, and
                sees the optimizer's current weights. Its backward can be the first one after ``no_sync``.
            **kwargs: what the class's ``step`` takes.

        Raises:
            RankMismatch: in a later forward, on every rank: a rank has skipped a step (``fsdp``, ``fsdp2``).
            OptimizerError: a trainable parameter received no gradient and ``find_unused_parameters`` is off; or the
                gradients are local, from backward passes under ``no_sync`` only, and the optimizer would look at them.
        """
        model = self.model
        setattr(self, STEPPED, True)
        if model.backend.settings.plan.precision.param == torch.float16 and not model._fsshard.scaled:
            # Once for each model.
            model._fsshard.scaled = True
            warnings.warn(
                "a step in float16 without loss scaling: small gradients become zero; use fsshard.GradScaler(model), "
                "or mixed_precision='bf16'",
                stacklevel=2,
            )
        with self._around_step:
            vars(self.inner)[HAS_BEGUN] = True
            model._fsshard.step_counts.took_step(self._number, self.inner.param_groups)
            if closure is not None:
                return self._step_with(closure, kwargs)
            self.finish_gradients()
            self._check_unused()
            return self.inner.step(**kwargs)

    def _step_with(self, closure: Callable[[], Any], kwargs: dict[str, Any]) -> Any:
        """Step with gradients that the closure makes: the last micro-batch after :meth:`no_sync`, or all of them."""
        if whole_owners(self.inner) is not None:
            return self._step_owned_with(closure, kwargs)
        # The user's class, over this rank's shards.
        local: Any = local_optimizer(self.inner)
        local.gradients_are_local = self.model._fsshard.step.has_local(entry.name for entry in self.entries)
        if not (self.request.begins_with_closure and local.gradients_are_local):
            # The class looks at gradients before it runs the closure.
            self.finish_gradients()
        try:
            return self.inner.step(finished_by(closure, self.finish_gradients), **kwargs)
        finally:
            local.gradients_are_local = False

    def _step_owned_with(self, closure: Callable[[], Any], kwargs: dict[str, Any]) -> Any:
        """Step whole parameters after the closure: all ranks run it, owners or not, and once, as torch's own do."""
        if not self.request.of_torch:
            raise UnsupportedByBackend(
                f"{self.optimizer_class.__name__}.step(closure) with whole=True",
                self.model.backend.name,
                "call forward and backward before step(), or use backend='fairscale' or 'ddp'",
            )
        with torch.enable_grad():
            loss = closure()
        self.finish_gradients()
        self.inner.step(**kwargs)
        return loss

    def _check_unused(self) -> None:
        backend = self.model.backend
        if backend.settings.find_unused_parameters:
            return
        unused = list(itertools.filterfalse(backend.step.dropped.__contains__, backend.unused(self._group_of)))
        if unused and len(unused) < sum(entry.parameter.requires_grad for entry in self.entries):
            # Parameters may have been replaced, which forwards of torch.compile(model) do not look at.
            check_same_parameters(backend)
            more = ", ..." if len(unused) > 5 else ""
            raise OptimizerError(
                f"expected gradients of all parameters, got none of {', '.join(unused[:5])}{more}; if the forward "
                "leaves some out on purpose, pass find_unused_parameters=True to fsshard.wrap"
            )

    def finish_gradients(self) -> None:
        """Make this optimizer's gradients final; they may be read then. Collective."""
        self.model.backend.reshard()
        self.model._fsshard.finish_gradients(self.entries)

    def local_gradients(self) -> list[Tensor]:
        """Return this rank's parts of this optimizer's gradients, as stored (real)."""
        backend = self.model.backend
        gradients = []
        for entry in self.entries:
            gradient = entry.grad() if owned(backend, entry) else None
            if gradient is not None:
                gradients.append(sparse_values(gradient) if gradient.is_sparse else gradient)
        return gradients

    @contextlib.contextmanager
    def under_scaler(self) -> Iterator[None]:
        """Context in which :meth:`step` is called by a scaler that asks all ranks."""
        self._under_scaler = True
        try:
            yield
        finally:
            self._under_scaler = False

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # The first thing that torch's GradScaler.step looks at, before it decides by this rank's gradients alone
        # whether to step (torch 2.13): another rank may decide otherwise, and the job hangs. The caller is told from
        # its frame, since FSDP's own scaler, which asks all ranks, comes the same way.
        if self._under_scaler:
            return False
        backend = self.model.backend
        settings = backend.settings
        # Then all ranks of the data group see the same gradients.
        alone = backend.facts.divides == "nothing" or settings.world_size == 1
        if alone and settings.all_ranks == settings.world_size:
            return False
        caller = sys._getframe(1).f_locals.get("self")
        classes = [cls.__name__ for cls in type(caller).__mro__]
        if "ShardedGradScaler" not in classes:
            raise OptimizerError(
                f"torch.amp.GradScaler sees this rank's gradients only under backend {backend.name!r}, and the ranks "
                "could disagree about a step; use fsshard.GradScaler(model)"
            )
        return False

    # ------------------------------------------------------------------------------------------ state

    def state_dict(self, *, rank0_only: bool = False) -> dict[str, Any]:
        """Return the whole optimizer state by parameter name. Collective.

        Args:
            rank0_only: other ranks take part and get ``{}``.

        Returns:
            ``{"state": {name: {key: tensor or value}}, "param_groups": [{..., "params": [names]}]}`` with the original
            names, shapes and (complex) dtypes, the same under every backend.
        """
        backend = self.model.backend
        settings = backend.settings
        if backend.facts.divides != "nothing":
            # A call on rank 0 alone would wait for the others without a word.
            meet(settings.everyone, "optimizer.state_dict()")
        keep = settings.is_first or not rank0_only
        state = {}
        for name, whole in self.iterate_state():
            if keep and whole:
                state[name] = whole
        if not keep:
            return {}
        names = [entry.name for entry in self.entries]
        groups = [by_name(group, names) for group in groups_by_name(self)]
        return {"state": by_name(state, names), "param_groups": groups}

    def iterate_state(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (parameter's name, its whole state), one at a time. Collective, so run it to its end on every rank."""
        with taking_part(self.model.backend.settings.group, "optimizer.state_dict()"):
            for entry, stored in gather_states(self.model.backend, self.inner, self.entries):
                whole = {key: _to_user(entry, value) for key, value in stored.items()}
                yield entry.name, whole

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` gave, on every rank the same. Nothing changes if it does not fit. Collective.

        Raises:
            StateDictError: groups with other parameters, or state of another shape.
            RankMismatch: names what differs between the ranks.
        """
        settings = self.model.backend.settings
        facts = {}
        if settings.all_ranks > 1:
            facts = _facts(state_dict, self._left_out_by_ranks(state_dict))
        check_alike(settings.everyone, "optimizer.load_state_dict()", facts, "load the same on every rank")
        self.check_state_dict(state_dict)
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            # Copies, as torch makes: a schedule writes into a learning rate that is a tensor.
            group.update({key: copy.deepcopy(value) for key, value in saved.items() if key != "params"})
        self.model.backend.reshard()
        state = state_dict["state"]
        counters = self._counters(state)
        for entry in self.entries:
            current = state_of(self.inner, entry)
            whole = {}
            for key, value in state.get(entry.name, {}).items():
                if key in counters:
                    whole[key] = self.placed(entry, value, current.get(key))
                else:
                    whole[key] = _to_stored(entry, value)
            # Every rank comes here for every parameter, also for one without saved state.
            scatter_state(self.model.backend, self.inner, entry, whole)

    def _counters(self, state: Mapping[str, Mapping[str, Any]]) -> set[str]:
        """Return the keys under which state holds one number for a whole parameter."""
        counters = {"step"}
        for entry in self.entries:
            # The shape of state does not tell where the parameter has one number itself.
            if entry.shape.numel() > 1:
                for key, value in state.get(entry.name, {}).items():
                    if isinstance(value, Tensor) and not value.dim():
                        counters.add(key)
        return counters

    def keeps_state_of(self, entry: Entry) -> bool:
        """Return whether this rank keeps state of the parameter, or of a part of it."""
        if not owns_state(self.model.backend, self.inner, entry):
            return False
        return state_entry(self.inner, entry).local().numel() > 0

    def _left_out_by_ranks(self, state_dict: Any) -> set[str]:
        """Return the parameters whose state some rank was not given, since it keeps none of it. Collective."""
        state = {}
        if isinstance(state_dict, Mapping):
            state = state_dict.get("state", {})
        left_out = []
        for entry in self.entries:
            # torch's set_optimizer_state_dict asks this rank's state for the keys of a flattened dict, and finds none.
            is_empty = entry.name in state and not state[entry.name]
            if is_empty and not self.keeps_state_of(entry):
                left_out.append(entry.name)
        names_of_ranks = meet(self.model.backend.settings.everyone, "optimizer.load_state_dict()", "\n".join(left_out))
        return set("\n".join(names_of_ranks).split("\n"))

    def placed(self, entry: Entry, value: Any, held: Any) -> Any:
        """Put state where the optimizer keeps it: where ``held`` is now, else with the parameter."""
        if not isinstance(value, Tensor):
            return value
        if isinstance(held, Tensor):
            return value.to(held.device)
        group = self._group_of[entry.name]
        # Counters lie on the host, unless the step is fused or captured, which reads them where the parameter is.
        beside = value.dim() or group.get("fused") or group.get("capturable")
        return value.to(state_device(self.inner, entry) if beside else "cpu")

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raise unless :meth:`load_state_dict` would take it. Local.

        Raises:
            StateDictError: names what is missing, unexpected or of another shape.
        """
        if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
            raise StateDictError("optimizer state", missing=["state", "param_groups"])
        saved_groups = state_dict["param_groups"]
        state = state_dict["state"]
        members = _members(groups_by_name(self))
        saved_members = _members(saved_groups)
        missing = members - saved_members
        unexpected = saved_members - members
        for name in state.keys() - self._group_of.keys():
            unexpected.add(f"state of {name}")
        mismatched: dict[str, tuple[object, object]] = {}
        for entry in self.entries:
            for key, value in state.get(entry.name, {}).items():
                if isinstance(value, Tensor) and value.dim() and not self._fits(entry, key, value):
                    mismatched[f"{entry.name}: {key}"] = (tuple(entry.full_shape), tuple(value.shape))
        if len(self.param_groups) != len(saved_groups):
            mismatched["number of param_groups"] = (len(self.param_groups), len(saved_groups))
        if missing or unexpected or mismatched:
            raise StateDictError("optimizer state", missing, unexpected, mismatched)

    def _fits(self, entry: Entry, key: str, value: Tensor) -> bool:
        # Factors and histories are shaped as the algorithm likes, on backends that keep parameters whole.
        if self.optimizer_class is not torch.optim.LBFGS:
            names = {base.__name__ for base in self.optimizer_class.__mro__}
            if self.request.whole or names & WHOLE_TENSOR_OPTIMIZERS or names & GLOBAL_OPTIMIZERS:
                return True
        if value.shape == entry.full_shape:
            return True
        current = state_of(self.inner, entry).get(key)
        return isinstance(current, Tensor) and current.shape == value.shape

    def __repr__(self) -> str:
        count = len(self.entries)
        return f"Sharded{self.optimizer_class.__name__}(backend={self.model.backend.name!r}, {count} parameters)"

    def __getstate__(self) -> dict[str, Any]:
        raise OptimizerError("a ShardedOptimizer belongs to its process group: keep its state_dict() instead")


def _to_user(entry: Entry, value: Any) -> Any:
    """Return the user's whole value. Collective where other mesh dimensions divide the parameter."""
    if is_plain_tensor(value) and value.dim() > 0 and value.shape == entry.stored_shape:
        return entry.put_together(entry.kind.to_user(value))
    return value


def _to_stored(entry: Entry, value: Any) -> Any:
    if not is_plain_tensor(value) or value.shape != entry.full_shape:
        return value
    if entry.kind.is_complex and not value.is_complex():
        # A real number for each complex one, such as a running mean of |g|^2.
        return value
    stored = entry.kind.to_stored(entry.take_part(value))
    if not value.is_complex() or entry.kind.order or entry.divided_over:
        return laid(stored, ())
    # Bases of a square weight keep the order in memory that they were saved with: products are rounded by it.
    order = order_in_memory(value)
    return laid(stored, (*order, len(order)) if order else ())


def _facts(state_dict: Any, left_out: Collection[str]) -> dict[str, str]:
    """Return texts that must be the same on every rank where an optimizer's state dict is loaded."""
    parts = {"the state dict": state_dict}
    if isinstance(state_dict, Mapping):
        parts = dict(state_dict)
    for index, group in enumerate(parts.pop("param_groups", ())):
        for key, value in group.items():
            parts[f"param_groups[{index}][{key!r}]"] = value
    for name, state in parts.pop("state", {}).items():
        if name in left_out:
            continue
        for key, value in state.items():
            parts[f"{key!r} of {name!r}"] = value
    return {str(name): rank_independent_text(value) for name, value in parts.items()}


def _members(groups: Iterable[Mapping[str, Any]]) -> set[str]:
    """Return a text for each parameter in groups of names: its name, and the number of its group."""
    members = set()
    for index, group in enumerate(groups):
        members |= {f"{name} in group {index}" for name in group["params"]}
    return members


def groups_by_name(optimizer: ShardedOptimizer) -> Groups:
    """Return the optimizer's groups with names in place of parameters."""
    find_entry = optimizer.model._fsshard.find_entry
    groups = []
    for group in optimizer.param_groups:
        named = {key: copied(group[key]) for key in sorted(group) if key != "params"}
        named["params"] = [find_entry(parameter).name for parameter in group["params"]]
        groups.append(named)
    return groups


# ------------------------------------------------------------------------------------------------ building


def build_optimizer(
    model: ShardedModule,
    optimizer_class: type[Optimizer],
    param_groups: Iterable[Any] | None = None,
    *,
    see_complex: bool = True,
    separable: bool | None = None,
    whole: bool = False,
    see: See | None = None,
    **defaults: Any,
) -> ShardedOptimizer:
    """Build an optimizer over a wrapped model. Collective over the ranks that share the work.

    Args:
        model: what :func:`fsshard.wrap` returned.
        optimizer_class: any ``torch.optim.Optimizer`` class.
        param_groups: as for a torch optimizer: parameters of the model or dicts with ``"params"``; names stand for
            parameters, and so do ``(name, parameter)`` pairs. None: all parameters in one group.
        see_complex: show complex weights to the optimizer as complex numbers. False shows real pairs, which fused
            kernels need; for optimizers that do not treat real and imaginary parts separately, that is another
            algorithm.
        separable: whether the optimizer computes the same on shards as on whole parameters. None: a class that is not
            torch's is tried on small tensors, and refused if the results differ; one that cannot be tried warns. True:
            you know that it does. False: it needs whole parameters.
        whole: let one rank step each parameter whole, for algorithms that look at matrices (Muon, SOAP, Shampoo) under
            ``fsdp`` and ``fsdp2``; elsewhere parameters are whole in any case. An owner keeps a copy of what it owns;
            docs/optimizers.md lists what a step sends.
        see: with ``whole=True``, show weights of three or more dims as matrices, complex ones as complex. "matrix":
            the first dim by all others. "modes": a matrix of the first two dims for each place along the others, as
            a spectral weight (in, out, \\*modes) has them for each Fourier mode; a class that takes a stack of
            matrices gets (modes, in, out). None: show weights as they are. A group may have a ``"see"`` of its own.
        **defaults: what the class takes (``lr`` and so on); parameters, or their names, in a list where the class takes
            some by keyword (neuraloperator's ``galore_params``). Groups of None are then all the others.

    Returns:
        A :class:`ShardedOptimizer`.

    Raises:
        OptimizerError: the parameters are not this model's, or a setting cannot work with complex weights; or under
            ``see`` the algorithm is not one for complex matrices: a step for U G is not U times that for G.
        UnsupportedByBackend: the algorithm needs whole parameters, or all of them, and this backend divides them.
        RankMismatch: the ranks ask for different classes, groups or settings, or one of them raised.
    """
    from fsshard.sharded.module import ShardedModule

    if not isinstance(model, ShardedModule):
        remedy = "wrap it first" if isinstance(model, nn.Module) else "pass the model; some of its parameters go third"
        raise OptimizerError(f"model: expected what fsshard.wrap returned, got {type(model).__name__}; {remedy}")
    backend = model.backend
    requests = []

    def prepare() -> str:
        if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
            raise OptimizerError(f"optimizer_class: expected a class of torch.optim, got {_told(optimizer_class)}")
        _check_settings(optimizer_class, param_groups, defaults)
        named, settings = parameters_by_keyword(defaults, backend.entries, model._fsshard.find_entry)
        if param_groups is None:
            by_keyword = set(itertools.chain(*named.values()))
            groups = [{"params": [name for name in backend.entries if name not in by_keyword]}]
        else:
            groups = _resolved(model, param_groups)
        if not groups:
            raise OptimizerError("param_groups: expected parameters, got none; pass None for all of the model's")
        if named:
            groups = groups_with_keywords(optimizer_class, groups, named, settings, backend.entries)
        parameters = {entry.name: (entry.shape, entry.kind.is_complex) for entry in backend.all}
        groups, shown = take_see(groups, see)
        request = OptimizerRequest(optimizer_class, groups, settings, parameters, see_complex, separable, whole, shown)
        requests.append(request)
        request.check_settings()
        return digest_of(request.asked())

    everyone = backend.settings.everyone
    with taking_part(everyone, "build_optimizer"):
        # What one rank raises in prepare() is raised on all of them.
        digests = exchange(everyone, prepare)
    (request,) = requests
    check_asked_alike(everyone, request, digests)
    agree(everyone, lambda: request.check_separable(type(backend), backend.settings))
    return new_optimizer(model, request)


# Schedulers from before wrap have wrapped the old step, and would warn of an order of calls that is right.
mark_tracked(ShardedOptimizer.step)


def new_optimizer(model: ShardedModule, request: OptimizerRequest) -> ShardedOptimizer:
    """Build an optimizer over the engine's own parameters, after all checks, alike on every rank."""
    viewing = viewing_class(request, model.backend)
    if model._fsshard.whole is None:
        # A constructor that keeps views of parameters must not keep those of gathered ones.
        model.backend.reshard()

    def made() -> Optimizer:
        groups = with_parameters(model, request.groups)
        return model.backend.new_optimizer(viewing, groups, dict(request.defaults))

    # Where each rank shows the constructor other parameters, it may raise on one alone.
    inner = agree(model.backend.settings.group, made) if request.whole else made()
    # State made by a constructor (Adagrad's) is shaped like its parameter; at rest state is local.
    for state in states_at_rest(inner).values():
        for key, value in state.items():
            if hasattr(value, LOCAL_TENSOR):
                state[key] = value.to_local()
    optimizer = ShardedOptimizer(model, inner, request)
    model._fsshard.optimizers.add(optimizer)
    return optimizer


def _check_settings(optimizer_class: type[Optimizer], param_groups: object, defaults: Mapping[str, Any]) -> None:
    """Raise for a number in the place of parameters, and for a text where the class takes a number."""
    name = optimizer_class.__name__
    if isinstance(param_groups, (int, float)):
        raise OptimizerError(
            f"param_groups={param_groups!r}: expected parameters, their names or groups, got a number; settings go by "
            f"name: build_optimizer(model, {name}, lr={param_groups!r})"
        )
    parameters = inspect.signature(optimizer_class.__init__).parameters
    for key, value in defaults.items():
        if not isinstance(value, str) or key not in parameters:
            continue
        if isinstance(parameters[key].default, (int, float)):
            raise OptimizerError(f"{key}={value!r}: expected a number, got a str; write {key}=float({value!r})")


def _told(given: object) -> str:
    """Return what was given instead of a class, and what to pass; an optimizer's own text has a dozen lines."""
    if not isinstance(given, Optimizer):
        return f"{given!r}; pass a class such as torch.optim.AdamW"
    name = type(given).__name__
    return f"an instance of {name}; pass the class and its settings: build_optimizer(model, {name}, lr=...)"


def _resolved(model: ShardedModule, given: Iterable[Any]) -> Groups:
    """Return groups of names for what torch's optimizers take: parameters, names, pairs, or dicts of them."""
    groups = [given] if isinstance(given, (str, Tensor)) else list(given)
    if groups and not isinstance(groups[0], dict):
        groups = [{"params": groups}]
    resolved = []
    for index, group in enumerate(groups):
        if not isinstance(group, dict) or "params" not in group:
            raise OptimizerError(f"param_groups[{index}]: expected a dict with 'params', got {group!r}")
        params = group["params"]
        members = [params] if isinstance(params, (str, Tensor)) else list(params)
        members = model.backend.settings.ignored.trainable(members)
        names = [model._fsshard.find_entry(member).name for member in members]
        named = {**group, "params": names}
        if members and isinstance(members[0], tuple):
            # Torch has done so with (name, parameter) pairs since 2.6.
            named["param_names"] = [name for name, _ in members]
        resolved.append(named)
    return resolved


def with_parameters(model: ShardedModule, groups: Sequence[Mapping[str, Any]]) -> Groups:
    """Return groups of names as groups of the engine's parameters."""
    entries = model.backend.entries
    with_them = []
    for group in groups:
        if "see" in group:
            raise OptimizerError(
                "'see' in a group added later: how weights are shown is fixed; build another optimizer"
            )
        parameters = [entries[name].parameter for name in group["params"]]
        with_them.append({**group, "params": parameters})
    return with_them


# ------------------------------------------------------------------------------------------------ handing one over


def check_unstepped(optimizer: object) -> None:
    """Raise unless ``optimizer`` is a live torch optimizer that has not taken a step."""
    if not isinstance(optimizer, Optimizer) or isinstance(optimizer, ShardedOptimizer):
        meant = f"; did you mean backend={optimizer!r}?" if isinstance(optimizer, str) else ""
        raise OptimizerError(f"optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}{meant}")
    for state in optimizer.state.values():
        # Adagrad has state from the start, with step 0.
        step = None
        if isinstance(state, Mapping):
            step = state.get("step")
        if step is None or float(step) != 0:
            raise OptimizerError(
                "the optimizer has taken steps already, and its state belongs to unsharded parameters; save both, "
                "torch.save({'model': model.state_dict(), 'optimizer': optimizer.state_dict()}, file), build the "
                "optimizer of the wrapped model with fsshard.build_optimizer, and fsshard.load(file, model, optimizer)"
            )


def name_groups(optimizer: Optimizer, names: Mapping[int, str], ignored: Ignored | None = None) -> Groups:
    """Return the groups of a torch optimizer with names (by id of parameter) in place of parameters."""
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        members = group["params"]
        if ignored is not None:
            members = ignored.trainable(members)
        unknown = [parameter for parameter in members if id(parameter) not in names]
        if unknown:
            raise OptimizerError(
                f"param_groups[{index}]: expected parameters of the model, got {len(unknown)} others (first: shape "
                f"{tuple(unknown[0].shape)}); hand over the optimizer of this model"
            )
        own_names = [names[id(parameter)] for parameter in members]
        groups.append({**group, "params": own_names})
    return groups


def constructor_arguments(optimizer: Optimizer) -> dict[str, Any]:
    """Return those of ``optimizer.defaults`` that its constructor takes.

    ``defaults`` can hold more (torch 2.13: AdamW subclasses Adam and keeps ``decoupled_weight_decay``).
    """
    parameters = inspect.signature(type(optimizer).__init__).parameters
    kinds = [parameter.kind for parameter in parameters.values()]
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return dict(optimizer.defaults)
    arguments = {key: value for key, value in optimizer.defaults.items() if key in parameters}
    # Settings that a class keeps as attributes, and not in its groups: galore_rank of neuraloperator's AdamW.
    for key in parameters:
        value = vars(optimizer).get(key)
        if key not in arguments and isinstance(value, (bool, int, float, str, tuple)):
            arguments[key] = value
    return arguments


def retire(optimizer: Optimizer, successor: Optimizer) -> None:
    """Make the optimizer that was handed over raise instead of stepping stale parameters."""

    def step(*_: Any, **__: Any) -> None:
        raise OptimizerError("this optimizer was handed to fsshard.wrap; use the one that wrap returned")

    # A scheduler that was not handed over then sets the rates that are used; and no whole weights are kept.
    # Somebody may keep the list, and somebody else the optimizer.
    optimizer.param_groups[:] = successor.param_groups
    optimizer.param_groups = successor.param_groups
    optimizer.state.clear()
    # Torch's schedulers would warn of an order of calls that is right.
    mark_tracked(step)
    setattr(optimizer, STEPPED, True)
    optimizer.step = optimizer.zero_grad = step  # type: ignore[assignment, method-assign]


_seen: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
"""Foreign optimizer -> how many groups were looked through in a step of it since the last wrap."""


def refuse_foreign_optimizers(model: Any) -> None:
    """Let a torch optimizer over replaced or engine-owned parameters raise at its step while the bare module lives."""
    _seen.clear()
    # Not while ``model`` lives: ``fsshard.wrap(module, backend="ddp")`` as a statement drops it at once.
    OPTIMIZER_STEP.keep_for(model.module, _refuse_foreign)


def _refuse_foreign(optimizer: Optimizer) -> None:
    foreign = not isinstance(optimizer, ShardedOptimizer)
    if foreign or current_graph_task_id() >= 0:
        check_step(optimizer)
    if not foreign or is_stepping() or _seen.get(optimizer) == len(optimizer.param_groups):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            refusal = record_of(parameter).refusal or record_of(stored_of(parameter)).refusal
            if refusal:
                raise OptimizerError(refusal)
    _seen[optimizer] = len(optimizer.param_groups)
