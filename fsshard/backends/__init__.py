"""The backends: one file and one class each. Vendors are imported in the class that needs them, when it is used."""

from __future__ import annotations

from importlib import import_module
from typing import cast

from fsshard.backends.base import Backend
from fsshard.errors import UnknownBackend

__all__ = ["BACKENDS", "backend_class"]

BACKENDS: dict[str, tuple[str, str]] = {
    "none": ("single", "SingleBackend"),
    "ddp": ("ddp", "DDPBackend"),
    "fsdp": ("fsdp1", "FSDP1Backend"),
    "fsdp2": ("fsdp2", "FSDP2Backend"),
    "fairscale": ("fairscale", "FairScaleBackend"),
}
"""Name -> (module in this package, class)."""


def backend_class(name: object, world_size: int) -> type[Backend]:
    """The class that ``backend=name`` means in a job of ``world_size`` ranks.

    Raises:
        UnknownBackend: lists the known ones.
    """
    if name == "auto":
        name = "none" if world_size == 1 else "fsdp2"
    if not isinstance(name, str) or name not in BACKENDS:
        raise UnknownBackend(name, list(BACKENDS))
    module, cls = BACKENDS[name]
    return cast(type[Backend], getattr(import_module(f"fsshard.backends.{module}"), cls))
