"""Between the call of an operator and its kernel: dispatch modes, and operators that have private names."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from fsshard.torch_private.registry import Area

__all__ = [
    "LOCAL_SCALAR_DENSE",
    "TorchDispatchMode",
    "current_modes",
    "disable_current_modes",
    "disable_torch_dispatch",
    "schema_of",
]

AREA = Area("dispatch")

if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode
else:
    TorchDispatchMode = AREA.take(
        "torch.utils._python_dispatch:TorchDispatchMode",
        use="sees every operator: trackers of memory, what a meta model's init writes, simulations",
        otherwise="estimates, memory trackers and initialisation of meta models",
    )
current_modes: Callable[[], list[Any]] = AREA.take(
    "torch.utils._python_dispatch:_get_current_dispatch_mode_stack",
    use="tells a memory tracker of collectives through shared memory, which no operator shows",
    otherwise="traffic through shared memory is missing from memory reports",
    fallback=list,
)
disable_current_modes: Callable[[], AbstractContextManager[Any]] = AREA.take(
    "torch.utils._python_dispatch:_disable_current_modes",
    use="computes with real numbers while a user's mode is active",
    otherwise="counts of steps cannot be compared between ranks",
)
disable_torch_dispatch: Callable[[], AbstractContextManager[Any]] = AREA.take(
    "torch._C:_DisableTorchDispatch",
    source="torch/csrc/autograd/init.cpp",
    use="hides shared memory from memory trackers, which would take it for the step's",
    otherwise="no collectives through shared memory",
)
schema_of: Callable[[Any], Any] = AREA.reader(
    "torch._ops:OpOverload._schema",
    use="an operator's name, and which arguments it writes to",
    otherwise="estimates, memory trackers and initialisation of meta models",
)

LOCAL_SCALAR_DENSE: Any = AREA.take(
    "torch:ops.aten._local_scalar_dense.default",
    source="aten/src/ATen/native/native_functions.yaml",
    use="what .item(), float() and bool() of a tensor call",
    otherwise="numbers read from a part of a tensor are not refused, and a simulation cannot answer for them",
    fallback=None,
)
