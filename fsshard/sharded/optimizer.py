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
from fsshard.torch_private.optimizers import mark_stepped, mark_tracked
from fsshard.torch_private.tensors import LOCAL_TENSOR, sparse_values

if TYPE_CHECKING:
    from fsshard.sharded.module import ShardedModule


class ShardedOptimizer(Optimizer):
    """A torch ``Optimizer`` over a :class:`~fsshard.sharded.module.ShardedModule`; made by :func:`build_optimizer`.

    ``param_groups``, ``zero_grad``, ``defaults``, step hooks and LR schedulers work as on the optimizer class that it
    was built of. ``state_dict`` is by parameter name, whole and complex on every backend, and loads under any.
    """

    def __init__(self, model: ShardedModule, inner: Optimizer, request: OptimizerRequest) -> None:
        self.inner, self.request, self.optimizer_class = inner, request, request.optimizer_class
        self._number = model._fsshard.step_counts.new_optimizer()
        self.model = model
        self._under_scaler = False
        defaults = dict(local_optimizer(inner).defaults)
        Optimizer.__setstate__(self, {"defaults": defaults})  # hooks and profiling, without building groups again
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
        members = [id(parameter) for group in resolved for parameter in group["params"]]
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
        (group,) = with_parameters(self.model, _resolved(self.model, [param_group]))
        self.inner.add_param_group(group)
        self._list_entries()

    def _check_groups_may_change(self, how: str) -> None:
        if isinstance(self.inner, PartitionedOptimizer) or whole_owners(self.inner) is not None:
            raise UnsupportedByBackend(how, self.model.backend.name, "build a second optimizer over the new parameters")

    def _list_entries(self) -> None:
        # Kept, because a closure looks at it while the groups hold views.
        pairs = [(self.model._fsshard.find_entry(p), group) for group in self.param_groups for p in group["params"]]
        self.entries = [entry for entry, _ in pairs]
        self._group_of = {entry.name: group for entry, group in pairs}

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
        mark_stepped(self)
        if model.plan.precision.param == torch.float16 and not model._fsshard.scaled:
            model._fsshard.scaled = True
            warnings.warn(
                "a step in float16 without loss scaling: small gradients become zero; use fsshard.GradScaler(model), "
                "or mixed_precision='bf16'",
                stacklevel=2,
            )
        with taking_part(model.backend.settings.group, "optimizer.step()"):
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
        local: Any = local_optimizer(self.inner)  # the user's class, over this rank's parts
        local.gradients_are_local = self.model._fsshard.step.has_local(entry.name for entry in self.entries)
        if not (self.request.begins_with_closure and local.gradients_are_local):
            self.finish_gradients()  # they are looked at before the closure runs
        try:
            return self.inner.step(finished_by(closure, self.finish_gradients), **kwargs)
        finally:
            local.gradients_are_local = False

    def _step_owned_with(self, closure: Callable[[], Any], kwargs: dict[str, Any]) -> Any:
        """Step whole parameters after the closure: all ranks run it, owners or not, and once, as torch's own do."""
        if not self.request.of_torch:
            told = f"{self.optimizer_class.__name__}.step(closure) with whole=True"
            instead = "call forward and backward before step(), or use backend='fairscale' or 'ddp'"
            raise UnsupportedByBackend(told, self.model.backend.name, instead)
        with torch.enable_grad():
            loss = closure()
        self.finish_gradients()
        self.inner.step(**kwargs)
        return loss

    def _check_unused(self) -> None:
        backend = self.model.backend
        if backend.settings.find_unused_parameters:
            return
        unused = [name for name in backend.unused(self._group_of) if name not in backend.step.dropped]
        if unused and len(unused) < sum(entry.parameter.requires_grad for entry in self.entries):
            check_same_parameters(backend)  # forwards of torch.compile(model) do not look
            raise OptimizerError(
                f"expected gradients of all parameters, got none of {', '.join(unused[:5])}; if the forward leaves "
                "some out on purpose, pass find_unused_parameters=True to fsshard.wrap"
            )

    def finish_gradients(self) -> None:
        """Make this optimizer's gradients final; they may be read then. Collective."""
        self.model.backend.reshard()
        self.model._fsshard.finish_gradients(self.entries)

    def local_gradients(self) -> list[Tensor]:
        """Return this rank's parts of this optimizer's gradients, as stored (real)."""
        backend = self.model.backend
        gradients = [g for e in self.entries if owned(backend, e) and (g := e.grad()) is not None]
        return [sparse_values(gradient) if gradient.is_sparse else gradient for gradient in gradients]

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
        backend, settings = self.model.backend, self.model.backend.settings
        alone = backend.facts.divides == "nothing" or settings.world_size == 1  # along data all see the same gradients
        if self._under_scaler or (alone and settings.all_ranks == settings.world_size):
            return False
        scaler = type(sys._getframe(1).f_locals.get("self"))
        if not any(cls.__name__ == "ShardedGradScaler" for cls in scaler.__mro__):
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
        settings = self.model.backend.settings
        if self.model.backend.facts.divides != "nothing":  # rank 0 alone would wait for the others
            meet(settings.everyone, "optimizer.state_dict()")
        keep = settings.is_first or not rank0_only
        state = {name: whole for name, whole in self.iterate_state() if keep and whole}
        if not keep:
            return {}
        names = [entry.name for entry in self.entries]
        groups = [by_name(group, names) for group in groups_by_name(self)]
        return {"state": by_name(state, names), "param_groups": groups}

    def iterate_state(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (parameter's name, its whole state), one at a time. Collective, so run it to its end on every rank."""
        with taking_part(self.model.backend.settings.group, "optimizer.state_dict()"):
            for entry, whole in gather_states(self.model.backend, self.inner, self.entries):
                yield entry.name, {key: _to_user(entry, value) for key, value in whole.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` gave, on every rank the same. Nothing changes if it does not fit. Collective.

        Raises:
            StateDictError: groups with other parameters, or state of another shape.
            RankMismatch: names what differs between the ranks.
        """
        settings = self.model.backend.settings
        facts: dict[str, str] = {}
        if settings.all_ranks > 1:
            facts = _facts(state_dict, self._left_out_by_ranks(state_dict))
        check_alike(settings.everyone, "optimizer.load_state_dict()", facts, "load the same on every rank")
        self.check_state_dict(state_dict)
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            # Copies, as torch makes: a schedule writes into a learning rate that is a tensor.
            group.update({key: copy.deepcopy(value) for key, value in saved.items() if key != "params"})
        self.model.backend.reshard()
        state = state_dict["state"]
        # Keys of one number for a whole parameter: of a 0-dim parameter the number's shape does not tell.
        shaped = [state[entry.name] for entry in self.entries if entry.shape.numel() > 1 and entry.name in state]
        counters = {"step"} | {k for saved in shaped for k, v in saved.items() if isinstance(v, Tensor) and not v.dim()}
        for entry in self.entries:
            mine, saved = state_of(self.inner, entry), state.get(entry.name, {})
            whole = {
                key: self.placed(entry, value, mine.get(key)) if key in counters else _to_stored(entry, value)
                for key, value in saved.items()
            }
            scatter_state(self.model.backend, self.inner, entry, whole)

    def keeps_state_of(self, entry: Entry) -> bool:
        """Return whether this rank keeps state of the parameter, or of a part of it."""
        return owns_state(self.model.backend, self.inner, entry) and state_entry(self.inner, entry).local().numel() > 0

    def _left_out_by_ranks(self, state_dict: Any) -> set[str]:
        """Return the parameters whose state some rank was not given, since it keeps none of it. Collective."""
        # torch's set_optimizer_state_dict asks this rank's state for the keys of a flattened dict, and finds none.
        state = state_dict.get("state", {}) if isinstance(state_dict, Mapping) else {}
        left_out = []
        for entry in self.entries:
            is_empty = entry.name in state and not state[entry.name]
            if is_empty and not self.keeps_state_of(entry):
                left_out.append(entry.name)
        told = meet(self.model.backend.settings.everyone, "optimizer.load_state_dict()", "\n".join(left_out))
        return set("\n".join(told).split("\n"))

    def placed(self, entry: Entry, value: Any, held: Any) -> Any:
        """Put state where the optimizer keeps it: where ``held`` is now, else with the parameter.

        Counters lie on the host, unless the step is fused or captured, which reads them where the parameter is.
        """
        if not isinstance(value, Tensor):
            return value
        if isinstance(held, Tensor):
            return value.to(held.device)
        group = self._group_of[entry.name]
        beside = value.dim() or group.get("fused") or group.get("capturable")
        return value.to(state_device(self.inner, entry) if beside else "cpu")

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raise unless :meth:`load_state_dict` would take it. Local.

        Raises:
            StateDictError: names what is missing, unexpected or of another shape.
        """
        if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
            raise StateDictError("optimizer state", missing=["state", "param_groups"])
        mine, saved, state = groups_by_name(self), state_dict["param_groups"], state_dict["state"]
        want, got = ({(i, n) for i, group in enumerate(groups) for n in group["params"]} for groups in (mine, saved))
        wrong: dict[str, tuple[object, object]] = {
            f"{entry.name}: {key}": (tuple(entry.full_shape), tuple(value.shape))
            for entry in self.entries
            for key, value in state.get(entry.name, {}).items()
            if isinstance(value, Tensor) and value.dim() and not self._fits(entry, key, value)
        }
        if len(mine) != len(saved):
            wrong["number of param_groups"] = (len(mine), len(saved))
        missing = [f"{name} in group {i}" for i, name in want - got]
        unexpected = [f"{name} in group {i}" for i, name in got - want]
        unexpected += [f"state of {name}" for name in state.keys() - {n for _, n in want}]
        if missing or unexpected or wrong:
            raise StateDictError("optimizer state", missing, unexpected, wrong)

    def _fits(self, entry: Entry, key: str, value: Tensor) -> bool:
        # Factors and histories are shaped as the algorithm likes, on backends that keep parameters whole.
        known = {base.__name__ for base in self.optimizer_class.__mro__} & (WHOLE_TENSOR_OPTIMIZERS | GLOBAL_OPTIMIZERS)
        if (known or self.request.whole) and self.optimizer_class is not torch.optim.LBFGS:
            return True
        mine = state_of(self.inner, entry).get(key)
        return value.shape == entry.full_shape or (isinstance(mine, Tensor) and mine.shape == value.shape)

    def __repr__(self) -> str:
        name, backend = self.optimizer_class.__name__, self.model.backend.name
        return f"Sharded{name}(backend={backend!r}, {len(self.entries)} parameters)"

    def __getstate__(self) -> dict[str, Any]:
        raise OptimizerError("a ShardedOptimizer belongs to its process group: keep its state_dict() instead")


def _to_user(entry: Entry, value: Any) -> Any:
    """Return the user's whole value. Collective where other mesh dimensions divide the parameter."""
    same = is_plain_tensor(value) and value.dim() > 0 and value.shape == entry.stored_shape
    return entry.put_together(entry.kind.to_user(value)) if same else value


def _to_stored(entry: Entry, value: Any) -> Any:
    if not is_plain_tensor(value) or value.shape != entry.full_shape:
        return value
    if entry.kind.is_complex and not value.is_complex():
        return value  # a real number per complex one (a running mean of |g|^2)
    stored = entry.kind.to_stored(entry.take_part(value))
    order = () if entry.kind.order or entry.divided_over or not value.is_complex() else order_in_memory(value)
    return laid(stored, (*order, len(order)) if order else ())  # bases of a square one, by which products are rounded


def _facts(state_dict: Any, left_out: Collection[str]) -> dict[str, str]:
    """Return texts that must be the same on every rank where an optimizer's state dict is loaded."""
    parts = dict(state_dict) if isinstance(state_dict, Mapping) else {"the state dict": state_dict}
    for index, group in enumerate(parts.pop("param_groups", ())):
        parts |= {f"param_groups[{index}][{key!r}]": value for key, value in group.items()}
    for name, state in parts.pop("state", {}).items():
        if name not in left_out:
            parts |= {f"{key!r} of {name!r}": value for key, value in state.items()}
    return {str(name): rank_independent_text(value) for name, value in parts.items()}


def groups_by_name(optimizer: ShardedOptimizer) -> list[dict[str, Any]]:
    """Return the optimizer's groups with names in place of parameters."""
    names = ([optimizer.model._fsshard.find_entry(p).name for p in group["params"]] for group in optimizer.param_groups)
    groups = zip(optimizer.param_groups, names, strict=True)
    return [{**{key: copied(g[key]) for key in sorted(g) if key != "params"}, "params": n} for g, n in groups]


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
    requests: list[OptimizerRequest] = []

    def prepare() -> str:
        if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
            raise OptimizerError(f"optimizer_class: expected a class of torch.optim, got {_told(optimizer_class)}")
        _check_settings(optimizer_class, param_groups, defaults)
        named, settings = parameters_by_keyword(defaults, backend.entries, model._fsshard.find_entry)
        if param_groups is None:
            taken = set(itertools.chain(*named.values()))
            groups = [{"params": [name for name in backend.entries if name not in taken]}]
        else:
            groups = _resolved(model, param_groups)
        if not groups:
            raise OptimizerError("param_groups: expected parameters, got none; pass None for all of the model's")
        if named:
            groups = groups_with_keywords(optimizer_class, groups, named, settings, backend.entries)
        parameters = {entry.name: (entry.shape, entry.kind.is_complex) for entry in backend.all}
        groups, shown = take_see(groups, see)
        asked = OptimizerRequest(optimizer_class, groups, settings, parameters, see_complex, separable, whole, shown)
        requests.append(asked)
        requests[0].check_settings()
        return digest_of(requests[0].asked())

    group = backend.settings.everyone
    with taking_part(group, "build_optimizer"):
        digests = exchange(group, prepare)
    (request,) = requests
    check_asked_alike(group, request, digests)
    agree(group, lambda: request.check_separable(type(backend), backend.settings))
    return new_optimizer(model, request)


# Else schedulers from before wrap warn of an order of calls that is none: their constructor has wrapped the old step.
mark_tracked(ShardedOptimizer.step)


def new_optimizer(model: ShardedModule, request: OptimizerRequest) -> ShardedOptimizer:
    """Build an optimizer over the engine's own parameters, after all checks, alike on every rank."""
    viewing = viewing_class(request, model.backend)
    if model._fsshard.whole is None:
        model.backend.reshard()  # a constructor that keeps views of parameters must not keep those of gathered ones

    def made() -> Optimizer:
        return model.backend.new_optimizer(viewing, with_parameters(model, request.groups), dict(request.defaults))

    # Where each rank shows the constructor other parameters, it may raise on one alone.
    inner = agree(model.backend.settings.group, made) if request.whole else made()
    # State made by a constructor (Adagrad's) is shaped like its parameter; at rest state is local.
    for state in states_at_rest(inner).values():
        state.update({key: value.to_local() for key, value in state.items() if hasattr(value, LOCAL_TENSOR)})
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
    known = inspect.signature(optimizer_class.__init__).parameters
    for key, value in defaults.items():
        if isinstance(value, str) and key in known and isinstance(known[key].default, (int, float)):
            raise OptimizerError(f"{key}={value!r}: expected a number, got a str; write {key}=float({value!r})")


def _told(given: object) -> str:
    """Return what was given instead of a class, and what to pass; an optimizer's own text has a dozen lines."""
    if not isinstance(given, Optimizer):
        return f"{given!r}; pass a class such as torch.optim.AdamW"
    name = type(given).__name__
    return f"an instance of {name}; pass the class and its settings: build_optimizer(model, {name}, lr=...)"


def _resolved(model: ShardedModule, given: Iterable[Any]) -> list[dict[str, Any]]:
    """Return groups of names for what torch's optimizers take: parameters, names, pairs, or dicts of them."""
    groups = [given] if isinstance(given, (str, Tensor)) else list(given)
    if groups and not isinstance(groups[0], dict):
        groups = [{"params": groups}]
    resolved = []
    for index, group in enumerate(groups):
        if not isinstance(group, dict) or "params" not in group:
            raise OptimizerError(f"param_groups[{index}]: expected a dict with 'params', got {group!r}")
        members = [group["params"]] if isinstance(group["params"], (str, Tensor)) else list(group["params"])
        members = model.backend.settings.ignored.trainable(members)
        resolved.append({**group, "params": [model._fsshard.find_entry(member).name for member in members]})
        if members and isinstance(members[0], tuple):  # as torch does since 2.6
            resolved[-1]["param_names"] = [member[0] for member in members]
    return resolved


def with_parameters(model: ShardedModule, groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return groups of names as groups of the engine's parameters."""
    if any("see" in group for group in groups):
        raise OptimizerError("'see' in a group added later: how weights are shown is fixed; build another optimizer")
    entries = model.backend.entries
    return [{**group, "params": [entries[name].parameter for name in group["params"]]} for group in groups]


# ------------------------------------------------------------------------------------------------ handing one over


def check_unstepped(optimizer: object) -> None:
    """Raise unless ``optimizer`` is a live torch optimizer that has not taken a step."""
    if not isinstance(optimizer, Optimizer) or isinstance(optimizer, ShardedOptimizer):
        meant = f"; did you mean backend={optimizer!r}?" if isinstance(optimizer, str) else ""
        raise OptimizerError(f"optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}{meant}")
    for state in optimizer.state.values():  # Adagrad has state from the start, with step 0
        step = state.get("step") if isinstance(state, Mapping) else None
        if step is None or float(step) != 0:
            raise OptimizerError(
                "the optimizer has taken steps already, and its state belongs to unsharded parameters; save both, "
                "torch.save({'model': model.state_dict(), 'optimizer': optimizer.state_dict()}, file), build the "
                "optimizer of the wrapped model with fsshard.build_optimizer, and fsshard.load(file, model, optimizer)"
            )


def name_groups(optimizer: Optimizer, names: Mapping[int, str], ignored: Ignored | None = None) -> list[dict[str, Any]]:
    """Return the groups of a torch optimizer with names (by id of parameter) in place of parameters."""
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        members = group["params"] if ignored is None else ignored.trainable(group["params"])
        unknown = [p for p in members if id(p) not in names]
        if unknown:
            raise OptimizerError(
                f"param_groups[{index}]: expected parameters of the model, got {len(unknown)} others (first: shape "
                f"{tuple(unknown[0].shape)}); hand over the optimizer of this model"
            )
        groups.append({**group, "params": [names[id(p)] for p in members]})
    return groups


def constructor_arguments(optimizer: Optimizer) -> dict[str, Any]:
    """Return those of ``optimizer.defaults`` that its constructor takes.

    ``defaults`` can hold more (torch 2.13: AdamW subclasses Adam and keeps ``decoupled_weight_decay``).
    """
    parameters = inspect.signature(type(optimizer).__init__).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
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
    optimizer.param_groups[:] = successor.param_groups  # for who keeps the list
    optimizer.param_groups = successor.param_groups
    optimizer.state.clear()
    mark_tracked(step)  # torch's schedulers warn of an order of calls that is none
    mark_stepped(optimizer)
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
    check_step(optimizer, foreign=foreign)
    if not foreign or is_stepping() or _seen.get(optimizer) == len(optimizer.param_groups):
        return
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        refusal = record_of(parameter).refusal or record_of(stored_of(parameter)).refusal
        if refusal:
            raise OptimizerError(refusal)
    _seen[optimizer] = len(optimizer.param_groups)
