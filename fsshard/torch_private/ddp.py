"""What DistributedDataParallel keeps of its reducer."""

from __future__ import annotations

from typing import Any

from fsshard.torch_private.registry import Area

__all__ = ["SteadyReducer", "has_comm_hooks", "rebuild_buckets", "uses_python_reducer"]

AREA = Area("ddp")
DDP, REDUCER = "torch/nn/parallel/distributed.py", "torch/csrc/distributed/c10d/init.cpp"

_PYTHON = AREA.attribute(
    "torch.nn.parallel:DistributedDataParallel._use_python_reducer",
    source=DDP,
    use="whether torch._dynamo.config.optimize_ddp has taken the reducer's place",
    otherwise="it is taken for torch's reducer in C++",
)
_HOOKS = AREA.attribute(
    "torch.nn.parallel:DistributedDataParallel._comm_hooks",
    source=DDP,
    use="whether buckets are reduced by a hook already",
    otherwise="a simulation cannot reduce by one of its own",
)
_REBUILD = AREA.attribute(
    "torch.distributed:Reducer._rebuild_buckets",
    source=REDUCER,
    use="puts gradients into the order in which they came: before torch.func, and not in simulations",
    otherwise="DDP under torch.func, and estimates of DDP",
)


def uses_python_reducer(engine: Any) -> bool:
    """Return whether torch's dynamo is in the reducer's place; it calls hooks with a gradient, not with a bucket."""
    return bool(getattr(engine, _PYTHON, False))


def has_comm_hooks(engine: Any) -> bool:
    """Return whether buckets are reduced by a hook."""
    return bool(getattr(engine, _HOOKS))


def rebuild_buckets(engine: Any) -> None:
    """Let DDP put gradients into the order in which they came, as it would at its next forward."""
    getattr(engine.reducer, _REBUILD)()


class SteadyReducer:
    """A reducer that keeps the buckets as they are: in another order they would be as large."""

    def __init__(self, reducer: Any) -> None:
        self.__dict__["_reducer"] = reducer

    def __getattr__(self, name: str) -> Any:
        if name == _REBUILD:
            return lambda: False
        return getattr(self.__dict__["_reducer"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_reducer"], name, value)


# ------------------------------------------------------------------------------------------------ counted on

AREA.stands_on(
    {
        "torch.nn.parallel.distributed:DistributedDataParallel": (
            "when buffers are sent, the reducer is told of a forward, and hooks get buckets"
        ),
    }
)
