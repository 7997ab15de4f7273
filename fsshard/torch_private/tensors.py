"""Plain tensors and DTensors: their memory, their hooks, and operators on lists of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from fsshard.torch_private.registry import Area

AREA = Area("tensors", cpp="torch/csrc/autograd/python_variable.cpp")
KERNELS = "aten/src/ATen/native/native_functions.yaml"

DATA: Any = torch.Tensor.data
"""torch's own attribute .data, under the one of watched parameters."""
GRAD: Any = torch.Tensor.grad
"""torch's own attribute .grad, under the one of parameters whose drops are heard."""
storage_key: Callable[[torch.UntypedStorage], int] = AREA.reader(
    "torch:UntypedStorage._cdata",
    source="torch/csrc/StorageMethods.cpp",
    use="tells one piece of memory from another while both live, also where it has no address",
    otherwise="memory cannot be counted: no reports, no estimates",
)
IS_PARAMETER = AREA.attribute(
    "torch.nn.parameter:Parameter._is_param",
    use="says of an instance of a subclass of Tensor that it is a Parameter; isinstance asks for it first",
    otherwise="isinstance(p, Parameter) takes longer for watched parameters",
)
version_of: Callable[[Tensor], int] = AREA.reader(
    "torch:Tensor._version",
    use="how often a tensor has been written in place: what a forward or a user has changed",
    otherwise="no writing in place is noticed: no recomputation of blocks with buffers, no mixed precision",
)
sparse_values: Callable[[Tensor], Tensor] = AREA.take(
    "torch:Tensor._values",
    source=KERNELS,
    use="the elements of a sparse gradient, as they lie",
    otherwise="sparse gradients",
)
base_of: Callable[[Tensor], Tensor | None] = AREA.reader(
    "torch:Tensor._base",
    use="what a view is a view of, where hooks hold when it is written in place",
    otherwise="outputs of units that are views",
)
backward_hooks_of: Callable[[Tensor], Mapping[int, Any] | None] = AREA.reader(
    "torch:Tensor._backward_hooks",
    use="whether a user has hooks on a parameter, which replacing it would lose",
    otherwise="no parameter can be flattened",
)
POST_ACCUMULATE_HOOKS = AREA.attribute(
    "torch:Tensor._post_accumulate_grad_hooks",
    use="as _backward_hooks",
    otherwise="hooks of that kind are lost where a parameter is replaced",
)
lazy_clone: Callable[[Tensor], Tensor] = AREA.take(
    "torch:_lazy_clone",
    source=KERNELS,
    use="a copy that takes memory only when either is written",
    otherwise="buffers of recomputed blocks are copied at once",
    fallback=lambda tensor: tensor.detach().clone(),
)

layout_by_name: Callable[[str], torch.layout] = AREA.take(
    "torch.serialization:_get_layout",
    use="what DCP's metadata calls to restore a layout",
    otherwise="DCP checkpoints are not read",
)

_LISTS = {"source": KERNELS, "otherwise": "OSS and ShardedDDP"}
foreach_add_: Callable[..., None] = AREA.take("torch:_foreach_add_", use="one kernel for a list of tensors", **_LISTS)
foreach_copy_: Callable[..., None] = AREA.take("torch:_foreach_copy_", use="as _foreach_add_", **_LISTS)
foreach_mul: Callable[..., Any] = AREA.take("torch:_foreach_mul", use="as _foreach_add_", **_LISTS)
foreach_mul_: Callable[..., None] = AREA.take("torch:_foreach_mul_", use="as _foreach_add_", **_LISTS)
foreach_norm: Callable[..., Any] = AREA.take("torch:_foreach_norm", use="as _foreach_add_", **_LISTS)
amp_unscale: Callable[[list[Tensor], Tensor, Tensor], None] = AREA.take(
    "torch:_amp_foreach_non_finite_check_and_unscale_",
    source=KERNELS,
    use="what torch's GradScaler divides gradients by, with its own note of what is not finite",
    otherwise="no GradScaler",
)

LOCAL_TENSOR = AREA.attribute(
    "torch.distributed.tensor._api:DTensor._local_tensor",
    use="this rank's part of a DTensor, outside of autograd and without a dispatch; its presence tells one",
    otherwise="DTensors are taken for plain tensors: no backend 'fsdp2'",
)
local_tensor: Callable[[Any], Tensor] = AREA.reader(
    "torch.distributed.tensor._api:DTensor._local_tensor",
    use="this rank's part of a DTensor, outside of autograd and without a dispatch",
    otherwise="no backend 'fsdp2'",
)


def dtensor_handlers() -> MutableMapping[Any, Any] | None:
    """Operations on DTensors that no sharding rule covers, by operator; None where torch keeps them elsewhere.

    ``OpDispatcher._custom_op_handlers`` is where torch itself puts them.
    """
    from torch.distributed.tensor import DTensor

    handlers: MutableMapping[Any, Any] | None = getattr(getattr(DTensor, _DISPATCHER, None), _HANDLERS, None)
    return handlers


_DISPATCHER = AREA.attribute(
    "torch.distributed.tensor._api:DTensor._op_dispatcher",
    use="holds what is done for an operator on DTensors",
    otherwise="numbers of parts of a tensor are not refused under backend 'fsdp2'",
)
_HANDLERS = AREA.attribute(
    "torch.distributed.tensor._dispatch:OpDispatcher._custom_op_handlers",
    use="lets a number of a part of a tensor raise",
    otherwise="numbers of parts of a tensor are not refused under backend 'fsdp2'",
)
