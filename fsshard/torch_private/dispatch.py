"""Between the call of an operator and its kernel: dispatch modes, and operators that have private names."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from fsshard.torch_private.registry import Area

AREA = Area("dispatch")

if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode
else:
    TorchDispatchMode = AREA.take(
        "torch.utils._python_dispatch:TorchDispatchMode",
        use="sees every operator: trackers of memory, what a meta model's init writes, simulations",
        otherwise="estimates, memory trackers and initialisation of meta models",
    )
disable_current_modes: Callable[[], AbstractContextManager[Any]] = AREA.take(
    "torch.utils._python_dispatch:_disable_current_modes",
    use="computes with real numbers while a user's mode is active",
    otherwise="counts of steps cannot be compared between ranks",
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
