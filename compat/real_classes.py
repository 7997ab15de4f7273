"""The real OSS and ShardedDataParallel with fsshard's mends, and FairScale's own signatures."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from fsshard.backends.fairscale_mended import MendedOSS, MendedShardedDataParallel
from fsshard.backends.outputs import grad_tensors
from fsshard.errors import UnsupportedByBackend

from .report import called

__all__ = ["OSS", "ShardedDataParallel"]

_ENGINE = "the real FairScale, mended by fsshard"


class OSS(MendedOSS):
    """FairScale's OSS; see :class:`fsshard.backends.fairscale_mended.MendedOSS`.

    Args:
        params: as of a torch optimizer.
        optim: the class of the optimizer that is sharded.
        group: the ranks that share the state; None is all.
        broadcast_buffer_size: not looked at.
        broadcast_fp16: send parameters in float16.
        force_broadcast_object: send state by torch.save.
        **default: for ``optim``.
    """

    def __init__(
        self,
        params: Any,
        optim: Callable[..., Optimizer] = SGD,
        group: Any = None,
        broadcast_buffer_size: int = -1,
        broadcast_fp16: bool = False,
        force_broadcast_object: bool = False,
        **default: Any,
    ) -> None:
        self._wrappers: weakref.WeakSet[ShardedDataParallel] = weakref.WeakSet()
        super().__init__(params, optim, group, broadcast_buffer_size, broadcast_fp16, force_broadcast_object, **default)
        called("fairscale.optim.oss.OSS", _ENGINE)

    def step(self, closure: Any = None, **kwargs: Any) -> Any:
        # Anew, so that torch puts the step hooks around it: MendedOSS leaves those to fsshard's own optimizer.
        return MendedOSS.step(self, closure, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for wrapper in self._wrappers:
            wrapper.discard(parameters, dropped=set_to_none)
        super().zero_grad(set_to_none=set_to_none)

    @property
    def _local_params(self) -> list[Tensor]:
        # FairScale keeps what had a gradient at the first clip_grad_norm; what is unfrozen later is left out for ever.
        mine = chain.from_iterable(parameters[self.rank] for parameters in self._per_device_params.values())
        return [parameter for parameter in mine if parameter.grad is not None]


class ShardedDataParallel(MendedShardedDataParallel):
    """FairScale's ShardedDataParallel; see :class:`fsshard.backends.fairscale_mended.MendedShardedDataParallel`.

    Args:
        module: the model.
        sharded_optimizer: the OSS, or several.
        process_group: the ranks; None is all.
        broadcast_buffers: send rank 0's buffers before each forward.
        sync_models_at_startup: send rank 0's parameters and buffers now.
        reduce_buffer_size: not looked at: gradients travel when the backward has ended.
        auto_refresh_trainable: follow changes of ``requires_grad``.
        reduce_fp16: False.
        warn_on_trainable_params_changed: not looked at.

    Raises:
        UnsupportedByBackend: ``reduce_fp16`` is set.
    """

    def __init__(
        self,
        module: nn.Module,
        sharded_optimizer: Any,
        process_group: Any = None,
        broadcast_buffers: bool = True,
        sync_models_at_startup: bool = True,
        reduce_buffer_size: int = 2**23,
        auto_refresh_trainable: bool = True,
        reduce_fp16: bool = False,
        warn_on_trainable_params_changed: bool = True,
    ) -> None:
        if reduce_fp16:
            raise UnsupportedByBackend("reduce_fp16=True", "fairscale", "the mended reduction knows no compression")
        optimizers = sharded_optimizer if isinstance(sharded_optimizer, list) else [sharded_optimizer]
        group = dist.group.WORLD if process_group is None else process_group
        super().__init__(module, optimizers, group)
        self._enable_broadcast_buffers = broadcast_buffers
        self._auto_refresh_trainable = auto_refresh_trainable
        if sync_models_at_startup:
            # Not state_dict().values(), as FairScale: extra state is no tensor, and some buffers are not in it.
            for tensor in chain(module.parameters(), module.buffers()):
                dist.broadcast(tensor.detach(), group=group, group_src=0)
        for optimizer in optimizers:
            if hasattr(optimizer, "_wrappers"):
                optimizer._wrappers.add(self)
        called("fairscale.nn.data_parallel.ShardedDataParallel", _ENGINE)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        output = super().forward(*inputs, **kwargs)
        if torch.is_grad_enabled():
            hook = functools.partial(_backward_starts, weakref.ref(self))
            for tensor in grad_tensors(output):
                tensor.register_hook(hook)
        return output

    def _before(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        if not self._callback_in:  # the output was of a kind that tensors cannot be found in
            self.backward_starts()
        super()._before(parameter, gradient)

    def zero_grad(self, set_to_none: bool = False) -> None:
        parameters: Iterable[nn.Parameter] = self.module.parameters()
        self.discard(parameters, dropped=set_to_none)
        self.module.zero_grad(set_to_none=set_to_none)


def _backward_starts(wrapper: Any, _: Tensor) -> None:
    found = wrapper()
    if found is not None:
        found.backward_starts()
