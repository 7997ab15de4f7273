"""``fairscale.optim.adascale``: a learning rate that grows with the batch as far as gradient noise allows.

The algorithm is AdaScale SGD (Johnson, Agrawal, Gu, Guestrin, 2020); the estimates are those of its appendix B.3::

    gain = (var + sqr) / (var / S + sqr)

``S`` is how many times larger the batch is than the one that the learning rate was chosen for, ``sqr`` the squared norm
of the true gradient, and ``var`` the variance of that of the smaller batch. Both come from what each rank's, and each
micro-batch's, gradient is before it is averaged, and from the average: FairScale 0.4.13 takes the norm of what a rank
has of that, and with OSS and ShardedDataParallel each rank trains by a gain of its own. Here those parts are summed.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import SGD, Optimizer

from fsshard.errors import ConfigurationError
from fsshard.oss.collectives import all_reduced
from fsshard.oss.partitioned import partitioned_within
from fsshard.torch_private.autograd import current_graph_task_id, current_node, queue_callback

from ...errors import MisuseError
from ...not_served import missing_from
from ...report import called

__all__ = ["AdaScale", "AdaScaleWrapper"]

__getattr__ = missing_from(__name__)

_KEY = "adascale"  # of the estimates, among the parameters' state
_SMALLEST_VARIANCE = 1e-6


class _SingleGradient(ConfigurationError, RuntimeError):
    """One gradient per step has no variance."""


class AdaScale(Optimizer):
    """Wraps an optimizer and multiplies its learning rates by the gain of each step.

    Works with DistributedDataParallel and with OSS under ShardedDataParallel: the gain is the same on all ranks, and
    the same with each of them. Without them, with ``num_gradients_to_accumulate``. Not with fully sharded parameters,
    whose gradients no rank sees whole. Steps whose gradients are infinite or NaN, which a gradient scaler will skip,
    leave the estimates as they are. The averages are of gradients as backward gives them: where a gradient scaler
    changes its scale, steps before and after it have another weight.

    Args:
        optimizer: its ``param_groups`` have an ``lr`` each. An OSS comes inside: ``AdaScale(OSS(...))``.
        world_size: how many ranks' gradients are averaged; None: those of the OSS, or of torch.distributed.
        scale: how many times larger the batch is than the one that the learning rate was chosen for; None:
            ``world_size * num_gradients_to_accumulate``.
        smoothing: of the estimates' moving averages, at least 0 and below 1; None:
            ``max(1 - world_size * num_gradients_to_accumulate / 1000, 0)``.
        num_gradients_to_accumulate: backward passes to each step.
        is_scaled_loss: each of those losses is divided by their number.
        debias_ewma: averages as Adam's, corrected for their start; False: as in the paper, means at first.

    Raises:
        MisuseError: an argument out of its range, or fully sharded parameters; of all methods but :meth:`gain`: a
            step's gradients are half accumulated.
        RuntimeError: there is one rank, and one gradient to each step.
    """

    scale = 1.0
    smoothing = 0.0
    # torch's GradScaler would leave it to the inner optimizer, where that is fused, to skip a step that overflowed.
    _step_supports_amp_scaling = False

    def __init__(
        self,
        optimizer: Optimizer,
        world_size: int | None = None,
        scale: float | None = None,
        smoothing: float | None = None,
        num_gradients_to_accumulate: int = 1,
        is_scaled_loss: bool = True,
        debias_ewma: bool = True,
    ) -> None:
        # Not super().__init__: param_groups, state and hooks are the inner optimizer's.
        self._hook_handles: list[Any] = []
        self._hooked: set[Tensor] = set()
        self._optimizer = optimizer
        self._local_grad_sqr: Tensor | None = None
        self._graph_task: int | None = None
        oss = partitioned_within(optimizer)
        ranks = oss.world_size if oss is not None else dist.get_world_size() if dist.is_initialized() else 1
        self._world_size = ranks if world_size is None else world_size
        self._num_backward_calls = self._last_final_backward_call = 0
        self._debias_ewma, self._is_scaled_loss = debias_ewma, is_scaled_loss
        self.set_num_gradients_to_accumulate(num_gradients_to_accumulate)
        if smoothing is not None:
            if not 0 <= smoothing < 1:
                raise MisuseError(f"smoothing: expected at least 0 and below 1, got {smoothing}")
            self.smoothing = smoothing
        self._state = _fresh(len(optimizer.param_groups))
        self.set_scale(self._world_size * self._num_grads_to_accum if scale is None else scale, update_estimate=False)
        self._hook()
        called("fairscale.optim.adascale.AdaScale", "fsshard")

    # ------------------------------------------------------------------------------------------ as the inner one

    def __getattr__(self, name: str) -> Any:
        if name == "_optimizer":  # not there yet
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        raise MisuseError("AdaScale cannot be copied or pickled: its hooks are on the parameters; use state_dict()")

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Let the optimizer step, each group with its learning rate times :meth:`gain`, and return what it returns."""
        self._check_complete("step")
        before = [group["lr"] for group in self.param_groups]
        try:
            for index, group in enumerate(self.param_groups):
                group["lr"] = group["lr"] * self.gain(index)  # not *=, which would change a tensor for good
            result = self._optimizer.step(*args, **kwargs)
        finally:
            for lr, group in zip(before, self.param_groups, strict=True):
                group["lr"] = lr
        self._hook()  # what was unfrozen
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, or set them to zero."""
        self._check_complete("zero_grad")
        self._optimizer.zero_grad(set_to_none=set_to_none)
        self._hook()

    def add_param_group(self, pg: dict[str, Any]) -> None:
        """Give the optimizer another group, whose estimates begin anew."""
        self._check_complete("add_param_group")
        self._optimizer.add_param_group(pg)
        self._hook()

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the optimizer's state, with AdaScale's estimates at ``["state"]["adascale"]``, as float64 tensors."""
        self._check_complete("state_dict")
        saved = self._optimizer.state_dict(*args, **kwargs)
        estimates = {name: value.clone() for name, value in self._state.items()}
        return {**saved, "state": {**saved["state"], _KEY: estimates}}

    def load_state_dict(self, data: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` gave, or FairScale's; estimates that a plain optimizer's lacks start again."""
        self._check_complete("load_state_dict")
        state = dict(data["state"])
        saved = state.pop(_KEY, None)
        groups = len(self.param_groups)
        estimates = _fresh(groups) if saved is None else _checked(saved, groups)
        self._optimizer.load_state_dict({**data, "state": state})
        self._state = estimates
        if saved is None:
            warnings.warn("no state of AdaScale in what was loaded: its estimates start from zero", stacklevel=2)

    # ------------------------------------------------------------------------------------------ what is asked

    def gain(self, pg_idx: int | None = None) -> float:
        """Return the gain of the step to come, of one group or all: from 1, without noise, to ``scale``."""
        averages = self._state["grad_var_avg"], self._state["grad_sqr_avg"]
        var, sqr = (float(value.sum() if pg_idx is None else value[pg_idx]) for value in averages)
        return (var + sqr) / (var / self.scale + sqr)

    def set_scale(self, scale: float, update_estimate: bool = True) -> None:
        """Say how large the batch is now, compared with the one that the learning rate was chosen for: at least 1.

        Args:
            scale: how many times larger.
            update_estimate: the variance that was estimated so far is that of another batch; convert it.
        """
        self._check_complete("set_scale")
        if scale < 1:
            raise MisuseError(f"scale: expected at least 1, got {scale}")
        if update_estimate:
            for name, value in self._state.items():
                # Sums and averages of the variance. Not "_unbias", nor "_count", which are weights.
                if name in ("grad_var_avg", "grad_var_avg_biased", "grad_var_avg_total"):
                    value.mul_(self.scale / scale)
        self.scale = float(scale)

    def set_num_gradients_to_accumulate(self, num_gradients_to_accumulate: int, update_smoothing: bool = True) -> None:
        """Change how many backward passes there are to each step; :meth:`set_scale` mostly has to follow.

        Args:
            num_gradients_to_accumulate: at least 1, and 2 on one rank.
            update_smoothing: set the smoothing to its default for this number.
        """
        self._check_complete("set_num_gradients_to_accumulate")
        if num_gradients_to_accumulate < 1:
            raise MisuseError(f"num_gradients_to_accumulate: expected at least 1, got {num_gradients_to_accumulate}")
        gradients = self._world_size * num_gradients_to_accumulate
        if gradients <= 1:
            raise _SingleGradient(
                f"AdaScale estimates the variance between the gradients of a step, and with world_size "
                f"{self._world_size} and num_gradients_to_accumulate {num_gradients_to_accumulate} there is one"
            )
        self._num_grads_to_accum = num_gradients_to_accumulate
        if update_smoothing:
            self.smoothing = max(1 - gradients / 1000, 0)

    def scale_grad_by_num_grads_to_accum(self) -> None:
        """Turn the sum of gradients of losses that were not divided into their mean; call it before :meth:`step`."""
        self._check_complete("scale_grad_by_num_grads_to_accum")
        if self._is_scaled_loss or self._num_grads_to_accum == 1:
            raise MisuseError(
                "scale_grad_by_num_grads_to_accum: it is for is_scaled_loss=False and num_gradients_to_accumulate "
                f"above 1; they are {self._is_scaled_loss} and {self._num_grads_to_accum}"
            )
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.div_(self._num_grads_to_accum)

    def _check_complete(self, what: str) -> None:
        if self._local_grad_sqr is not None:
            done = self._num_backward_calls - self._last_final_backward_call
            raise MisuseError(
                f"{what} of AdaScale in the middle of a step: {done} backward passes of "
                f"num_gradients_to_accumulate={self._num_grads_to_accum} have ended"
            )

    # ------------------------------------------------------------------------------------------ hooks

    def _hook(self) -> None:
        """See the gradients of all parameters that have one; of those that had none before, too."""
        _extend(self._state, len(self.param_groups))
        for index, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                if parameter in self._hooked or not parameter.requires_grad:
                    continue
                if hasattr(parameter, "to_local"):  # its hook sees the mean alone, and the gain would be 1
                    raise MisuseError(
                        "AdaScale needs each rank's own gradient of each parameter, which fully sharded parameters do "
                        "not have (FairScale's is off there as well); use ShardedDataParallel or "
                        "DistributedDataParallel"
                    )
                # Weak: the collector does not see through hooks that C++ holds, and nothing would ever be freed.
                hook = functools.partial(_call, weakref.ref(self), index)
                self._hook_handles.append(parameter.register_hook(hook))
                self._hooked.add(parameter)

    def unhook(self) -> None:
        """Take the hooks off the parameters. The gain stays what it is."""
        for handle in self._hook_handles:
            handle.remove()
        self._hook_handles.clear()
        self._hooked.clear()

    def _backward_hook(self, pg_idx: int, grad: Tensor) -> None:
        """Add up the squares of this rank's gradients, of this backward alone, before anything is averaged."""
        if self._local_grad_sqr is None:
            self._local_grad_sqr = torch.zeros(len(self.param_groups), dtype=torch.float64, device=grad.device)
        self._local_grad_sqr[pg_idx] += _square(grad).to(self._local_grad_sqr.device)
        task = current_graph_task_id()
        if task != self._graph_task:
            self._graph_task = task
            queue_callback(self._backward_ends)

    def _backward_ends(self) -> None:
        self._graph_task = None
        if current_node() is not None:  # that of the outer one
            self._local_grad_sqr = None
            raise MisuseError(
                "AdaScale cannot tell where a backward ends that runs inside of another one, as under reentrant "
                "checkpointing; use fairscale.nn.checkpoint_wrapper, or torch's checkpoint with use_reentrant=False"
            )
        # DistributedDataParallel's own callback, which waits for the averages, may come after this one.
        queue_callback(self._final_callback)

    def _final_callback(self) -> None:
        """Count a backward, and estimate once all of a step have ended: gradients are averages now."""
        self._num_backward_calls += 1
        if (self._num_backward_calls - self._last_final_backward_call) % self._num_grads_to_accum == 0:
            self._last_final_backward_call = self._num_backward_calls
            with torch.no_grad():
                self._estimate()
            self._local_grad_sqr = None

    # ------------------------------------------------------------------------------------------ estimates

    def _estimate(self) -> None:
        """Follow appendix B.3, for a batch that is ``scale`` times, and not always ``count`` times, the smaller one."""
        local, total = self._square_norms()
        if self._is_scaled_loss:
            local *= self._num_grads_to_accum**2
        else:
            total /= self._num_grads_to_accum**2
        scale, count = self.scale, self._world_size * self._num_grads_to_accum
        var = local * (scale / count) / (count - 1) - total * scale / (count - 1)
        sqr = total - var / scale
        if bool(torch.isfinite(var).all() and torch.isfinite(sqr).all()):  # alike on all ranks
            self._update_avg("grad_sqr_avg", sqr.clamp(min=0.0), self.smoothing)
            self._update_avg("grad_var_avg", var.clamp(min=_SMALLEST_VARIANCE), self.smoothing)

    def _square_norms(self) -> tuple[Tensor, Tensor]:
        """Return for each group the sum of all local gradients' squared norms, and the squared norm of their average.

        Where each parameter's average is at one rank, its square travels from there, in a place of its own: added up
        in the same order, the sum has the same bits as under DistributedDataParallel.
        """
        finish: Callable[[], None] | None = getattr(self._optimizer, "finish_gradients", None)
        if finish is not None:  # of OSS: ends what ShardedDataParallel has begun
            finish()
        oss = partitioned_within(self._optimizer)
        local = self._local_grad_sqr
        assert local is not None
        groups = [group["params"] for group in self.param_groups]
        every = [parameter for parameters in groups for parameter in parameters]
        averages = local.new_zeros(len(every))
        for place, parameter in enumerate(every):
            # Not leftovers of what is frozen, gradients whose local parts went unseen, and another rank's.
            seen = parameter.grad is not None and parameter.requires_grad and parameter in self._hooked
            if seen and (oss is None or oss.owner_of(parameter) == oss.rank):
                averages[place] = _square(parameter.grad).to(local)
        if self._world_size > 1 and oss is None:
            local = all_reduced(local, dist.ReduceOp.SUM)
        elif oss is not None and self._world_size > 1:
            shared = all_reduced(torch.cat([local, averages]), dist.ReduceOp.SUM, oss.group)
            local, averages = shared.split([len(groups), len(every)])
        parts = averages.cpu().split([len(parameters) for parameters in groups])
        return local.cpu().clone(), torch.stack([part.sum() for part in parts])

    def _update_avg(self, name: str, value: Tensor, factor: float) -> None:
        state = self._state
        if self._debias_ewma:
            zeros = torch.zeros_like(value)
            biased = state.get(name + "_biased", zeros) * factor + (1.0 - factor) * value
            weight = state.get(name + "_unbias", zeros) * factor + (1.0 - factor)
            state.update({name + "_biased": biased, name + "_unbias": weight, name: biased / weight})
            return
        count = state.get(name + "_count", torch.zeros(1, dtype=value.dtype)) + 1
        state[name + "_count"] = count
        if count.item() < 1 / (1 - self.smoothing):
            total = state.get(name + "_total", torch.zeros_like(value)) + value
            state.update({name + "_total": total, name: total / count})
        else:
            state[name] = factor * state[name] + (1.0 - factor) * value


class AdaScaleWrapper(AdaScale):
    """AdaScale with the constructor of an optimizer: it builds the one that it wraps.

    ``AdaScaleWrapper(params, optim_cls=OSS, optim=SGD, lr=0.1)`` is AdaScale(OSS). As an OSS's ``optim``, each rank
    would have the gain of its own parameters, from which no common one can be had.

    Args:
        params, **additional_optim_args: for the optimizer, an ``optim_cls``; the rest is as of :class:`AdaScale`.
    """

    def __init__(
        self,
        params: Any,
        world_size: int | None = None,
        scale: float | None = None,
        smoothing: float | None = None,
        num_gradients_to_accumulate: int = 1,
        debias_ewma: bool = True,
        optim_cls: Callable[..., Optimizer] = SGD,
        **additional_optim_args: Any,
    ) -> None:
        super().__init__(
            optim_cls(params, **additional_optim_args),
            world_size,
            scale,
            smoothing,
            num_gradients_to_accumulate,
            debias_ewma=debias_ewma,  # FairScale 0.4.13 gives it by position, as is_scaled_loss
        )


def _call(adascale: weakref.ref[AdaScale], pg_idx: int, grad: Tensor) -> None:
    found = adascale()
    if found is not None:
        found._backward_hook(pg_idx, grad.detach())


def _square(gradient: Tensor) -> Tensor:
    """Return the squared norm, without the overflow that half precision has at 65504."""
    if gradient.is_sparse:
        gradient = gradient.coalesce().values()
    if gradient.is_complex():
        gradient = torch.view_as_real(gradient.resolve_conj())
    if gradient.dtype in (torch.float16, torch.bfloat16):
        gradient = gradient.float()
    return gradient.square().sum()


# ---------------------------------------------------------------------------------------------- the estimates' state

# What a group that is new has of each: of the first, FairScale's start, by which the first gain is 1.
_START = {"grad_sqr_avg": 1.0, "grad_var_avg": 0.0}


def _fresh(groups: int) -> dict[str, Tensor]:
    return {name: torch.full((groups,), value, dtype=torch.float64) for name, value in _START.items()}


def _extend(state: dict[str, Tensor], groups: int) -> None:
    """Begin the estimates of groups that are new."""
    for name, value in state.items():
        if not name.endswith("_count") and len(value) < groups:
            more = value.new_full((groups - len(value),), _START.get(name, 0.0))
            state[name] = torch.cat([value, more])


def _checked(saved: Mapping[str, Any], groups: int) -> dict[str, Tensor]:
    """Copy estimates, ours or FairScale's, which are numpy arrays."""
    estimates = {name: torch.as_tensor(value).to("cpu", torch.float64, copy=True) for name, value in saved.items()}
    shapes = {name: tuple(value.shape) for name, value in estimates.items()}
    expected = {name: (1,) if name.endswith("_count") else (groups,) for name in {**_START, **estimates}}
    if shapes != expected:
        raise MisuseError(f"AdaScale's state is of different parameter groups: expected {expected}, got {shapes}")
    return estimates
