"""``OSS``: any torch optimizer with its state sharded, each parameter's state on the rank that owns the parameter."""

from __future__ import annotations

import copy
import inspect
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from fsshard.comm import watchdog
from fsshard.comm.agreement import agree
from fsshard.errors import NotConsolidated, NotCopyable, OptimizerStateMismatch
from fsshard.nested import map_leaves
from fsshard.oss import partition
from fsshard.oss.collectives import come_together
from fsshard.oss.norm_and_scaling import agreed, combined, owned_norms, scale
from fsshard.oss.partitioned import PartitionedOptimizer, finished_by, step_without_global_hooks
from fsshard.torch_private.c10d import device_types

StateDict = dict[str, Any]

# State that the optimizers of torch 2.13 keep in the shape of the parameter. Others (Adafactor's) have shapes of their
# own, about which nothing can be said here.
SHAPED = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg"}
    | {"acc_delta", "sum", "prev", "ax"}
)


Groups = Iterable[dict[str, Any]]


class OSS(PartitionedOptimizer, Optimizer):
    """A torch optimizer whose state is divided among ranks, parameter by parameter.

    Each rank updates the parameters that it owns, and sends them to the others. It works with gradients that are the
    same everywhere (DistributedDataParallel), with those that only owners have (ShardedDataParallel), and without a
    wrapper. Weights are those of the plain optimizer to the last bit. All methods except :meth:`zero_grad`,
    :meth:`state_dict` and :meth:`load_state_dict` are collective.

    Args:
        params: parameters, ``(name, parameter)`` pairs, or groups, as for a torch optimizer.
        optim: the class of the optimizer.
        group: the process group; None is all ranks.
        **default: what ``optim`` takes.

    Attributes:
        optim: this rank's optimizer, an ``optim`` with all groups, of which it has its own parameters.
        param_groups: all parameters on all ranks; the settings in it are those that :meth:`step` uses.
        state: empty until :meth:`load_state_dict`; from then on ``{}`` for what other ranks own.
        group: the process group, with ``world_size``, ``rank``, ``global_rank`` and ``backend`` of it.
        buckets: by device and owner, the flat buffers that parameters are views of.

    Raises:
        UnsupportedByBackend: the algorithm needs all parameters at once.
    """

    optim: Optimizer
    state: Any
    in_super_constructor: bool

    def __init__(
        self,
        params: Any,
        optim: Callable[..., Optimizer] = SGD,
        group: dist.ProcessGroup | None = None,
        **default: Any,
    ) -> None:
        everyone: Any = dist.group.WORLD
        self.group = everyone if group is None else group
        self.rank = dist.get_rank(self.group)
        self.world_size = dist.get_world_size(self.group)
        self.global_rank = dist.get_global_rank(self.group, self.rank)
        self.backend = dist.get_backend(self.group)
        # So that ranks that wait for this one can find out where it is.
        watchdog.join()
        partition.check_separable(optim, self.world_size)
        self.in_super_constructor = True
        super().__init__(params, default)
        self.in_super_constructor = False
        self.state = _State(dict)
        self._param_to_rank: dict[Tensor, int] = {}
        self._loads = [0] * self.world_size
        self._partition_version = 0
        self._reducers: list[weakref.ref[Any]] = []
        # Frozen, without a gradient at their owners.
        self._at_rest: set[Tensor] = set()
        self._shards: list[dict[Any, Any]] | None = None
        self._shards_are_old = False
        self.buckets: partition.Buckets = {}
        self._pointers: list[tuple[Tensor, bool, int]] = []
        partition.assign_owners(self._parameters(), self._param_to_rank, self._loads)
        # Before the inner optimizer, which may keep views of parameters from its constructor (DistributedShampoo's
        # blocks): FairScale 0.4.13 moves parameters after that, and such an optimizer trains nothing, silently.
        self.refresh_trainable()
        own_groups = self.partition_parameters()[self.rank]
        self.optim = partition.build_inner(optim, own_groups, default)
        # Schedulers ask for "betas" and "momentum" there (OneCycleLR, CyclicLR); FairScale 0.4.13 has only what it was
        # given: "optimizer must support momentum or beta1".
        self.defaults = {**self.defaults, **self.optim.defaults}
        self._sync_param_groups(self.optim.param_groups, self.param_groups)

    # ------------------------------------------------------------------------------------------------ partition

    def _parameters(self) -> Iterator[Tensor]:
        return chain.from_iterable(group["params"] for group in self.param_groups)

    def partition_parameters(self) -> list[list[dict[str, Any]]]:
        """Return the groups of each rank: all settings, and the parameters that it owns."""
        groups_of_ranks = []
        for rank in range(self.world_size):
            groups = [partition.group_of_owner(group, self._param_to_rank, rank) for group in self.param_groups]
            groups_of_ranks.append(groups)
        return groups_of_ranks

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; what was there before stays with its owners. Not a collective, but to be called on all ranks."""
        super().add_param_group(param_group)
        if self.in_super_constructor:
            return
        group = self.param_groups[-1]
        owners = dict(self._param_to_rank)
        loads = list(self._loads)
        partition.assign_owners(group["params"], owners, loads)
        try:
            self.optim.add_param_group(partition.group_of_owner(group, owners, self.rank))
        except BaseException:
            self.param_groups.pop()
            raise
        self._param_to_rank = owners
        self._loads = loads
        self._partition_version += 1
        self._shards_are_old = True
        own_group = self.optim.param_groups[-1]
        self._sync_param_groups([own_group], [group])
        self.refresh_trainable()

    def refresh_trainable(self) -> None:
        """Lay the buffers out anew after parameters were frozen, unfrozen or moved; :meth:`step` does so by itself."""
        parameters = list(self._parameters())
        self.buckets = partition.lay_out(parameters, self._param_to_rank, self.buckets)
        self._at_rest.difference_update(parameter for parameter in parameters if parameter.requires_grad)
        self._pointers = self._current_pointers()

    def _refresh_buckets(self) -> None:
        # Not by copying back: memory that a parameter has left belongs to whoever still holds it: a backup by
        # reference, an average whose weights were exchanged with the model's.
        for parameter, trained, pointer in self._pointers:
            if parameter.requires_grad != trained or parameter.data_ptr() != pointer:
                self.refresh_trainable()
                return

    def _current_pointers(self) -> list[tuple[Tensor, bool, int]]:
        return [(parameter, parameter.requires_grad, parameter.data_ptr()) for parameter in self._parameters()]

    @staticmethod
    def _sync_param_groups(source: Groups, destination: Groups) -> None:
        """Copy settings from one list of groups to another: what schedulers change, what a step adds."""
        for group, other in zip(source, destination, strict=False):
            for key, value in group.items():
                if key not in partition.NOT_SYNCED:
                    other[key] = value

    # ------------------------------------------------------------------------------------------------ reducers

    def attach(self, reducer: Any) -> None:
        """Let a reducer, held weakly, know of what happens here.

        It has ``finish_gradients()``, a collective that completes what is under way, and
        ``discard_gradients(parameters)``, for those that are zeroed, or dropped.
        """
        if not any(reducer is each for each in self._attached()):
            self._reducers.append(weakref.ref(reducer))

    def _attached(self) -> list[Any]:
        """Return the reducers that are alive, in the order in which they came, which is the same on all ranks."""
        reducers = [reference() for reference in self._reducers]
        return [reducer for reducer in reducers if reducer is not None]

    def finish_gradients(self) -> None:
        for reducer in self._attached():
            reducer.finish_gradients()

    def _in_order_of_model(self) -> list[Tensor]:
        """Return all parameters, in the order of the attached models where there are any, else of the groups."""
        # A sum of norms depends on it, and clip_grad_norm_(model.parameters(), ...) adds in the model's order.
        own = dict.fromkeys(self._parameters())
        ordered = []
        for reducer in self._attached():
            if isinstance(reducer, nn.Module):
                ordered += [parameter for parameter in reducer.parameters() if parameter in own]
        # Each once, where it comes first.
        return list(dict.fromkeys([*ordered, *own]))

    # ------------------------------------------------------------------------------------------------ a step

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # torch's GradScaler leaves it to such a step() to unscale and to decide. Not to one of a subclass that it
        # cannot be handed to: gradients would stay scaled there.
        return "grad_scaler" in inspect.signature(self.step).parameters

    def step(
        self,
        closure: Any = None,
        *,
        grad_scaler: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Update the own parameters, send them to the other ranks, and return what the optimizer's ``step`` returns.

        Args:
            closure, **kwargs: for the ``step`` of the optimizer.
            grad_scaler: torch's ``GradScaler`` gives itself: all ranks step, or none, and then return None.
        """
        self.finish_gradients()
        if grad_scaler is not None and not agreed(self, grad_scaler):
            return None
        self._sync_param_groups(self.param_groups, self.optim.param_groups)
        if callable(closure):
            closure = finished_by(closure, self.finish_gradients)
        if closure is not None:
            kwargs["closure"] = closure
        loss = step_without_global_hooks(self.optim, kwargs)
        self._broadcast_params()
        self._sync_param_groups(self.optim.param_groups, self.param_groups)
        self._shards_are_old = True
        # Unless the user has replaced it.
        if isinstance(self.state, _State):
            self.state.initialised = True
        return loss

    @torch.no_grad()
    def _broadcast_params(self) -> None:
        """Send the parameters from their owners to all."""
        self._refresh_buckets()
        if self.world_size == 1:
            return
        works = []
        for by_owner in self.buckets.values():
            for bucket in by_owner.values():
                works += [self._send(buffer, bucket.owner) for buffer in bucket.as_bytes]
        for parameter in self._moved_frozen():
            # A view with gaps cannot be sent.
            if parameter.stride() != partition.dense_strides(parameter):
                parameter.data = parameter.detach().clone()
            owner = self._param_to_rank[parameter]
            works.append(self._send(partition.as_bytes(parameter), owner))
        with watchdog.seen_waiting(self.group, "step()"):
            for work in works:
                work.wait()

    def _send(self, buffer: Tensor, owner: int) -> Any:
        return dist.broadcast(buffer, group=self.group, group_src=owner, async_op=True)

    def _moved_frozen(self) -> list[Tensor]:
        """Return the frozen parameters that their owners' optimizers move all the same, by a gradient left over."""
        # One that is not moved is not asked about again until it is trained, so that a frozen trunk costs nothing.
        frozen = []
        for parameter, trains, _ in self._pointers:
            if not trains and parameter.numel() and parameter not in self._at_rest:
                frozen.append(parameter)
        moved = self.with_gradient_at_owner(frozen, self._comm_device)
        self._at_rest.update(frozen)
        self._at_rest.difference_update(moved)
        return moved

    @property
    def _comm_device(self) -> torch.device:
        """Return the device of tensors that the group can send: NCCL takes no memory of the CPU."""
        kinds = [device.type for device in device_types(self.group)]
        if "cpu" in kinds:
            return torch.device("cpu")
        return torch.device(kinds[0], torch.accelerator.current_device_index())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of all parameters, or set them to zero; what is under way is forgotten. Not collective."""
        parameters = list(self._parameters())
        for reducer in self._attached():
            reducer.discard_gradients(parameters)
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def clip_grad_norm(
        self,
        max_norm: float | int,
        norm_type: float | int = 2.0,
        filter_params_fn: Callable[[Any], Any] | None = None,
    ) -> Tensor:
        """Clip the gradients by their norm over all parameters, as ``torch.nn.utils.clip_grad_norm_`` does under DDP.

        Args:
            max_norm: of all gradients together.
            norm_type: of the p-norm; ``inf`` for the largest absolute value.
            filter_params_fn: from the own parameters that have gradients, gives those that count for the norm. All are
                scaled.

        Returns:
            The norm before clipping, the same on all ranks, equal to torch's to the last bit.
        """
        self.finish_gradients()
        norm_type = float(norm_type)
        own = []
        for parameter in self._parameters():
            if parameter.grad is None:
                continue
            if self._param_to_rank[parameter] == self.rank:
                own.append(parameter)
        # The user's function: if it raises on one rank, the others must not wait for the norm.
        if filter_params_fn is not None:
            own = agree(self.group, lambda: list(filter_params_fn(own)))
        counted = set(map(id, own))
        parameters = self._in_order_of_model()
        places = [place for place, parameter in enumerate(parameters) if id(parameter) in counted]
        norms = owned_norms(parameters, places, norm_type, self.group, self._comm_device)
        total = combined(norms, parameters, norm_type)
        scale(parameters, float(max_norm), total)
        return total

    # ------------------------------------------------------------------------------------------------ state

    def consolidate_state_dict(self, recipient_rank: int = 0) -> None:
        """Collect the state of all ranks, in the memory of the CPU, for :meth:`state_dict`. On all ranks.

        Args:
            recipient_rank: the rank of the group that gets it; -1 is all of them.

        Raises:
            NotTogether: a rank has ended, or waits in another collective, which is found out within seconds; one that
                computes is waited for as long as the process group does.
        """
        self._sync_param_groups(self.param_groups, self.optim.param_groups)
        come_together(self.group, f"consolidate_state_dict({recipient_rank})")
        index = {parameter: number for number, parameter in enumerate(self._parameters())}
        shard = agree(self.group, lambda: _own_state(self.optim, index))
        self._shards = _send_objects(shard, recipient_rank, self.group)
        self._shards_are_old = False

    def state_dict(self, all_ranks: bool = False) -> StateDict:
        """Return the whole state as of the last :meth:`consolidate_state_dict`, in the plain optimizer's form.

        Args:
            all_ranks: consolidate first, for all ranks; then this is collective.

        Raises:
            NotConsolidated: this rank has not been the recipient of a consolidation.
        """
        if all_ranks:
            self.consolidate_state_dict(-1)
        if self._shards is None:
            raise NotConsolidated(
                f"rank {self.rank} of {self.world_size} has only its own part of the optimizer state; call "
                "consolidate_state_dict(recipient_rank) on all ranks before, or state_dict(all_ranks=True) on all ranks"
            )
        if self._shards_are_old:
            warnings.warn(
                "OSS.state_dict(): the state is that of the last consolidate_state_dict, before the last step or "
                "add_param_group; call it again, on all ranks",
                stacklevel=2,
            )
        # What comes besides the parameters' state, by keys that are no numbers, is the first rank's.
        whole = {}
        for shard in reversed(self._shards):
            whole.update(shard)
        parameters = list(self._parameters())
        state = {}
        for number in sorted(key for key in whole if isinstance(key, int)):
            state[parameters[number]] = whole.pop(number)
        own = self.state
        self.state = state | whole
        try:
            # It numbers the parameters, and runs hooks.
            return super().state_dict()
        finally:
            self.state = own

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a whole state, of this or of the plain optimizer; each rank keeps a copy of its part. Not collective.

        Args:
            state_dict: left as it is.

        Raises:
            OptimizerStateMismatch: the groups, or the shapes of the state, are others. Nothing was loaded.
        """
        # torch runs hooks before and after it takes over a state dict. Ours come last and first of them, so that torch
        # sees groups without state: it would copy the state of all ranks to the device of each.
        before = self.register_load_state_dict_pre_hook(lambda _, given: self._load_own_part(given))
        after = self.register_load_state_dict_post_hook(lambda _: self._show_own_part(), prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()

    def _load_own_part(self, state_dict: StateDict) -> StateDict:
        _check_fits(state_dict, self.param_groups)
        _load_inner(self.optim, self.param_groups, state_dict)
        # Torch sees groups without state, and copies none of other ranks' to the device.
        empty: dict[Any, Any] = {number: {} for number in state_dict["state"]}
        return {**state_dict, "state": empty}

    def _show_own_part(self) -> None:
        self._sync_param_groups(self.optim.param_groups, self.param_groups)
        state = _State(dict)
        for parameter in self.state:
            if isinstance(parameter, Tensor):
                is_own = self.owner_of(parameter) == self.rank
                state[parameter] = self.optim.state[parameter] if is_own else {}
        state.initialised = True
        self.state = state
        self._shards_are_old = True

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        # FairScale 0.4.13 (and torch's ZeroRedundancyOptimizer) give a copy without ``optim``, and no error.
        raise NotCopyable(
            "an OSS belongs to its process group and cannot be copied or pickled; keep its state_dict() "
            "(after consolidate_state_dict) and build another"
        )


class _State(defaultdict[Any, Any]):
    """``OSS.state``: true as soon as the optimizers of the ranks have state, though it shows none of it.

    ``torch.distributed.checkpoint.state_dict`` (torch 2.13) takes an empty ``state`` for an optimizer that has not
    begun, and makes a step with gradients of zero: it would spoil the averages, and hang where ranks disagree.
    """

    initialised = False

    def __bool__(self) -> bool:
        return self.initialised or len(self) > 0


# ------------------------------------------------------------------------------------------------ parts of a state dict


def _own_state(inner: Optimizer, index: Mapping[Tensor, int]) -> dict[Hashable, Any]:
    """Copy to the CPU what a rank's optimizer keeps, by the parameter's place in all groups."""

    def on_cpu(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach().to("cpu", copy=True)
        return copy.deepcopy(value)

    shard: dict[Hashable, Any] = {}
    for key, state in inner.state.items():
        if not isinstance(key, Tensor):
            shard[key] = map_leaves(on_cpu, state)
        elif key in index:
            shard[index[key]] = map_leaves(on_cpu, state)
    return shard


def _send_objects(payload: Any, recipient: int, group: dist.ProcessGroup) -> list[Any] | None:
    """Return every rank's object on one rank, or on all (-1), and None elsewhere. Collective."""
    rank = group.rank()
    payloads = []
    # One after the other: together they would be in memory twice.
    for source in range(group.size()):
        box = [payload]
        if recipient == -1:
            dist.broadcast_object_list(box, group=group, group_src=source)
        elif source != recipient and source == rank:
            dist.send_object_list(box, group=group, group_dst=recipient)
        elif source != recipient and recipient == rank:
            dist.recv_object_list(box, group=group, group_src=source)
        payloads += box
    return payloads if recipient in (-1, rank) else None


def _check_fits(state_dict: Any, groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise unless a state dict is of these groups, and its tensors of their parameters' shapes."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
        raise OptimizerStateMismatch("optimizer state", missing=["state", "param_groups"])
    saved_groups = state_dict["param_groups"]
    states = state_dict["state"]
    sizes = [len(group["params"]) for group in groups]
    saved_sizes = [len(group["params"]) for group in saved_groups]
    if sizes != saved_sizes:
        wrong_sizes = {"number of parameters in each group": (sizes, saved_sizes)}
        raise OptimizerStateMismatch("optimizer state", mismatched=wrong_sizes)
    wrong = {}
    known = set()
    for i, (own, saved) in enumerate(zip(groups, saved_groups, strict=True)):
        numbers = saved["params"]
        known.update(numbers)
        names = own.get("param_names") or [f"parameter {number} (in group {i})" for number in numbers]
        for parameter, number, name in zip(own["params"], numbers, names, strict=True):
            shape = parameter.shape
            for key, value in (states.get(number) or {}).items():
                if key in SHAPED and isinstance(value, Tensor) and value.shape != shape:
                    wrong[f"{name}: {key}"] = (tuple(shape), tuple(value.shape))
    unexpected = [f"state of parameter {key}" for key in states if isinstance(key, int) and key not in known]
    if unexpected or wrong:
        raise OptimizerStateMismatch("optimizer state", (), unexpected, wrong)


def _load_inner(
    inner: Optimizer,
    groups: Sequence[Mapping[str, Any]],
    state_dict: Mapping[str, Any],
) -> None:
    """Load a rank's part of a state dict, which fits all ranks' groups, by its optimizer's own method, from copies."""
    own_parameters = chain.from_iterable(group["params"] for group in inner.param_groups)
    here = {parameter: number for number, parameter in enumerate(own_parameters)}
    states = dict(state_dict["state"])
    state = {}
    param_groups = []
    for own, group, saved in zip(inner.param_groups, groups, state_dict["param_groups"], strict=True):
        for parameter, number in zip(group["params"], saved["params"], strict=True):
            of_parameter = states.pop(number, None)
            if parameter in here and of_parameter is not None:
                state[here[parameter]] = copy.deepcopy(of_parameter)
        settings = {key: value for key, value in saved.items() if key not in partition.NOT_SYNCED}
        settings["params"] = [here[parameter] for parameter in own["params"]]
        param_groups.append(settings)
    # What is left an optimizer keeps besides the state of parameters.
    state |= copy.deepcopy(states)
    inner.load_state_dict({"state": state, "param_groups": param_groups})
