"""The reducer of DistributedDataParallel."""

from __future__ import annotations

from typing import Any

from fsshard.torch_private.registry import Area

AREA = Area("ddp", cpp="torch/csrc/distributed/c10d/init.cpp")

_REBUILD = AREA.attribute(
    "torch.distributed:Reducer._rebuild_buckets",
    use="puts gradients into the order in which they came: before torch.func, and not in simulations",
    otherwise="DDP under torch.func, and estimates of DDP",
)


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
