"""Between the call of an operator and its kernel: dispatch modes, and operators that have private names."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from fsshard.torch_private.registry import Area

__all__ = [
    "LOCAL_SCALAR_DENSE",
    "REDUCE_SCATTER_BASE",
    "TO_COPY",
    "TorchDispatchMode",
    "current_modes",
    "disable_current_modes",
    "disable_torch_dispatch",
    "schema_of",
]

AREA = Area("dispatch")
MODES = "torch/utils/_python_dispatch.py"

if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode
else:
    TorchDispatchMode = AREA.take(
        "torch.utils._python_dispatch:TorchDispatchMode",
        source=MODES,
        use="sees every operator: trackers of memory, what a meta model's init writes, simulations",
        otherwise="estimates, memory trackers and initialisation of meta models",
    )
current_modes: Callable[[], list[Any]] = AREA.take(
    "torch.utils._python_dispatch:_get_current_dispatch_mode_stack",
    source=MODES,
    use="tells a memory tracker of collectives through shared memory, which no operator shows",
    otherwise="traffic through shared memory is missing from memory reports",
    fallback=list,
)
disable_current_modes: Callable[[], AbstractContextManager[Any]] = AREA.take(
    "torch.utils._python_dispatch:_disable_current_modes",
    source=MODES,
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
    source="torch/_ops.py",
    use="an operator's name, and which arguments it writes to",
    otherwise="estimates, memory trackers and initialisation of meta models",
)

_ATEN = "aten/src/ATen/native/native_functions.yaml"
LOCAL_SCALAR_DENSE: Any = AREA.take(
    "torch:ops.aten._local_scalar_dense.default",
    source=_ATEN,
    use="what .item(), float() and bool() of a tensor call",
    otherwise="numbers read from a part of a tensor are not refused, and a simulation cannot answer for them",
    fallback=None,
)
TO_COPY: Any = AREA.take(
    "torch:ops.aten._to_copy.default",
    source=_ATEN,
    use="what a cast calls: a tracker follows gradients through it",
    otherwise="gradients in another dtype are counted as temporaries",
    fallback=None,
)
REDUCE_SCATTER_BASE: Any = AREA.take(
    "torch:ops.c10d._reduce_scatter_base_.default",
    source="torch/csrc/distributed/c10d/Ops.cpp",
    use="whose copy on gloo a simulation counts",
    otherwise="estimates for gloo are lower by that copy",
    fallback=None,
)
